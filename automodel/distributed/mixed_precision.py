"""Compute in a lower precision from fp32 master weights, where FSDP2 does not do it itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from automodel.config.distributed import MixedPrecision


def dtype_of(name: str | None) -> torch.dtype | None:
    """``"bfloat16"`` -> ``torch.bfloat16``; None stays None."""
    return None if name is None else getattr(torch, name)


def cast_in_forward(model: nn.Module, policy: MixedPrecision, units: Iterable[nn.Module] = ()) -> None:
    """Make every module compute in ``policy.param_dtype``, in place; parameters stay as they are.

    The same numbers as FSDP2's mixed precision: a module that owns parameters sees them cast during
    its forward, floating inputs are cast where the model is entered, floating outputs where it is left.
    The cast is differentiable, so gradients arrive in the parameters' own dtype. Buffers, such
    as rotary frequencies, are not cast.

    Args:
        model: in fp32.
        policy: the dtypes.
        units: modules whose parameters are all cast when the module is entered, instead of each submodule's when it is
            entered. The copies then live until the backward even where the module is recomputed in it.
    """
    param_dtype = dtype_of(policy.param_dtype)
    output_dtype = dtype_of(policy.output_dtype)
    if param_dtype is not None:
        within_units: set[nn.Module] = set()
        for unit in units:
            within_units.update(unit.modules())
            unit.forward = _with_cast_parameters(list(unit.modules()), unit.forward, param_dtype)
        for module in model.modules():
            if module not in within_units and module._parameters:
                module.forward = _with_cast_parameters([module], module.forward, param_dtype)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (
            (_cast(args, param_dtype), _cast(kwargs, param_dtype)) if policy.cast_forward_inputs else (args, kwargs)
        ),
        with_kwargs=True,
    )
    model.register_forward_hook(lambda _, args, output: _cast(output, output_dtype))


def _with_cast_parameters(
    modules: list[nn.Module], forward: Callable[..., Any], dtype: torch.dtype
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        own = [dict(module._parameters) for module in modules]
        try:
            for module, parameters in zip(modules, own, strict=True):
                for name, parameter in parameters.items():
                    if parameter is not None and parameter.is_floating_point():
                        # Read by the module as an attribute: a cast copy in the parameter's place keeps its graph.
                        module._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            for module, parameters in zip(modules, own, strict=True):
                module._parameters.update(parameters)

    return cast_forward


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)
