"""Learning rate schedules, as a pure function of the step."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from automodel.config.errors import ConfigError
from automodel.config.schema import LRSchedulerConfig


def learning_rate_factor(config: LRSchedulerConfig, total_steps: int, step: int) -> float:
    """What the configured learning rate is multiplied by in a step.

    With steps s = 1..T, W = ``warmup_steps``, r = ``min_lr_ratio`` and D = ``decay_steps``:

    - warm-up, s <= W: s / W. The first step already trains, and step W has the full rate.
    - afterwards, with p = (s - P) / (T - P), where P = max(W, 1) is the first step at the full rate:

      - constant: 1
      - linear: 1 - (1 - r) p
      - cosine: r + (1 - r) (1 + cos(pi p)) / 2 (Loshchilov and Hutter, 2017, arXiv:1608.03983)
      - wsd: 1 until step T - D, then 1 - (1 - r) (s - (T - D)) / D (warm-up, stable, decay: Hu et al.,
        2024, arXiv:2404.06395, with a linear decay). D defaults to a tenth of the run.

    All but constant end at exactly r in step T, and stay there. A run that is shorter than its warm-up
    ends inside it.

    Args:
        config: the schedule.
        total_steps: optimizer steps of the whole run.
        step: from 1.
    """
    warmup_steps, floor = config.warmup_steps, config.min_lr_ratio
    if step <= warmup_steps:
        return step / warmup_steps
    peak_step = max(warmup_steps, 1)
    if config.name == "constant" or step == peak_step:
        return 1.0
    if step >= total_steps:
        return floor
    if config.name == "wsd":
        decay_steps = _wsd_decay_steps(config, total_steps)
        progress = max(0.0, (step - (total_steps - decay_steps)) / decay_steps)
    else:
        progress = (step - peak_step) / (total_steps - peak_step)
    if config.name == "cosine":
        return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - floor) * progress


def build_lr_scheduler(
    optimizer: torch.optim.Optimizer, config: LRSchedulerConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule for every parameter group of ``optimizer``; see :func:`learning_rate_factor`.

    The rate of step 1 is set at once; call ``step()`` after each optimizer step.

    Args:
        optimizer: its groups' ``lr`` is the full rate.
        config: the schedule.
        total_steps: optimizer steps of the whole run, at least 1.

    Raises:
        ConfigError: wsd's decay does not fit between the warm-up and the end of the run.
    """
    decay_steps = config.decay_steps
    room = total_steps - config.warmup_steps
    if config.name == "wsd" and decay_steps is not None and not 1 <= decay_steps <= room:
        raise ConfigError(
            "lr_scheduler.decay_steps",
            decay_steps,
            f"warm-up ({config.warmup_steps}) and decay must fit into the {total_steps} steps of the run",
            f"1 to {room}, or none: a tenth of the run" if room >= 1 else "none: a tenth of the run",
        )
    return _StepFunctionLR(optimizer, functools.partial(_factor_after, config, total_steps))


def _factor_after(config: LRSchedulerConfig, total_steps: int, finished_steps: int) -> float:
    return learning_rate_factor(config, total_steps, finished_steps + 1)


def _wsd_decay_steps(config: LRSchedulerConfig, total_steps: int) -> int:
    return max(1, total_steps // 10) if config.decay_steps is None else config.decay_steps


class _StepFunctionLR(torch.optim.lr_scheduler.LambdaLR):
    """LambdaLR whose state is the number of finished steps and nothing else.

    The rates follow from that number and this run's settings, so a checkpoint loads under a layout with
    other parameter groups, and a learning rate given anew on resume is the one that holds.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved step. Call after the optimizer's state is loaded, which brings old rates."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        self._last_lr = [
            base * function(self.last_epoch) for base, function in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, base, rate in zip(self.optimizer.param_groups, self.base_lrs, self._last_lr, strict=True):
            group["initial_lr"] = base
            group["lr"] = rate
