"""Cross entropy from hidden states and the output head, without the logits of all tokens at once.

The logits of a chunk of tokens are made, reduced to its loss and its gradients, and freed, as in Cut Your
Losses in Large-Vocabulary Language Models (Wijmans et al., 2024) and torch's own ``linear_cross_entropy``.
So the peak is ``[CHUNK_TOKENS, vocab]`` instead of ``[batch, seq, vocab]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
# Large enough for efficient products with the head, small beside a vocabulary of 100,000.
CHUNK_TOKENS = 512


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the head's output: ``cap * tanh(scale * z / cap)``.

    Attributes:
        scale: a factor.
        soft_cap: the largest magnitude that is approached (Gemma 2, section 2); None: no cap.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    @property
    def is_identity(self) -> bool:
        return self.scale == 1.0 and self.soft_cap is None

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's logits for the head's output, any shape."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def gradient(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the head's output, from that of the model's logits and these logits themselves."""
        if self.soft_cap is not None:
            gradient = gradient * (1.0 - (logits / self.soft_cap).square())
        return gradient * self.scale if self.scale != 1.0 else gradient


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the head that this rank holds, of a vocabulary spread over ``group``.

    Attributes:
        group: ranks that hold the other rows and the same hidden states.
        offset: token id of the first row.
    """

    group: dist.ProcessGroup
    offset: int


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Summed cross entropy of ``transform(hidden @ weight.T + bias)`` in fp32, and its gradients.

    The products run in the dtype of ``hidden``, softmax and sums in fp32; the head's gradient is added up in
    fp32 over the chunks. Gradients are computed in the forward, so a second backward raises.

    Args:
        hidden: ``[tokens, hidden]``.
        weight: ``[vocab, hidden]``, or this rank's rows of it.
        labels: ``[tokens]``, already shifted; tokens with ``IGNORE_INDEX`` do not count.
        bias: ``[vocab]``, or this rank's part.
        transform: applied to the head's output.
        shard: for a head spread over ranks. Collective over its group then: every rank gets the whole loss, the
            gradient of its own rows, and the whole gradient of the hidden states.

    Returns:
        shape [], fp32; zero, with zero gradients, when no token counts.
    """
    transform = transform or LogitTransform()
    if shard is None and transform.is_identity and _torch_has_it_for(hidden, weight):
        return F.linear_cross_entropy(
            hidden,
            weight,
            labels,
            linear_bias=bias,
            reduction="sum",
            ignore_index=IGNORE_INDEX,
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK_TOKENS),
        )
    if not torch.is_grad_enabled():
        # A function of autograd is told that gradients are wanted even here.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, transform, shard)
    return loss


def _torch_has_it_for(hidden: Tensor, weight: Tensor) -> bool:
    """torch has the function since 2.13; below fp32 it returns the sum itself in the low precision."""
    return hasattr(F, "linear_cross_entropy") and hidden.dtype == weight.dtype == torch.float32


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        transform: LogitTransform,
        shard: VocabularyShard | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            chunk = hidden[rows]
            logits = transform(F.linear(chunk, weight, bias).float())
            chunk_loss, gradient = _chunk_loss(logits, labels[rows], shard)
            loss += chunk_loss
            if not (wants_hidden or wants_weight or wants_bias):
                continue
            gradient = transform.gradient(gradient, logits)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[rows])
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient.t(), chunk)
        if hidden_gradient is not None and shard is not None:
            dist.all_reduce(hidden_gradient, group=shard.group)
        ctx.save_for_backward(
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None or bias is None else bias_gradient.to(bias.dtype),
        )
        return loss

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        (output_gradient,) = output_gradients
        # In place: the head's gradient is as large as the head. autograd refuses a second backward by itself.
        scaled = [None if g is None else g.mul_(output_gradient.to(g.dtype)) for g in ctx.saved_tensors]
        return (*scaled, None, None, None)


def _chunk_loss(logits: Tensor, labels: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, shape [], and its gradient by the logits ``[tokens, vocab]``."""
    counts = labels != IGNORE_INDEX
    index = labels - (0 if shard is None else shard.offset)
    held = counts & (index >= 0) & (index < logits.shape[-1])
    index = index.masked_fill(~held, 0).unsqueeze(-1)
    normaliser = torch.logsumexp(logits, dim=-1)
    if logits.shape[-1]:
        target = logits.gather(-1, index).squeeze(-1).masked_fill(~held, 0.0)
    else:
        target = torch.zeros_like(normaliser)
    if shard is not None:
        normaliser, target = _over_shards(normaliser, target, shard.group)
    loss = (normaliser - target).masked_fill(~counts, 0.0).sum()
    gradient = torch.exp(logits - normaliser.unsqueeze(-1)).mul_(counts.unsqueeze(-1))
    if logits.shape[-1]:
        gradient.scatter_add_(-1, index, held.unsqueeze(-1).to(gradient.dtype).neg_())
    return loss, gradient


def _over_shards(normaliser: Tensor, target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The whole vocabulary's log-sum-exp and target logit, ``[tokens]`` each, the same bits on every rank.

    One exchange: log-sum-exp of the shards' log-sum-exps keeps each shard's maximum.
    """
    local = torch.stack([normaliser, target])
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    gathered = torch.stack(parts)
    return torch.logsumexp(gathered[:, 0], dim=0), gathered[:, 1].sum(0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` with an fp32 total, without a temporary where the factors are fp32 too."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
