"""Schedules by name on torch's classes, which rank holds which stage, and a pass without backward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from automodel.config.distributed import PipelineConfig
from automodel.config.pipeline_csv import read_csv_schedule
from automodel.config.pipeline_rules import count_stages, find_schedule
from automodel.distributed.pipeline_stage import Stage

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_CLASSES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "v_schedule": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}

# An error inside a schedule is told once, by the rank it happened on; torch also logs the whole schedule.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


def place_stages(config: PipelineConfig, pp_size: int, num_layers: int) -> list[int]:
    """The pipeline rank of each stage.

    Stages go round the ranks; in the V placement of ``v_schedule`` and ``dualpipe_v`` they go up and come back, so
    that the first rank has the first and the last stage; a schedule from a file places them itself.
    """
    if config.pp_schedule_csv is not None:
        return list(read_csv_schedule(config.pp_schedule_csv, pp_size).stage_ranks)
    num_stages = count_stages(config, pp_size, num_layers)
    assert num_stages is not None, "the number of layers is known here"
    if find_schedule(config.pp_schedule).stages == "two":
        return [*range(pp_size), *reversed(range(pp_size))]
    return [stage % pp_size for stage in range(num_stages)]


def build_schedule(
    config: PipelineConfig, stages: list[Stage], num_microbatches: int, loss_function: LossFunction
) -> Any:
    """The schedule of a training step.

    Args:
        stages: of this rank.
        loss_function: ``(output, labels) -> loss`` of one micro-batch, called by the last stage.

    Raises:
        ValueError: the schedule cannot run this number of micro-batches.
    """
    options: dict[str, Any] = {
        "n_microbatches": num_microbatches,
        "loss_fn": loss_function,
        "scale_grads": config.scale_grads_in_schedule,
    }
    if config.pp_schedule_csv is not None:
        schedule = _PipelineScheduleRuntime(stages, **options)
        schedule._load_csv(str(Path(config.pp_schedule_csv).expanduser()))
        return schedule
    name = find_schedule(config.pp_schedule)
    return _CLASSES[name.name](stages[0] if name.stages == "one" else stages, **options)


def build_forward_schedule(
    stage_ranks: list[int], pp_size: int, stages: list[Stage], num_microbatches: int, loss_function: LossFunction
) -> Any:
    """A schedule for ``eval()``: all micro-batches through one stage before the next, for any number of them.

    Training schedules ask for certain numbers of micro-batches, which validation and text generation need not have.
    torch wants to see backwards in a schedule; ``eval()`` skips them. Private in torch (tried 2.13):
    ``_PipelineScheduleRuntime`` and ``_prepare_schedule_with_comms``, the base of its public schedules.

    Args:
        stage_ranks: from :func:`place_stages`.
    """
    schedule = _PipelineScheduleRuntime(stages, n_microbatches=num_microbatches, loss_fn=loss_function)
    order: dict[int, list[_Action | None]] = {}
    for rank in range(pp_size):
        own = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
        forwards = [(stage, _ComputationType.FORWARD) for stage in own]
        backwards = [(stage, _ComputationType.FULL_BACKWARD) for stage in reversed(own)]
        order[rank] = [
            _Action(stage, kind, microbatch)
            for stage, kind in [*forwards, *backwards]
            for microbatch in range(num_microbatches)
        ]
    schedule._prepare_schedule_with_comms(order)
    return schedule
