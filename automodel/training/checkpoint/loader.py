"""From a checkpoint back into a run, under whatever layout."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from automodel.config.errors import ConfigError
from automodel.config.schema import TrainConfig
from automodel.distributed.gradients import local_tensor
from automodel.training.checkpoint import folder
from automodel.training.checkpoint.folder import RESUME, Checkpoint, DamagedCheckpoint
from automodel.training.checkpoint.pieces import (
    MODEL,
    OPTIMIZER,
    RNG,
    Piece,
    empty_generator_states,
    make_optimizer_state,
    model_tensors,
    piece_of,
    restore_generator,
)
from automodel.training.checkpoint.saver import first_failure
from automodel.training.checkpoint.storage import PieceLoadPlanner, PieceReader

_LOG = logging.getLogger(__name__)
_SHOWN = 5


def choose_checkpoint(
    resume: str | None, run_dir: Path, rank: int, group: dist.ProcessGroup | None
) -> Checkpoint | None:
    """What to go on from; None: a fresh start. Rank 0 looks, so that all ranks take the same. Collective.

    Raises:
        ConfigError: what is named is not there or not whole, or the run folder already holds another run.
    """
    found = _choose(resume, run_dir) if rank == 0 else None
    if group is not None:
        told = [str(found.path) if found else ""]
        dist.broadcast_object_list(told, src=0, group=group)
        if rank > 0 and told[0]:
            found = folder.read_checkpoint(Path(told[0]))
    return found


def _choose(resume: str | None, run_dir: Path) -> Checkpoint | None:
    if resume is not None and resume != "auto":
        if folder.step_of(Path(resume)) is None and Path(resume).resolve() != run_dir.resolve():
            raise ConfigError(
                RESUME,
                resume,
                f"a run goes on inside its own folder, and this one writes to {run_dir}",
                f"auto, a step_<N> folder; or without a sweep and hydra.run.dir, {resume}",
            )
        return folder.find_named(resume)
    found, passed = folder.newest_whole(run_dir)
    if resume is None:
        if found is None:
            return None
        raise ConfigError(
            "hydra.run.dir",
            run_dir,
            f"it holds a run already, with a checkpoint of step {found.step}, and checkpoint.resume is none",
            f"another folder, or checkpoint.resume=auto, or checkpoint.resume={run_dir}",
        )
    for reason in passed:
        _LOG.warning("checkpoint.resume=auto passes over a checkpoint: %s", reason)
    if found is None:
        if passed:
            raise ConfigError(RESUME, resume, "none of the run's checkpoints is whole", "none, and another folder")
        _LOG.info("checkpoint.resume=auto: no checkpoint in %s, so this is a fresh start", run_dir)
    return found


def check_same_model(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint of another model.

    Args:
        shapes: of the whole model's parameters and saved buffers, by name.

    Raises:
        ConfigError: lists what is missing, unexpected or of another shape.
    """
    prefix = f"{MODEL}."
    saved = {
        key.removeprefix(prefix): tuple(stored["shape"])
        for key, stored in checkpoint.index["tensors"].items()
        if key.startswith(prefix)
    }
    differences = [f"{name} is not in the checkpoint" for name in shapes if name not in saved]
    differences += [f"{name} is not in the model" for name in saved if name not in shapes]
    differences += [
        f"{name} is {list(saved[name])} in the checkpoint and {list(shape)} in the model"
        for name, shape in shapes.items()
        if name in saved and saved[name] != shape
    ]
    if differences:
        more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise ConfigError(
            RESUME,
            checkpoint.path,
            f"it was saved from another model: {'; '.join(differences[:_SHOWN])}{more}",
            "a checkpoint of this model, or the model settings it was saved with",
        )


def check_same_run(checkpoint: Checkpoint, config: TrainConfig, fingerprint: str) -> None:
    """Refuse to go on with other data, in another order, or with another kind of optimizer.

    Args:
        fingerprint: of the training samples.

    Raises:
        ConfigError: names what differs.
    """
    saved = checkpoint.index["optimizer"]
    if saved != config.optimizer.name:
        raise ConfigError(
            "optimizer", config.optimizer.name, f"{checkpoint.path} holds the state of another optimizer", saved
        )
    seed = checkpoint.index["config"]["seed"]
    if seed != config.seed:
        raise ConfigError(
            "seed",
            config.seed,
            f"{checkpoint.path} is in the middle of an order of samples that another seed gave",
            str(seed),
        )
    if checkpoint.index["data_fingerprint"] != fingerprint:
        raise ConfigError(
            "data",
            config.data.files or config.data.source,
            f"{checkpoint.path} was saved over other training samples: going on would skip some and repeat others",
            "the files, tokenizer, training.seq_length and data settings of the checkpoint's run",
        )


def load_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world_size: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill the model and the optimizer, in place. Collective.

    The generators' states are this rank's own, so they are restored where the number of ranks is the same.

    Raises:
        ConfigError: a file is damaged.
    """
    tensors = checkpoint.index["tensors"]
    targets: dict[str, Piece] = {}
    copies: list[tuple[Piece, Piece]] = []

    def add(key: str, tensor: torch.Tensor) -> None:
        piece = piece_of(tensor)
        if key in targets:
            copies.append((targets[key], piece))
        else:
            targets[key] = piece

    saved_fields = _optimizer_fields(tensors)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, tensor in model_tensors(model):
        add(f"{MODEL}.{name}", tensor)
        if id(tensor) in groups and name in saved_fields:
            state = make_optimizer_state(groups[id(tensor)], tensor, saved_fields[name])
            optimizer.state[tensor] = state
            for field, value in state.items():
                add(f"{OPTIMIZER}.{name}.{field}", value)
    generators = empty_generator_states() if checkpoint.index["world_size"] == world_size else {}
    generators = {device: room for device, room in generators.items() if f"{RNG}.{rank}.{device}" in tensors}
    for device, room in generators.items():
        add(f"{RNG}.{rank}.{device}", room)
    _read(checkpoint, targets, PieceReader(checkpoint, rank, world_size), group)
    with torch.no_grad():
        for source, target in copies:
            local_tensor(target.tensor).copy_(local_tensor(source.tensor))
    for device, room in generators.items():
        restore_generator(device, room)


def _optimizer_fields(tensors: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Parameter name -> field -> shape, of the saved optimizer state."""
    fields: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, stored in tensors.items():
        kind, _, rest = key.partition(".")
        if kind == OPTIMIZER:
            name, _, field = rest.rpartition(".")
            fields.setdefault(name, {})[field] = tuple(stored["shape"])
    return fields


def _read(
    checkpoint: Checkpoint, targets: dict[str, Piece], reader: PieceReader, group: dist.ProcessGroup | None
) -> None:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # One process needs no process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                dict(targets),
                storage_reader=reader,
                planner=PieceLoadPlanner(),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        if any(isinstance(_cause(wrapped), DamagedCheckpoint) for wrapped in error.failures.values()):
            raise ConfigError(RESUME, checkpoint.path, first_failure(error), "a checkpoint that is whole") from error
        raise


def _cause(wrapped: Any) -> BaseException:
    return wrapped[0] if isinstance(wrapped, tuple) else wrapped
