"""Pipeline parallelism against the reference run: initial weights, losses, norms, every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import TINY_LLAMA, Case, Outcome
from tests.parity.compare import differences
from tests.parity.ranks import Ranks

LLAMA = {**TINY_LLAMA, "num_hidden_layers": 8}
TIED = {**LLAMA, "tie_word_embeddings": True}
_WITHOUT_HEAD_DIM = {name: value for name, value in LLAMA.items() if name != "head_dim"}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": LLAMA,
    "phi3": {**_WITHOUT_HEAD_DIM, "pad_token_id": 3},
    # Tied, with scaled embeddings and a sliding window on five of six layers.
    "gemma3_text": {**LLAMA, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gpt_neox": {name: value for name, value in _WITHOUT_HEAD_DIM.items() if name != "num_key_value_heads"},
}
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "v_schedule", "dualpipe_v", "zero_bubble")


def pipelined(
    pp_size: int,
    schedule: str,
    model: dict[str, Any] = LLAMA,
    model_type: str = "llama",
    local: int = 8,
    pipeline: dict[str, Any] | None = None,
    **distributed: Any,
) -> Case:
    """``local`` micro-batches of one sample; the global batch of 16 makes 16 / (local * dp) local batches."""
    return Case(
        model=model,
        model_type=model_type,
        distributed={"pp_size": pp_size, "pipeline": {"pp_schedule": schedule, **(pipeline or {})}, **distributed},
        settings={"training": {"local_batch_size": local}},
    )


def layers(count: int, **more: Any) -> dict[str, Any]:
    return {**LLAMA, "num_hidden_layers": count, **more}


# name -> (world size, case)
LAYOUTS: dict[str, tuple[int, Case]] = {
    **{f"pp4_{schedule}": (4, pipelined(4, schedule)) for schedule in SCHEDULES},
    **{f"pp2_dp2_{schedule}_tied": (4, pipelined(2, schedule, TIED, local=4)) for schedule in SCHEDULES},
    **{f"pp2_{model_type}": (2, pipelined(2, "1f1b", model, model_type)) for model_type, model in MODELS.items()},
    # Uneven layers, a stage with one layer, more than two stages a rank.
    "pp2_5_layers": (2, pipelined(2, "1f1b", layers(5))),
    "pp2_7_layers_on_4_stages": (2, pipelined(2, "interleaved_1f1b", layers(7))),
    "pp4_7_layers_tied": (4, pipelined(4, "gpipe", layers(7, tie_word_embeddings=True))),
    "pp2_8_stages": (2, pipelined(2, "looped_bfs", pipeline={"layers_per_stage": 1})),
    "pp2_explicit_parts": (
        2,
        pipelined(
            2,
            "1f1b",
            layers(3),
            pipeline={
                "module_fqns_per_model_part": [
                    ["model.embed_tokens", "model.layers.0", "model.rotary_emb"],
                    ["model.layers.1", "model.layers.2", "model.norm", "lm_head"],
                ]
            },
        ),
    ),
    # Micro-batches of two samples; odd numbers of micro-batches.
    "pp2_micro_batch_2": (2, pipelined(2, "1f1b", pipeline={"pp_microbatch_size": 2})),
    "pp2_accumulation_1": (2, pipelined(2, "1f1b", local=16)),
    "pp2_scaled_in_schedule": (2, pipelined(2, "1f1b", local=16, pipeline={"scale_grads_in_schedule": True})),
    # FSDP's own settings.
    "pp2_dp2_reduce_each_local_batch": (4, pipelined(2, "1f1b", local=4, defer_fsdp_grad_sync=False)),
    "pp2_dp2_zero3": (4, pipelined(2, "1f1b", local=4, reshard_after_forward=True)),
    "pp2_dp2_zero3_zero_bubble": (4, pipelined(2, "zero_bubble", local=4, reshard_after_forward=True)),
    "pp2_dp2_zero3_v_schedule": (4, pipelined(2, "v_schedule", TIED, local=4, reshard_after_forward=True)),
    "pp2_dp2_prefetch": (4, pipelined(2, "1f1b", local=4, forward_prefetch=1, backward_prefetch=1)),
    "pp2_dp2_cpu_offload": (4, pipelined(2, "1f1b", local=4, offload_policy="cpu")),
    "pp2_checkpointing": (2, pipelined(2, "1f1b", activation_checkpointing=True)),
    "pp2_checkpointing_v_schedule": (2, pipelined(2, "v_schedule", activation_checkpointing="full")),
    "pp2_hsdp_2x2": (8, pipelined(2, "1f1b", TIED, local=2, dp_replicate_size=2)),
    "pp2_tp2": (4, pipelined(2, "1f1b", tp_size=2)),
    "pp2_tp2_sequence_v_schedule_tied": (4, pipelined(2, "v_schedule", TIED, tp_size=2, sequence_parallel=True)),
    # 21 samples: the last step of an epoch has 5, padded to whole local batches.
    "pp2_short_window": (2, dataclasses.replace(pipelined(2, "1f1b"), num_samples=21, steps=4)),
    "pp2_dp2_short_window": (4, dataclasses.replace(pipelined(2, "1f1b", TIED, local=4), num_samples=21, steps=4)),
    "pp2_hardly_any_token": (
        2,
        dataclasses.replace(
            pipelined(2, "1f1b"), settings={"training": {"local_batch_size": 8}, "data": {"mask_labels": 0.99}}
        ),
    ),
}
FULL_LAYOUTS: dict[str, tuple[int, Case]] = {
    **{f"pp2_{schedule}": (2, pipelined(2, schedule)) for schedule in SCHEDULES},
    **{f"pp2_{schedule}_tied": (2, pipelined(2, schedule, TIED)) for schedule in SCHEDULES},
    **{f"pp4_{schedule}_tied": (4, pipelined(4, schedule, TIED)) for schedule in SCHEDULES},
    **{f"pp2_dp2_{schedule}": (4, pipelined(2, schedule, local=4)) for schedule in SCHEDULES},
    **{f"pp2_tp2_{schedule}_tied": (4, pipelined(2, schedule, TIED, tp_size=2)) for schedule in SCHEDULES},
    **{
        f"pp2_dp2_tp2_sequence_{schedule}_tied": (
            8,
            pipelined(2, schedule, TIED, local=4, tp_size=2, sequence_parallel=True),
        )
        for schedule in SCHEDULES
    },
    **{
        f"pp{size}_{schedule}_{model_type}": (size, pipelined(size, schedule, model, model_type))
        for size in (2, 4)
        for schedule in SCHEDULES
        for model_type, model in MODELS.items()
    },
}


def _check(world_size: int, case: Case, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]) -> None:
    outcome = ranks(world_size).run("tests.parity.cases:run_case", case, world_size)
    assert differences(outcome, reference(case)) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_matches_reference_run(name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]) -> None:
    _check(*LAYOUTS[name], ranks, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL_LAYOUTS)
def test_matches_reference_run_in_full(
    name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    _check(*FULL_LAYOUTS[name], ranks, reference)


def test_a_plan_of_the_users_own_matches_reference_run(
    ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    model = {
        "vocab_size": 67,
        "n_embd": 64,
        "n_layer": 5,
        "n_head": 4,
        "initializer_range": 0.1,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    plan = ["transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head"]
    _check(2, pipelined(2, "1f1b", model, "gpt2", pipeline={"pp_plan": plan}), ranks, reference)


def test_a_schedule_from_a_file_matches_reference_run(
    tmp_path: Path, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1I0,1F1,1I1,1W0,1W1\n")
    case = pipelined(2, "1f1b", TIED, local=2, pipeline={"pp_schedule_csv": str(path)})
    _check(2, case, ranks, reference)


def test_bf16_matches_within_its_rounding(ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]) -> None:
    case = pipelined(2, "zero_bubble", TIED)
    case = dataclasses.replace(case, settings={**case.settings, "precision": {"param_dtype": "bfloat16"}}, steps=2)
    outcome = ranks(2).run("tests.parity.cases:run_case", case, 2)
    assert differences(outcome, reference(case), scale=1000.0, gradients=False) == []


NEGATIVE_CONTROLS = {
    "schedule_scales_gradients": (2, pipelined(2, "1f1b")),
    "tied_copy_counts_in_norm": (2, pipelined(2, "1f1b", TIED)),
    "norm_of_one_stage": (2, pipelined(2, "1f1b")),
    "stock_backward_halves": (4, pipelined(2, "zero_bubble", local=4, reshard_after_forward=True)),
    "last_local_batch_is_not_reduced": (4, pipelined(2, "1f1b", local=4)),
}


@pytest.mark.parametrize("fault", NEGATIVE_CONTROLS)
def test_comparison_notices_fault(
    fault: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    world_size, case = NEGATIVE_CONTROLS[fault]
    outcome = ranks(world_size).run(
        "tests.parity.cases:run_case", case, world_size, fault=f"tests.parity.pipeline_faults:{fault}"
    )
    assert differences(outcome, reference(case)) != []


def test_comparison_notices_tied_copies_that_drift_apart(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(RuntimeError, match="drifted apart"):
        ranks(2).run(
            "tests.parity.cases:run_case",
            pipelined(2, "1f1b", TIED),
            2,
            fault="tests.parity.pipeline_faults:tied_gradients_stay_apart",
        )
