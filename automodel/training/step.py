"""Forward and backward of one step, over all micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from automodel.config.schema import LossName
from automodel.data.batches import MicroBatch
from automodel.distributed.strategy import StrategyManager
from automodel.model.seeding import seed_generators
from automodel.training.loss import cross_entropy_sum


def forward(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[batch, seq, vocab]`` for token ids ``[batch, seq]``."""
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


def loss_sum_of(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, loss: LossName) -> torch.Tensor:
    """Summed loss in fp32, shape [], of token ids and shifted labels, ``[batch, seq]`` each."""
    if loss == "linear_cross_entropy":
        summed: torch.Tensor = model(input_ids=input_ids, shifted_labels=labels, use_cache=False).loss
        return summed
    return cross_entropy_sum(forward(model, input_ids), labels)


def forward_backward(
    model: nn.Module,
    manager: StrategyManager,
    micro_batches: Sequence[MicroBatch],
    num_label_tokens: int,
    device: torch.device,
    loss_name: LossName = "cross_entropy",
) -> torch.Tensor:
    """Add the gradients of a step's loss to the parameters' ``.grad``.

    The loss is the sum over all trained tokens of the global batch divided by their number, which is known
    before the first forward, so that gradients need no later scaling.

    Args:
        micro_batches: this rank's; every rank has the same number.
        num_label_tokens: trained tokens of the whole global batch, at least 1.
        loss_name: the one that the model was prepared for.

    Returns:
        this rank's summed, undivided loss, shape [], fp64.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for index, micro_batch in enumerate(micro_batches):
        with manager.micro_batch(model, is_first=index == 0, is_last=index == len(micro_batches) - 1):
            # Dropout is a function of the samples, not of the rank that happens to hold them.
            seed_generators(micro_batch.seed)
            loss = loss_sum_of(model, micro_batch.input_ids.to(device), micro_batch.labels.to(device), loss_name)
            (loss / num_label_tokens).backward()
            loss_sum += loss.detach()
    return loss_sum


@torch.no_grad()
def evaluation_sum(
    model: nn.Module,
    manager: StrategyManager,
    micro_batches: Iterable[MicroBatch],
    device: torch.device,
    loss_name: LossName = "cross_entropy",
) -> tuple[torch.Tensor, int]:
    """Summed loss (shape [], fp64) and number of trained tokens of this rank's micro-batches, without dropout."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_label_tokens = 0
    was_training = model.training
    model.eval()
    try:
        with manager.forward_only(model):
            for micro_batch in micro_batches:
                loss_sum += loss_sum_of(
                    model, micro_batch.input_ids.to(device), micro_batch.labels.to(device), loss_name
                )
                num_label_tokens += micro_batch.num_label_tokens
    finally:
        model.train(was_training)
    return loss_sum, num_label_tokens
