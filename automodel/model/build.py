"""A Hugging Face configuration and, on meta, its causal language model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from automodel.config.errors import ConfigError, nearest
from automodel.config.schema import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_config(config: ModelConfig) -> PretrainedConfig:
    """The model's own configuration with ``model.config`` laid over it.

    Raises:
        ConfigError: an unknown model type, a path without a configuration, or a field that the
            configuration class does not have (with the nearest name).
    """
    from transformers import CONFIG_MAPPING

    if config.pretrained_model_name_or_path is None:
        model_type = config.model_type or ""
        if model_type not in CONFIG_MAPPING:
            known = sorted(CONFIG_MAPPING.keys())
            raise ConfigError(
                "model.model_type",
                config.model_type,
                "transformers has no model of this type",
                "a model type of transformers, such as llama, qwen3, mistral",
                nearest(model_type, known),
            )
        config_class: Any = CONFIG_MAPPING[model_type]
        _check_fields(config_class, config.config)
        return _construct(config_class, {}, config.config)
    config_class, written = _load_config(config)
    _check_fields(config_class, config.config)
    return _construct(config_class, written, config.config)


def _load_config(config: ModelConfig) -> tuple[type[PretrainedConfig], dict[str, Any]]:
    from transformers import AutoConfig

    path = config.pretrained_model_name_or_path
    assert path is not None
    try:
        loaded: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        # As written, before the class derives fields from others: an override must reach those too.
        written, _ = type(loaded).get_config_dict(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            "model.pretrained_model_name_or_path",
            path,
            f"no usable model configuration there: {reason}",
            "a folder with a config.json, or the name of a model on the Hugging Face hub",
        ) from error
    return type(loaded), written


def _construct(config_class: Any, base: dict[str, Any], overrides: dict[str, Any]) -> PretrainedConfig:
    try:
        built: PretrainedConfig = config_class.from_dict({**base, **overrides})
    except Exception as error:  # the configuration classes validate with exceptions of many types
        raise ConfigError(
            "model.config",
            overrides,
            f"{config_class.__name__} refuses these fields: {error}",
            "see the class's documentation",
        ) from error
    return built


# Fields of every configuration class that this system sets itself.
RESERVED_FIELDS = {
    "dtype": "the dtypes of a run are set by the precision group",
    "use_cache": "training never uses a cache",
    "return_dict": "the trainer reads the model's named outputs",
}


def _check_fields(config_class: Any, overrides: dict[str, Any]) -> None:
    legal = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map or {})
    for name, value in overrides.items():
        if name in RESERVED_FIELDS:
            raise ConfigError(f"model.config.{name}", value, RESERVED_FIELDS[name], "leave it out")
        if name not in legal:
            raise ConfigError(
                f"model.config.{name}",
                value,
                f"{config_class.__name__} has no field of this name",
                sorted(legal),
                nearest(name, sorted(legal)),
            )


def build_model(hf_config: PretrainedConfig, config: ModelConfig) -> PreTrainedModel:
    """The causal language model on meta, in fp32, without weights.

    Raises:
        ConfigError: the configuration has no causal language model, or not this attention.
    """
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **options
            )
    except (ValueError, ImportError) as error:
        key = "model.attn_implementation" if "attention" in str(error).lower() else "model"
        value = config.attn_implementation if key.endswith("implementation") else hf_config.model_type
        raise ConfigError(
            key,
            value,
            str(error).strip().splitlines()[0],
            "a causal language model of transformers and an attention it has",
        ) from error
    # Training recomputes nothing from a cache, and transformers turns document boundaries off when it makes one.
    model.config.use_cache = False
    return model.train()


def count_parameters(model: Any) -> int:
    """Number of elements of all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
