"""The main job as a user runs it: real processes, real text, the files that it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.train_support import EXACT, ROOT, SMALL, environment, metrics, train


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, the settings that compare layouts."""
    folder = tmp_path_factory.mktemp("reference")
    done = train(folder, *SMALL, *EXACT, "training.val_every_steps=2", "training.val_at_start=true")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize(
    "layout",
    [
        ["distributed.dp_size=2"],
        ["distributed=hsdp"],
        ["distributed=ddp", "distributed.dp_size=2", "distributed.activation_checkpointing=full"],
    ],
    ids=["fsdp2_dp2", "hsdp_2x2", "ddp2_checkpointing"],
)
def test_every_layout_logs_the_numbers_of_one_process(layout: list[str], reference_run: Path, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        *SMALL,
        *EXACT,
        "training.val_every_steps=2",
        "training.val_at_start=true",
        "training.local_batch_size=2",
        *layout,
    )
    assert done.returncode == 0, done.stderr
    ours, our_validations = metrics(tmp_path / "run")
    theirs, their_validations = metrics(reference_run)
    assert [line["sample_ids"] for line in ours] == [line["sample_ids"] for line in theirs]
    assert [line["num_label_tokens"] for line in ours] == [line["num_label_tokens"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=1e-5)
    assert [line["grad_norm"] for line in ours] == pytest.approx([line["grad_norm"] for line in theirs], rel=1e-4)
    assert [line["step"] for line in our_validations] == [0, 2, 3]
    assert [line["val_loss"] for line in our_validations] == pytest.approx(
        [line["val_loss"] for line in their_validations], abs=1e-5
    )


def test_metrics_hold_what_the_contract_names(reference_run: Path) -> None:
    steps, validations = metrics(reference_run)
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line.keys() == {
            "step",
            "epoch",
            "loss",
            "grad_norm",
            "lr",
            "num_label_tokens",
            "tokens_per_second",
            "step_time_s",
            "peak_memory_bytes",
            "sample_ids",
        }
        assert len(line["sample_ids"]) == 8
        assert line["sample_ids"] == sorted(line["sample_ids"])
        # About a third of 8 x 32 labels is masked.
        assert 140 < line["num_label_tokens"] < 205
        assert line["peak_memory_bytes"] > 50 * 2**20
    for line in validations:
        assert line.keys() == {"step", "val_loss", "val_num_label_tokens"}


def test_run_folder_holds_config_log_and_metrics(reference_run: Path) -> None:
    assert sorted(path.name for path in reference_run.iterdir()) == [
        ".hydra",
        "checkpoints",
        "hf",
        "metrics.jsonl",
        "train.log",
    ]
    assert (reference_run / ".hydra" / "config.yaml").exists()
    log = (reference_run / "train.log").read_text()
    assert log.count("step 3/3 loss") == 1
    assert str(reference_run) in log


def test_default_run_closes_with_losses_text_and_folder(tmp_path: Path) -> None:
    overrides = [item for item in SMALL if not item.startswith("training.generate_tokens")]
    done = train(
        tmp_path, *overrides, "training.generate_tokens=12", "training.val_at_start=true", "training.max_steps=2"
    )
    assert done.returncode == 0, done.stderr
    closing = done.stdout[done.stdout.rindex("loss   ") :] if "loss   " in done.stdout else done.stdout
    assert "in 2 steps" in done.stdout
    assert "validation loss" in closing
    assert "  | def " in done.stdout
    assert f"run folder       {tmp_path / 'run'}" in done.stdout


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path) -> None:
    overrides = [*SMALL, "training.max_steps=1", "training.val_at_end=false"]
    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    runs = [subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    folders = [path.parent for path in (tmp_path / "outputs").rglob("metrics.jsonl")]
    assert len(folders) == 2
    for folder in folders:
        assert not set(str(folder.relative_to(tmp_path))) & set("=[] ")


def test_own_text_files_train(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"document {number}: " + "all work and no play. " * 40)
    done = train(tmp_path, *SMALL, "data=text", "data.files=texts/*.txt")
    assert done.returncode == 0, done.stderr
    steps, validations = metrics(tmp_path / "run")
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert len(validations) == 1


def test_a_hugging_face_folder_gives_the_configuration(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    general = [item for item in SMALL if not item.startswith("model.")]
    done = train(
        tmp_path,
        *general,
        "model=hf",
        "model.pretrained_model_name_or_path=checkpoint",
        "model.init=random",
        "model.config.num_hidden_layers=1",
    )
    assert done.returncode == 0, done.stderr
    assert "checkpoint: " in done.stdout
    assert len(metrics(tmp_path / "run")[0]) == 3


def test_a_norm_that_is_not_finite_ends_the_run_before_the_update(tmp_path: Path) -> None:
    done = train(
        tmp_path, *SMALL, "optimizer=sgd", "optimizer.lr=1e30", "training.max_grad_norm=none", "distributed.dp_size=2"
    )
    assert done.returncode == 1
    assert "is not finite" in done.stderr
    assert "step 2: the loss is not finite (nan) on rank 0, 1" in done.stderr
    assert done.stderr.count("Traceback") == 1, "told once, by one rank"
    assert done.stderr.count("ended with the same error") == 1
    assert (tmp_path / "run" / "error.txt").exists()
    assert [line["step"] for line in metrics(tmp_path / "run")[0]] == [1]


def test_a_step_without_a_trained_token_changes_nothing_and_is_said(tmp_path: Path) -> None:
    done = train(tmp_path, *SMALL, "data.mask_labels=1.0", "training.val_at_end=false")
    assert done.returncode == 0, done.stderr
    assert "step 1 has no trained token" in done.stdout
    assert [line["num_label_tokens"] for line in metrics(tmp_path / "run")[0]] == [0, 0, 0]


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = train(tmp_path, *SMALL, "logger=tensorboard")
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("loss")]
    assert logged == pytest.approx([line["loss"] for line in metrics(tmp_path / "run")[0]])


def test_epochs_end_with_a_shorter_step(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefg " * 60)
    done = train(
        tmp_path,
        *SMALL,
        "data=text",
        "data.files=text.txt",
        "data.log_sample_ids=true",
        "training.max_steps=none",
        "training.num_epochs=2",
        "training.val_at_end=false",
        "distributed.dp_size=2",
    )
    assert done.returncode == 0, done.stderr
    steps, _ = metrics(tmp_path / "run")
    for epoch in (0, 1):
        ids = sorted(sample for line in steps if line["epoch"] == epoch for sample in line["sample_ids"])
        assert ids == list(range(len(ids)))
    assert len(steps[-1]["sample_ids"]) < 8


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.config.num_layrs=3"], "model.config.num_layrs"),
        (
            ["model=hf", "model.pretrained_model_name_or_path=nowhere", "model.init=random"],
            "model.pretrained_model_name_or_path",
        ),
        (["model.model_type=lama"], "model.model_type"),
        (["data=text", "data.files=nothing/*.txt"], "data.files"),
        (["training.global_batch_size=7"], "training.global_batch_size"),
        (["+extra=1"], "extra"),
        (["model.attn_implementation=flash_attention_9"], "model.attn_implementation"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_impossible_request_is_refused_before_anything_starts(
    overrides: list[str], key: str, tmp_path: Path
) -> None:
    done = train(tmp_path, *SMALL, *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"key    {key}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_takes_no_second_one(reference_run: Path, tmp_path: Path) -> None:
    before = (reference_run / "metrics.jsonl").read_bytes()
    done = train(tmp_path, *SMALL, f"hydra.run.dir={reference_run}")
    assert done.returncode == 2
    assert "key    hydra.run.dir" in done.stderr
    assert (reference_run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "overrides", [["hydra.run.dir=file/run"], ["model=[1,2]"], ["training.global_batch_size=999999999"]]
)
def test_requests_that_hydra_or_arithmetic_would_stumble_over_are_refused(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = train(tmp_path, *SMALL, *overrides, timeout=30)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("impossible request, nothing was started")
