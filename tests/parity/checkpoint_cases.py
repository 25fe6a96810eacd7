"""A part of a run, from a checkpoint or the start to another checkpoint, on ranks that are started once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from automodel.data import EpochSampler, TrainLoader
from automodel.distributed.mesh import MeshAxisName
from automodel.distributed.setup import setup_distributed
from automodel.model.build import build_config, build_model
from automodel.model.infrastructure import apply_model_infrastructure, instantiate_infrastructure
from automodel.training.checkpoint import loader as loading
from automodel.training.checkpoint.continuing import describe_run
from automodel.training.checkpoint.folder import read_checkpoint, step_folder
from automodel.training.checkpoint.loader import check_same_model, check_same_run, load_checkpoint
from automodel.training.checkpoint.pieces import Piece, model_tensors
from automodel.training.checkpoint.saver import CheckpointSaver, checkpoint_group
from automodel.training.checkpoint.storage import PieceReader
from automodel.training.lr_scheduler import build_lr_scheduler
from automodel.training.metrics import StepMetrics
from automodel.training.optimizer import build_optimizer
from automodel.training.run import mixed_precision
from automodel.training.trainer import Trainer, TrainingObserver
from tests.parity.cases import Case, synthetic_data


@dataclass
class Part:
    """What the steps of a part gave."""

    steps: list[int]
    losses: list[float]
    norms: list[float]
    sample_ids: list[list[int]]


class _Recorder(TrainingObserver):
    def __init__(self) -> None:
        self.lines: list[StepMetrics] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.lines.append(metrics)


def run_part(case: Case, world_size: int, run_dir: str, until: int, resume: str | None = None) -> Part:
    """Train to the end of step ``until`` and save there; collective when ``world_size`` > 1."""
    config = case.config(reference=world_size == 1)
    mesh_context = setup_distributed(config.distributed, world_size, "cpu")
    infrastructure = instantiate_infrastructure(mesh_context, mixed_precision(config.precision), config.training.loss)
    model = build_model(build_config(config.model), config.model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model_tensors(model)}
    trained = apply_model_infrastructure(model, infrastructure, config.seed)
    data = synthetic_data(config, case.num_samples)
    optimizer = build_optimizer(trained, config.optimizer)
    sampler = EpochSampler(len(data.train), config.seed)
    loader = TrainLoader(
        data.train,
        sampler,
        config.training.global_batch_size,
        config.training.local_batch_size,
        mesh_context.axis_rank(MeshAxisName.DP),
        mesh_context.dp_size,
    )
    rank = dist.get_rank() if world_size > 1 else 0
    group = checkpoint_group(world_size)
    description = describe_run(config, Path(run_dir), mesh_context, data)
    saver = CheckpointSaver(config.checkpoint, Path(run_dir), trained, optimizer, rank, world_size, group, description)
    recorder = _Recorder()
    trainer = Trainer(
        config=config,
        mesh_context=mesh_context,
        model=trained,
        manager=infrastructure.manager,
        optimizer=optimizer,
        lr_scheduler=build_lr_scheduler(optimizer, config.lr_scheduler, case.steps),
        data=data,
        loader=loader,
        total_steps=case.steps,
        observer=recorder,
        stop_requested=lambda: trainer.step >= until,
        saver=saver,
    )
    if resume is not None:
        checkpoint = read_checkpoint(Path(resume))
        check_same_model(checkpoint, shapes)
        check_same_run(checkpoint, config, data.train.fingerprint)
        load_checkpoint(checkpoint, trained, optimizer, rank, world_size, group)
        trainer.load_state_dict(checkpoint.index["trainer"])
    trainer.train()
    return Part(
        steps=[line.step for line in recorder.lines],
        losses=[line.loss for line in recorder.lines],
        norms=[line.grad_norm for line in recorder.lines],
        sample_ids=[line.sample_ids or [] for line in recorder.lines],
    )


def whole_tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Every model and optimizer tensor of a checkpoint, put together on one process."""
    checkpoint = read_checkpoint(step_folder(run_dir, step))
    dtypes = {"F32": torch.float32}
    targets = {}
    for key, stored in checkpoint.index["tensors"].items():
        if not key.startswith("rng."):
            tensor = torch.full(stored["shape"], torch.nan, dtype=dtypes[stored["dtype"]])
            targets[key] = Piece(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    loading._read(checkpoint, targets, PieceReader(checkpoint, 0, 1), None)
    return {key: piece.tensor for key, piece in targets.items()}


@contextmanager
def without_optimizer_state() -> Iterator[None]:
    """The momentum starts anew."""
    with mock.patch.object(loading, "_optimizer_fields", return_value={}):
        yield


@contextmanager
def one_shard_for_all() -> Iterator[None]:
    """Every rank reads the first rows, wherever its shard begins."""
    original: Any = loading.piece_of

    def broken(tensor: torch.Tensor) -> Piece:
        piece = original(tensor)
        return dataclasses.replace(piece, offsets=(0,) * len(piece.offsets))

    with mock.patch.object(loading, "piece_of", broken):
        yield
