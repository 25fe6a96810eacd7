"""Random numbers that are functions of what a thing is, never of which rank or process asks.

Everything random about the data (order, masks, the validation subset, dropout seeds) comes from here. The
bits are those of NumPy's PCG64 seeded by a BLAKE2 digest: both are guaranteed not to change between versions,
unlike ``hash()`` (salted in each process) and NumPy's ``permutation`` and ``choice`` (free to change).
"""

from __future__ import annotations

import hashlib

import numpy as np


def stable_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on ``parts`` alone, the same in every process and on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") >> 1


def random_uniform(count: int, *parts: int | str) -> np.ndarray:
    """``count`` numbers in [0, 1) as float64 [count], a function of ``parts`` alone."""
    bits = np.random.PCG64(stable_seed(*parts)).random_raw(count)
    return (bits >> np.uint64(11)) * 2.0**-53


def random_permutation(count: int, *parts: int | str) -> np.ndarray:
    """A permutation of 0..count-1 as int64 [count], a function of ``count`` and ``parts`` alone."""
    bits = np.random.PCG64(stable_seed(*parts)).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int64)
