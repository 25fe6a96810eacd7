"""Which layers, modules and parameters each stage gets; models are on meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from automodel.config import ConfigError
from automodel.config.distributed import PipelineConfig
from automodel.config.schema import ModelConfig
from automodel.distributed.blocks import NotOwned, transformer_blocks
from automodel.distributed.pipeline_parallel import plan_pipeline
from automodel.distributed.pipeline_split import SplitPlan, balanced_counts, take_stage
from automodel.model.build import build_config, build_model, count_parameters
from automodel.model.pipeline_checks import check_pipeline_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2_PLAN = ["transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head"]


def build(model_type: str = "llama", **fields: Any) -> Any:
    sizes = GPT2 if model_type == "gpt2" else SIZES
    if model_type == "gpt_neox":
        sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    config = ModelConfig(model_type=model_type, config={**sizes, **fields})
    return build_model(build_config(config), config)


def split(model: Any, pp_size: int, **settings: Any) -> tuple[list[int], SplitPlan]:
    return plan_pipeline(model, PipelineConfig(**settings), pp_size)


@pytest.mark.parametrize("layers", range(1, 13))
def test_no_layer_is_lost_and_no_stage_is_empty(layers: int) -> None:
    for stages in range(1, layers + 1):
        counts = balanced_counts([1] * layers, 1, 1, stages)
        assert sum(counts) == layers
        assert len(counts) == stages
        assert min(counts) >= 1


@pytest.mark.parametrize(
    ("layers", "before", "after", "stages", "expected"),
    [
        (8, 1, 1, 2, [4, 4]),
        (8, 0, 0, 4, [2, 2, 2, 2]),
        (8, 1, 1, 4, [2, 2, 2, 2]),
        (14, 1, 1, 4, [3, 4, 4, 3]),
        (7, 1, 1, 4, [1, 2, 2, 2]),
        (32, 2.4, 2.4, 4, [7, 9, 9, 7]),
        (8, 0, 4, 2, [6, 2]),
        (4, 100, 100, 2, [2, 2]),
    ],
)
def test_embedding_and_head_count_as_work(
    layers: int, before: float, after: float, stages: int, expected: list[int]
) -> None:
    ten = [10] * layers
    counts = balanced_counts(ten, int(before * 10), int(after * 10), stages)
    assert counts == expected


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("1f1b", [0, 1, 2, 3]),
        ("interleaved_1f1b", [0, 1, 2, 3, 0, 1, 2, 3]),
        ("v_schedule", [0, 1, 2, 3, 3, 2, 1, 0]),
        ("dualpipe_v", [0, 1, 2, 3, 3, 2, 1, 0]),
    ],
)
def test_placement(schedule: str, ranks: list[int]) -> None:
    assert split(build(), 4, pp_schedule=schedule)[0] == ranks


def test_layers_per_stage_is_taken_at_its_word() -> None:
    stage_ranks, plan = split(build(num_hidden_layers=7), 2, pp_schedule="looped_bfs", layers_per_stage=2)
    assert stage_ranks == [0, 1, 0, 1]
    assert plan.num_layers == (2, 2, 2, 1)


def test_rounding_changes_the_number_of_stages() -> None:
    settings = {"pp_schedule": "looped_bfs", "layers_per_stage": 3}
    up = split(build(), 2, **settings, round_virtual_stages_to_pp_multiple="up")[1]
    down = split(build(), 2, **settings, round_virtual_stages_to_pp_multiple="down")[1]
    assert (len(up.stages), sum(up.num_layers)) == (4, 8)
    assert (len(down.stages), sum(down.num_layers)) == (2, 8)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_keep_names_and_add_up_to_the_model(tied: bool) -> None:
    model = build(tie_word_embeddings=tied)
    _, plan = split(model, 4)
    assert sum(plan.num_parameters) == count_parameters(model)
    parts = [take_stage(model, plan, index) for index in range(4)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert len(names) == len(set(names))
    copies = {tie.copy_name for tie in plan.ties}
    assert copies == ({"lm_head.weight"} if tied else set())
    assert set(names) - copies == {name for name, _ in model.named_parameters()}
    assert list(transformer_blocks(parts[1])) == ["model.layers.2", "model.layers.3"]


def test_what_a_stage_does_not_own_hands_its_input_on() -> None:
    layer = build().model.layers[0]
    layer.attention_type = "sliding_attention"
    stand_in = NotOwned(layer)
    hidden = torch.ones(1, 2, 3)
    assert stand_in(hidden, attention_mask=None) is hidden
    assert stand_in.attention_type == "sliding_attention"
    assert not list(stand_in.parameters())
    assert torch.equal(hidden + NotOwned(torch.nn.Embedding(4, 3))(torch.zeros(1, 2, dtype=torch.long)), hidden)


def test_explicit_parts_may_name_modules_without_parameters() -> None:
    parts = [["model.embed_tokens", "model.layers.0", "model.rotary_emb"], ["model.layers.1", "model.norm", "lm_head"]]
    _, plan = split(build(num_hidden_layers=2), 2, module_fqns_per_model_part=parts)
    assert plan.stages[0] == ("model.embed_tokens", "model.layers.0")


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ([["model.embed_tokens", "model.layers.1"], ["model.layers.0", "model.norm", "lm_head"]], "model.layers.1"),
        ([["model.embed_tokens", "model.layers.0"], ["model.layers.1", "lm_head"]], "lm_head"),
        ([["model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]], "model.layers.0"),
        ([["model.embed_tokens", "model.layer.0"], ["model.layers.1", "model.norm", "lm_head"]], "model.layer.0"),
    ],
    ids=["order", "norm missing", "embedding missing", "misspelled"],
)
def test_parts_that_are_not_the_model_are_refused(parts: list[list[str]], value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        split(build(num_hidden_layers=2), 2, module_fqns_per_model_part=parts)
    assert (refused.value.key, refused.value.value) == ("distributed.pipeline.module_fqns_per_model_part", value)


def test_a_model_without_a_plan_is_refused_by_class_name_and_shown_one() -> None:
    with pytest.raises(ConfigError) as refused:
        split(build("gpt2", attn_pdrop=0.0), 2)
    assert "GPT2LMHeadModel has no pipeline plan" in refused.value.rule
    assert f"distributed.pipeline.pp_plan=[{','.join(GPT2_PLAN)}]" in refused.value.legal
    check_pipeline_model(build("gpt2", attn_pdrop=0.0), PipelineConfig(pp_plan=GPT2_PLAN), 2)


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (["transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"], "transformer.wpe.weight"),
        (["transformer.wte", "transformer.wpe", "lm_head"], "list of layers"),
        (["transformer.embed", "transformer.h"], "no module of this name"),
    ],
)
def test_plans_that_leave_something_out_are_refused(plan: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as refused:
        split(build("gpt2"), 2, pp_plan=plan)
    assert refused.value.key == "distributed.pipeline.pp_plan"


@pytest.mark.parametrize(
    ("model_type", "fields", "key"),
    [
        ("llama", {"attention_dropout": 0.1}, "model.config.attention_dropout"),
        ("gpt_neox", {"hidden_dropout": 0.1}, "model.config.hidden_dropout"),
        ("phi3", {"resid_pdrop": 0.1, "pad_token_id": 0}, "model.config.resid_pdrop"),
    ],
)
def test_dropout_is_refused_in_a_pipeline(model_type: str, fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_pipeline_model(build(model_type, **fields), PipelineConfig(), 2)
    assert refused.value.key == key
