"""A sharded model to a folder that ``AutoModelForCausalLM.from_pretrained`` loads.

Ranks write files side by side. Tensors are gathered one at a time by the ranks that hold them, so none ever has more
of the model than its own part and a few single tensors.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel.distributed.pipeline_parallel import AutoPipeline
from automodel.model.checkpoint_names import SavedTensor
from automodel.model.safetensors_writer import FileWriter, OutputFile, OutputTensor, index_of, plan_files

__all__ = ["ExportError", "export_model", "held_tensors", "planned_tensors", "write_export"]

SideFiles = Callable[[Path], None]


class ExportError(RuntimeError):
    """The folder could not be written; what stood there before is as it was."""


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers of this rank by the whole model's names.

    Args:
        model: what a step calls, from ``apply_model_infrastructure``.
    """
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    parts: Sequence[nn.Module] = model.parts if isinstance(model, AutoPipeline) else [unwrapped]
    return {name: tensor for part in parts for name, tensor in part.state_dict(keep_vars=True).items()}


def export_model(
    model: nn.Module,
    tensors: Sequence[SavedTensor],
    folder: Path,
    dtype: torch.dtype,
    side_files: SideFiles,
    max_file_bytes: int | None = None,
) -> None:
    """Write the weights of a trained model, and what else belongs into ``folder``. Collective over the world.

    The files do not depend on the layout, bit for bit.

    Args:
        model: what a step calls.
        tensors: of the whole model, from :func:`automodel.model.checkpoint_names.saved_tensors`, before it was sharded.
        folder: on a disk that all ranks share; appears in one rename, in the place of one that is there.
        dtype: of parameters in the files; buffers keep theirs.
        side_files: called on rank 0 with the folder to write configuration and tokenizer into.
        max_file_bytes: 5 GB where not given.

    Raises:
        ExportError: on every rank, with the first failing rank's reason.
    """
    held = held_tensors(model)
    by_key = {tensor.key: tensor for tensor in tensors}
    rank, world_size = _place()
    holders = _holders({tensor.name for tensor in tensors if tensor.name in held})

    def fetch(output: OutputTensor, writer: int) -> Tensor | None:
        name = by_key[output.key].name
        ranks = holders[name]
        whole = _whole(held[name], output.dtype) if name in held else None
        if writer in ranks:
            return whole.cpu() if whole is not None and rank == writer else None
        # The writer is in another pipeline stage.
        if rank == ranks[0]:
            assert whole is not None
            dist.send(whole.to(_exchange_device()).contiguous(), dst=writer)
        if rank == writer:
            received = torch.empty(output.shape, dtype=output.dtype, device=_exchange_device())
            dist.recv(received, src=ranks[0])
            return received.cpu()
        return None

    outputs = planned_tensors(tensors, dtype)
    files = plan_files(outputs) if max_file_bytes is None else plan_files(outputs, max_file_bytes)
    with torch.no_grad():
        write_export(files, folder, fetch, side_files, rank, world_size)


def write_export(
    files: Sequence[OutputFile],
    folder: Path,
    fetch: Callable[[OutputTensor, int], Tensor | None],
    side_files: SideFiles,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Write ``files`` beside ``folder`` and rename. Collective over ``world_size`` ranks.

    Args:
        fetch: called with a tensor and its writer, on all ranks in one order; gives the writer the whole tensor, on
            the CPU.

    Raises:
        ExportError: see :func:`export_model`.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    _agree(folder, lambda: _start(partial) if rank == 0 else None)
    # Spread over the world, and so over its nodes.
    count = len(files)
    writers = [number * world_size // count if count <= world_size else number % world_size for number in range(count)]
    lanes: dict[int, list[tuple[int, OutputTensor]]] = {}
    for number, (file, writer) in enumerate(zip(files, writers, strict=True)):
        lanes.setdefault(writer, []).extend((number, tensor) for tensor in file.tensors)
    open_files: dict[int, FileWriter] = {}
    errors: list[Exception] = []

    def close(number: int) -> None:
        try:
            open_files.pop(number).close()
        except (OSError, ValueError) as error:
            errors.append(error)

    # A tensor for each writer in turn: while one writes, the others gather.
    for turn in itertools.zip_longest(*lanes.values()):
        for item in turn:
            if item is None:
                continue
            number, tensor = item
            whole = fetch(tensor, writers[number])
            if whole is None:
                continue
            if number not in open_files:
                for earlier in list(open_files):
                    close(earlier)
                open_files[number] = FileWriter(partial, files[number])
            open_files[number].put(whole)
    for number in list(open_files):
        close(number)

    def finish() -> None:
        if errors:
            raise errors[0]
        if rank == 0:
            index = index_of(files)
            if index is not None:
                (partial / index[0]).write_text(index[1])
            side_files(partial)

    try:
        _agree(folder, finish)
    except ExportError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    _agree(folder, lambda: _publish(partial, folder) if rank == 0 else None)


def planned_tensors(tensors: Sequence[SavedTensor], dtype: torch.dtype) -> list[OutputTensor]:
    """What the files are to hold: parameters in ``dtype``, buffers in their own."""
    return [
        OutputTensor(
            tensor.key,
            dtype if tensor.is_parameter and tensor.dtype.is_floating_point else tensor.dtype,
            tensor.shape,
        )
        for tensor in tensors
    ]


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor in ``dtype``, on every rank that holds a part; collective over these."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(dtype)
    # Converted before it is gathered: half the traffic for a 16-bit type.
    # On the mesh's device: offloaded parameters cannot be gathered where they are.
    local = tensor.to_local().detach().to(tensor.device_mesh.device_type, dtype)
    converted = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return converted.full_tensor()


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _holders(names: set[str]) -> Mapping[str, list[int]]:
    """Name -> ranks that hold it or a part of it, ascending. Collective."""
    gathered = [names]
    if dist.is_initialized():
        gathered = gathered * dist.get_world_size()
        dist.all_gather_object(gathered, names)
    holders: dict[str, list[int]] = {}
    for holder, held in enumerate(gathered):
        for name in held:
            holders.setdefault(name, []).append(holder)
    return holders


def _exchange_device() -> torch.device:
    """Where tensors must be for the world's own group."""
    return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")


def _agree(folder: Path, action: Callable[[], None]) -> None:
    """Run ``action``; if it fails on any rank, fail on all."""
    error: str | None = None
    try:
        action()
    except (OSError, ValueError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors: list[str | None] = [error]
    if dist.is_initialized():
        errors = errors * dist.get_world_size()
        dist.all_gather_object(errors, error)
    failed = [(rank, text) for rank, text in enumerate(errors) if text is not None]
    if failed:
        raise ExportError(f"the model could not be written to {folder}: rank {failed[0][0]}: {failed[0][1]}")


def _start(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _publish(partial: Path, folder: Path) -> None:
    """One rename makes the folder visible; one that stood there before gives way."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    if replaced.exists():
        shutil.rmtree(replaced)
