"""The exchanges of tensor parallelism as operators that ``torch.compile`` takes into its graph as they are.

A compiler cannot follow collectives that write into buffers through autograd functions; an operator with a known
output shape it leaves alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Operators take names and not objects. One entry for each tp axis that this process is on.
_GROUPS: dict[str, Any] = {}


def register_group(name: str, group: Any) -> None:
    """Let the operators find a ``TensorParallelGroup`` by the name of its process group."""
    _GROUPS[name] = group


@torch.library.custom_op("automodel::all_reduce", mutates_args=(), schema="(Tensor tensor, str group) -> Tensor")
def all_reduce(tensor: Tensor, group: str) -> Tensor:
    return _GROUPS[group].all_reduce(tensor.clone())


@all_reduce.register_fake
def _(tensor: Tensor, group: str) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "automodel::all_gather", mutates_args=(), schema="(Tensor tensor, str group, int dim, int size) -> Tensor"
)
def all_gather(tensor: Tensor, group: str, dim: int, size: int) -> Tensor:
    return _GROUPS[group].all_gather(tensor, dim, size)


@all_gather.register_fake
def _(tensor: Tensor, group: str, dim: int, size: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.new_empty(shape)


@torch.library.custom_op(
    "automodel::reduce_scatter", mutates_args=(), schema="(Tensor tensor, str group, int dim) -> Tensor"
)
def reduce_scatter(tensor: Tensor, group: str, dim: int) -> Tensor:
    return _GROUPS[group].reduce_scatter(tensor, dim)


@reduce_scatter.register_fake
def _(tensor: Tensor, group: str, dim: int) -> Tensor:
    shape = list(tensor.shape)
    start, end = _GROUPS[group].bounds(shape[dim])
    shape[dim] = end - start
    return tensor.new_empty(shape)
