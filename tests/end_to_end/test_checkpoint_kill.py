"""kill -9 at random moments, during steps and during saves; then the run goes on and is bitwise the straight one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.end_to_end.checkpoint_support import (
    DROPOUT,
    SETTINGS,
    contents,
    kill_hard,
    numbers,
    start,
    straight_run,
    wait_for_step,
    write_text,
)

WORDS = [
    *SETTINGS,
    DROPOUT,
    "training.ckpt_every_steps=1",
    "training.val_at_end=false",
    "distributed.dp_size=2",
]
MODES = ["checkpoint.async_save=false", "checkpoint.async_save=true"]


def survives(kills: int, steps: int, seed: int, mode: str, folder: Path) -> None:
    """Kill and resume a run until ``kills`` have happened, then let it end and hold it against a straight one."""
    (folder / "straight").mkdir()
    words = [*WORDS, f"training.max_steps={steps}", mode]
    straight = straight_run(folder / "straight", *words)
    draw = random.Random(seed)
    write_text(folder)
    run_dir = folder / "run"
    words += [f"hydra.run.dir={run_dir}", "checkpoint.resume=auto"]
    done_steps = 0
    for number in range(kills):
        process = start(folder, *words)
        # A save is most of a step of this model, so that about every second kill meets one.
        wait_for_step(run_dir, min(done_steps + 1, steps - 1))
        time.sleep(draw.uniform(0.0, 0.1))
        kill_hard(process)
        lines, _ = numbers(run_dir)
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), f"kill {number}"
        done_steps = len(lines)
    process = start(folder, *words)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert numbers(run_dir) == numbers(straight)
    assert contents(run_dir, steps) == contents(straight, steps)
    assert not list((run_dir / "checkpoints").glob(".*")), "no half-written checkpoint is left"


@pytest.mark.parametrize("mode", MODES)
def test_three_kills_leave_the_straight_run(mode: str, tmp_path: Path) -> None:
    survives(3, steps=12, seed=1, mode=mode, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_twenty_kills_leave_the_straight_run(mode: str, tmp_path: Path) -> None:
    survives(20, steps=60, seed=2, mode=mode, folder=tmp_path)
