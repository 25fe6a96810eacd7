"""Ways to get tensor parallelism wrong, for negative controls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from automodel.distributed import tensor_parallel_styles


@contextmanager
def gradients_of_replicated_weights_not_summed() -> Iterator[None]:
    """Norms over slices, and replicated key-value projections, keep the parts of their gradients."""
    original = tensor_parallel_styles.local_parameter

    def broken(module: Any, name: str, partial: bool = False) -> Tensor | None:
        return original(module, name, partial=False)

    with mock.patch.object(tensor_parallel_styles, "local_parameter", broken):
        yield


@contextmanager
def gradients_of_activations_not_summed() -> Iterator[None]:
    """What sharded weights read gets only this rank's part of its gradient."""
    with mock.patch.object(tensor_parallel_styles, "for_sharded_weights", lambda tensor, group: tensor):
        yield
