"""Runs that are saved, stopped, killed and resumed, on a text of a few dozen samples."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.end_to_end import train_support
from tests.end_to_end.train_support import ROOT, SMALL, environment, metrics

# Five uneven layers, dropout, AdamW, and epochs of four steps, of which the last is shorter.
SETTINGS = [
    *SMALL,
    "model.config.num_hidden_layers=5",
    "model.config.vocab_size=267",
    "data=text",
    "data.files=text.txt",
    "data.log_sample_ids=true",
    "data.val_max_samples=4",
    "training.max_steps=8",
    "training.ckpt_every_steps=2",
    "checkpoint.save_consolidated=never",
]
# Of one run, in seconds; a machine may be busy.
PATIENCE = 400
DROPOUT = "+model.config.attention_dropout=0.2"
VARYING = ("tokens_per_second", "step_time_s", "peak_memory_bytes")


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """As the others do, with more patience."""
    return train_support.train(folder, *overrides, timeout=PATIENCE)


def write_text(folder: Path) -> None:
    """Thirty-one samples of 32 tokens."""
    text = "".join(
        f"{number}: the quick brown fox jumps over {number * 7919 % 1000} lazy dogs. " for number in range(23)
    )
    (folder / "text.txt").write_text(text[: 31 * 32 + 112])


def straight_run(folder: Path, *overrides: str) -> Path:
    """A run to its end; its folder."""
    write_text(folder)
    done = train(folder, *SETTINGS, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def as_of(run_dir: Path, step: int, target: Path) -> Path:
    """A copy of a finished run as a kill after ``step`` left it: without later checkpoints, with later metrics."""
    shutil.copytree(run_dir, target)
    for path in (target / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return target


def resume(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python train.py <words>`` and nothing else."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def numbers(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Everything in metrics.jsonl that must not vary."""
    steps, validations = metrics(run_dir)
    return [{key: value for key, value in line.items() if key not in VARYING} for line in steps], validations


def checkpoint_index(run_dir: Path, step: int) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((run_dir / "checkpoints" / f"step_{step}" / "checkpoint.json").read_text())
    return index


def contents(run_dir: Path, step: int) -> dict[str, bytes]:
    """The tensor files of a checkpoint, byte for byte."""
    folder = run_dir / "checkpoints" / f"step_{step}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))


def wait_for_step(run_dir: Path, step: int, timeout: float = PATIENCE) -> None:
    """Until metrics.jsonl has the step."""
    deadline = time.monotonic() + timeout
    path = run_dir / "metrics.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.02)


def kill_hard(process: subprocess.Popen[str]) -> None:
    """kill -9 of the launcher and of all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
