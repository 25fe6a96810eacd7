"""The folders of checkpoints: names, completeness, and which to keep. Free of torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.config.errors import ConfigError, nearest

CHECKPOINTS = "checkpoints"
INDEX = "checkpoint.json"
MARKER = "complete"
FORMAT = 1
RESUME = "checkpoint.resume"
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: absolute.
        index: what its ``checkpoint.json`` says.
    """

    path: Path
    index: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.index["step"])

    @property
    def run_dir(self) -> Path | None:
        """The run folder that it stands in, or None when it was moved elsewhere."""
        return self.path.parent.parent if self.path.parent.name == CHECKPOINTS else None


class DamagedCheckpoint(Exception):
    """A folder that is no whole checkpoint; the text says why."""


def step_of(path: Path) -> int | None:
    """N of a path that ends in ``step_<N>``."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step_{step}"


def partial_folder(run_dir: Path, step: int) -> Path:
    """Where a checkpoint is written before it is whole."""
    return run_dir / CHECKPOINTS / f".step_{step}.partial"


def steps_in(run_dir: Path) -> list[int]:
    """Steps of the run's checkpoint folders, whole or not, ascending."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    return sorted(step for path in folder.iterdir() if (step := step_of(path)) is not None)


def publish(partial: Path, final: Path, index: Mapping[str, Any]) -> None:
    """Close a written checkpoint: index, then marker, then the one rename that makes it visible.

    Everything is on the disk before the rename. A checkpoint of the same name gives way.
    """
    text = json.dumps(index, separators=(",", ":"), allow_nan=False).encode()
    _write_durably(partial / INDEX, text)
    _write_durably(partial / MARKER, f"{zlib.crc32(text)}\n".encode())
    _sync_folder(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    _remove_tree(replaced)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync_folder(final.parent)
    _remove_tree(replaced)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``; sizes of files are held against the index, their contents are not read.

    Raises:
        DamagedCheckpoint: something is missing, cut off or not readable.
    """
    path = path.resolve()
    try:
        text = (path / INDEX).read_bytes()
        marker = (path / MARKER).read_text().strip()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is incomplete: {Path(error.filename or '').name} cannot be read") from error
    if marker != str(zlib.crc32(text)):
        raise DamagedCheckpoint(f"{path / INDEX} is damaged: its checksum is not the one in {MARKER}")
    index: dict[str, Any] = json.loads(text)
    if index.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {index.get('format')}, and this version reads format {FORMAT}")
    for name, file in index["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{path} is incomplete: {name} cannot be read") from error
        if size != file["bytes"]:
            raise DamagedCheckpoint(f"{path / name} is damaged: it has {size} bytes instead of {file['bytes']}")
    return Checkpoint(path, index)


def newest_whole(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run, and why newer folders were passed over."""
    passed: list[str] = []
    for step in reversed(steps_in(run_dir)):
        try:
            return read_checkpoint(step_folder(run_dir, step)), passed
        except DamagedCheckpoint as error:
            passed.append(str(error))
    return None, passed


def find_named(value: str) -> Checkpoint:
    """The checkpoint that ``checkpoint.resume`` names: a step folder, or the newest whole one of a run folder.

    Raises:
        ConfigError: it is not there, or not whole.
    """
    path = Path(value)
    if step_of(path) is None:
        return _newest_of_run(value, path)
    if not path.is_dir():
        there = [f"step_{step}" for step in steps_in(path.parent.parent)]
        legal = ", ".join(str(path.parent / name) for name in there) or "auto, a run folder, a step_<N> folder, none"
        raise ConfigError(RESUME, value, "there is no such checkpoint", legal, nearest(path.name, there))
    try:
        return read_checkpoint(path)
    except DamagedCheckpoint as error:
        whole, _ = newest_whole(path.parent.parent)
        legal = str(whole.path) if whole else "a whole checkpoint, or none"
        raise ConfigError(RESUME, value, str(error), legal) from error


def _newest_of_run(value: str, path: Path) -> Checkpoint:
    if not path.is_dir():
        raise ConfigError(RESUME, value, "there is no such folder", "auto, a run folder, a step_<N> folder, none")
    found, passed = newest_whole(path)
    if found is None:
        reason = f" ({'; '.join(passed)})" if passed else ""
        raise ConfigError(
            RESUME, value, f"this run folder has no whole checkpoint{reason}", "another run folder, or none: start anew"
        )
    return found


def superfluous(val_losses: Mapping[int, float | None], keep_last: int | None, keep_best: int | None) -> list[int]:
    """Steps whose checkpoints may go.

    Args:
        val_losses: step -> validation loss measured at that step, of every whole checkpoint of the run.
        keep_last: the newest that stay; None: all, or only the newest one where ``keep_best`` is given.
        keep_best: those with the lowest validation loss that stay, too.
    """
    if keep_last is None and keep_best is None:
        return []
    kept = set(sorted(val_losses)[-(keep_last or 1) :])
    if keep_best is not None:
        measured = [(loss, step) for step, loss in val_losses.items() if loss is not None]
        kept |= {step for _, step in sorted(measured)[:keep_best]}
    return sorted(val_losses.keys() - kept)


def prune(run_dir: Path, keep_last: int | None, keep_best: int | None) -> None:
    """Remove superfluous checkpoints; each vanishes in one rename, and one that is not whole is left alone."""
    if keep_last is None and keep_best is None:
        return
    val_losses: dict[int, float | None] = {}
    for step in steps_in(run_dir):
        with contextlib.suppress(DamagedCheckpoint):
            val_losses[step] = read_checkpoint(step_folder(run_dir, step)).index["val_loss"]
    for step in superfluous(val_losses, keep_last, keep_best):
        doomed = run_dir / CHECKPOINTS / f".step_{step}.removed"
        _remove_tree(doomed)
        step_folder(run_dir, step).rename(doomed)
        _remove_tree(doomed)


def clear_leftovers(run_dir: Path) -> None:
    """Remove what a killed save left behind; only while no other process writes there."""
    folder = run_dir / CHECKPOINTS
    if folder.is_dir():
        for path in folder.glob(".step_*"):
            _remove_tree(path)


def set_aside_after(run_dir: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps than ``step`` to ``superseded_step_<N>``: the run goes on from before them.

    Returns:
        their new paths.
    """
    moved = []
    for later in steps_in(run_dir):
        if later > step:
            target = run_dir / CHECKPOINTS / f"superseded_step_{later}"
            _remove_tree(target)
            step_folder(run_dir, later).rename(target)
            moved.append(target)
    return moved


def start_partial(partial: Path) -> None:
    """An empty folder to write into."""
    _remove_tree(partial)
    partial.mkdir(parents=True)


def discard_partial(partial: Path) -> None:
    """Give back the disk space of a save that failed, as far as possible."""
    with contextlib.suppress(OSError):
        _remove_tree(partial)


def _remove_tree(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
