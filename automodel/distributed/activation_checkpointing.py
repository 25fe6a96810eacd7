"""Activation checkpointing: recompute a block in backward instead of keeping its activations."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from automodel.config.distributed import ActivationCheckpointing
from automodel.distributed.blocks import transformer_blocks


def apply_activation_checkpointing(model: nn.Module, mode: ActivationCheckpointing) -> None:
    """Wrap the forward of each block, in place; parameter names do not change.

    Applied before ``fully_shard``, so that FSDP's hooks stay outside the recomputation. The random
    state is kept, so that dropout in the recomputation repeats itself.

    Args:
        model: a model with blocks.
        mode: False: nothing; True or ``full``: every block.
    """
    if mode in (True, "full"):
        for block in transformer_blocks(model).values():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
