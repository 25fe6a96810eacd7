"""When a checkpoint is saved and how: at once, or copied and written in the background."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from automodel.config.schema import CheckpointConfig
from automodel.training.checkpoint import folder
from automodel.training.checkpoint.pieces import Piece, Staging, pieces_to_save
from automodel.training.checkpoint.storage import PieceSavePlanner, PieceWriter

_LOG = logging.getLogger(__name__)


def checkpoint_group(world_size: int) -> dist.ProcessGroup | None:
    """All ranks, on the CPU, for checkpoints alone: a save in the background never meets training's exchanges.

    Collective; None for one process.
    """
    return dist.new_group(backend="gloo") if world_size > 1 else None


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; earlier ones are as they were."""


@dataclass(frozen=True)
class SaveRequest:
    """What a checkpoint says besides its tensors, as of the moment of saving.

    Attributes:
        step: number of finished steps.
        trainer: the trainer's own state, JSON values only.
        metrics_offset: size in bytes of metrics.jsonl; 0 on ranks that do not write it.
        val_loss: measured at this step, or None.
    """

    step: int
    trainer: Mapping[str, Any]
    metrics_offset: int
    val_loss: float | None


@dataclass
class _Background:
    """A save that a thread writes."""

    step: int
    thread: threading.Thread
    error: list[CheckpointError] = field(default_factory=list)


class CheckpointSaver:
    """Saves the state of a run; every rank calls the same methods in the same order.

    Args:
        config: retention, background writing, and what a failure means.
        run_dir: on a disk that all ranks share.
        model: what a step calls.
        optimizer: over its parameters.
        rank, world_size: of the run.
        group: from :func:`checkpoint_group`.
        description: JSON values for the index that stay the same during the run, such as the config.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        description: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.run_dir = run_dir.resolve()
        self.model = model
        self.optimizer = optimizer
        self.rank = rank
        self.world_size = world_size
        self.description = dict(description)
        self.saved_step: int | None = None
        self._group = group
        self._staging = Staging()
        self._background: _Background | None = None

    def save(self, request: SaveRequest, final: bool = False) -> None:
        """Save, unless this very step is saved already. Collective.

        Args:
            final: nothing follows, so wait until the checkpoint is whole.

        Raises:
            CheckpointError: it cannot be written, or an earlier one in the background could not, and
                ``checkpoint.on_failure`` is stop.
        """
        self.wait()
        if self.saved_step != request.step:
            self.saved_step = request.step
            pieces = pieces_to_save(self.model, self.optimizer, self.rank)
            if self.config.async_save:
                self._start(request, self._staging.copy(pieces))
            else:
                try:
                    self._write(request, pieces)
                except CheckpointError as error:
                    self._failed(error)
        if final:
            self.wait()

    def check(self) -> None:
        """Notice a save in the background that has failed meanwhile.

        Raises:
            CheckpointError: see :meth:`save`.
        """
        if self._background is not None and not self._background.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return once no save is under way.

        Raises:
            CheckpointError: see :meth:`save`.
        """
        background, self._background = self._background, None
        if background is not None:
            background.thread.join()
            if background.error:
                self._failed(background.error[0])

    def _start(self, request: SaveRequest, copies: dict[str, Piece]) -> None:
        def run() -> None:
            try:
                self._write(request, copies)
            except CheckpointError as error:
                background.error.append(error)

        # A daemon: a run that fails ends at once, and what is half written stays invisible.
        thread = threading.Thread(target=run, name=f"save step {request.step}", daemon=True)
        background = _Background(request.step, thread)
        self._background = background
        thread.start()

    def _write(self, request: SaveRequest, pieces: dict[str, Piece]) -> None:
        started = time.perf_counter()
        partial = folder.partial_folder(self.run_dir, request.step)
        final = folder.step_folder(self.run_dir, request.step)

        def describe() -> dict[str, Any]:
            return {
                **self.description,
                "step": request.step,
                "val_loss": request.val_loss,
                "metrics_offset": request.metrics_offset,
                "trainer": dict(request.trainer),
            }

        def published() -> None:
            _LOG.info("saved %s in %.1f s", final, time.perf_counter() - started)
            try:
                folder.prune(self.run_dir, self.config.keep_last, self.config.keep_best)
            except OSError as error:
                # The new one is whole, which is what counts.
                _LOG.warning("an old checkpoint in %s could not be removed: %s", final.parent, error)

        writer = PieceWriter(partial, final, self.rank, describe, published)
        try:
            _save(pieces, writer, self._group)
        except CheckpointException as error:
            if self.rank == 0:
                folder.discard_partial(partial)
            raise CheckpointError(f"checkpoint {final} was not saved: {first_failure(error)}") from error

    def _failed(self, error: CheckpointError) -> None:
        self.saved_step = None
        if self.config.on_failure == "stop":
            raise error
        if self.rank == 0:
            _LOG.warning("%s; training goes on (checkpoint.on_failure=warn)", error)


def _save(pieces: dict[str, Piece], writer: PieceWriter, group: dist.ProcessGroup | None) -> None:
    with warnings.catch_warnings():
        # One process needs no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            dict(pieces),
            storage_writer=writer,
            planner=PieceSavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


def first_failure(error: CheckpointException) -> str:
    """The lowest failed rank's own words, without the stacks that torch adds."""
    failures = error.failures
    rank = min(failures)
    wrapped = failures[rank]
    cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    return f"rank {rank}: {cause}" if str(cause) else f"rank {rank}: {type(cause).__name__}"
