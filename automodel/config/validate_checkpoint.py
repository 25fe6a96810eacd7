"""Rules of checkpoints that the settings alone decide."""

from __future__ import annotations

from automodel.config.errors import ConfigError
from automodel.config.schema import TrainConfig


def check_checkpoint(config: TrainConfig) -> None:
    """Ranges, and a choice of the best among checkpoints that nothing measures.

    Raises:
        ConfigError: names the setting.
    """
    checkpoint, training = config.checkpoint, config.training
    for name in ("keep_last", "keep_best"):
        value = getattr(checkpoint, name)
        if value is not None and value < 1:
            raise ConfigError(f"checkpoint.{name}", value, "it must be at least 1", "1, 2, ..., none")
    if checkpoint.keep_best is None:
        return
    every, validated = training.ckpt_every_steps, training.val_every_steps
    if every is not None and (validated is None or every % validated):
        raise ConfigError(
            "checkpoint.keep_best",
            checkpoint.keep_best,
            "the best are those with the lowest val_loss, so each checkpoint must come after a validation",
            f"training.val_every_steps={every}, or a divisor of it; or none",
        )
