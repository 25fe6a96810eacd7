"""The folder protocol: whole or invisible, newest whole, and which checkpoints may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel.config.errors import ConfigError
from automodel.training.checkpoint.folder import (
    DamagedCheckpoint,
    clear_leftovers,
    find_named,
    newest_whole,
    partial_folder,
    prune,
    publish,
    read_checkpoint,
    set_aside_after,
    start_partial,
    step_folder,
    steps_in,
    superfluous,
)

LOSSES = {1: 5.0, 2: 3.0, 3: None, 4: 3.5, 5: 4.0}


def make(run_dir: Path, step: int, val_loss: float | None = None, content: bytes = b"data") -> Path:
    partial = partial_folder(run_dir, step)
    start_partial(partial)
    (partial / "rank_0.safetensors").write_bytes(content)
    files = {"rank_0.safetensors": {"bytes": len(content), "crc32": 0}}
    publish(partial, step_folder(run_dir, step), {"format": 1, "step": step, "val_loss": val_loss, "files": files})
    return step_folder(run_dir, step)


def test_a_checkpoint_is_invisible_until_it_is_whole(tmp_path: Path) -> None:
    start_partial(partial_folder(tmp_path, 7))
    assert steps_in(tmp_path) == []
    make(tmp_path, 7)
    assert steps_in(tmp_path) == [7]
    assert read_checkpoint(step_folder(tmp_path, 7)).step == 7


def test_what_a_killed_save_left_is_cleared(tmp_path: Path) -> None:
    make(tmp_path, 1)
    start_partial(partial_folder(tmp_path, 2))
    clear_leftovers(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_a_checkpoint_of_the_same_step_gives_way(tmp_path: Path) -> None:
    make(tmp_path, 1, content=b"old")
    make(tmp_path, 1, content=b"newer")
    assert (step_folder(tmp_path, 1) / "rank_0.safetensors").read_bytes() == b"newer"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


@pytest.mark.parametrize("name", ["checkpoint.json", "complete", "rank_0.safetensors"])
def test_each_missing_or_shortened_file_makes_it_no_checkpoint(name: str, tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)
    path = step_folder(tmp_path, 2) / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        read_checkpoint(step_folder(tmp_path, 2))
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"incomplete: {name}"):
        read_checkpoint(step_folder(tmp_path, 2))
    found, passed = newest_whole(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(passed) == 1


def test_a_run_folder_means_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        make(tmp_path, step)
    assert find_named(str(tmp_path)).step == 10
    assert find_named(str(tmp_path / "checkpoints" / "step_2")).step == 2
    with pytest.raises(ConfigError, match="did you mean 'step_10'"):
        find_named(str(tmp_path / "checkpoints" / "step_11"))


def test_later_steps_are_set_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step)
    moved = set_aside_after(tmp_path, 2)
    assert steps_in(tmp_path) == [2]
    assert [path.name for path in moved] == ["superseded_step_4", "superseded_step_6"]
    assert read_checkpoint(moved[1]).step == 6


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "gone"),
    [
        (None, None, []),
        (1, None, [1, 2, 3, 4]),
        (2, None, [1, 2, 3]),
        (9, None, []),
        (None, 1, [1, 3, 4]),
        (1, 2, [1, 3]),
        (2, 1, [1, 3]),
    ],
)
def test_which_checkpoints_may_go(keep_last: int | None, keep_best: int | None, gone: list[int]) -> None:
    assert superfluous(LOSSES, keep_last, keep_best) == gone


def test_pruning_leaves_a_damaged_checkpoint_to_a_person(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (step_folder(tmp_path, 1) / "complete").unlink()
    prune(tmp_path, keep_last=1, keep_best=None)
    assert steps_in(tmp_path) == [1, 3]
