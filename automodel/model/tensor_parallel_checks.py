"""Rules of tensor and sequence parallelism that need the model class."""

from __future__ import annotations

from torch import nn

from automodel.config.distributed import DistributedSection
from automodel.distributed.sequence_parallel import check_sequence_parallel
from automodel.distributed.tensor_parallel import resolve_plan


def check_tensor_parallel(model: nn.Module, section: DistributedSection) -> None:
    """Hold a tensor-parallel plan, the model's own or the user's, against the model.

    A user's plan is checked even at tp_size 1, where it is unused: a misspelt name is told before it matters.

    Args:
        model: whole, on meta.
        section: sizes and the user's plan.

    Raises:
        ConfigError: no plan, an entry that matches nothing, a style that does not fit, key-value heads that
            tp_size cannot serve, or blocks that sequence parallelism cannot split.
    """
    user_plan = getattr(section.strategy_config, "tp_plan", None)
    if section.tp_size == 1 and user_plan is None:
        return
    plan = resolve_plan(model, user_plan, section.tp_size)
    if section.sequence_parallel and section.tp_size > 1:
        check_sequence_parallel(model, plan)
