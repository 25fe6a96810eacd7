"""Hydra's own errors come out as refusals: key, value, rule, legal values, nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import CONF
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from automodel.config import ConfigError, load, schema
from automodel.config.hydra_errors import translate


def _refusal(*overrides: str, conf: Path = CONF, name: str = "train") -> ConfigError | None:
    schema.register()
    with initialize_config_dir(str(conf), version_base="1.3"):
        try:
            composed = compose(name, list(overrides))
            plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            assert isinstance(plain, dict)
            load(plain)
        except Exception as error:
            translated = translate(error, list(overrides))
            if translated is None:
                raise
            return translated
    return None


# override, key, value, a word of what is legal, hint
CASES = [
    # no such choice
    ("model=tiny_lama", "model", "tiny_lama", "tiny_llama", "did you mean 'tiny_llama'?"),
    ("distributed=fsdp", "distributed", "fsdp", "megatron_fsdp", "did you mean 'fsdp2'?"),
    ("experiment=debugg", "experiment", "debugg", "hsdp_parity", "did you mean 'debug'?"),
    ("pipeline=1f1", "pipeline", "1f1", "zero_bubble", "did you mean '1f1b'?"),
    ("model=", "model", "(empty)", "tiny_llama", None),
    ("optimizer=none", "optimizer", "none", "adamw, sgd", None),
    ("logger=null", "logger", "null", "tensorboard", None),
    ("model=3", "model", "3", "tiny_llama", None),
    ("hydra/job_logging=quiet", "hydra/job_logging", "quiet", "none", None),
    # no such key or group
    ("training.max_step=3", "training.max_step", "3", "max_steps", "did you mean 'max_steps'?"),
    ("optimizer.learning_rate=3", "optimizer.learning_rate", "3", "lr", None),
    ("model.confg.num_hidden_layers=4", "model.confg", "4", "config", "did you mean 'config'?"),
    ("optimzer=sgd", "optimzer", "sgd", "optimizer", "did you mean 'optimizer'?"),
    ("speed=3", "speed", "3", "seed", "did you mean 'seed'?"),
    ("speed/high=3", "speed/high", "3", "optimizer", None),
    ("speed@here=3", "speed@here", "3", "optimizer", None),
    ("hydra.run.dirr=x", "hydra.run.dirr", "x", "dir", "did you mean 'dir'?"),
    ("distributed.tp_sise=2", "distributed.tp_sise", "2", "tp_size", "did you mean 'tp_size'?"),
    ("training.max_steps.a=3", "training.max_steps.a", "3", "training.max_steps=<value>", None),
    # + and ~
    ("+speed=3", "speed", "3", "seed", "did you mean 'seed'?"),
    ("+training.max_step=3", "training.max_step", "3", "max_steps", "did you mean 'max_steps'?"),
    ("+seed=3", "+seed", "3", "seed=3", None),
    ("+model=hf", "+model", "hf", "model=hf", None),
    ("+model=tiny_llama", "+model", "tiny_llama", "model=tiny_llama", None),
    ("++model=hf", "++model", "hf", "model=hf", None),
    ("~speed", "~speed", "(none)", "optimizer", None),
    ("~model=hf", "~model", "hf", "tiny_llama", "did you mean 'hf'?"),
    ("~training.max_steps", "~training.max_steps", "(none)", "training.max_steps=none", None),
    # wrong types
    ("training=5", "training", "5", "max_steps", None),
    ("training=[1]", "training", "[1]", "max_steps", None),
    ("model.config=3", "model.config", "3", "model.config.num_hidden_layers=4", None),
    ("training.max_steps=many", "training.max_steps", "many", "a whole number or none", None),
    ("seed=2.5", "seed", "2.5", "a whole number", None),
    ("training.val_at_end=maybe", "training.val_at_end", "maybe", "true, false", None),
    ("hydra.job.chdir=maybe", "hydra.job.chdir", "maybe", "type", None),
    ("seed=???", "seed", "???", "seed=<value>", None),
    # references
    ("seed=${speed}", "seed", "${speed}", "existing key", None),
    ("seed=${speed:3}", "seed", "${speed:3}", "existing key", None),
    ("seed='${speed'", "seed", "'${speed'", "existing key", None),
    # syntax
    ("training.max_steps", "training.max_steps", "(none)", "training.max_steps=<value>", None),
    ("=3", "=3", "3", "key=value", None),
    ("seed={a:", "seed", "{a:", "key={a:1}", """for a value with special characters: 'seed="{a:"'"""),
    ("data.files=['a.txt", "data.files", "['a.txt", "quotes", None),
    ("training.=3", "training.", "3", "key=value", """for a value with special characters: 'training.="3"'"""),
    # a sweep without -m
    ("seed=1,2", "seed", "1,2", "-m", None),
    ("seed=range(3)", "seed", "range(3)", "-m", None),
    ("distributed=glob(*)", "distributed", "glob(*)", "-m", None),
]


@pytest.mark.parametrize(("override", "key", "value", "legal", "hint"), CASES, ids=[case[0] for case in CASES])
def test_is_refused_like_every_other_request(override: str, key: str, value: str, legal: str, hint: str | None) -> None:
    error = _refusal("training.seq_length=64", override)
    assert error is not None
    assert (error.key, str(error.value), error.hint) == (key, value, hint)
    assert legal in error.legal
    assert error.rule
    assert "\n" not in error.rule
    assert "Traceback" not in str(error)


def test_a_wrong_override_is_told_apart_from_the_right_ones_around_it() -> None:
    error = _refusal("optimizer=sgd", "model=tiny_llama", "training.max_steps=3", "+seed=4", "data=stdlib")
    assert error is not None
    assert (error.key, error.value) == ("+seed", "4")


@pytest.mark.parametrize(
    "override",
    ["model.config.rope_theta=5000", "model.config={num_hidden_layers: 4}", "distributed.mp_policy.param_dtype=float32",
     "seed=${training.max_steps}", "data.files=a b.txt", "data.files=*.txt", "++seed=4", "~seed"],
)  # fmt: skip
def test_is_legal(override: str) -> None:
    assert _refusal(override) is None


def test_open_sections_are_open_without_a_plus() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        schema.register()
        composed = compose(
            "train", ["model.config.rope_theta=5000", "distributed.strategy=ddp", "distributed.bucket_cap_mb=5"]
        )
    assert composed.model.config.rope_theta == 5000
    assert composed.model.config.num_hidden_layers == 8
    assert composed.distributed.bucket_cap_mb == 5


@pytest.fixture
def own_conf(tmp_path: Path) -> Path:
    """A folder of configs of the user's own."""
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "train.yaml").write_text("defaults:\n  - train_schema\n  - optimizer: mine\n  - _self_\n")
    (tmp_path / "optimizer" / "mine.yaml").write_text("lr: 0.5\n")
    return tmp_path


