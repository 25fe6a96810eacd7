"""Activation checkpointing: recompute a block in backward instead of keeping its activations.

``full`` keeps a block's input alone. ``selective`` also keeps, per operation (:class:`SelectivePolicy`):

- the output of fused attention, the costliest operation to repeat, unless it drew dropout;
- every second matrix product of the block, which halves the repeated work. The second and not the first: recomputation
  ends with the last tensor that backward needs, so a block's last product is not repeated in any case.

Everything else, such as norms, activations and copies, is cheap and recomputed.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from automodel.config.distributed import ActivationCheckpointing
from automodel.distributed.blocks import transformer_blocks

MATRIX_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
# Fused attention -> position of its dropout probability.
ATTENTION_DROPOUT_POSITION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 5,
}


class SelectivePolicy:
    """Which operations of one forward of one block are kept. Made anew for each forward."""

    def __init__(self) -> None:
        self.num_matrix_products: Counter[bool] = Counter()

    def __call__(
        self, context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if operation in MATRIX_PRODUCTS:
            # torch before 2.13 asks again while it recomputes, and must hear the same.
            self.num_matrix_products[context.is_recompute] += 1
            keep = self.num_matrix_products[context.is_recompute] % 2 == 0
        else:
            # A kept operation does not run again, so it would leave the random generator behind: what draws after
            # it in the block would get other numbers than in the forward.
            position = ATTENTION_DROPOUT_POSITION.get(operation)
            keep = position is not None and not kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """The ``context_fn`` of ``checkpoint`` that keeps what :class:`SelectivePolicy` says."""
    return create_selective_checkpoint_contexts(SelectivePolicy())


def apply_activation_checkpointing(model: nn.Module, mode: ActivationCheckpointing) -> None:
    """Wrap the forward of each block, in place; parameter names do not change.

    Applied before ``fully_shard``, so that FSDP's hooks stay outside the recomputation. The random
    state is kept, so that dropout in the recomputation repeats itself.

    Args:
        model: a model with blocks.
        mode: False: nothing; True or ``full``: every block whole; ``selective``: every block but what
            :class:`SelectivePolicy` keeps.
    """
    if mode is False:
        return
    options: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}
    for block in transformer_blocks(model).values():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
