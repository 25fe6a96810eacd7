"""A corpus as one row of tokens, cut into samples of equal length."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import numpy as np

from automodel.data.seeds import random_permutation, random_uniform

IGNORED_LABEL = -100


def join_documents(documents: Iterable[np.ndarray], eos_token_id: int, dtype: type[np.generic]) -> np.ndarray:
    """Token ids [tokens] of all documents in order, each closed by one eos."""
    encoded = list(documents)
    joined = np.full(sum(len(ids) + 1 for ids in encoded), eos_token_id, dtype=dtype)
    start = 0
    for ids in encoded:
        joined[start : start + len(ids)] = ids
        start += len(ids) + 1
    return joined


class TokenDataset:
    """Samples of ``seq_length`` tokens. Sample i reads ``tokens[i*S : i*S + S + 1]``.

    The causal shift is done here and nowhere else: ``labels[t]`` is the token after ``input_ids[t]``, also
    across a sample's right edge, so that every token but the corpus' first is a label once. A rest shorter than
    a sample, fewer than S + 1 tokens at the corpus' end, belongs to no sample.

    Args:
        tokens: token ids [tokens], any integer dtype.
        seq_length: S.
        mask_labels: share of labels set to -100, drawn from (seed, sample index) alone.
        seed: the run's.
        indices: the samples to keep, ascending; None: all.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_length: int,
        mask_labels: float = 0.0,
        seed: int = 0,
        indices: np.ndarray | None = None,
    ) -> None:
        self.tokens = tokens
        self.seq_length = seq_length
        self.mask_labels = mask_labels
        self.seed = seed
        self.indices = np.arange(max(0, len(tokens) - 1) // seq_length) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        """``input_ids`` and ``labels``, both int64 [seq_length].

        Raises:
            IndexError: ``position`` is not in 0..len-1.
        """
        start = self.sample_id(position) * self.seq_length
        window = self.tokens[start : start + self.seq_length + 1].astype(np.int64)
        labels = window[1:].copy()
        if self.mask_labels:
            drawn = random_uniform(self.seq_length, "label mask", self.seed, self.sample_id(position))
            labels[drawn < self.mask_labels] = IGNORED_LABEL
        return {"input_ids": window[:-1], "labels": labels}

    def sample_id(self, position: int) -> int:
        """The sample's index in the whole corpus, which a subset does not change."""
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        return int(self.indices[position])

    def subset(self, max_samples: int | None) -> TokenDataset:
        """At most ``max_samples`` of the samples, chosen by the seed alone; None: all."""
        if max_samples is None or max_samples >= len(self):
            return self
        chosen = random_permutation(len(self), "validation subset", self.seed)[:max_samples]
        return TokenDataset(self.tokens, self.seq_length, self.mask_labels, self.seed, self.indices[np.sort(chosen)])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the samples: equal on two machines, or before and after a resume, if the data is."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.seq_length} {self.mask_labels} {self.seed if self.mask_labels else 0}".encode())
        digest.update(np.ascontiguousarray(self.indices, dtype=np.int64).tobytes())
        digest.update(np.ascontiguousarray(self.tokens).view(np.uint8).data)
        return digest.hexdigest()
