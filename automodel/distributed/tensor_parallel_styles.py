"""The styles of tensor-parallel plans: how a module's parameters are cut and what its forward exchanges.

Names are those of Hugging Face's plans. Parameters become DTensors, so that optimizer, checkpoint and gradient norm
know their whole shape; the computation runs on their local tensors, which spares DTensor's dispatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers.pytorch_utils import Conv1D

from automodel.distributed.local_forward import call_with, local_parameter
from automodel.distributed.tensor_parallel_collectives import (
    TensorParallelGroup,
    for_sharded_weights,
    gather_slices,
    split_to_slices,
    sum_parts,
    sum_parts_to_slices,
)

__all__ = ["STYLES", "TensorParallelStyle"]

SEQUENCE_DIM = 1


class TensorParallelStyle:
    """What one entry of a plan does to one module."""

    def placement(self, module: nn.Module, name: str) -> Placement | None:
        """How the parameter ``name`` of ``module`` is cut over the tp axis; None: it stays a plain tensor."""
        raise NotImplementedError

    def install(self, module: nn.Module, group: TensorParallelGroup) -> None:
        """Put the exchanges around the module's forward; the parameters are DTensors already."""
        module.forward = functools.partial(self._forward, module, group, module.forward)

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        raise NotImplementedError


def output_dim(module: nn.Module) -> int:
    """The dimension of ``weight`` that makes the output: GPT-2's Conv1D has it last."""
    return 1 if isinstance(module, Conv1D) else 0


def output_size(module: nn.Module) -> int:
    """Features of a linear module's whole output."""
    weight: Any = module.weight
    return weight.shape[output_dim(module)]


def linear(
    module: nn.Module, forward: Callable[..., Any], features: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """A linear module's own forward with these parameters in the place of its own."""
    if isinstance(module, Conv1D):
        # Its own forward has the whole output's size built in, and wants a bias.
        assert weight is not None
        return nn.functional.linear(features, weight.t(), bias)
    return call_with(module, forward, {"weight": weight, "bias": bias}, features)


class Colwise(TensorParallelStyle):
    """Output features are cut.

    Args:
        gather_output: every rank gets the whole output.
    """

    def __init__(self, gather_output: bool = False) -> None:
        self.gather_output = gather_output

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(0 if name == "bias" else output_dim(module))

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        features = for_sharded_weights(args[0], group)
        output = linear(module, forward, features, local_parameter(module, "weight"), local_parameter(module, "bias"))
        return gather_slices(output, group, -1, output_size(module)) if self.gather_output else output


class Rowwise(TensorParallelStyle):
    """Input features are cut; the ranks' parts of the output are summed.

    Args:
        split_input: the input is replicated, and each rank takes its slice.
        scatter_sequence: each rank keeps its slice of the sequence of the sum.
    """

    def __init__(self, split_input: bool = False, scatter_sequence: bool = False) -> None:
        self.split_input = split_input
        self.scatter_sequence = scatter_sequence

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Replicate() if name == "bias" else Shard(1 - output_dim(module))

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        features = split_to_slices(args[0], group, -1) if self.split_input else args[0]
        parts = linear(module, forward, features, local_parameter(module, "weight"), None)
        bias = local_parameter(module, "bias", partial=self.scatter_sequence)
        output = sum_parts_to_slices(parts, group, SEQUENCE_DIM) if self.scatter_sequence else sum_parts(parts, group)
        # After the sum: a bias on each rank would count as often as there are ranks.
        return output if bias is None else output + bias


class EmbeddingRowwise(TensorParallelStyle):
    """The vocabulary is cut: each rank looks up the tokens it has, and the results are summed."""

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(0)

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        embedding: Any = module
        start, end = group.bounds(embedding.weight.shape[0])
        here = (args[0] >= start) & (args[0] < end)
        tokens = (args[0] - start).masked_fill(~here, 0)
        with _local_padding(embedding, start, end):
            found = call_with(module, forward, {"weight": local_parameter(module, "weight")}, tokens)
        return sum_parts(found.masked_fill(~here.unsqueeze(-1), 0.0), group)


def _local_padding(embedding: Any, start: int, end: int) -> AbstractContextManager[None]:
    """The padding token's row, which gets no gradient, by its number on this rank."""
    whole = getattr(embedding, "padding_idx", None)
    if whole is None:
        return nullcontext()

    @contextmanager
    def renumbered() -> Any:
        try:
            embedding.padding_idx = whole - start if start <= whole < end else None
            yield
        finally:
            embedding.padding_idx = whole

    return renumbered()


class EmbeddingColwise(TensorParallelStyle):
    """The hidden dimension is cut, and every rank gets the whole."""

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(1)

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        weight: Any = module.weight
        found = call_with(module, forward, {"weight": local_parameter(module, "weight")}, *args, **kwargs)
        return gather_slices(found, group, -1, weight.shape[1])


class ReplicatedPartialGradient(TensorParallelStyle):
    """Whole parameters that each rank applies to its slice of the activations: their gradients are summed.

    Norms over the heads of a rank, and norms over a slice of the sequence.
    """

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Replicate()

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        local = {name: local_parameter(module, name, partial=True) for name in module._parameters}
        return call_with(module, forward, local, *args, **kwargs)


class ReplicatedKeyValue(TensorParallelStyle):
    """Key or value projection whose heads do not divide over the ranks: each computes those its queries need.

    The weight is whole on every rank. Of each rank's rows come parts of the gradients of weight and input.

    Args:
        num_heads: key-value heads of the whole projection.
        heads: those of this rank in order, repeated where its query heads share one unevenly.
    """

    def __init__(self, num_heads: int, heads: list[int]) -> None:
        self.num_heads = num_heads
        self.heads = heads

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Replicate()

    def _forward(
        self, module: nn.Module, group: TensorParallelGroup, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        features = for_sharded_weights(args[0], group)
        rows = [self._rows(local_parameter(module, name, partial=True)) for name in ("weight", "bias")]
        return linear(module, forward, features, *rows)

    def _rows(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        by_head = parameter.unflatten(0, (self.num_heads, -1))
        first, count = self.heads[0], len(self.heads)
        if self.heads == list(range(first, first + count)):
            return by_head.narrow(0, first, count).flatten(0, 1)
        return by_head[self.heads].flatten(0, 1)


STYLES: dict[str, Callable[[], TensorParallelStyle]] = {
    "colwise": Colwise,
    "colwise_gather_output": lambda: Colwise(gather_output=True),
    "colwise_rep": lambda: Colwise(gather_output=True),
    "rowwise": Rowwise,
    "rowwise_split_input": lambda: Rowwise(split_input=True),
    "rowwise_rep": lambda: Rowwise(split_input=True),
    "embedding_rowwise": EmbeddingRowwise,
    "embedding_colwise": EmbeddingColwise,
    "replicated_with_grad_allreduce": ReplicatedPartialGradient,
}
