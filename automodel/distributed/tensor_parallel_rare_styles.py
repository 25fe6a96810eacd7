"""Styles that few plans name: experts cut inside, packed weights, latent attention, parameters without a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from automodel.distributed.local_forward import call_with, local_parameter
from automodel.distributed.tensor_parallel_collectives import TensorParallelGroup, for_sharded_weights, sum_parts
from automodel.distributed.tensor_parallel_styles import TensorParallelStyle

__all__ = ["PARAMETER_PLACEMENTS", "RARE_STYLES"]


class _WithoutParameters(TensorParallelStyle):
    """Acts on what goes through a module; its parameters are cut by entries of their own, or not at all."""

    def placement(self, module: nn.Module, name: str) -> Placement | None:
        return None


class LocalParameters(_WithoutParameters):
    """The forward reads this rank's part of the module's own parameters, such as attention sinks."""

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        local = {name: local_parameter(module, name) for name in module._parameters}
        return call_with(module, forward, local, *args, **kwargs)


class ShardedExperts(_WithoutParameters):
    """Every rank holds a slice of every expert: its outputs are parts to be summed.

    Called with hidden states ``[tokens, hidden]``, the chosen experts' indices and weights ``[tokens, top_k]``.
    """

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        read = [
            for_sharded_weights(value, group) if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in args
        ]
        local = {name: local_parameter(module, name) for name in module._parameters}
        return sum_parts(call_with(module, forward, local, *read, **kwargs).clone(), group)


class IdentityExpert(_WithoutParameters):
    """An expert without weights inside cut experts: it counts once in the sum over ranks."""

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return forward(args[0] / group.size, *args[1:], **kwargs)


class SumOutput(_WithoutParameters):
    """The module's output is a part on each rank."""

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        return sum_parts(forward(*args, **kwargs).clone(), group)


class LatentKeyValue(_WithoutParameters):
    """Latent attention's down projection: the rotary part goes past the cut up-projection into each rank's heads.

    Args:
        rotary_size: features at the end of the output that are the rotary part.
    """

    def __init__(self, rotary_size: int) -> None:
        self.rotary_size = rotary_size

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        output = forward(*args, **kwargs)
        latent, rotary = output.split([output.shape[-1] - self.rotary_size, self.rotary_size], dim=-1)
        return torch.cat([latent, for_sharded_weights(rotary, group)], dim=-1)


class Replicated(_WithoutParameters):
    """Whole on every rank."""

    def install(self, module: nn.Module, group: TensorParallelGroup) -> None:
        return


RARE_STYLES: dict[str, Callable[[], TensorParallelStyle]] = {
    "local_params": LocalParameters,
    "moe_tp_experts": ShardedExperts,
    "moe_identity_expert": IdentityExpert,
    "all_reduce": SumOutput,
    "replicate": Replicated,
}


def _packed(dim: int) -> Placement:
    """Two matrices side by side along ``dim``, each cut: a rank holds a slice of both.

    Private in torch (tried 2.13): no public placement says it.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim=dim, split_factor=2)


# How an entry that names a parameter instead of a module cuts it: matrices are the last two dimensions.
PARAMETER_PLACEMENTS: dict[str, Callable[[nn.Parameter], Placement]] = {
    "colwise": lambda parameter: Shard(max(parameter.ndim - 2, 0)),
    "rowwise": lambda parameter: Replicate() if parameter.ndim == 1 else Shard(parameter.ndim - 1),
    "packed_colwise": lambda parameter: Shard(0) if parameter.ndim == 1 else _packed(parameter.ndim - 2),
    "packed_rowwise": lambda parameter: Replicate() if parameter.ndim == 1 else _packed(parameter.ndim - 1),
}
