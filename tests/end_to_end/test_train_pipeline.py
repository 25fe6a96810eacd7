"""Pipelines as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.train_support import EXACT, SMALL, metrics, train

WATCHED = ["training.val_every_steps=2", "training.val_at_start=true", "training.generate_tokens=5"]


def assert_same_numbers(ours: Path, theirs: Path) -> None:
    our_steps, our_validations = metrics(ours)
    their_steps, their_validations = metrics(theirs)
    assert [line["loss"] for line in our_steps] == pytest.approx([line["loss"] for line in their_steps], abs=1e-5)
    assert [line["grad_norm"] for line in our_steps] == pytest.approx(
        [line["grad_norm"] for line in their_steps], rel=1e-4
    )
    assert [line["num_label_tokens"] for line in our_steps] == [line["num_label_tokens"] for line in their_steps]
    assert [line["step"] for line in our_validations] == [line["step"] for line in their_validations]
    assert [line["val_loss"] for line in our_validations] == pytest.approx(
        [line["val_loss"] for line in their_validations], abs=1e-5
    )


def generated(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith("  | ")]


def test_loss_validation_and_text_of_a_pipeline_are_those_of_one_process(tmp_path: Path) -> None:
    # The loss arises on the second rank with 1f1b.
    layout = ["distributed=fsdp2_pp2", "model.config.tie_word_embeddings=true"]
    one = train(tmp_path, *SMALL, *EXACT, *WATCHED, layout[1], f"hydra.run.dir={tmp_path}/one")
    two = train(tmp_path, *SMALL, *EXACT, *WATCHED, *layout, f"hydra.run.dir={tmp_path}/two")
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert_same_numbers(tmp_path / "two", tmp_path / "one")
    assert generated(two.stdout) == generated(one.stdout) != []
    table = [line.split() for line in two.stdout.splitlines()]
    assert ["stage", "rank", "layers", "parameters", "also"] in table
    assert [row[:3] for row in table if row[-1:] == ["lm_head"]] == [["1", "1", "1"]]
    assert "step 3/3 loss" in two.stdout


def test_a_model_without_a_plan_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    model = ["model=hf", "model.model_type=gpt2", "model.init=random", "model.config={vocab_size: 264, n_layer: 2}"]
    refused = train(tmp_path, *model, "distributed=fsdp2_pp2")
    assert refused.returncode == 2
    assert "GPT2LMHeadModel has no pipeline plan" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_32_ranks_give_the_loss_of_one_process(tmp_path: Path) -> None:
    steps = ["training.max_steps=2", "training.generate_tokens=0", "data.val_max_samples=8", "precision=fp32"]
    one = train(tmp_path, *steps, "launch.device=cpu", f"hydra.run.dir={tmp_path}/one", timeout=300)
    many = train(
        tmp_path,
        *steps,
        "launch.device=cpu",
        "distributed=fsdp2_tp8_pp4",
        f"hydra.run.dir={tmp_path}/many",
        timeout=1200,
    )
    assert (one.returncode, many.returncode) == (0, 0), one.stderr + many.stderr
    assert_same_numbers(tmp_path / "many", tmp_path / "one")
