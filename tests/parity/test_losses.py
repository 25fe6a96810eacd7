"""The loss without the logits against the reference run with plain cross entropy: losses, norms, every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automodel.distributed.tensor_parallel_collectives import TensorParallelGroup
from automodel.model import linear_cross_entropy, output_head
from automodel.model.linear_cross_entropy import LogitTransform
from automodel.model.output_head import head_loss
from tests.parity.cases import TINY_LLAMA, Case, Outcome
from tests.parity.compare import differences
from tests.parity.ranks import Ranks

TIED = {**TINY_LLAMA, "tie_word_embeddings": True}
# Caps and scales that bite at the size of a tiny model's logits.
GEMMA2 = {**TINY_LLAMA, "final_logit_softcapping": 2.0}
WITHOUT_HEAD_DIM = {key: value for key, value in TINY_LLAMA.items() if key != "head_dim"}
COHERE = {**WITHOUT_HEAD_DIM, "logit_scale": 0.25}
GRANITE = {**WITHOUT_HEAD_DIM, "logits_scaling": 4.0}
DDP = {"strategy": "ddp"}
LINEAR = {"training": {"loss": "linear_cross_entropy"}}
CHECKPOINTING = {"activation_checkpointing": "full"}


def linear(local_batch_size: int) -> dict[str, dict[str, Any]]:
    return {"training": {"loss": "linear_cross_entropy", "local_batch_size": local_batch_size}}


# name -> (world size, case). The reference run has the same settings but plain cross entropy.
LAYOUTS: dict[str, tuple[int, Case]] = {
    "one_process": (1, Case(settings=LINEAR)),
    "dp2": (2, Case(settings=LINEAR)),
    "dp2_tied": (2, Case(model=TIED, settings=LINEAR)),
    "dp2_accumulation_2": (2, Case(settings=linear(4))),
    "dp2_checkpointing": (2, Case(settings=LINEAR, distributed=CHECKPOINTING)),
    "dp2_gathered_once": (2, Case(settings=LINEAR, distributed={"gather_once_per_step": True})),
    "dp2_cpu_offload": (2, Case(settings=LINEAR, distributed={"offload_policy": "cpu"})),
    "hsdp_2x2": (4, Case(settings=LINEAR, distributed={"dp_replicate_size": 2})),
    "ddp2": (2, Case(settings=LINEAR, distributed=DDP)),
    "ddp2_tied": (2, Case(model=TIED, settings=LINEAR, distributed=DDP)),
    "ddp2_unused": (2, Case(settings=LINEAR, distributed={**DDP, "find_unused_parameters": True})),
    "dp2_gemma2": (2, Case("gemma2", GEMMA2, settings=LINEAR)),
    "ddp2_gemma2": (2, Case("gemma2", GEMMA2, settings=LINEAR, distributed=DDP)),
    "dp2_cohere": (2, Case("cohere", COHERE, settings=LINEAR)),
    "dp2_granite": (2, Case("granite", GRANITE, settings=LINEAR)),
    "dp2_bias": (2, Case("phi", WITHOUT_HEAD_DIM, settings=LINEAR)),
    "tp2": (2, Case(settings=LINEAR, distributed={"tp_size": 2})),
    "tp2_sequence_parallel": (2, Case(settings=LINEAR, distributed={"tp_size": 2, "sequence_parallel": True})),
    # Nearly everything masked: micro-batches, and ranks, without a trained token.
    "dp4_hardly_any_token": (4, Case(settings={**LINEAR, "data": {"mask_labels": 0.99}})),
}


def with_plain_loss(case: Case) -> Case:
    settings = {**case.settings, "training": {**case.settings["training"], "loss": "cross_entropy"}}
    return Case(case.model_type, case.model, settings=settings, num_samples=case.num_samples, steps=case.steps)


def run(case: Case, world_size: int, ranks: Callable[[int], Ranks], fault: str | None = None) -> Outcome:
    return ranks(world_size).run("tests.parity.cases:run_case", case, world_size, fault=fault)


@pytest.mark.parametrize("name", LAYOUTS)
def test_matches_cross_entropy(name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]) -> None:
    world_size, case = LAYOUTS[name]
    assert differences(run(case, world_size, ranks), reference(with_plain_loss(case))) == []


@pytest.mark.parametrize("distributed", [{}, DDP], ids=["dp2", "ddp2"])
def test_bf16_matches_within_its_rounding(
    distributed: dict[str, Any], ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = Case(settings={**LINEAR, "precision": {"param_dtype": "bfloat16"}}, distributed=distributed, steps=2)
    outcome = run(case, 2, ranks)
    assert differences(outcome, reference(with_plain_loss(case)), scale=1000.0, gradients=False) == []
    # The loss itself is a sum in fp32: one in bf16 would be a multiple of 2**-6 times the number of tokens.
    fp32 = reference(Case(steps=2))
    assert outcome.losses != fp32.losses
    assert differences(outcome, fp32, scale=2000.0, gradients=False) == []


@contextmanager
def transform_left_out() -> Iterator[None]:
    """The head's own output is taken for the model's logits, unchecked."""

    def unchecked(model: Any) -> tuple[nn.Module, LogitTransform]:
        return model.get_output_embeddings(), LogitTransform()

    with mock.patch.object(output_head, "check_output_head", unchecked):
        yield


@contextmanager
def ignored_labels_count() -> Iterator[None]:
    """Masked tokens are trained on token 0."""
    original = output_head.linear_cross_entropy_sum

    def broken(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any) -> torch.Tensor:
        return original(hidden, weight, labels.clamp(min=0), *rest)

    with mock.patch.object(output_head, "linear_cross_entropy_sum", broken):
        yield


NEGATIVE_CONTROLS = {
    "transform_left_out-gemma2": Case("gemma2", GEMMA2, settings=LINEAR),
    "transform_left_out-cohere": Case("cohere", COHERE, settings=LINEAR),
    "transform_left_out-granite": Case("granite", GRANITE, settings=LINEAR),
    "ignored_labels_count-llama": Case(settings=LINEAR),
}


@pytest.mark.parametrize("name", NEGATIVE_CONTROLS)
def test_comparison_notices_fault(
    name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = NEGATIVE_CONTROLS[name]
    outcome = run(case, 2, ranks, fault=f"tests.parity.test_losses:{name.partition('-')[0]}")
    assert differences(outcome, reference(with_plain_loss(case))) != []


def sharded_head_errors(vocab_size: int, bias: bool, transform: LogitTransform, cut_sequence: bool) -> list[float]:
    """Largest errors of loss and gradients of a head whose rows are dealt out over all ranks; collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    group = TensorParallelGroup(mesh)
    torch.manual_seed(5)
    head = nn.Linear(16, vocab_size, bias=bias)
    nn.init.normal_(head.weight)
    hidden = torch.randn(2, 12, 16, requires_grad=True)
    labels = torch.randint(vocab_size, (2, 12))
    labels[0, :5] = linear_cross_entropy.IGNORE_INDEX
    logits = transform(head(hidden))
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    whole = {"hidden": hidden.grad, **{name: parameter.grad for name, parameter in head.named_parameters()}}
    for name, parameter in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    own = hidden.detach().requires_grad_() if not cut_sequence else group.slice(hidden.detach(), 1).requires_grad_()
    with mock.patch.object(linear_cross_entropy, "CHUNK_TOKENS", 7):
        loss = head_loss(head, own, labels, transform)
    loss.backward()
    assert own.grad is not None
    assert whole["hidden"] is not None
    expected_hidden = group.slice(whole["hidden"], 1) if cut_sequence else whole["hidden"]
    errors = [(loss - expected).abs().item() / 24, (own.grad - expected_hidden).abs().max().item()]
    for name, parameter in head.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        errors.append((parameter.grad.full_tensor() - whole[name]).abs().max().item())
    return errors


