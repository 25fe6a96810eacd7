"""A resumed run is the straight run: bit for bit at the same layout, with the same samples at another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.checkpoint_support import (
    DROPOUT,
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

# Step 6 of 4 a epoch is in the middle of epoch 2.
CUT = 6
LAYOUTS = {
    "one_process": [],
    "fsdp2": ["distributed.dp_size=2"],
    "ddp2": ["distributed=ddp", "distributed.dp_size=2"],
    "tp2_sequence_parallel": ["distributed=fsdp2_tp2", "distributed.dp_size=1", "distributed.sequence_parallel=true"],
    "pp2": ["distributed=fsdp2_pp2", "distributed.dp_size=1", "training.local_batch_size=4"],
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, with dropout."""
    return straight_run(tmp_path_factory.mktemp("straight"), "distributed.dp_size=2", DROPOUT)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, without dropout, which a pipeline refuses."""
    return straight_run(tmp_path_factory.mktemp("plain"), "distributed.dp_size=2")


def test_a_run_folder_alone_goes_on_bitwise_in_the_middle_of_epoch_2(straight: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = as_of(straight, CUT, tmp_path / "run")
    done = resume(tmp_path, "checkpoint.resume=run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(run_dir) == numbers(straight)
    assert [line["epoch"] for line in numbers(run_dir)[0]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert contents(run_dir, 8) == contents(straight, 8)
    log = (run_dir / "train.log").read_text()
    assert log.count("step 1/8 loss") == 1, "the log is continued"
    assert f"going on after step 6 from {run_dir}/checkpoints/step_6" in log


def test_auto_in_the_same_folder_goes_on_bitwise(straight: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = as_of(straight, 2, tmp_path / "run")
    done = train(tmp_path, *SETTINGS, "distributed.dp_size=2", DROPOUT, "checkpoint.resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(run_dir) == numbers(straight)
    assert contents(run_dir, 8) == contents(straight, 8)


def test_auto_without_a_checkpoint_starts_afresh_and_says_so(straight: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = as_of(straight, 0, tmp_path / "run")
    done = train(tmp_path, *SETTINGS, "distributed.dp_size=2", DROPOUT, "checkpoint.resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "so this is a fresh start" in done.stdout
    assert numbers(run_dir) == numbers(straight), "no step twice"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_folder_goes_on_under_any_layout_with_the_same_samples(layout: str, plain: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    source = plain / "checkpoints" / f"step_{CUT}"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    done = train(tmp_path, *SETTINGS, *LAYOUTS[layout], f"checkpoint.resume={source}")
    assert done.returncode == 0, done.stdout + done.stderr
    ours, our_validations = numbers(tmp_path / "run")
    theirs, their_validations = numbers(plain)
    theirs = theirs[CUT:]
    for key in ("step", "epoch", "lr", "sample_ids", "num_label_tokens"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=1e-5)
    assert [line["grad_norm"] for line in ours] == pytest.approx([line["grad_norm"] for line in theirs], rel=1e-4)
    assert our_validations[-1]["val_loss"] == pytest.approx(their_validations[-1]["val_loss"], abs=1e-5)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_explicit_words_win_over_the_runs_own_config(straight: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = as_of(straight, CUT, tmp_path / "run")
    done = resume(
        tmp_path, "distributed=ddp", "checkpoint.resume=run", "training.max_steps=9", "training.ckpt_every_steps=none"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps, _ = numbers(run_dir)
    assert [line["step"] for line in steps] == list(range(1, 10))
    assert "ddp on 2 x cpu" in done.stdout
    assert saved_steps(run_dir) == [2, 4, 6, 9]
    again = resume(tmp_path, "checkpoint.resume=run")
    assert again.returncode == 0, again.stdout + again.stderr
    assert numbers(run_dir)[0] == steps, "a finished run has nothing to add"
    assert "ddp on 2 x cpu" in again.stdout, "its own config is now the one it was last resumed with"


def test_conf_files_that_have_changed_since_do_not_change_the_run(straight: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = as_of(straight, CUT, tmp_path / "run")
    conf = tmp_path / "conf"
    shutil.copytree(Path(__file__).resolve().parents[2] / "conf", conf)
    optimizer = (conf / "optimizer" / "adamw.yaml").read_text()
    (conf / "optimizer" / "adamw.yaml").write_text(optimizer.replace("lr: 3.0e-3", "lr: 7e-3"))
    assert "7e-3" in (conf / "optimizer" / "adamw.yaml").read_text()
    done = resume(tmp_path, "checkpoint.resume=run", f"--config-path={conf}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(run_dir) == numbers(straight)


def test_going_back_to_an_earlier_step_sets_later_checkpoints_aside(straight: Path, tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = as_of(straight, 8, tmp_path / "run")
    words = [
        *SETTINGS,
        "distributed.dp_size=2",
        DROPOUT,
        "hydra.run.dir=run",
        "checkpoint.resume=run/checkpoints/step_4",
    ]
    done = train(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_2", "step_4", "step_6", "step_8", "superseded_step_6", "superseded_step_8"]
    assert numbers(run_dir) == numbers(straight)
