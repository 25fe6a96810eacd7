"""What a model needs for pipeline stages: answered before any rank starts."""

from __future__ import annotations

from transformers import PreTrainedModel

from automodel.config.distributed import PipelineConfig
from automodel.config.errors import ConfigError
from automodel.distributed.pipeline_parallel import plan_pipeline


def check_pipeline_model(model: PreTrainedModel, config: PipelineConfig, pp_size: int) -> None:
    """Split the model as the run would, and refuse dropout.

    Args:
        model: whole, on meta.

    Raises:
        ConfigError: see :func:`automodel.distributed.pipeline_parallel.plan_pipeline`; dropout.
    """
    plan_pipeline(model, config, pp_size)
    _check_dropout(model)


def _check_dropout(model: PreTrainedModel) -> None:
    """Masks are drawn for a whole local batch at once, and a pipeline sees it in pieces and in another order.

    The same run would then have other numbers under another layout, which no result may have.
    """
    used = any(
        "drop" in f"{type(module).__name__}.{name}".lower() and _is_positive(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name == "p" or "drop" in name
    )
    if not used:
        return
    fields = {
        name: value
        for name, value in model.config.get_text_config().to_dict().items()
        if "drop" in name and _is_positive(value) and not name.startswith(("classifier", "summary"))
    }
    name = next(iter(fields), None)
    raise ConfigError(
        f"model.config.{name}" if name else "model",
        fields[name] if name else type(model).__name__,
        "with pp_size > 1 dropout would depend on how the batch is cut, so that layouts would differ",
        f"0{', and 0 for ' + ', '.join(list(fields)[1:]) if len(fields) > 1 else ''}; or distributed.pp_size=1"
        if name
        else "a model without dropout, or distributed.pp_size=1",
    )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