HEADS = {
    "even": (64, False, LogitTransform(), False),
    "uneven": (67, False, LogitTransform(), False),
    "empty_last_shard": (2, False, LogitTransform(), False),
    "bias": (67, True, LogitTransform(), False),
    "capped_and_scaled": (67, True, LogitTransform(0.5, 2.0), False),
    "sequence_slices": (67, False, LogitTransform(), True),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", HEADS)
def test_vocabulary_spread_over_ranks_gives_the_whole_loss(
    name: str, world_size: int, ranks: Callable[[int], Ranks]
) -> None:
    errors = ranks(world_size).run("tests.parity.test_losses:sharded_head_errors", *HEADS[name])
    assert max(errors) < 1e-5, errors


@contextmanager
def softmax_of_each_shard_alone() -> Iterator[None]:
    """No exchange between the ranks of a spread vocabulary."""
    with mock.patch.object(
        linear_cross_entropy, "_over_shards", lambda normaliser, target, group: (normaliser, target)
    ):
        yield


def test_comparison_notices_a_softmax_of_each_shard_alone(ranks: Callable[[int], Ranks]) -> None:
    errors = ranks(2).run(
        "tests.parity.test_losses:sharded_head_errors",
        *HEADS["even"],
        fault="tests.parity.test_losses:softmax_of_each_shard_alone",
    )
    assert max(errors) > 0.1
