"""Configurations, models on meta, and their initial weights and buffers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from automodel.config.coerce import from_mapping
from automodel.config.errors import ConfigError
from automodel.config.schema import ModelConfig
from automodel.model.build import build_config, build_model, count_parameters
from automodel.model.init import initialize_weights, materialise

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
# Their buffers: rotary frequencies, ALiBi slopes, sinusoidal positions, causal masks, embedding scales.
FAMILIES = ["llama", "gemma3_text", "gpt_neox", "gpt2", "gptj", "bloom", "opt", "falcon", "phi"]


def initialized(config: ModelConfig, seed: int = 0) -> nn.Module:
    model = build_model(build_config(config), config)
    materialise(model, torch.device("cpu"))
    initialize_weights(model, seed, torch.device("cpu"))
    return model


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_named_model_has_a_configuration_that_transformers_takes(file: Path) -> None:
    settings = yaml.safe_load(file.read_text())
    settings.pop("defaults", None)
    config = from_mapping(ModelConfig, settings, "model")
    if config.model_type is None:
        assert file.stem == "hf"
        return
    model = build_model(build_config(config), config)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_named_sizes_are_the_models() -> None:
    def parameters(name: str) -> int:
        config = from_mapping(ModelConfig, yaml.safe_load((CONF / f"{name}.yaml").read_text()), "model")
        return count_parameters(build_model(build_config(config), config))

    assert parameters("llama3_8b") == 8_030_261_248
    assert parameters("llama3_70b") == 70_553_706_496
    assert 1_000_000 < parameters("tiny_llama") < 3_000_000


@pytest.mark.parametrize("model_type", FAMILIES)
def test_buffers_are_those_of_a_model_built_in_memory(model_type: str) -> None:
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4}
    sizes["intermediate_size"] = 64
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    known |= set(CONFIG_MAPPING[model_type].attribute_map)
    config = ModelConfig(model_type=model_type, config={k: v for k, v in sizes.items() if k in known})
    hf_config = build_config(config)
    stock = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    ours = initialized(config)
    expected = dict(stock.named_buffers())
    found = dict(ours.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        torch.testing.assert_close(found[name], buffer, rtol=0, atol=0, msg=name)


def test_weights_are_a_function_of_the_seed() -> None:
    config = ModelConfig(model_type="llama", config=SMALL)
    first, again, other = (initialized(config, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_weights_have_the_spread_that_the_model_asks_for() -> None:
    config = ModelConfig(model_type="llama", config={**SMALL, "hidden_size": 128, "initializer_range": 0.05})
    model = initialized(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert 0.045 < parameter.std().item() < 0.055, name


def test_a_block_that_scales_its_projections_has_its_way() -> None:
    # GPT-2 divides the spread of each block's output projections by the root of twice the depth.
    small = {"vocab_size": 64, "n_embd": 128, "n_layer": 8, "n_head": 4}
    model = initialized(ModelConfig(model_type="gpt2", config=small))
    spread = model.get_parameter("transformer.h.0.attn.c_proj.weight").std().item()
    assert spread == pytest.approx(0.02 / 4, rel=0.05)
    assert model.get_parameter("transformer.h.0.attn.c_attn.weight").std().item() == pytest.approx(0.02, rel=0.05)


def test_tied_weights_stay_one_parameter() -> None:
    model = initialized(ModelConfig(model_type="llama", config={**SMALL, "tie_word_embeddings": True}))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_what_a_model_leaves_unset_is_named() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.model.layers[0].extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM leaves these .*model\.layers\.0\.extra"):
        initialize_weights(model, 0)


@pytest.mark.parametrize("field", ["dtype", "use_cache"])
def test_fields_that_the_run_itself_decides_are_refused(field: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(ModelConfig(model_type="llama", config={field: "bfloat16"}))
    assert error.value.key == f"model.config.{field}"
    assert error.value.legal == "leave it out"
