"""Things broken on purpose in the pipeline, and disturbances that must change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.pipelining import PipelineStage

from automodel.data.batches import MicroBatch, StepBatch, TrainLoader
from automodel.distributed.pipeline_parallel import AutoPipeline
from automodel.distributed.pipeline_stage import Stage
from automodel.distributed.world import World


@contextmanager
def schedule_scales_gradients() -> Iterator[None]:
    """torch's own default: each schedule step divides all gradients so far."""
    original = AutoPipeline._schedule

    def broken(self: AutoPipeline, num_microbatches: int, train: bool) -> Any:
        schedule = original(self, num_microbatches, train)
        schedule.scale_grads = True
        return schedule

    with mock.patch.object(AutoPipeline, "_schedule", broken):
        yield


@contextmanager
def tied_gradients_stay_apart() -> Iterator[None]:
    with mock.patch.object(AutoPipeline, "sum_tied_gradients"):
        yield


@contextmanager
def tied_copy_counts_in_norm() -> Iterator[None]:
    with mock.patch.object(AutoPipeline, "counted_parameters", lambda self: list(self.parameters())):
        yield


@contextmanager
def norm_of_one_stage() -> Iterator[None]:
    """Each parameter is taken to be on all ranks, not on those of its stage."""
    original = World.__init__

    def broken(self: World, *args: Any) -> None:
        original(self, *args)
        self.ranks_of_a_stage = self.size

    with mock.patch.object(World, "__init__", broken):
        yield


@contextmanager
def stock_backward_halves() -> Iterator[None]:
    """A split backward looks up parameters that are resharded by then."""
    with mock.patch.object(Stage, "backward_maybe_with_nosync", PipelineStage.backward_maybe_with_nosync):
        yield


@contextmanager
def last_local_batch_is_not_reduced() -> Iterator[None]:
    """Each data rank keeps the gradients of its last local batch to itself."""
    original = AutoPipeline.run_training

    def broken(self: AutoPipeline, *args: Any, reduce_gradients: bool, **kwargs: Any) -> None:
        original(self, *args, reduce_gradients=not reduce_gradients, **kwargs)

    with mock.patch.object(AutoPipeline, "run_training", broken):
        yield


@contextmanager
def evaluation_after_each_local_batch() -> Iterator[None]:
    """Other lengths and numbers of rows pass through the stages between a backward and the next."""
    original = AutoPipeline.run_training

    def disturbed(self: AutoPipeline, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        original(self, input_ids, *args, **kwargs)
        self.eval()
        self.run_forward(input_ids[:1, :5])
        self.run_forward(input_ids[:2])
        self.train()

    with mock.patch.object(AutoPipeline, "run_training", disturbed):
        yield


@contextmanager
def evaluation_wipes_gradients() -> Iterator[None]:
    """What the stock stage does when it looks for shapes again."""
    original = AutoPipeline.run_forward

    def broken(self: AutoPipeline, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for stage in self._stages:
            stage._post_metadata_inference_cleanup()
        return result

    with evaluation_after_each_local_batch(), mock.patch.object(AutoPipeline, "run_forward", broken):
        yield


@contextmanager
def other_length_in_every_second_local_batch() -> Iterator[None]:
    original = TrainLoader.next_step

    def shortened(batch: MicroBatch) -> MicroBatch:
        labels = batch.labels[:, :10]
        return dataclasses.replace(
            batch, input_ids=batch.input_ids[:, :10], labels=labels, num_label_tokens=int((labels != -100).sum())
        )

    def next_step(self: TrainLoader) -> StepBatch:
        step = original(self)
        batches = [shortened(batch) if index % 2 else batch for index, batch in enumerate(step.micro_batches)]
        return dataclasses.replace(
            step, micro_batches=batches, num_label_tokens=sum(batch.num_label_tokens for batch in batches)
        )

    with mock.patch.object(TrainLoader, "next_step", next_step):
        yield


@contextmanager
def stage_1_fails_in_the_second_forward() -> Iterator[None]:
    from automodel.distributed.pipeline_stage import StageModule

    original = StageModule.forward
    calls = [0]

    def broken(self: StageModule, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += self.index == 1
        if calls[0] == 2:
            raise ValueError("broken on purpose")
        return original(self, *args, **kwargs)

    with mock.patch.object(StageModule, "forward", broken):
        yield
