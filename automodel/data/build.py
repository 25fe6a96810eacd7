"""From the settings to tokenised samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from automodel.config.schema import TrainConfig
from automodel.data.checks import check_settings, check_text_field, check_token_count
from automodel.data.dataset import TokenDataset, join_documents
from automodel.data.documents import Document, check_utf8
from automodel.data.split import corpus_files, load_documents
from automodel.data.tokenizer import encode_documents, is_byte_tokenizer, load_tokenizer, token_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DataBundle:
    """What a run trains and validates on; the same on every rank.

    Attributes:
        tokenizer: encodes and decodes; saved with the model.
        train: samples in corpus order; :class:`automodel.data.EpochSampler` shuffles them.
        validation: the held-out samples of which ``data.val_max_samples`` are used; None: no validation.
        max_token_id: the largest id in either; the model's vocabulary must be larger.
    """

    tokenizer: PreTrainedTokenizerBase
    train: TokenDataset
    validation: TokenDataset | None
    max_token_id: int


def build_data(config: TrainConfig) -> DataBundle:
    """Read, tokenise and cut the corpus. Needs no other process.

    Raises:
        ConfigError: as :func:`automodel.data.check_data`, for corpora of any size, and a tokenizer that cannot
            be loaded.
    """
    check_settings(config.data)
    files = corpus_files(config.data)
    check_text_field(config.data, files)
    tokenizer = load_tokenizer(config)
    parts = load_documents(config.data, files)
    if not is_byte_tokenizer(tokenizer):
        check_utf8("data.files", [*parts[0], *parts[1]])
    train, validation = (_tokens(tokenizer, documents) for documents in parts)
    check_token_count(config, len(train), len(validation))
    datasets = [
        TokenDataset(tokens, config.training.seq_length, config.data.mask_labels, config.seed)
        for tokens in (train, validation)
    ]
    return DataBundle(
        tokenizer=tokenizer,
        train=datasets[0],
        validation=datasets[1].subset(config.data.val_max_samples) if len(datasets[1]) else None,
        max_token_id=max(int(tokens.max()) for tokens in (train, validation) if len(tokens)),
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> np.ndarray:
    encoded = encode_documents(tokenizer, (document.text for document in documents))
    assert isinstance(tokenizer.eos_token_id, int)
    return join_documents(encoded, tokenizer.eos_token_id, token_dtype(tokenizer))
