"""Samples: where text comes from, how it becomes tokens, and which rank sees which of them when.

Everything here is a function of the settings, the seed and a sample's index, never of the rank that asks. Importing
it brings in neither torch nor transformers.
"""

from automodel.data.batches import MicroBatch, StepBatch, TrainLoader, validation_batches
from automodel.data.build import DataBundle, build_data
from automodel.data.checks import check_data
from automodel.data.dataset import IGNORED_LABEL, TokenDataset
from automodel.data.sampler import EpochSampler, GlobalBatch
from automodel.data.seeds import stable_seed
from automodel.data.tokenizer import BYTE_VOCABULARY_SIZE, byte_tokenizer, load_tokenizer, names_byte_tokenizer

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
