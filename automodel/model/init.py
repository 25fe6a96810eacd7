"""Initial weights that do not depend on the layout.

Each module's parameters are drawn whole from a seed made of the run's seed and the module's name, by the
model's own ``_init_weights``, and each rank keeps its slice. So every layout starts from the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from automodel.model.seeding import seed_generators


def module_seed(seed: int, name: str) -> int:
    """A 63-bit seed from the run's seed and a module's fully qualified name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def materialise(model: nn.Module, device: torch.device, parameter_device: torch.device | None = None) -> None:
    """Give a model on meta real, uninitialised storage, in place, keeping tied parameters tied.

    Args:
        model: parameters may be DTensors.
        device: of the buffers.
        parameter_device: of the parameters; None: ``device``. Differs under CPU offload.
    """
    ties = _tied_names(model)
    model.to_empty(device=parameter_device or device)
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._parameters[attribute] = parameter
    if parameter_device is not None and parameter_device != device:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _walk(
    module: nn.Module, owner: PreTrainedModel, name: str = ""
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Every module, parents first, with its name and the nearest PreTrainedModel: its ``_init_weights`` counts."""
    if isinstance(module, PreTrainedModel):
        owner = module
    yield name, module, owner
    for child_name, child in module.named_children():
        yield from _walk(child, owner, f"{name}.{child_name}" if name else child_name)


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, seed: int, device: torch.device | None = None) -> None:
    """Draw the initial weights, in place; buffers that live outside checkpoints are computed too.

    The whole parameters of one module and its direct children exist at a time: some models'
    ``_init_weights`` reaches from a block into its projections, which is why a child's values are final only
    after its parent's turn. Of tied parameters the first name in the model's order counts.

    Args:
        model: materialised; parameters plain or DTensors of any placement.
        seed: of the run.
        device: where values are drawn; None: the parameters' own. Kinds of device draw different numbers, so
            offloaded parameters are drawn where the reference run draws them.

    Raises:
        RuntimeError: a parameter or buffer that the model's ``_init_weights`` leaves unset.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    # Parameter -> the first of its names; a tied one gets the values of the module that this names.
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    unset = _initialize_unit([], [("", model, model)], seed, names, device)
    for name, module, owner in _walk(model, model):
        children = [
            (f"{name}.{key}" if name else key, child, child if isinstance(child, PreTrainedModel) else owner)
            for key, child in module.named_children()
        ]
        unset += _initialize_unit([(name, module, owner)], children, seed, names, device)
    _check_set(model, unset)


@torch.no_grad()
def initialize_buffers(model: PreTrainedModel, seed: int, device: torch.device | None = None) -> None:
    """Compute the buffers, in place, such as rotary frequencies; parameters are not touched.

    For weights that come from files: those hold no such buffers, and meta left garbage in them.

    Args:
        model: materialised.
        seed: of the run.
        device: of the buffers.

    Raises:
        RuntimeError: a buffer that the model's ``_init_weights`` leaves unset.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    held = {module: dict(module._parameters) for module in model.modules()}
    try:
        # Drawing a parameter on meta costs nothing.
        for module, parameters in held.items():
            for key, parameter in parameters.items():
                if parameter is not None:
                    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    module._parameters[key] = nn.Parameter(stand_in, requires_grad=False)
        for name, module, owner in _walk(model, model):
            if module._buffers:
                _init_module(owner, module, module_seed(seed, name), device)
    finally:
        for module, parameters in held.items():
            module._parameters.update(parameters)
    _check_set(model, [])


def _check_set(model: PreTrainedModel, unset: list[str]) -> None:
    unset += [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.isnan().any()]
    if unset:
        raise RuntimeError(f"{type(model).__name__} leaves these without initial values: {', '.join(unset)}")


def _initialize_unit(
    parents: list[tuple[str, nn.Module, PreTrainedModel]],
    children: list[tuple[str, nn.Module, PreTrainedModel]],
    seed: int,
    names: dict[int, str],
    device: torch.device | None,
) -> list[str]:
    """Initialise children, then let the parent change them; store the children's slices.

    Returns:
        names of the children's parameters that stayed unset.
    """
    held = {id(module): dict(module._parameters) for _, module, _ in [*children, *parents]}
    unset = []
    try:
        for _, module, _ in [*children, *parents]:
            for key, parameter in held[id(module)].items():
                if parameter is not None:
                    where = device or parameter.device
                    full = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device=where)
                    module._parameters[key] = nn.Parameter(full, requires_grad=False)
        for name, module, owner in [*children, *parents]:
            _init_module(owner, module, module_seed(seed, name), device)
        for name, module, _ in children:
            for key, parameter in held[id(module)].items():
                full_name = f"{name}.{key}" if name else key
                if parameter is None or names[id(parameter)] != full_name:
                    continue
                full_parameter = module._parameters[key]
                assert full_parameter is not None
                if full_parameter.isnan().any():
                    unset.append(full_name)
                _copy_slice(parameter, full_parameter)
    finally:
        for _, module, _ in [*children, *parents]:
            module._parameters.update(held[id(module)])
    return unset


def _init_module(owner: PreTrainedModel, module: nn.Module, seed: int, device: torch.device | None) -> None:
    """Run ``_init_weights``, private in transformers (tried 5.24): it has no public spelling per module."""
    # A run on the CPU must not open a context on a GPU that happens to be there.
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        seed_generators(seed)
        module._is_hf_initialized = False  # type: ignore[assignment]
        owner._init_weights(module)


def _copy_slice(parameter: nn.Parameter, full: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        sliced = distribute_tensor(full.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(sliced.to_local())
    else:
        parameter.copy_(full)
