"""Sequence parallelism: between the tensor-parallel parts of a block each tp rank holds a slice of the sequence.

The stack of blocks is entered by splitting the hidden states ``[batch, seq, hidden]`` along the sequence and left by
gathering them, so embeddings, masks, rotary tables and the head see whole sequences, on every pipeline stage. Inside a
block, norms work on slices; every other child (attention, MLP, mixer) gathers its input and gives back a slice.
After Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from automodel.config.errors import ConfigError
from automodel.distributed.blocks import transformer_blocks
from automodel.distributed.tensor_parallel import TensorParallelPlan
from automodel.distributed.tensor_parallel_collectives import TensorParallelGroup, gather_slices, split_to_slices
from automodel.distributed.tensor_parallel_styles import (
    SEQUENCE_DIM,
    STYLES,
    ReplicatedPartialGradient,
    Rowwise,
    TensorParallelStyle,
)

__all__ = ["apply_sequence_parallel", "check_sequence_parallel"]


def check_sequence_parallel(model: nn.Module, plan: TensorParallelPlan) -> None:
    """Refuse models whose blocks are not one stack, or that cut a block's own linear modules.

    Raises:
        ConfigError: names the model's class.
    """
    blocks = transformer_blocks(model)
    stacks = {name.rpartition(".")[0] for name in blocks}
    if len(stacks) > 1:
        raise ConfigError(
            "distributed.sequence_parallel",
            True,
            f"{type(model).__name__} has several stacks of blocks: {', '.join(sorted(stacks))}",
            "false",
        )
    for name, block in blocks.items():
        for child, _ in _called_children(block):
            if f"{name}.{child}" in plan.modules and plan.modules[f"{name}.{child}"] in STYLES:
                raise ConfigError(
                    "distributed.sequence_parallel",
                    True,
                    f"{type(model).__name__} cuts {name}.{child}, which is not inside an attention or MLP",
                    "false",
                )


class _Sequence:
    """The length of the sequence that the stack of blocks is working on."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.length = 0

    def enter(self, hidden: Tensor) -> Tensor:
        self.length = hidden.shape[SEQUENCE_DIM]
        return split_to_slices(hidden, self.group, SEQUENCE_DIM)

    def gather(self, hidden: Tensor) -> Tensor:
        return gather_slices(hidden, self.group, SEQUENCE_DIM, self.length)

    def split(self, hidden: Tensor) -> Tensor:
        return split_to_slices(hidden, self.group, SEQUENCE_DIM)


def apply_sequence_parallel(
    model: nn.Module, group: TensorParallelGroup, styles: Mapping[str, TensorParallelStyle]
) -> None:
    """Split the sequence over the group between tensor-parallel parts, in place; after the styles are installed.

    Args:
        model: on meta, a whole model or a pipeline stage.
        group: the tp axis.
        styles: the installed ones, by module name.
    """
    blocks = {name: block for name, block in transformer_blocks(model).items() if any(True for _ in block.parameters())}
    if not blocks:
        return
    sequence = _Sequence(group)
    for name, block in blocks.items():
        for child_name, child in _called_children(block):
            if _works_on_slices(child):
                for module in child.modules():
                    _sum_parameter_gradients(module, group)
                    _draw_whole_dropout(module, sequence)
            else:
                scatters = _scatter_last_projection(f"{name}.{child_name}", child, styles)
                _wrap(child, sequence.gather, None if scatters else sequence.split)
        _sum_parameter_gradients(block, group)
    in_order = list(blocks.values())
    _wrap(in_order[0], sequence.enter, None)
    _wrap(in_order[-1], None, sequence.gather)


def _called_children(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in block.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{inner}", module) for inner, module in _called_children(child))
        else:
            yield name, child


def _works_on_slices(module: nn.Module) -> bool:
    """Norms and dropout treat each token by itself; Hugging Face's norms have no class in common but their names."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return False
    return "norm" in type(module).__name__.lower() or isinstance(module, nn.Dropout | nn.Identity)


def _sum_parameter_gradients(module: nn.Module, group: TensorParallelGroup) -> None:
    """A module's own parameters see this rank's tokens only, so their gradients are parts."""
    own = [key for key, parameter in module._parameters.items() if parameter is not None]
    for key in own:
        parameter = module._parameters[key]
        assert parameter is not None
        if not isinstance(parameter, DTensor):
            tensor = distribute_tensor(parameter.detach(), group.mesh, [Replicate()], src_data_rank=None)
            module._parameters[key] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    if own:
        ReplicatedPartialGradient().install(module, group)


def _draw_whole_dropout(module: nn.Module, sequence: _Sequence) -> None:
    """Every rank draws the mask of the whole sequence, the one of a single process, and takes its slice."""
    if not isinstance(module, nn.Dropout):
        return
    forward = module.forward

    def dropout(hidden: Tensor) -> Tensor:
        if not module.training or module.p == 0.0:
            return forward(hidden)
        shape = list(hidden.shape)
        shape[SEQUENCE_DIM] = sequence.length
        mask = forward(torch.ones(shape, dtype=hidden.dtype, device=hidden.device))
        return hidden * sequence.group.slice(mask, SEQUENCE_DIM)

    module.forward = dropout  # type: ignore[method-assign, assignment]


def _scatter_last_projection(name: str, child: nn.Module, styles: Mapping[str, TensorParallelStyle]) -> bool:
    """Let a child's only row-cut projection give slices of its sum at once, instead of the sum to be sliced.

    Where dropout follows inside the child, it is to see the whole.
    """
    found = [styles.get(f"{name}.{key}") for key, _ in child.named_children()]
    rows = [style for style in found if isinstance(style, Rowwise)]
    if len(rows) != 1 or any(isinstance(module, nn.Dropout) and module.p > 0 for module in child.modules()):
        return False
    rows[0].scatter_sequence = True
    return True


def _wrap(
    module: nn.Module, before: Callable[[Tensor], Tensor] | None, after: Callable[[Tensor], Tensor] | None
) -> None:
    """Put exchanges around a forward: on its hidden states, first or by name, and on its first output."""
    module.forward = functools.partial(_exchange, module, module.forward, before, after)


def _exchange(
    module: nn.Module,
    forward: Callable[..., Any],
    before: Callable[[Tensor], Tensor] | None,
    after: Callable[[Tensor], Tensor] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if before is not None:
        if args:
            args = (before(args[0]), *args[1:])
        elif "hidden_states" in kwargs:
            kwargs = {**kwargs, "hidden_states": before(kwargs["hidden_states"])}
        else:
            raise TypeError(f"{type(module).__name__} is called without hidden states: no sequence to exchange")
    output = forward(*args, **kwargs)
    if after is None:
        return output
    if isinstance(output, tuple):
        return (after(output[0]), *output[1:])
    return after(output)
