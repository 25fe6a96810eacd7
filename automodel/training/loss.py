"""Token-normalised cross entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from automodel.model.linear_cross_entropy import IGNORE_INDEX


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy in fp32; the caller divides once, by the global batch's trained tokens.

    Args:
        logits: ``[batch, seq, vocab]``, any floating dtype.
        labels: ``[batch, seq]``, already shifted: ``labels[:, t]`` is the token after position t, or -100.

    Returns:
        shape []; zero, with zero gradients, when no label is trained.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
