"""What each kind of checkpointing recomputes and keeps, counted, and that the numbers stay the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from automodel.config.distributed import ActivationCheckpointing
from automodel.distributed.activation_checkpointing import SelectivePolicy, apply_activation_checkpointing

NUM_LAYERS = 2
# Of a Llama block: q, k, v, output, gate, up, down.
PRODUCTS_OF_A_BLOCK = 7
MM = torch.ops.aten.mm.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


class Operations(TorchDispatchMode):
    """Counts operations, and the bytes of their results that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.results: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        self.counts[operation] += 1
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.results[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def live_bytes(self) -> int:
        return sum(size for storage, size in self.results.values() if not storage.expired())


def build(dropout: float = 0.0) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        attention_dropout=dropout,
    )
    return AutoModelForCausalLM.from_config(config).train()


def run(
    mode: ActivationCheckpointing, dropout: float = 0.0
) -> tuple[Counter[Any], Counter[Any], int, list[torch.Tensor]]:
    """Operations of forward and of backward, bytes alive between them, and the gradients."""
    model = build(dropout)
    apply_activation_checkpointing(model, mode)
    torch.manual_seed(1)
    with Operations() as forward:
        loss = model(input_ids=torch.arange(48)[None], use_cache=False).logits.logsumexp(-1).sum()
    live = forward.live_bytes()
    with Operations() as backward:
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return forward.counts, backward.counts, live, gradients


def test_selective_recomputes_half_of_the_products_and_no_attention() -> None:
    (_, plain, plain_live, _), (_, full, full_live, _), (_, selective, selective_live, _) = (
        run(mode) for mode in (False, "full", "selective")
    )
    # Recomputation ends with what the last product reads, so that one is never repeated.
    assert full[MM] - plain[MM] == NUM_LAYERS * (PRODUCTS_OF_A_BLOCK - 1)
    assert selective[MM] - plain[MM] == NUM_LAYERS * (PRODUCTS_OF_A_BLOCK - 1) // 2
    assert full[ATTENTION] == NUM_LAYERS
    assert selective[ATTENTION] == plain[ATTENTION] == 0
    assert full_live < selective_live < plain_live


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mode", [True, "full", "selective"])
def test_gradients_are_bitwise_those_without_checkpointing(mode: ActivationCheckpointing, dropout: float) -> None:
    expected, found = run(False, dropout)[3], run(mode, dropout)[3]
    assert len(found) == len(expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_parameter_names_do_not_change() -> None:
    model = build()
    names = list(model.state_dict())
    apply_activation_checkpointing(model, "selective")
    assert list(model.state_dict()) == names


def decisions(operation: Any, *args: Any, times: int = 1, is_recompute: bool = False, **kwargs: Any) -> list[bool]:
    """Whether each of several calls in a row is kept."""
    policy = SelectivePolicy()
    context = SelectiveCheckpointContext(is_recompute=is_recompute)
    return [policy(context, operation, *args, **kwargs) == CheckpointPolicy.MUST_SAVE for _ in range(times)]


@pytest.mark.parametrize("is_recompute", [False, True])
def test_every_second_product_is_kept(is_recompute: bool) -> None:
    assert decisions(MM, times=5, is_recompute=is_recompute) == [False, True, False, True, False]


def test_recomputation_is_told_what_the_forward_was_told() -> None:
    policy = SelectivePolicy()
    forward, again = (SelectiveCheckpointContext(is_recompute=value) for value in (False, True))
    assert [policy(forward, MM) for _ in range(3)] == [policy(again, MM) for _ in range(3)]


@pytest.mark.parametrize(
    ("operation", "args", "kwargs", "kept"),
    [
        (FLASH, ("q", "k", "v"), {}, True),
        (FLASH, ("q", "k", "v", 0.0, True), {}, True),
        (FLASH, ("q", "k", "v", 0.1, True), {}, False),
        (FLASH, ("q", "k", "v"), {"dropout_p": 0.1}, False),
        (EFFICIENT, ("q", "k", "v", None, True), {}, True),
        (EFFICIENT, ("q", "k", "v", None, True, 0.1), {}, False),
        (torch.ops.aten.silu.default, ("x",), {}, False),
    ],
)
def test_attention_is_kept_unless_it_drew_dropout(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: bool
) -> None:
    assert decisions(operation, *args, **kwargs) == [kept]


@pytest.mark.parametrize(
    ("operation", "position"),
    [(FLASH, 3), (ATTENTION, 3), (EFFICIENT, 5), (torch.ops.aten._scaled_dot_product_cudnn_attention.default, 5)],
)
def test_dropout_stands_where_the_policy_looks_for_it(operation: Any, position: int) -> None:
    assert [argument.name for argument in operation._schema.arguments][position] == "dropout_p"
