"""The exchanges of tensor parallelism as differentiable functions of local tensors.

Convention: a *replicated* activation has the same value on every rank, and its gradient is the whole
gradient, the same on every rank. What reads it with sharded weights makes a part of that gradient on each
rank; :func:`for_sharded_weights` sums the parts. After Megatron-LM (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022 for the sequence dimension), with uneven slices: dimensions are cut like ``torch.chunk``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 gave both new names and warns about the old ones, which are all that older versions have.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_SHARED_ATTRIBUTE = "_tensor_parallel_shared"


class TensorParallelGroup:
    """This process's place on the tp axis.

    Args:
        mesh: the tp axis alone.
        in_place: sums may overwrite what they add up. Not under selective checkpointing, which keeps some of it.
    """

    def __init__(self, mesh: DeviceMesh, in_place: bool = True) -> None:
        self.in_place = in_place
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.process_group = mesh.get_group()

    def bounds(self, size: int, rank: int | None = None) -> tuple[int, int]:
        """First index and the one after the last of a rank's slice of a dimension of ``size``."""
        chunk = -(-size // self.size)
        rank = self.rank if rank is None else rank
        return min(rank * chunk, size), min((rank + 1) * chunk, size)

    def slice(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice of ``tensor``, contiguous."""
        start, end = self.bounds(tensor.shape[dim])
        return tensor.narrow(dim, start, end - start).contiguous()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in the place of ``tensor`` where that is allowed and ``tensor`` contiguous."""
        tensor = tensor.contiguous() if self.in_place else tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int, size: int) -> Tensor:
        """The slices of all ranks joined to a dimension of ``size``."""
        dim %= tensor.ndim
        # The collective wants slices of one length: short ones are filled up.
        tensor = self._filled(tensor, dim, -(-size // self.size)).contiguous()
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        _all_gather_single(gathered, tensor, group=self.process_group)
        slices = gathered.unflatten(0, (self.size, tensor.shape[0]))
        lengths = [end - start for start, end in (self.bounds(size, rank) for rank in range(self.size))]
        return torch.cat([slices[rank].narrow(dim, 0, length) for rank, length in enumerate(lengths)], dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice of the sum over ranks."""
        dim %= tensor.ndim
        size = tensor.shape[dim]
        chunk = -(-size // self.size)
        filled = self._filled(tensor, dim, chunk * self.size)
        slices = filled.unflatten(dim, (self.size, chunk)).movedim(dim, 0).contiguous()
        own = torch.empty_like(slices[0])
        _reduce_scatter_single(own, slices.flatten(0, 1), group=self.process_group)
        start, end = self.bounds(size)
        return own if end - start == chunk else own.narrow(dim, 0, end - start).clone()

    def _filled(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """``tensor`` with zeros up to ``length`` along ``dim``."""
        missing = length - tensor.shape[dim]
        if not missing:
            return tensor
        return torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing))


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.group.all_reduce(gradients[0]), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        return group.all_reduce(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup, dim: int, size: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(tensor, dim, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.group.slice(gradients[0], ctx.dim), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, tensor.shape[dim]
        return group.slice(tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.group.all_gather(gradients[0], ctx.dim, ctx.size), None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, tensor.shape[dim]
        return group.reduce_scatter(tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.group.all_gather(gradients[0], ctx.dim, ctx.size), None, None


class _GatheredForShardedWeights(torch.autograd.Function):
    """``gathered``, made of every rank's ``shard``; the parts of its gradient are summed where they belong."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, gathered: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.group.reduce_scatter(gradients[0], ctx.dim), None, None, None


def for_sharded_weights(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """A replicated activation as modules with sharded weights read it: its gradient's parts are summed.

    Modules that read the same tensor, such as the query, key and value projections, share one sum.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    if torch.compiler.is_compiling():
        return _SumGradients.apply(tensor, group)
    shared = getattr(tensor, _SHARED_ATTRIBUTE, None)
    if shared is None:
        shared = _SumGradients.apply(tensor, group)
        setattr(tensor, _SHARED_ATTRIBUTE, shared)
    return shared


def sum_parts(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Replicated sum of every rank's part. ``tensor`` may be overwritten: nothing else may hold it."""
    return _Sum.apply(tensor, group)


def sum_parts_to_slices(tensor: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
    """This rank's slice along ``dim`` of the sum of every rank's part."""
    return _SumScatter.apply(tensor, group, dim)


def gather_slices(tensor: Tensor, group: TensorParallelGroup, dim: int, size: int) -> Tensor:
    """Replicated activation from every rank's slice along ``dim``, whose whole length is ``size``.

    Where :func:`for_sharded_weights` reads the result, its sum and the way back are one reduce-scatter.
    """
    gathered = _Gather.apply(tensor, group, dim, size)
    if tensor.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        shared = _GatheredForShardedWeights.apply(tensor, gathered.detach(), group, dim)
        setattr(gathered, _SHARED_ATTRIBUTE, shared)
    return gathered


def split_to_slices(tensor: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
    """This rank's slice along ``dim`` of a replicated activation."""
    return _Split.apply(tensor, group, dim)
