"""When two runs are the same (law L1)."""

from __future__ import annotations

import numpy as np

from tests.parity.cases import Outcome

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4


def differences(outcome: Outcome, reference: Outcome, scale: float = 1.0, gradients: bool = True) -> list[str]:
    """What differs, each as a sentence; empty when the runs are the same.

    Losses are compared absolutely, norms and gradients relative to the largest value of the reference.

    Args:
        scale: multiplies all tolerances, e.g. for bf16.
        gradients: compare every parameter's gradient of every step.
    """
    found = []
    if outcome.weights != reference.weights:
        found.append("the initial weights are not bitwise those of the reference run")
    if len(outcome.losses) != len(reference.losses):
        found.append(f"{len(outcome.losses)} steps instead of {len(reference.losses)}")
    for step, (ours, theirs) in enumerate(zip(outcome.losses, reference.losses, strict=False), 1):
        if not abs(ours - theirs) <= LOSS_TOLERANCE * scale:
            found.append(f"step {step}: loss {ours} instead of {theirs}")
    for step, (ours, theirs) in enumerate(zip(outcome.norms, reference.norms, strict=False), 1):
        if not abs(ours - theirs) <= NORM_TOLERANCE * scale * theirs:
            found.append(f"step {step}: gradient norm {ours} instead of {theirs}")
    assert outcome.val_loss is not None
    assert reference.val_loss is not None
    if not abs(outcome.val_loss - reference.val_loss) <= LOSS_TOLERANCE * scale:
        found.append(f"validation loss {outcome.val_loss} instead of {reference.val_loss}")
    if gradients:
        found += _gradient_differences(outcome, reference, GRADIENT_TOLERANCE * scale)
    return found


def _gradient_differences(outcome: Outcome, reference: Outcome, tolerance: float) -> list[str]:
    found = []
    for step, (ours, theirs) in enumerate(zip(outcome.gradients, reference.gradients, strict=False), 1):
        if ours.keys() != theirs.keys():
            found.append(f"step {step}: gradients of {sorted(ours.keys() ^ theirs.keys())} are missing on one side")
            continue
        for name, gradient in theirs.items():
            error = np.abs(ours[name] - gradient).max() / max(np.abs(gradient).max(), 1e-6)
            if not error <= tolerance:
                found.append(f"step {step}: gradient of {name} differs by {error:.1e}")
    return found
