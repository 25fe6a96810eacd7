"""What cannot be resumed is refused by name, and a save that fails harms nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.checkpoint_support import (
    PATIENCE,
    SETTINGS,
    as_of,
    contents,
    numbers,
    resume,
    saved_steps,
    straight_run,
    train,
    write_text,
)
from tests.end_to_end.train_support import ROOT, environment


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return straight_run(tmp_path_factory.mktemp("finished"), "training.max_steps=4")


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A run that was killed after step 2, and its text beside it."""
    write_text(tmp_path)
    return as_of(finished, 2, tmp_path / "run")


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_what_is_not_there_is_refused_before_anything_starts(run_dir: Path) -> None:
    folder = run_dir.parent
    refused(resume(folder, "checkpoint.resume=nowhere"), "there is no such folder", "nowhere")
    refused(
        resume(folder, "checkpoint.resume=run/checkpoints/step_3"),
        "there is no such checkpoint",
        "did you mean 'step_2'",
    )
    (folder / "empty").mkdir()
    refused(resume(folder, "checkpoint.resume=empty"), "no whole checkpoint")
    assert not (folder / "outputs").exists()


def test_an_incomplete_checkpoint_is_refused_by_name_and_passed_over_by_auto(finished: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = as_of(finished, 4, tmp_path / "run")
    (run_dir / "checkpoints" / "step_4" / "complete").unlink()
    refused(resume(tmp_path, "checkpoint.resume=run/checkpoints/step_4"), "step_4 is incomplete", "step_2")
    done = train(tmp_path, *SETTINGS, "training.max_steps=4", "checkpoint.resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passes over a checkpoint" in done.stdout
    assert numbers(run_dir) == numbers(finished)
    assert contents(run_dir, 4) == contents(finished, 4)


def test_a_damaged_file_is_refused_by_name(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "step_2" / "rank_0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    refused(resume(run_dir.parent, "checkpoint.resume=run"), f"{path} is damaged")
    path.write_bytes(content[:-8])
    refused(resume(run_dir.parent, "checkpoint.resume=run"), "rank_0.safetensors is damaged", "bytes instead of")


def test_another_model_other_data_and_another_optimizer_are_refused(run_dir: Path) -> None:
    folder = run_dir.parent
    refused(
        resume(folder, "checkpoint.resume=run", "model.config.hidden_size=16", "model.config.num_hidden_layers=4"),
        "saved from another model",
        "model.layers.4.",
        "is not in the model",
    )
    refused(resume(folder, "checkpoint.resume=run", "optimizer=sgd"), "optimizer", "adamw")
    refused(resume(folder, "checkpoint.resume=run", "training.seq_length=16"), "other training samples")
    refused(resume(folder, "checkpoint.resume=run", "seed=1"), "an order of samples that another seed gave")
    done = resume(folder, "checkpoint.resume=run")
    assert done.returncode == 0, "a refused request leaves the run as it was: " + done.stderr


def test_another_folder_for_a_run_that_goes_on_inside_its_own_is_refused(run_dir: Path) -> None:
    refused(resume(run_dir.parent, "checkpoint.resume=run", "hydra.run.dir=other"), "goes on inside that folder")
    refused(train(run_dir.parent, *SETTINGS, "training.max_steps=4"), "it holds a run already")


def limited(folder: Path, kilobytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A run in which no file can grow beyond a limit, as on a full disk."""
    command = f'ulimit -f {kilobytes}; exec "$0" "$@"'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, str(ROOT / "train.py"), *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_failing_write_stops_the_run_names_the_path_and_harms_nothing(finished: Path, run_dir: Path) -> None:
    before = contents(run_dir, 2)
    done = limited(run_dir.parent, 64, "checkpoint.resume=run")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"checkpoint {run_dir}/checkpoints/step_4 was not saved" in done.stderr
    assert "File too large" in done.stderr
    assert saved_steps(run_dir) == [2]
    assert contents(run_dir, 2) == before
    assert not list((run_dir / "checkpoints").glob(".*")), "the space is given back"
    again = resume(run_dir.parent, "checkpoint.resume=run")
    assert again.returncode == 0, again.stdout + again.stderr
    assert numbers(run_dir) == numbers(finished)
    assert contents(run_dir, 4) == contents(finished, 4)


@pytest.mark.parametrize("mode", ["checkpoint.async_save=false", "checkpoint.async_save=true"])
def test_a_failing_write_is_a_warning_where_that_is_asked_for(mode: str, run_dir: Path) -> None:
    done = limited(run_dir.parent, 64, "checkpoint.resume=run", "checkpoint.on_failure=warn", mode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step_4 was not saved" in done.stdout
    assert saved_steps(run_dir) == [2]
    assert [line["step"] for line in numbers(run_dir)[0]] == [1, 2, 3, 4]


def test_keep_last_and_keep_best_hold_during_a_run(tmp_path: Path) -> None:
    write_text(tmp_path)
    words = [*SETTINGS, "training.max_steps=6", "training.ckpt_every_steps=1", "training.val_every_steps=1"]
    # A rate that spoils what the first steps have learnt.
    worse = ["optimizer.lr=0.2", "lr_scheduler=constant", "checkpoint.keep_last=1", "checkpoint.keep_best=2"]
    done = train(tmp_path, *words, *worse)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = {line["step"]: line["val_loss"] for line in numbers(tmp_path / "run")[1]}
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert saved_steps(tmp_path / "run") == sorted({*best, 6})
