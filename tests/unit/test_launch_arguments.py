"""The command line is read as Hydra reads it."""

from pathlib import Path

import pytest

from automodel.config.errors import ConfigError
from automodel.launch.arguments import parse_arguments

CONF = Path("/project/conf")


def test_overrides_make_an_ordinary_run():
    arguments = parse_arguments(["seed=1", "+experiment=debug", "~data"], CONF)
    assert arguments.overrides == ("seed=1", "+experiment=debug", "~data")
    assert (arguments.config_path, arguments.config_name) == (CONF, "train")
    assert (arguments.help, arguments.query, arguments.multirun) == (False, False, False)


@pytest.mark.parametrize("words", [["--cfg", "job"], ["-c", "job"], ["--info"], ["--version"], ["--hydra-help"]])
def test_questions_to_hydra_are_no_runs(words):
    assert parse_arguments(words, CONF).query


@pytest.mark.parametrize("words", [["-m", "seed=1,2"], ["--multirun"], ["hydra.mode=MULTIRUN", "seed=1,2"]])
def test_sweeps_are_told_from_runs(words):
    assert parse_arguments(words, CONF).multirun


def test_folders_are_made_absolute_and_hydra_is_not_asked_to_guess():
    arguments = parse_arguments(["--config-path", "other", "--config-name=big", "-cd", "/extra", "seed=1"], CONF)
    assert arguments.config_path == Path("/project/other")
    assert arguments.config_name == "big"
    assert arguments.config_dir == Path("/extra")
    assert arguments.argv == ("--config-name=big", "-cd", "/extra", "seed=1")


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(ConfigError) as refused:
        parse_arguments(["--multirn", "seed=1"], CONF)
    assert refused.value.hint == "did you mean '--multirun'?"


def test_options_may_stand_between_overrides():
    arguments = parse_arguments(["seed=1", "-m", "optimizer.lr=1,2", "--config-name", "big"], CONF)
    assert arguments.multirun
    assert arguments.overrides == ("seed=1", "optimizer.lr=1,2")
    assert arguments.argv == ("-m", "--config-name", "big", "seed=1", "optimizer.lr=1,2")
