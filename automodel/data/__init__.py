"""Samples: where text comes from, how it becomes tokens, and which rank sees which of them when.

Everything here is a function of the settings, the seed and a sample's index, never of the rank that asks. Importing
it brings in neither torch nor transformers, and numpy only with the names that need it: public names are imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel.data.batches import MicroBatch, StepBatch, TrainLoader, validation_batches
    from automodel.data.build import DataBundle, build_data
    from automodel.data.checks import check_data
    from automodel.data.dataset import IGNORED_LABEL, TokenDataset
    from automodel.data.sampler import EpochSampler, GlobalBatch
    from automodel.data.seeds import stable_seed
    from automodel.data.tokenizer import BYTE_VOCABULARY_SIZE, byte_tokenizer, load_tokenizer, names_byte_tokenizer

_HOME = {
    "BYTE_VOCABULARY_SIZE": "tokenizer",
    "IGNORED_LABEL": "dataset",
    "DataBundle": "build",
    "EpochSampler": "sampler",
    "GlobalBatch": "sampler",
    "MicroBatch": "batches",
    "StepBatch": "batches",
    "TokenDataset": "dataset",
    "TrainLoader": "batches",
    "build_data": "build",
    "byte_tokenizer": "tokenizer",
    "check_data": "checks",
    "load_tokenizer": "tokenizer",
    "names_byte_tokenizer": "tokenizer",
    "stable_seed": "seeds",
    "validation_batches": "batches",
}
__all__ = [
    "BYTE_VOCABULARY_SIZE",
    "IGNORED_LABEL",
    "DataBundle",
    "EpochSampler",
    "GlobalBatch",
    "MicroBatch",
    "StepBatch",
    "TokenDataset",
    "TrainLoader",
    "build_data",
    "byte_tokenizer",
    "check_data",
    "load_tokenizer",
    "names_byte_tokenizer",
    "stable_seed",
    "validation_batches",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'automodel.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"automodel.data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
