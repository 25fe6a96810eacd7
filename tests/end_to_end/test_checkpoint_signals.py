"""Checkpoints on demand: SIGUSR1 saves and goes on, SIGTERM saves and stops; one rank's signal is enough."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.end_to_end.checkpoint_support import (
    PATIENCE,
    SETTINGS,
    checkpoint_index,
    numbers,
    resume,
    saved_steps,
    start,
    wait_for_step,
    write_text,
)

LONG = [*SETTINGS, "training.ckpt_every_steps=none", "training.max_steps=100000", "training.val_at_end=false"]


def processes_of(session: int) -> list[int]:
    """Process ids of the ranks: those that have opened the run's log."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            logs = [link for link in (entry / "fd").iterdir() if os.readlink(link).endswith("/run/train.log")]
        except OSError:
            continue
        if int(fields[3]) == session and logs:
            found.append(int(entry.name))
    return sorted(found)


def wait_for_checkpoint(run_dir: Path, count: int) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    while len(steps := saved_steps(run_dir) if (run_dir / "checkpoints").exists() else []) < count:
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.02)
    return steps


def run(folder: Path) -> subprocess.Popen[str]:
    write_text(folder)
    process = start(folder, *LONG, "distributed.dp_size=2", f"hydra.run.dir={folder}/run")
    wait_for_step(folder / "run", 2)
    return process


def test_sigusr1_saves_and_goes_on_and_sigterm_saves_and_stops(tmp_path: Path) -> None:
    process = run(tmp_path)
    process.send_signal(signal.SIGUSR1)
    (first,) = wait_for_checkpoint(tmp_path / "run", 1)
    # One rank alone is asked; both save.
    os.kill(processes_of(process.pid)[-1], signal.SIGUSR1)
    _, second = wait_for_checkpoint(tmp_path / "run", 2)
    assert second > first
    wait_for_step(tmp_path / "run", second + 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, output
    last = saved_steps(tmp_path / "run")[-1]
    lines, _ = numbers(tmp_path / "run")
    assert lines[-1]["step"] == last > second
    assert len(checkpoint_index(tmp_path / "run", last)["files"]) == 2
    again = resume(tmp_path, "checkpoint.resume=run", f"training.max_steps={last + 1}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line["step"] for line in numbers(tmp_path / "run")[0]] == list(range(1, last + 2))


def test_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    process = run(tmp_path)
    os.kill(processes_of(process.pid)[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, output
    (step,) = saved_steps(tmp_path / "run")
    assert numbers(tmp_path / "run")[0][-1]["step"] == step
    assert re.search(rf"saved .*/step_{step} in", output)
