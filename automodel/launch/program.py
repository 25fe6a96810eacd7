"""What launched processes run, by dotted name, so that the launcher itself never imports it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.config.schema import TrainConfig


@dataclass(frozen=True)
class Program:
    """The functions of a run as ``module:name``.

    Attributes:
        run: ``(config, run_dir, context, device_type, stop_requested) -> float | None``, called
            in every rank; rank 0's result is the run's objective.
        check_model: ``(config, world_size) -> None``, raises ConfigError for a request that only
            the model's own class shows to be impossible.
        preload: modules imported once in the fork server; ranks then start with them in memory,
            their pages shared. A module that cannot be imported is left to the rank to report.
    """

    run: str = "automodel.training.run:run"
    check_model: str = "automodel.training.checks:check_run"
    preload: tuple[str, ...] = (
        "torch",
        "torch.distributed",
        "transformers",
        "automodel.training.checks",
        "automodel.training.run",
    )

    def modules_for(self, config: TrainConfig) -> tuple[str, ...]:
        """``preload`` and, where its type is known without transformers, the model's own module."""
        model_type = config.model.model_type or _model_type_of(config.model.pretrained_model_name_or_path)
        if "transformers" not in self.preload or not model_type:
            return self.preload
        name = model_type.replace("-", "_")
        return (*self.preload, f"transformers.models.{name}.modeling_{name}")


def resolve(name: str) -> Callable[..., Any]:
    """``module:name`` to the object."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _model_type_of(path: str | None) -> str | None:
    """``model_type`` of a local checkpoint folder, or None."""
    if not path:
        return None
    try:
        found = json.loads((Path(path) / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