def test_a_config_file_that_is_not_there_is_named(own_conf: Path) -> None:
    error = _refusal(conf=own_conf, name="trian")
    assert error is not None
    assert (error.key, error.value) == ("--config-name", "trian")


def test_an_unknown_key_in_a_file_is_named(own_conf: Path) -> None:
    (own_conf / "optimizer" / "mine.yaml").write_text("learning_rate: 0.5\n")
    error = _refusal(conf=own_conf)
    assert error is not None
    assert (error.key, error.value) == ("optimizer.learning_rate", "(not on the command line)")
    assert "lr" in error.legal


def test_a_choice_that_only_a_file_names_is_told_with_that_file(own_conf: Path) -> None:
    (own_conf / "optimizer" / "mine.yaml").unlink()
    (own_conf / "optimizer" / "other.yaml").write_text("lr: 0.5\n")
    error = _refusal(conf=own_conf)
    assert error is not None
    assert (error.key, error.value, error.legal) == ("optimizer", "mine", "other")
    assert "In 'train'" in error.rule


def test_a_file_that_is_no_yaml_is_named_with_the_line(own_conf: Path) -> None:
    (own_conf / "optimizer" / "mine.yaml").write_text("lr: 0.5\nname: [adamw\n")
    error = _refusal(conf=own_conf)
    assert error is not None
    assert "mine.yaml, line 3" in str(error.value)


@pytest.mark.parametrize(
    ("override", "key", "legal"),
    [("logger=null", "logger", "tensorboard"), ("~speed", "~speed", "optimizer"), ("speed=3", "speed", "experiment")],
)
def test_groups_are_known_after_hydra_has_let_go_of_its_search_path(override: str, key: str, legal: str) -> None:
    schema.register()
    with (
        pytest.raises((ConfigCompositionException, ValueError)) as caught,
        initialize_config_dir(str(CONF), version_base="1.3"),
    ):
        compose("train", [override])
    error = translate(caught.value, [override])
    assert error is not None
    assert error.key == key
    assert legal in error.legal


def test_errors_that_are_no_requests_are_left_alone() -> None:
    assert translate(RuntimeError("a fault of the program"), ["seed=1"]) is None
    assert translate(ValueError("another"), ["seed=1"]) is None
    refused = ConfigError("seed", -1, "rule", "legal")
    assert translate(refused, []) is refused
