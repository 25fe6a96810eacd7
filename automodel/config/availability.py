"""What the design has and this version does not, refused by name after every other rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from automodel.config.errors import ConfigError
from automodel.config.schema import TrainConfig


@dataclass(frozen=True)
class Missing:
    """One setting that this version cannot serve.

    Attributes:
        key: dotted name of the setting.
        requested: its value when it is asked for, else None.
        what: what is not there yet.
        legal: the way out.
    """

    key: str
    requested: Callable[[TrainConfig], Any]
    what: str
    legal: str


def _size(name: str) -> Callable[[TrainConfig], int | None]:
    return lambda config: size if (size := getattr(config.distributed, name)) > 1 else None


MISSING = (
    Missing("distributed.cp_size", _size("cp_size"), "context parallel", "1"),
    Missing("distributed.ep_size", _size("ep_size"), "expert parallel", "1"),
    Missing(
        "distributed.strategy",
        lambda config: "megatron_fsdp" if config.distributed.strategy == "megatron_fsdp" else None,
        "this strategy",
        "fsdp2, ddp",
    ),
    Missing(
        "distributed.enable_compile",
        lambda config: (
            True
            if getattr(config.distributed.strategy_config, "enable_compile", False)
            and (config.distributed.tp_size > 1 or config.distributed.pp_size > 1)
            else None
        ),
        "torch.compile under tensor or pipeline parallel",
        "false",
    ),
    Missing(
        "training.loss",
        lambda config: (
            config.training.loss
            if config.training.loss == "linear_cross_entropy" and config.distributed.pp_size > 1
            else None
        ),
        "this loss under pipeline parallel",
        "cross_entropy",
    ),
    Missing("data.packed_sequence_size", lambda config: config.data.packed_sequence_size or None, "packing", "0"),
)


def check_available(config: TrainConfig) -> None:
    """Refuse what this version does not have.

    Raises:
        ConfigError: names the setting.
    """
    for item in MISSING:
        value = item.requested(config)
        if value is not None:
            raise ConfigError(item.key, value, f"{item.what} is not supported by this version", item.legal)
