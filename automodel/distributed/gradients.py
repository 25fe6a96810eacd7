"""One global gradient norm over parameters of any placement, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from automodel.distributed.mesh import MeshContext

EPSILON = 1e-6


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(parameter: Tensor, world_size: int) -> int:
    """On how many of ``world_size`` ranks the same elements of ``parameter`` are held.

    A plain tensor is on all of them; a DTensor on all but those that hold its other shards.
    """
    if not isinstance(parameter, DTensor):
        return world_size
    shards = 1
    for axis, placement in enumerate(parameter.placements):
        if not isinstance(placement, Replicate):
            shards *= parameter.device_mesh.size(axis)
    return world_size // shards


@torch.no_grad()
def local_square_sum(parameters: Iterable[Tensor], world_size: int, device: torch.device) -> Tensor:
    """This rank's share of the squared global gradient norm, in fp64, shape [].

    Each parameter's local square sum is divided by the number of ranks that hold the same
    elements, so the plain sum over **all** ranks counts each element once, whatever mesh its
    parameter lives on.
    """
    by_copies: dict[tuple[int, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            if gradient.numel():
                by_copies.setdefault((copies(parameter, world_size), gradient.device), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (count, _), gradients in by_copies.items():
        norms = torch._foreach_norm([g.float() if g.dtype != torch.float64 else g for g in gradients])
        total += torch.stack(list(norms)).double().square().sum().to(device) / count
    return total


def global_gradient_norm(parameters: Iterable[Tensor], mesh_context: MeshContext) -> float:
    """The norm of all gradients of the run, each element counted once; the same on every rank. Collective.

    For a loop of one's own; pass it to :func:`clip_gradients`.

    Args:
        parameters: this rank's; of an ``AutoPipeline`` its ``counted_parameters()``.
    """
    device, world_size = mesh_context.device, mesh_context.world_size
    total = local_square_sum(parameters, world_size // mesh_context.pp_size, device)
    if world_size > 1:
        dist.all_reduce(total)
    return total.sqrt().item()


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], global_norm: float, max_norm: float | None) -> None:
    """Scale all gradients by ``max_norm / global_norm`` where the norm is larger.

    Args:
        parameters: gradients are scaled in place, each rank its own part.
        global_norm: over all ranks, equal on all.
        max_norm: None: no clipping.
    """
    if max_norm is None:
        return
    factor = max_norm / (global_norm + EPSILON)
    if factor >= 1.0:
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            by_device.setdefault(gradient.device, []).append(gradient)
    for gradients in by_device.values():
        torch._foreach_mul_(gradients, factor)
