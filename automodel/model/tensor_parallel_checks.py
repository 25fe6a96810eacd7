"""Rules of tensor and sequence parallelism that need the model class."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from automodel.config.distributed import DistributedSection
from automodel.config.errors import ConfigError
from automodel.distributed.sequence_parallel import check_sequence_parallel
from automodel.distributed.tensor_parallel import TensorParallelPlan, resolve_plan

# Found by the walk over all model types (docs/tensor_parallel_models.md): they run, and their losses are others.
INEXACT_MODEL_TYPES = frozenset({"inkling2_text", "inkling2_loop_text"})
INEXACT_SEQUENCE_PARALLEL_TYPES = INEXACT_MODEL_TYPES | {"llama4_text"}


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
    if section.tp_size > 1:
        _check_exact(model, section)
    plan = resolve_plan(model, user_plan, section.tp_size)
    if section.tp_size > 1:
        _check_attention_dropout(model, plan)
    if section.sequence_parallel and section.tp_size > 1:
        check_sequence_parallel(model, plan)


def _check_exact(model: nn.Module, section: DistributedSection) -> None:
    model_type = model.config.get_text_config().model_type if isinstance(model, PreTrainedModel) else None
    if model_type in INEXACT_MODEL_TYPES:
        raise ConfigError(
            "distributed.tp_size",
            section.tp_size,
            f"{type(model).__name__} does not give the numbers of one device under its tensor-parallel plan",
            "1",
        )
    if section.sequence_parallel and model_type in INEXACT_SEQUENCE_PARALLEL_TYPES:
        raise ConfigError(
            "distributed.sequence_parallel",
            True,
            f"{type(model).__name__} does not give the numbers of one device under sequence parallelism",
            "false",
        )


def _check_attention_dropout(model: nn.Module, plan: TensorParallelPlan) -> None:
    """Masks over attention weights are drawn for all heads at once: a rank that holds some cannot know its part.

    Where the plan leaves attention whole, or drops tokens' activations only, masks are those of one device.
    """
    sharded = any(
        "att" in name.rpartition(".")[0] and "colwise" in style and "gather" not in style
        for name, style in plan.modules.items()
    )
    fields = model.config.get_text_config().to_dict() if isinstance(model, PreTrainedModel) else {}
    for field, value in fields.items():
        if sharded and "att" in field and "drop" in field and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"model.config.{field}",
                value,
                "with tp_size > 1 each rank holds some heads, and their dropout masks would differ from one device's",
                "0, or distributed.tp_size=1",
            )
