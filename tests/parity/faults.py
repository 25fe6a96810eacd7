"""Things broken on purpose, one at a time, to see the parity tests fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

from automodel.distributed.world import World


@contextmanager
def ddp_averages() -> Iterator[None]:
    """DDP's own mean instead of the sum."""
    from torch.nn.parallel import DistributedDataParallel

    with mock.patch.object(DistributedDataParallel, "register_comm_hook"):
        yield


@contextmanager
def fsdp_averages() -> Iterator[None]:
    """FSDP's own mean instead of the sum."""
    with (
        mock.patch.object(FSDPModule, "set_gradient_divide_factor"),
        mock.patch.object(FSDPModule, "set_force_sum_reduction_for_comms"),
    ):
        yield


@contextmanager
def local_token_count() -> Iterator[None]:
    """Each rank divides by its own tokens times the world: a mean of means."""
    original = World.sum_counts

    def broken(self: World, tokens: int, *rest: int) -> list[int]:
        return [max(tokens, 1) * self.size, *original(self, tokens, *rest)[1:]]

    with mock.patch.object(World, "sum_counts", broken):
        yield


@contextmanager
def unseeded_dropout() -> Iterator[None]:
    """Each rank draws dropout from wherever its generator stands."""
    with mock.patch("automodel.training.step.seed_generators"):
        yield


@contextmanager
def no_gradient_accumulation() -> Iterator[None]:
    """Only the last micro-batch of a rank counts."""
    from automodel.training import step_runner

    original: Any = step_runner.forward_backward

    def broken(model: torch.nn.Module, manager: Any, micro_batches: list[Any], *rest: Any) -> torch.Tensor:
        return original(model, manager, micro_batches[-1:], *rest)

    with mock.patch.object(step_runner, "forward_backward", broken):
        yield


@contextmanager
def norm_counts_every_replica() -> Iterator[None]:
    """The norm counts an element once for each replica that holds it."""
    from automodel.distributed import gradients

    with mock.patch.object(gradients, "copies", return_value=1):
        yield


@contextmanager
def replicas_do_not_meet() -> Iterator[None]:
    """HSDP reduces within a replica only."""
    from automodel.distributed.fsdp2 import FSDP2Manager

    original = FSDP2Manager.micro_batch

    @contextmanager
    def broken(self: FSDP2Manager, model: torch.nn.Module, *rest: Any, **options: Any) -> Iterator[None]:
        with original(self, model, *rest, **options):
            assert isinstance(model, FSDPModule)
            # Here, because asking for synchronisation asks for this exchange too.
            model.set_requires_all_reduce(False)
            yield

    with mock.patch.object(FSDP2Manager, "micro_batch", broken):
        yield
