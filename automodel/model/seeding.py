"""The seed of the generators that a run draws from."""

from __future__ import annotations

import torch


def seed_generators(seed: int) -> None:
    """Seed the default generator of the CPU and, where CUDA is in use, of its devices.

    The same numbers follow as after ``torch.manual_seed``, which also prepares every other kind of device and formats
    the call stack for each: milliseconds, where this is called for each module and micro-batch.

    Args:
        seed: 0 to 2**63 - 1.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
