"""The chunked loss against plain cross entropy of the whole logits: value and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from automodel.model import linear_cross_entropy as module
from automodel.model.linear_cross_entropy import IGNORE_INDEX, LogitTransform, linear_cross_entropy_sum

NUM_TOKENS, HIDDEN, VOCAB = 37, 16, 50


def inputs(dtype: torch.dtype = torch.float32, masked: float = 0.33) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, labels; logits reach some tens, so that a soft cap bends them."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (2 * torch.randn(VOCAB, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)
    labels[torch.rand(NUM_TOKENS, generator=generator) < masked] = IGNORE_INDEX
    return hidden, weight, bias, labels


def value_and_gradients(loss: Callable[..., Tensor], dtype: torch.dtype, masked: float, bias: bool) -> list[Tensor]:
    hidden, weight, bias_tensor, labels = inputs(dtype, masked)
    value = loss(hidden, weight, labels, bias_tensor if bias else None)
    (value / 7).backward()
    gradients = [hidden.grad, weight.grad, bias_tensor.grad if bias else torch.zeros(())]
    return [value.detach(), *(gradient for gradient in gradients if gradient is not None)]


def torch_function(used: bool) -> AbstractContextManager[object]:
    """Whether torch's own chunked function may be used."""
    return nullcontext() if used else mock.patch.object(module, "_torch_has_it_for", return_value=False)


def plain(transform: LogitTransform) -> Callable[..., Tensor]:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        logits = transform(F.linear(hidden, weight, bias).float())
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")

    return loss


def chunked(transform: LogitTransform) -> Callable[..., Tensor]:
    return lambda hidden, weight, labels, bias: linear_cross_entropy_sum(hidden, weight, labels, bias, transform)


TRANSFORMS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(scale=0.0625),
    "capped": LogitTransform(soft_cap=5.0),
    "scaled_and_capped": LogitTransform(scale=2.0, soft_cap=30.0),
}


@pytest.mark.parametrize("chunk", [1, 8, 37, 512])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("own", [True, False], ids=["own", "torch_where_it_fits"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_equals_cross_entropy_of_all_logits(name: str, own: bool, bias: bool, chunk: int) -> None:
    expected = value_and_gradients(plain(TRANSFORMS[name]), torch.float32, 0.33, bias)
    with mock.patch.object(module, "CHUNK_TOKENS", chunk), torch_function(used=not own):
        found = value_and_gradients(chunked(TRANSFORMS[name]), torch.float32, 0.33, bias)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", [True, False], ids=["own", "torch_where_it_fits"])
def test_no_trained_token_gives_zero_and_zero_gradients(own: bool) -> None:
    with torch_function(used=not own):
        for tensor in value_and_gradients(chunked(LogitTransform()), torch.float32, 1.0, False):
            assert torch.equal(tensor, torch.zeros_like(tensor))


def test_loss_of_bf16_inputs_is_not_rounded_to_bf16() -> None:
    expected = value_and_gradients(plain(LogitTransform()), torch.bfloat16, 0.33, True)
    found = value_and_gradients(chunked(LogitTransform()), torch.bfloat16, 0.33, True)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0.0)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (5, 6))
    labels = torch.tensor([0, 5, IGNORE_INDEX, 2, 3])
    transform = LogitTransform(scale=1.5, soft_cap=2.0)
    step = 1e-3

    def loss(values: Tensor) -> Tensor:
        return linear_cross_entropy_sum(values, weight, labels, None, transform)

    leaf = hidden.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    for row, column in ((0, 0), (1, 3), (2, 1), (4, 2)):
        shift = torch.zeros_like(hidden)
        shift[row, column] = step
        slope = (loss(hidden + shift) - loss(hidden - shift)) / (2 * step)
        assert leaf.grad[row, column].item() == pytest.approx(slope.item(), abs=2e-3)


def test_no_gradient_is_computed_in_evaluation() -> None:
    hidden, weight, _, labels = inputs()
    with (
        torch.no_grad(),
        mock.patch.object(module, "_torch_has_it_for", return_value=False),
        mock.patch.object(module, "_add_product", side_effect=AssertionError("a gradient was computed")),
    ):
        value = linear_cross_entropy_sum(hidden, weight, labels)
    torch.testing.assert_close(value, plain(LogitTransform())(hidden, weight, labels, None).detach())


def test_second_backward_is_refused() -> None:
    hidden, weight, _, labels = inputs()
    loss = linear_cross_entropy_sum(hidden, weight, labels, None, LogitTransform(scale=2.0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_never_holds_more_logits_than_one_chunk() -> None:
    largest = 0
    original = module._chunk_loss

    def watch(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        nonlocal largest
        largest = max(largest, logits.shape[0])
        return original(logits, *rest)

    hidden, weight, _, labels = inputs()
    with mock.patch.object(module, "CHUNK_TOKENS", 8), mock.patch.object(module, "_chunk_loss", watch):
        linear_cross_entropy_sum(hidden, weight, labels, None, LogitTransform(soft_cap=30.0))
    assert largest == 8
