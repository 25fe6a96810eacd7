"""This rank's part of each saved tensor, by name, whatever the layout.

Optimizer state goes by parameter name and never by position: the optimizer's groups depend on the layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel.distributed.gradients import local_tensor
from automodel.distributed.pipeline_parallel import AutoPipeline

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"
# What torch.compile and checkpoint wrappers put into names.
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, held by this rank.

    Attributes:
        tensor: the block itself, plain, on whatever device.
        offsets: of its first element in the whole tensor, one a dim.
        shape: of the whole tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def piece_of(tensor: Tensor) -> Piece:
    """This rank's piece of a DTensor or plain tensor; shares its memory.

    ``fully_shard`` over a tensor that another axis has cut already marks its placement with a ``split_factor``: it
    cuts what the other axes left, and the marked axes come last, whatever their order in the mesh.

    Raises:
        RuntimeError: the local block is not the one that the placements describe.
    """
    local = local_tensor(tensor.detach())
    if not isinstance(tensor, DTensor):
        return Piece(local, (0,) * local.ndim, tuple(local.shape))
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds no part of a tensor on a mesh that it is not in"
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    for axis in sorted(axes, key=lambda axis: hasattr(tensor.placements[axis], "split_factor")):
        dim = getattr(tensor.placements[axis], "dim", None)
        if dim is None:
            raise RuntimeError(f"a tensor with placement {tensor.placements[axis]} cannot be saved")
        # As torch.chunk cuts: equal parts, rounded up; the last ones are shorter or empty.
        part = -(-sizes[dim] // tensor.device_mesh.size(axis))
        start = min(part * coordinate[axis], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(part, sizes[dim] - start)
    if local.numel() and list(local.shape) != sizes:
        raise RuntimeError(f"placements {tensor.placements} describe a block {sizes}, and here is {list(local.shape)}")
    return Piece(local, tuple(offsets), tuple(tensor.shape))


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers by the whole model's names; a tensor under several names once.

    Of a parameter that two pipeline stages hold both copies come, under the one name that the whole model gives it.
    """
    homes = {tie.copy_name: tie.name for tie in model.split.ties} if isinstance(model, AutoPipeline) else {}
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    parts: Iterable[nn.Module] = model.parts if isinstance(model, AutoPipeline) else [unwrapped]
    seen: set[int] = set()
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                clean = _WRAPPERS.sub("", name)
                yield homes.get(clean, clean), tensor


def pieces_to_save(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Piece]:
    """Everything that this rank holds, by key: ``model.<name>``, ``optimizer.<name>.<field>``, ``rng.<rank>.<device>``.

    Raises:
        TypeError: the optimizer keeps something else than tensors and nothing.
    """
    pieces: dict[str, Piece] = {}
    for name, tensor in model_tensors(model):
        pieces[f"{MODEL}.{name}"] = piece_of(tensor)
        for field, value in _state_of(optimizer, tensor).items():
            if isinstance(value, Tensor):
                pieces[f"{OPTIMIZER}.{name}.{field}"] = piece_of(value)
            elif value is not None:
                raise TypeError(f"optimizer state {field} of {name} is a {type(value).__name__} and cannot be saved")
    for device, state in _generator_states().items():
        pieces[f"{RNG}.{rank}.{device}"] = piece_of(state)
    # A resumed run may have made its state in another order; its files are to be the same.
    return dict(sorted(pieces.items()))


def _state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    # `get`: the state makes an entry for whatever it is asked for with brackets.
    return optimizer.state.get(parameter, {})


def make_optimizer_state(
    group: dict[str, Any], parameter: Tensor, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Room for a parameter's saved state, laid out as the parameter is.

    Args:
        group: the optimizer's, that the parameter is in.
        shapes: of each saved field; one shaped like the parameter is sharded like it, any other is whole on each rank.
    """
    # torch keeps the step count where the update runs: on the parameter's device for fused and capturable updates.
    step_device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    state = {}
    for field, shape in shapes.items():
        if field != "step" and shape == tuple(parameter.shape):
            state[field] = torch.zeros_like(parameter.detach())
        else:
            device = step_device if field == "step" else parameter.device
            state[field] = torch.zeros(shape, dtype=torch.float32, device=device)
    return state


def _generator_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generator(device: str, state: Tensor) -> None:
    """Set this rank's generator; ``state`` as ``torch.get_rng_state`` gave it."""
    if device == "cpu":
        torch.set_rng_state(state)
    elif torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


def empty_generator_states() -> dict[str, Tensor]:
    """Room for the states of this rank's generators."""
    return {device: torch.zeros_like(state) for device, state in _generator_states().items()}


class Staging:
    """Copies of pieces in the memory of the CPU, so that training goes on while they are written.

    The buffers are kept for the next save. On CUDA they are pinned, and the copies run side by side.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """The same pieces as they are at this moment; valid until the next call."""
        copies = {}
        for key, piece in pieces.items():
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
                pinned = piece.tensor.is_cuda
                buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, device="cpu", pin_memory=pinned)
                self._buffers[key] = buffer
            buffer.copy_(piece.tensor, non_blocking=True)
            copies[key] = Piece(buffer, piece.offsets, piece.shape)
        if any(piece.tensor.is_cuda for piece in pieces.values()):
            torch.cuda.synchronize()
        return copies
