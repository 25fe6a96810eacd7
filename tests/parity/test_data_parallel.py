"""FSDP2, HSDP and DDP against the reference run: initial weights, losses, norms, every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tests.parity.cases import TINY_LLAMA, Case, Outcome
from tests.parity.compare import differences
from tests.parity.ranks import Ranks

TIED = {**TINY_LLAMA, "tie_word_embeddings": True}
DROPOUT = {**TINY_LLAMA, "attention_dropout": 0.2}
BF16 = {"precision": {"param_dtype": "bfloat16"}}
DDP = {"strategy": "ddp"}


def accumulate(local_batch_size: int) -> dict[str, dict[str, int]]:
    return {"training": {"local_batch_size": local_batch_size}}


# name -> (world size, case). A global batch is 16 samples, so local 2 accumulates 4 micro-batches on 2 ranks.
LAYOUTS: dict[str, tuple[int, Case]] = {
    "dp2": (2, Case()),
    "dp4": (4, Case()),
    "hsdp_2x2": (4, Case(distributed={"dp_replicate_size": 2})),
    "ddp2": (2, Case(distributed=DDP)),
    "ddp4": (4, Case(distributed=DDP)),
    "dp2_accumulation_1": (2, Case(settings=accumulate(8))),
    "dp2_accumulation_2": (2, Case(settings=accumulate(4))),
    "ddp2_accumulation_1": (2, Case(distributed=DDP, settings=accumulate(8))),
    "ddp2_accumulation_2": (2, Case(distributed=DDP, settings=accumulate(4))),
    "dp2_tied": (2, Case(model=TIED)),
    "hsdp_2x2_tied": (4, Case(model=TIED, distributed={"dp_replicate_size": 2})),
    "ddp2_tied": (2, Case(model=TIED, distributed=DDP)),
    "dp2_sync_each_micro_batch": (2, Case(distributed={"defer_fsdp_grad_sync": False})),
    "hsdp_2x2_sync_each_micro_batch": (4, Case(distributed={"dp_replicate_size": 2, "defer_fsdp_grad_sync": False})),
    "dp2_zero2": (2, Case(distributed={"reshard_after_forward": False})),
    "dp2_gathered_once": (2, Case(distributed={"gather_once_per_step": True})),
    "dp2_prefetch": (2, Case(distributed={"forward_prefetch": 2, "backward_prefetch": 1})),
    "dp2_cpu_offload": (2, Case(distributed={"offload_policy": "cpu"})),
    "dp2_checkpointing": (2, Case(distributed={"activation_checkpointing": "full"}, model=DROPOUT)),
    "ddp2_checkpointing": (2, Case(distributed={**DDP, "activation_checkpointing": True}, model=DROPOUT)),
    "dp2_dropout": (2, Case(model=DROPOUT)),
    "dp4_dropout": (4, Case(model=DROPOUT)),
    "ddp2_bucket_view": (2, Case(distributed={**DDP, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.01})),
    "ddp2_unused": (2, Case(distributed={**DDP, "find_unused_parameters": True})),
    "ddp2_static_graph": (2, Case(distributed={**DDP, "static_graph": True}, settings=accumulate(8))),
    # 21 samples: the second step of each epoch has 5 samples, padded to whole micro-batches, ranks without any.
    "dp4_short_window": (4, Case(num_samples=21, steps=4)),
    "ddp2_short_window": (2, Case(distributed=DDP, num_samples=21, steps=4)),
    "dp4_more_ranks_than_samples": (4, Case(num_samples=3, steps=3)),
    "dp2_no_clipping": (2, Case(settings={"training": {"max_grad_norm": None}})),
    # Nearly everything masked: micro-batches, and ranks, without a trained token.
    "dp4_hardly_any_token": (4, Case(settings={"data": {"mask_labels": 0.99}})),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_matches_reference_run(name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]) -> None:
    world_size, case = LAYOUTS[name]
    outcome = ranks(world_size).run("tests.parity.cases:run_case", case, world_size)
    assert differences(outcome, reference(case)) == []


BF16_LAYOUTS = {
    "dp2": (2, Case(settings=BF16)),
    "hsdp_2x2": (4, Case(settings=BF16, distributed={"dp_replicate_size": 2})),
    "ddp2": (2, Case(settings=BF16, distributed=DDP)),
    "dp2_tied": (2, Case(settings=BF16, model=TIED)),
}


@pytest.mark.parametrize("name", BF16_LAYOUTS)
def test_bf16_matches_within_its_rounding(
    name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    world_size, case = BF16_LAYOUTS[name]
    outcome = ranks(world_size).run("tests.parity.cases:run_case", case, world_size)
    # bf16 keeps 8 bits: losses near 4 within 0.01, norms and gradients within some per cent.
    assert differences(outcome, reference(case), scale=1000.0, gradients=False) == []
    fp32 = reference(dataclasses.replace(case, settings={}))
    assert outcome.weights == fp32.weights, "master weights stay fp32"
    assert outcome.losses != fp32.losses, "the computation is not in bf16"
    assert differences(outcome, fp32, scale=2000.0, gradients=False) == []


NEGATIVE_CONTROLS = {
    "ddp_averages": (2, Case(distributed=DDP)),
    "fsdp_averages": (2, Case()),
    "local_token_count": (2, Case()),
    "unseeded_dropout": (2, Case(model=DROPOUT)),
    "no_gradient_accumulation": (2, Case()),
    "norm_counts_every_replica": (4, Case(distributed={"dp_replicate_size": 2})),
    "replicas_do_not_meet": (4, Case(distributed={"dp_replicate_size": 2})),
}


@pytest.mark.parametrize("fault", NEGATIVE_CONTROLS)
def test_comparison_notices_fault(
    fault: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    world_size, case = NEGATIVE_CONTROLS[fault]
    group = ranks(world_size)
    outcome = group.run("tests.parity.cases:run_case", case, world_size, fault=f"tests.parity.faults:{fault}")
    assert differences(outcome, reference(case)) != []


def test_each_rank_holds_its_share_of_every_weight(
    ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = Case(model={**TINY_LLAMA, "vocab_size": 64})
    whole = reference(case).local_numels
    sharded = ranks(4).run("tests.parity.cases:run_case", case, 4).local_numels
    hybrid = dataclasses.replace(case, distributed={"dp_replicate_size": 2})
    replicated = ranks(4).run("tests.parity.cases:run_case", hybrid, 4).local_numels
    assert sharded == {name: numel // 4 for name, numel in whole.items()}
    assert replicated == {name: numel // 2 for name, numel in whole.items()}


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_step_without_a_trained_token_changes_no_parameter(strategy: str, ranks: Callable[[int], Ranks]) -> None:
    # Decay and momentum would change parameters even at a gradient of zero.
    case = Case(
        distributed={"strategy": strategy},
        settings={"data": {"mask_labels": 1.0}, "optimizer": {"name": "adamw", "lr": 0.1, "weight_decay": 0.5}},
        steps=2,
    )
    outcome = ranks(2).run("tests.parity.cases:run_case", case, 2)
    assert outcome.final_weights == outcome.weights
    assert outcome.losses == outcome.norms == [0.0, 0.0]
    assert outcome.val_loss is None


def test_every_group_of_the_meshes_has_the_runs_time_out(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).run("tests.parity.cases:mesh_time_outs", 4, 77.0) == {77.0}
