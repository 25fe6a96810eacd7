"""Tensor-parallel plans against models on meta: what they become, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from automodel.config.distributed import parse_distributed_section
from automodel.config.errors import ConfigError
from automodel.distributed.tensor_parallel import _replicated_key_value, resolve_plan
from automodel.model.tensor_parallel_checks import check_tensor_parallel

CONF = Path(__file__).parents[2] / "conf"
SIZES = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def model_on_meta(model_type: str = "llama", **fields: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SIZES, **fields}))


def gpt2() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](vocab_size=67, n_embd=64, n_layer=2, n_head=4))


def test_the_models_own_plan_names_every_projection_of_every_layer() -> None:
    plan = resolve_plan(model_on_meta(), None, 2)
    assert plan.modules["model.layers.1.self_attn.q_proj"] == "colwise"
    assert plan.modules["model.layers.1.mlp.down_proj"] == "rowwise"
    assert plan.modules["model.embed_tokens"] == "embedding_rowwise"
    assert plan.modules["lm_head"] == "colwise_gather_output"
    assert len(plan.modules) == 2 * 7 + 2
    assert plan.unmatched == ()


def test_a_plan_of_the_users_replaces_the_models_own() -> None:
    plan = resolve_plan(model_on_meta(), {"model.layers.*.mlp.up_proj": "colwise_gather_output"}, 2)
    assert plan.modules == {f"model.layers.{layer}.mlp.up_proj": "colwise_gather_output" for layer in (0, 1)}


def test_the_plan_for_gpt2_in_conf_fits_gpt2() -> None:
    preset = yaml.safe_load((CONF / "distributed" / "gpt2_tp2.yaml").read_text())
    plan = resolve_plan(gpt2(), preset["distributed"]["tp_plan"], 2)
    assert plan.modules["transformer.h.1.mlp.c_fc"] == "colwise"


REFUSALS: dict[str, tuple[dict[str, str], str, str]] = {
    "matches_nothing": (
        {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.upproj": "colwise"},
        "distributed.tp_plan.model.layers.*.mlp.upproj",
        "model.layers.*.mlp.up_proj",
    ),
    "unknown_style": (
        {"model.layers.*.mlp.up_proj": "colwize"},
        "distributed.tp_plan.model.layers.*.mlp.up_proj",
        "colwise",
    ),
    "linear_style_on_an_embedding": ({"model.embed_tokens": "colwise"}, "distributed.tp_plan.model.embed_tokens", ""),
    "embedding_style_on_a_projection": (
        {"model.layers.*.mlp.up_proj": "embedding_rowwise"},
        "distributed.tp_plan.model.layers.*.mlp.up_proj",
        "",
    ),
    "linear_style_on_a_norm": ({"model.norm": "rowwise"}, "distributed.tp_plan.model.norm", ""),
    "parameter_style_on_a_module": (
        {"model.layers.*.mlp.up_proj": "packed_colwise"},
        "distributed.tp_plan.model.layers.*.mlp.up_proj",
        "",
    ),
    "parameter_that_has_a_module": (
        {"model.layers.*.mlp.up_proj.weight": "colwise"},
        "distributed.tp_plan.model.layers.*.mlp.up_proj.weight",
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_plan_that_does_not_fit_is_refused_by_its_entry(name: str) -> None:
    plan, key, hint = REFUSALS[name]
    with pytest.raises(ConfigError) as refused:
        resolve_plan(model_on_meta(), plan, 2)
    assert refused.value.key == key
    assert hint in str(refused.value)


def test_a_models_own_plan_that_names_no_part_of_its_blocks_is_refused() -> None:
    model = model_on_meta()
    model.tp_plan = {"lm_head": "colwise_gather_output"}
    assert resolve_plan(model, None, 2).modules == {"lm_head": "colwise_gather_output"}
    model.tp_plan = {"lm_head": "colwise_gather_output", "model.layer.*.mlp.up_proj": "colwise"}
    with pytest.raises(ConfigError, match="LlamaForCausalLM names no part of its blocks"):
        resolve_plan(model, None, 2)


def test_a_model_without_a_plan_is_refused_with_its_class_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel") as refused:
        resolve_plan(gpt2(), None, 2)
    assert "distributed.tp_plan" in refused.value.legal


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "tp_size", "expected"),
    [
        # Per rank: the key-value heads it computes, and how many of its query heads share each.
        (8, 1, 2, [([0], 4), ([0], 4)]),
        (8, 2, 4, [([0], 2), ([0], 2), ([1], 2), ([1], 2)]),
        (8, 4, 8, [([rank // 2], 1) for rank in range(8)]),
        (6, 3, 2, [([0, 0, 1], 1), ([1, 2, 2], 1)]),
        (12, 6, 4, [([0, 0, 1], 1), ([1, 2, 2], 1), ([3, 3, 4], 1), ([4, 5, 5], 1)]),
    ],
)
def test_each_rank_computes_the_key_value_heads_that_its_query_heads_need(
    heads: int, key_value_heads: int, tp_size: int, expected: list[tuple[list[int], int]]
) -> None:
    model = model_on_meta(
        hidden_size=16 * heads, head_dim=16, num_attention_heads=heads, num_key_value_heads=key_value_heads
    )
    plan = resolve_plan(model, None, tp_size)
    attention = model.model.layers[0].self_attn
    for rank, (of_rank, groups) in enumerate(expected):
        found = _replicated_key_value(model, "model.layers.0.self_attn", attention, plan, tp_size, rank)
        assert found is not None
        assert (found[0].heads, found[0].num_heads, found[1]) == (of_rank, key_value_heads, groups)


def test_key_value_heads_that_divide_are_cut_like_all_projections() -> None:
    model = model_on_meta()
    plan = resolve_plan(model, None, 2)
    attention = model.model.layers[0].self_attn
    assert _replicated_key_value(model, "model.layers.0.self_attn", attention, plan, 2, 0) is None


def test_sequence_parallelism_refuses_projections_that_stand_alone_in_a_block() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Block()])

    section = parse_distributed_section(
        {
            "tp_size": 2,
            "sequence_parallel": True,
            "tp_plan": {"layers.*.first": "colwise", "layers.*.second": "rowwise"},
        }
    )
    with pytest.raises(ConfigError, match=r"layers\.0\.first") as refused:
        check_tensor_parallel(Model(), section)
    assert refused.value.key == "distributed.sequence_parallel"


def test_a_plan_is_checked_even_where_it_is_unused() -> None:
    section = parse_distributed_section({"tp_plan": {"model.layrs.*.mlp.up_proj": "colwise"}})
    with pytest.raises(ConfigError, match="layrs"):
        check_tensor_parallel(model_on_meta(), section)
    check_tensor_parallel(gpt2(), parse_distributed_section({}))


@pytest.mark.parametrize(("model_type", "refused"), [("llama", True), ("phi3", False)])
def test_attention_dropout_is_refused_where_heads_are_sharded(model_type: str, refused: bool) -> None:
    # phi3's own plan leaves attention whole on every rank, and its masks are those of one device.
    model = model_on_meta(model_type, attention_dropout=0.1, pad_token_id=None)
    section = parse_distributed_section({"tp_size": 2})
    if not refused:
        check_tensor_parallel(model, section)
        return
    with pytest.raises(ConfigError) as error:
        check_tensor_parallel(model, section)
    assert error.value.key == "model.config.attention_dropout"


def test_a_model_type_whose_numbers_differ_is_refused_by_its_class() -> None:
    model = model_on_meta()
    model.config.model_type = "inkling2_text"
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not give the numbers of one device"):
        check_tensor_parallel(model, parse_distributed_section({"tp_size": 2}))
