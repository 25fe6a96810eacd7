"""What a data-parallel strategy does for the model and the step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from automodel.config.distributed import DDPConfig, FSDP2Config, MixedPrecision
from automodel.distributed.mesh import MeshContext


class StrategyManager(Protocol):
    """Implemented by FSDP2Manager and DDPManager.

    A strategy sums gradients over data-parallel ranks, never averages them: the loss is already
    divided by the trained tokens of the whole global batch.
    """

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard the parameters of a model on meta; called before weights exist."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model whose weights are in place; returns what the step calls."""

    def micro_batch(self, model: nn.Module, is_first: bool, is_last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one micro-batch of a step."""

    def forward_only(self, model: nn.Module) -> AbstractContextManager[None]:
        """Surrounds forwards without backward; afterwards the model holds no more than before."""


def build_manager(mesh_context: MeshContext, precision: MixedPrecision | None = None) -> StrategyManager:
    """The manager of the context's strategy.

    Args:
        mesh_context: holds the strategy's config.
        precision: dtypes for strategies without a policy of their own; None is fp32 for DDP and
            bf16 (``MixedPrecision()``) for FSDP2.
    """
    config = mesh_context.strategy_config
    if isinstance(config, FSDP2Config):
        from automodel.distributed.fsdp2 import FSDP2Manager

        return FSDP2Manager(config, mesh_context, precision)
    if isinstance(config, DDPConfig):
        from automodel.distributed.ddp import DDPManager

        return DDPManager(config, mesh_context, precision)
    raise ValueError(f"no manager for {type(config).__name__}")
