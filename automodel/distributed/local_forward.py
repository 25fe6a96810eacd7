"""A module's forward with other tensors in the place of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate


def local_parameter(module: nn.Module, name: str, partial: bool = False) -> Tensor | None:
    """This rank's part of a parameter, differentiably; a plain one is its own, a missing one None.

    Args:
        module: owns the parameter.
        name: of the parameter in ``module``.
        partial: the rank's use makes a part of the gradient of a replicated parameter, to be summed.
    """
    parameter = module._parameters.get(name)
    if not isinstance(parameter, DTensor):
        return parameter
    if partial:
        placements = [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
        return parameter.to_local(grad_placements=placements)
    return parameter.to_local()


def call_with(
    module: nn.Module,
    forward: Callable[..., Any],
    parameters: dict[str, Tensor | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``forward(*args, **kwargs)`` while ``parameters`` stand in the place of the module's own."""
    own = {name: module._parameters[name] for name in parameters}
    try:
        # Read by the module as attributes: a tensor in a parameter's place keeps its graph.
        module._parameters.update(parameters)  # type: ignore[arg-type]
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(own)
