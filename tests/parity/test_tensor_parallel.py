"""Tensor and sequence parallelism against the reference run: weights, losses, norms, every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor

from tests.parity.cases import TINY_LLAMA, Case, Outcome, named_parameters, run_case
from tests.parity.compare import differences
from tests.parity.ranks import Ranks

CONF = Path(__file__).parents[2] / "conf"
TP2 = {"tp_size": 2}
SEQUENCE = {"tp_size": 2, "sequence_parallel": True}
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attention_dropout": 0.2}
HSDP = {"dp_replicate_size": 2}

_WITHOUT_HEAD_DIM = {key: value for key, value in TINY_LLAMA.items() if key != "head_dim"}
_WITHOUT_KEY_VALUE_HEADS = {key: value for key, value in _WITHOUT_HEAD_DIM.items() if key != "num_key_value_heads"}
_GEMMA = {**TINY_LLAMA, "query_pre_attn_scalar": 16, "sliding_window": 8}
# model type -> fields: a vocabulary of 67 and, with biases, heads of the two kinds in every size.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**TINY_LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**_WITHOUT_HEAD_DIM, "tie_word_embeddings": True},
    "qwen3": TINY_LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": {**_WITHOUT_HEAD_DIM, "pad_token_id": 3},
    "olmo2": {**_WITHOUT_HEAD_DIM, "pad_token_id": 3},
    "granite": {**_WITHOUT_HEAD_DIM, "attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "gpt_neox": _WITHOUT_KEY_VALUE_HEADS,
    "gpt2": {"vocab_size": 67, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.1},
}
HAVE_A_PLAN = [name for name in MODELS if name != "gpt2"]
GPT2_PLAN: dict[str, str] = yaml.safe_load((CONF / "distributed" / "gpt2_tp2.yaml").read_text())["distributed"][
    "tp_plan"
]


def case(model_type: str, distributed: dict[str, Any], **fields: Any) -> Case:
    settings = fields.pop("settings", {})
    return Case(model_type, {**MODELS[model_type], **fields}, distributed, settings)


# name -> (world size, case). A global batch is 16 samples in local batches of 2, so every case accumulates.
LAYOUTS: dict[str, tuple[int, Case]] = {
    **{f"tp2_{name}": (2, case(name, TP2)) for name in HAVE_A_PLAN},
    **{f"tp2_sequence_{name}": (2, case(name, SEQUENCE)) for name in HAVE_A_PLAN},
    **{f"dp2_tp2_{name}": (4, case(name, TP2)) for name in ("llama", "qwen3", "phi3")},
    **{f"dp2_tp2_sequence_{name}": (4, case(name, SEQUENCE)) for name in ("llama", "qwen3", "phi3")},
    **{f"hsdp_2x2_tp2_{name}": (8, case(name, {**TP2, **HSDP})) for name in ("llama", "phi3")},
    **{f"hsdp_2x2_tp2_sequence_{name}": (8, case(name, {**SEQUENCE, **HSDP})) for name in ("llama", "qwen3")},
    "tp4_llama": (4, case("llama", {"tp_size": 4})),
    "tp2_accumulation_2": (2, case("qwen3", SEQUENCE, settings={"training": {"local_batch_size": 8}})),
    "dp2_tp2_sync_each_micro_batch": (4, case("qwen3", {**SEQUENCE, "defer_fsdp_grad_sync": False})),
    "dp2_tp2_gathered_once": (4, case("llama", {**TP2, "gather_once_per_step": True})),
    "dp2_tp2_tied": (4, case("qwen2", SEQUENCE)),
    "tp2_one_key_value_head": (2, case("llama", TP2, num_key_value_heads=1)),
    "tp2_sequence_one_key_value_head": (2, case("qwen3", SEQUENCE, num_key_value_heads=1)),
    "dp2_tp2_one_key_value_head": (4, case("qwen3", TP2, num_key_value_heads=1)),
    "tp4_two_key_value_heads": (4, case("qwen2", {"tp_size": 4}, num_key_value_heads=2)),
    "tp2_three_key_value_heads": (
        2,
        case("llama", TP2, hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8),
    ),
    "tp2_uneven_intermediate": (2, case("llama", TP2, intermediate_size=97)),
    "tp2_sequence_checkpointing": (2, case("qwen3", {**SEQUENCE, "activation_checkpointing": "full"})),
    "tp2_gpt2": (2, case("gpt2", {**TP2, "tp_plan": GPT2_PLAN})),
    "tp2_sequence_gpt2": (2, case("gpt2", {**SEQUENCE, "tp_plan": GPT2_PLAN})),
    # Masks are drawn for whole sequences and, in phi3, whole heads: those of one process.
    "tp2_dropout": (2, case("phi3", TP2, **DROPOUT)),
    "tp2_sequence_dropout": (2, case("phi3", SEQUENCE, **DROPOUT)),
    "tp2_sequence_padding_token": (2, case("llama", SEQUENCE, pad_token_id=50)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_matches_reference_run(name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]) -> None:
    world_size, case = LAYOUTS[name]
    outcome = ranks(world_size).run("tests.parity.cases:run_case", case, world_size)
    assert differences(outcome, reference(case)) == []


def test_bf16_matches_within_its_rounding(ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]) -> None:
    bf16 = case("qwen3", SEQUENCE, settings={"precision": {"param_dtype": "bfloat16"}})
    outcome = ranks(2).run("tests.parity.cases:run_case", bf16, 2)
    assert differences(outcome, reference(bf16), scale=1000.0, gradients=False) == []
    fp32 = reference(dataclasses.replace(bf16, settings={}))
    assert outcome.weights == fp32.weights, "master weights stay fp32"
    assert differences(outcome, fp32, scale=2000.0, gradients=False) == []


NEGATIVE_CONTROLS: dict[str, tuple[str, Case]] = {
    "norms_on_heads": ("gradients_of_replicated_weights_not_summed", case("qwen3", TP2)),
    "norms_on_slices_of_the_sequence": ("gradients_of_replicated_weights_not_summed", case("llama", SEQUENCE)),
    "one_key_value_head": ("gradients_of_replicated_weights_not_summed", case("llama", TP2, num_key_value_heads=1)),
    "activations": ("gradients_of_activations_not_summed", case("llama", TP2)),
}


@pytest.mark.parametrize("name", NEGATIVE_CONTROLS)
def test_comparison_notices_gradients_that_are_not_summed(
    name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    fault, broken = NEGATIVE_CONTROLS[name]
    dotted = f"tests.parity.tensor_parallel_faults:{fault}"
    outcome = ranks(2).run("tests.parity.cases:run_case", broken, 2, fault=dotted)
    assert differences(outcome, reference(broken)) != []


def replicated_gradients_differ(case: Case, world_size: int) -> list[str]:
    """Names of parameters, whole on both tp ranks, whose gradients are not the same bits there; collective."""
    gradients: dict[str, torch.Tensor] = {}

    def record(model: torch.nn.Module) -> None:
        for name, parameter in named_parameters(model).items():
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            # The last axis is tp where there are two; a parameter on one axis is whole over tp.
            if len(placements) < 2 or placements[-1].is_replicate():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: gradients.update({name: p.grad.to_local().clone()})
                )

    run_case(case, world_size, record)
    differing = []
    for name, gradient in sorted(gradients.items()):
        both = [torch.empty_like(gradient) for _ in range(world_size)]
        torch.distributed.all_gather(both, gradient)
        if not torch.equal(both[0], both[1]):
            differing.append(name)
    assert gradients
    return differing


@pytest.mark.parametrize("distributed", [TP2, SEQUENCE], ids=["tp2", "tp2_sequence"])
def test_replicated_parameters_have_the_same_gradient_on_all_tp_ranks(
    distributed: dict[str, Any], ranks: Callable[[int], Ranks]
) -> None:
    differing = ranks(2).run(f"{__name__}:replicated_gradients_differ", case("qwen3", distributed), 2)
    assert differing == []
