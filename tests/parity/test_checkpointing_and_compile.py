"""Selective checkpointing and torch.compile against the reference run, which has neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from automodel.distributed import activation_checkpointing, compilation
from tests.parity.cases import TINY_LLAMA, Case, Outcome
from tests.parity.compare import differences
from tests.parity.ranks import Ranks

DROPOUT = {**TINY_LLAMA, "attention_dropout": 0.2}
BF16 = {"precision": {"param_dtype": "bfloat16"}}
LINEAR = {"training": {"loss": "linear_cross_entropy"}}
SELECTIVE = {"activation_checkpointing": "selective"}
FULL = {"activation_checkpointing": "full"}
COMPILE = {"enable_compile": True}
DDP = {"strategy": "ddp"}
TP = {"tp_size": 2}
SEQUENCE_PARALLEL = {"tp_size": 2, "sequence_parallel": True}

CHECKPOINTED: dict[str, Case] = {
    "dp2": Case(distributed=SELECTIVE),
    "dp2_dropout": Case(model=DROPOUT, distributed=SELECTIVE),
    "ddp2": Case(distributed={**DDP, **SELECTIVE}),
    "ddp2_dropout": Case(model=DROPOUT, distributed={**DDP, **SELECTIVE}),
    "dp2_gathered_once": Case(distributed={**SELECTIVE, "gather_once_per_step": True}),
    "dp2_gemma2": Case("gemma2", distributed=SELECTIVE),
    "dp2_gpt2_dropout": Case("gpt2", {"vocab_size": 67, "n_embd": 64, "n_layer": 2, "n_head": 4}, SELECTIVE),
    "tp2": Case(distributed={**TP, **SELECTIVE}),
    "tp2_sequence_parallel": Case(distributed={**SEQUENCE_PARALLEL, **SELECTIVE}),
}

COMPILED: dict[str, Case] = {
    "dp2": Case(distributed=COMPILE),
    "dp2_full_checkpointing": Case(distributed={**COMPILE, **FULL}),
    "dp2_selective_checkpointing": Case(distributed={**COMPILE, **SELECTIVE}),
    "dp2_linear_loss": Case(distributed={**COMPILE, **SELECTIVE}, settings=LINEAR),
    "ddp2": Case(distributed={**DDP, **COMPILE}),
    "ddp2_selective_checkpointing": Case(distributed={**DDP, **COMPILE, **SELECTIVE}),
}


@contextmanager
def without_code_generation() -> Iterator[None]:
    """Everything of torch.compile but its kernels: graphs are captured, differentiated and run as they are."""
    torch.compiler.reset()
    with mock.patch.object(compilation, "BACKEND", "aot_eager"):
        yield


@contextmanager
def selective_without_random_state() -> Iterator[None]:
    """The recomputation draws new numbers."""
    original = activation_checkpointing.checkpoint

    def forgets(*args: Any, **kwargs: Any) -> Any:
        return original(*args, preserve_rng_state=False, **kwargs)

    with mock.patch.object(activation_checkpointing, "checkpoint", forgets):
        yield


def run(case: Case, ranks: Callable[[int], Ranks], fault: str | None = None) -> Outcome:
    dotted = fault and f"tests.parity.test_checkpointing_and_compile:{fault}"
    return ranks(2).run("tests.parity.cases:run_case", case, 2, fault=dotted)


def reference_of(case: Case) -> Case:
    settings = {name: values for name, values in case.settings.items() if values is not LINEAR["training"]}
    return Case(case.model_type, case.model, settings=settings, steps=case.steps)


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_selective_checkpointing_matches_reference_run(
    name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = CHECKPOINTED[name]
    assert differences(run(case, ranks), reference(reference_of(case))) == []


def test_comparison_notices_a_recomputation_with_other_random_numbers(
    ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = CHECKPOINTED["dp2_dropout"]
    outcome = run(case, ranks, fault="selective_without_random_state")
    assert differences(outcome, reference(reference_of(case))) != []


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_match_reference_run(
    name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = COMPILED[name]
    # Parameters are compared by name, so no compiled wrapper can have changed one.
    assert differences(run(case, ranks, fault="without_code_generation"), reference(reference_of(case))) == []


def test_generated_kernels_match_reference_run(
    ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = Case(distributed={**COMPILE, **SELECTIVE}, steps=2)
    # Fused kernels sum in another order.
    assert differences(run(case, ranks), reference(reference_of(case)), scale=2.0) == []


@pytest.mark.parametrize("distributed", [{**COMPILE}, {**DDP, **COMPILE, **FULL}], ids=["dp2", "ddp2_full"])
def test_compiled_bf16_matches_within_its_rounding(
    distributed: dict[str, Any], ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = Case(distributed=distributed, settings=BF16, steps=2)
    outcome = run(case, ranks, fault="without_code_generation")
    assert differences(outcome, reference(reference_of(case)), scale=1000.0, gradients=False) == []
    fp32 = reference(Case(steps=2))
    assert outcome.weights == fp32.weights, "master weights stay fp32"
    assert outcome.losses != fp32.losses, "the computation is not in bf16"
