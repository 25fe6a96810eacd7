"""Rules that need the model class: answered before any rank starts."""

from __future__ import annotations

from transformers import PreTrainedModel

from automodel.config.errors import ConfigError
from automodel.config.schema import TrainConfig
from automodel.config.validate_layout import EXPERT_COUNT_FIELDS, MODEL_SIZE_FIELDS, check_model_sizes
from automodel.model.build import build_config, build_model
from automodel.model.checkpoint_names import NeedsConversion, saved_tensors
from automodel.model.output_head import check_output_head
from automodel.model.pipeline_checks import check_pipeline_model
from automodel.model.tensor_parallel_checks import check_tensor_parallel
from automodel.model.weights import check_pretrained_weights


def check_model(config: TrainConfig, world_size: int) -> None:
    """Build the model on meta and hold its sizes against the layout.

    Raises:
        ConfigError: an unknown field, model or attention; sizes that the layout does not divide; a mixture of
            experts, whose balancing loss this version would leave out; an output head that the loss does not fit;
            a tensor-parallel or pipeline plan that does not fit the model; pretrained weights that are not those of
            the model; a model that cannot be written as its class reads it.
    """
    hf_config = build_config(config.model)
    text_config = hf_config.get_text_config()
    for name in EXPERT_COUNT_FIELDS:
        if (getattr(text_config, name, None) or 0) > 1:
            raise ConfigError(
                "model",
                hf_config.model_type,
                "mixtures of experts are not supported by this version",
                "a dense model",
            )
    check_model_sizes(config, {name: getattr(text_config, name, None) for name in MODEL_SIZE_FIELDS}, world_size)
    model = build_model(hf_config, config.model)
    check_tensor_parallel(model, config.distributed)
    if config.training.loss == "linear_cross_entropy":
        check_output_head(model)
    if config.distributed.pp_size > 1:
        check_pipeline_model(model, config.distributed.pipeline, config.distributed.pp_size)
    # A run that goes on has its weights from its checkpoint, even where the first ones are no longer there.
    if config.model.weights_source is not None and config.checkpoint.resume in (None, "auto"):
        check_pretrained_weights(model, config.model.weights_source)
    if config.checkpoint.save_consolidated != "never":
        _check_export(model, config.checkpoint.save_consolidated)


def _check_export(model: PreTrainedModel, when: str) -> None:
    try:
        saved_tensors(model)
    except NeedsConversion as error:
        raise ConfigError(
            "checkpoint.save_consolidated",
            when,
            f"the files of {type(model).__name__} hold its tensors put together or taken apart, which is not supported "
            f"by this version: {error}",
            "never",
        ) from error
