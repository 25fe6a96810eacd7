"""What the launcher checks with the model's class at hand, before any rank starts."""

from __future__ import annotations

from automodel.config.schema import TrainConfig
from automodel.model.build import build_config, build_model
from automodel.model.checks import check_model
from automodel.training.checkpoint.folder import find_named
from automodel.training.checkpoint.loader import check_same_model
from automodel.training.checkpoint.pieces import model_tensors


def check_run(config: TrainConfig, world_size: int) -> None:
    """Hold the model against the layout and against the checkpoint that is to be resumed.

    Raises:
        ConfigError: see :func:`automodel.model.checks.check_model` and
            :func:`automodel.training.checkpoint.loader.check_same_model`.
    """
    check_model(config, world_size)
    resume = config.checkpoint.resume
    if resume is not None and resume != "auto":
        checkpoint = find_named(resume)
        model = build_model(build_config(config.model), config.model)
        check_same_model(checkpoint, {name: tuple(tensor.shape) for name, tensor in model_tensors(model)})
