"""The words that bring a run's own config back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from automodel.config.errors import ConfigError
from automodel.launch.arguments import Arguments, parse_arguments
from automodel.launch.compose import compose_unresolved
from automodel.launch.resume import changed_since, compose_continued, quoted
from automodel.training.checkpoint.folder import partial_folder, publish, start_partial, step_folder

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.5,
        1e-05,
        "none",
        "a b=c, [d] {e}",
        "it's",
        "1",
        [1, "two", None],
        {"a": 1, "b": [True]},
        [],
        {},
    ],
)
def test_a_value_survives_the_grammar_of_overrides(value: object) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"++key={quoted(value)}"])
    assert override.value() == value
    assert type(override.value()) is type(value)


def test_only_what_differs_is_brought_back() -> None:
    then = {"a": {"same": 1, "changed": 2, "gone": 3}, "checkpoint": {"resume": "old"}, "list": [1, 2], "empty": {}}
    now = {"a": {"same": 1, "changed": 5, "new": 7}, "checkpoint": {"resume": None}, "list": [1], "empty": {}}
    assert changed_since(then, now) == ["++a.changed=2", "++a.gone=3", "++list=[1,2]"]


RAN_WITH = ["distributed=fsdp2_tp2", "training.max_steps=7", "optimizer.lr=0.5", "checkpoint.resume=auto", "seed=3"]


def parsed(*words: str) -> Arguments:
    return parse_arguments(list(words), CONF)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with one whole checkpoint, which records the config as it was."""
    composed = compose_unresolved(parsed(*RAN_WITH))
    # As if conf/ had another value at that time.
    composed["training"]["seq_length"] = 48
    partial = partial_folder(tmp_path, 4)
    start_partial(partial)
    index = {"format": 1, "step": 4, "files": {}, "composed": composed, "overrides": RAN_WITH}
    publish(partial, step_folder(tmp_path, 4), index)
    return tmp_path


def test_a_run_folder_alone_brings_its_own_config_back(run_dir: Path) -> None:
    arguments, container = compose_continued(parsed(f"checkpoint.resume={run_dir}"))
    assert container["distributed"]["tp_size"] == 2
    assert (container["training"]["max_steps"], container["optimizer"]["lr"], container["seed"]) == (7, 0.5, 3)
    assert container["training"]["seq_length"] == 48, "the files in conf/ have changed, the run does not"
    assert container["checkpoint"]["resume"] == str(run_dir)
    assert arguments.overrides[-1] == f"hydra.run.dir='{run_dir}'"
    assert arguments.argv == arguments.overrides


def test_explicit_words_win_also_as_a_choice_of_a_group(run_dir: Path) -> None:
    words = ["distributed=ddp", "training.seq_length=32", f"checkpoint.resume={run_dir}", f"hydra.run.dir={run_dir}"]
    _, container = compose_continued(parsed(*words))
    assert container["distributed"]["strategy"] == "ddp"
    assert container["distributed"].get("tp_size", 1) == 1
    assert container["training"]["seq_length"] == 32
    assert container["training"]["max_steps"] == 7


def test_anything_else_is_composed_as_it_stands(run_dir: Path) -> None:
    for resume in ("none", "auto", str(step_folder(run_dir, 4))):
        arguments = parsed(f"checkpoint.resume={resume}")
        continued, container = compose_continued(arguments)
        assert continued is arguments
        assert container["training"]["max_steps"] == 400


def test_another_run_folder_beside_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="goes on inside that folder"):
        compose_continued(parsed(f"checkpoint.resume={run_dir}", f"hydra.run.dir={tmp_path}/other"))
