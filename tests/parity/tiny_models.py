"""A tiny configuration for any causal language model of transformers, for walks over all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Every field that some family gives a size by; a configuration takes those that it has.
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 67,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embedding_dropout": 0.0,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# What a family asks for beyond sizes.
OWN: dict[str, dict[str, Any]] = {}


def has_pipeline_plan(model_type: str) -> bool:
    return bool(getattr(CONFIG_MAPPING[model_type], "base_model_pp_plan", None))


def causal_model_types() -> list[str]:
    """Every model type with a causal language model, by name."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def tiny_config(model_type: str) -> dict[str, Any]:
    """Fields for ``model.config``."""
    config_class: Any = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map or {})
    own = dict(OWN.get(model_type, {}))
    if "kv_lora_rank" in names:
        # Latent attention has a key and a value for every head.
        own.setdefault("num_key_value_heads", SIZES["num_attention_heads"])
    return {name: value for name, value in {**SIZES, **own}.items() if name in names}
