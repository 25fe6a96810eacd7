"""Composes the project's own configs as the command line does; shared by the tests of the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from automodel.config import ConfigError, TrainConfig, load, schema
from automodel.config.validate import resolve_world_size, validate

CONF = Path(__file__).resolve().parents[2] / "conf"


def compose_node(*overrides: str, with_hydra: bool = False) -> DictConfig:
    schema.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides), return_hydra_config=with_hydra)


def compose_plain(*overrides: str) -> dict[str, Any]:
    plain = OmegaConf.to_container(compose_node(*overrides), resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return plain


def compose_config(*overrides: str) -> TrainConfig:
    return load(compose_plain(*overrides))


def refusal(
    config: TrainConfig, world_size: int | None = None, local_world_size: int | None = None
) -> ConfigError | None:
    """What validation says to ``config`` on a host without GPUs, or None if it is legal."""
    try:
        world = resolve_world_size(config, world_size, 0)
        validate(config, world, local_world_size)
    except ConfigError as error:
        return error
    return None


def broken_rule(
    config: TrainConfig, world_size: int | None = None, local_world_size: int | None = None
) -> ConfigError | None:
    """The same, apart from parallel kinds that the version at hand does not have: they are refused last."""
    error = refusal(config, world_size, local_world_size)
    return None if error is not None and "not supported by this version" in error.rule else error
