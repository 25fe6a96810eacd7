"""The rules that are told before a run are those that torch's schedules have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from automodel.config.distributed import PipelineConfig
from automodel.config.pipeline_rules import SCHEDULES, find_schedule
from automodel.distributed.pipeline_schedules import build_forward_schedule, build_schedule, place_stages

STAGE_RANKS = {"zigzag": [0, 1, 1, 0], "loop": [0, 1, 0, 1], "plain": [0, 1], "three": [0, 1, 2, 0, 1, 2]}


def stages_of(stage_ranks: list[int], pp_size: int, rank: int = 0) -> list[Any]:
    """What a schedule reads of its stages when it is made."""
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=len(stage_ranks),
            group_size=pp_size,
            group_rank=rank,
            is_first=index == 0,
            is_last=index == len(stage_ranks) - 1,
            submod=nn.Identity(),
        )
        for index, owner in enumerate(stage_ranks)
        if owner == rank
    ]


@pytest.mark.parametrize("pp_size", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_that_torch_takes_are_those_of_the_rules(name: str, pp_size: int) -> None:
    config = PipelineConfig(pp_schedule=name)
    stage_ranks = place_stages(config, pp_size, num_layers=2 * pp_size)
    for count in range(1, 14):
        try:
            build_schedule(config, stages_of(stage_ranks, pp_size), count, lambda logits, labels: logits)
            taken = True
        except (ValueError, AssertionError):
            taken = False
        assert taken == (find_schedule(name).needs_microbatches(count, pp_size) is None), f"{count} micro-batches"


@pytest.mark.parametrize("placement", STAGE_RANKS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_forward_alone_takes_any_placement_and_number(placement: str, count: int) -> None:
    stage_ranks = STAGE_RANKS[placement]
    pp_size = max(stage_ranks) + 1
    for rank in range(pp_size):
        stages = stages_of(stage_ranks, pp_size, rank)
        schedule = build_forward_schedule(stage_ranks, pp_size, stages, count, lambda logits, labels: logits)
        assert schedule.stage_index_to_group_rank == dict(enumerate(stage_ranks))
