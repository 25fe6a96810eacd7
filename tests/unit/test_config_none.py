"""Every optional value can be switched off with none, None or null, and keeps its place when it is a number."""

from __future__ import annotations

import dataclasses
import types
import typing

import pytest
from composing import compose_config

from automodel.config import TrainConfig
from automodel.config.distributed import STRATEGIES, DistributedSection


def _optional_fields(cls: type, prefix: str) -> list[str]:
    found = []
    for name, hint in typing.get_type_hints(cls).items():
        if name == "strategy_config":
            continue
        if dataclasses.is_dataclass(hint) and hint is not DistributedSection:
            found += _optional_fields(hint, f"{prefix}{name}.")
        elif typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint):
            found.append(prefix + name)
    return found


OF_THE_RUN = _optional_fields(TrainConfig, "")
OF_THE_SECTION = _optional_fields(DistributedSection, "distributed.")


def _read(config: TrainConfig, key: str) -> object:
    node: object = config
    for name in key.split("."):
        strategy = getattr(node, "strategy_config", None)
        node = getattr(strategy if hasattr(strategy, name) else node, name)
    return node


def test_the_table_sees_the_optional_fields() -> None:
    assert {"training.max_grad_norm", "data.val_max_samples", "checkpoint.resume", "model.init"} <= set(OF_THE_RUN)
    assert {"distributed.dp_size", "distributed.pipeline.layers_per_stage"} <= set(OF_THE_SECTION)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("spelling", ["none", "None", "null"])
def test_every_optional_field_takes_none_in_any_spelling(strategy: str, spelling: str) -> None:
    own = _optional_fields(STRATEGIES[strategy], "distributed.")
    keys = [*OF_THE_RUN, *OF_THE_SECTION, *own]
    config = compose_config(f"distributed={strategy}", *(f"{key}={spelling}" for key in keys))
    for key in keys:
        assert _read(config, key) is None, key


@pytest.mark.parametrize("spelling", ["none", "None", "null"])
def test_fields_of_the_model_take_none_too(spelling: str) -> None:
    assert compose_config(f"model.config.rope_scaling={spelling}").model.config["rope_scaling"] is None


def test_numbers_in_quotes_are_numbers() -> None:
    config = compose_config('training.max_steps="12"', 'optimizer.lr="1e-3"', 'distributed.dp_size="2"', "seed='7'")
    assert (config.training.max_steps, config.optimizer.lr, config.distributed.dp_size, config.seed) == (12, 1e-3, 2, 7)


@pytest.mark.parametrize("section", ["distributed.pipeline", "distributed.moe"])
def test_a_nested_section_can_be_none(section: str) -> None:
    config = compose_config(f"{section}=none")
    assert config.distributed == compose_config().distributed
