"""What a rank does in the tests of pretrained weights and exports, and what is broken there on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from automodel.distributed.setup import setup_distributed
from automodel.model import safetensors_files
from automodel.model.build import build_config, build_model
from automodel.model.checkpoint_names import saved_tensors
from automodel.model.export import export_model, held_tensors
from automodel.model.infrastructure import apply_model_infrastructure, instantiate_infrastructure
from automodel.model.weights import PretrainedWeights
from automodel.training.run import mixed_precision
from tests.parity.cases import Case, Outcome, run_case

# Small, so that even these models have several files.
MAX_FILE_BYTES = 100_000


@dataclass
class Reading:
    """What one rank read from the files, and what it holds of the model, both in bytes of the files' dtype."""

    rank: int
    read: int
    held: int


def load_train_export(case: Case, world_size: int, folder: str, dtype: str = "float32") -> Outcome:
    """Train as ``case`` says; what was loaded is written to ``folder`` before the first step."""
    config = case.config(reference=world_size == 1)
    tensors = saved_tensors(build_model(build_config(config.model), config.model))

    def export(model: torch.nn.Module) -> None:
        export_model(model, tensors, Path(folder), getattr(torch, dtype), _side_files, MAX_FILE_BYTES)

    return run_case(case, world_size, export)


def _side_files(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def readings(case: Case, world_size: int, file_itemsize: int) -> list[Reading]:
    """What each rank reads; counted on what the library of safetensors hands out."""
    config = case.config(reference=world_size == 1)
    mesh_context = setup_distributed(config.distributed, world_size, "cpu")
    infrastructure = instantiate_infrastructure(mesh_context, mixed_precision(config.precision))
    model = build_model(build_config(config.model), config.model)
    source = config.model.weights_source
    assert source is not None
    weights = PretrainedWeights(model, source)
    with _counted() as counts:
        trained = apply_model_infrastructure(model, infrastructure, config.seed, weights)
    assert sum(counts) == weights.bytes_read
    unique = {id(tensor): tensor for tensor in held_tensors(trained).values()}
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in unique.values()]
    reading = Reading(
        dist.get_rank() if world_size > 1 else 0, sum(counts), sum(tensor.numel() for tensor in local) * file_itemsize
    )
    gathered: list[Any] = [reading] * world_size
    if world_size > 1:
        dist.all_gather_object(gathered, reading)
    return gathered


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes of every tensor that comes out of an opened file."""
    counts: list[int] = []
    real = safetensors_files.safe_open

    class View:
        def __init__(self, view: Any) -> None:
            self.view = view

        def __getitem__(self, place: Any) -> torch.Tensor:
            data: torch.Tensor = self.view[place]
            counts.append(data.numel() * data.element_size())
            return data

    class File:
        def __init__(self, *arguments: Any) -> None:
            self.file = real(*arguments)

        def get_slice(self, key: str) -> View:
            return View(self.file.get_slice(key))

    with mock.patch.object(safetensors_files, "safe_open", File):
        yield counts


@contextmanager
def every_rank_reads_the_first_slice() -> Iterator[None]:
    """The offsets of all ranks are those of rank 0."""
    from automodel.model import weights

    def broken(tensor: torch.Tensor) -> list[list[tuple[int, int]]]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return [[(0, size)] for size in local.shape]

    with mock.patch.object(weights, "local_runs", broken):
        yield


@contextmanager
def buffers_stay_as_meta_left_them() -> Iterator[None]:
    """Nothing computes the rotary frequencies."""

    def broken(model: torch.nn.Module, *_: Any) -> None:
        for buffer in model.buffers():
            buffer.zero_()

    with mock.patch("automodel.model.infrastructure.initialize_buffers", broken):
        yield


@contextmanager
def ranks_write_their_own_rows() -> Iterator[None]:
    """The writer does not gather."""
    from automodel.model import export

    def broken(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.zeros(tensor.shape, dtype=dtype)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        whole[tuple(slice(0, size) for size in local.shape)] = local
        return whole

    with mock.patch.object(export, "_whole", broken):
        yield
