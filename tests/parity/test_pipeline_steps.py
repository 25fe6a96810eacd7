"""What happens between and around the schedule steps of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group

from tests.parity import pipeline_faults
from tests.parity.cases import Case, Outcome, run_case
from tests.parity.compare import differences
from tests.parity.ranks import Ranks
from tests.parity.test_pipeline_parallel import TIED, pipelined

FAULTS = "tests.parity.pipeline_faults"
RUN_CASE = "tests.parity.cases:run_case"
DISTURBED = {
    "pp2_1f1b": (2, pipelined(2, "1f1b", TIED)),
    "pp2_dp2_gpipe": (4, pipelined(2, "gpipe", local=4)),
    "pp2_dp2_v_schedule": (4, pipelined(2, "v_schedule", local=4, defer_fsdp_grad_sync=False)),
    "pp2_dualpipe_v": (2, pipelined(2, "dualpipe_v")),
    "pp2_dp2_zero_bubble": (4, pipelined(2, "zero_bubble", local=4)),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_evaluation_between_local_batches_changes_nothing(
    name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    world_size, case = DISTURBED[name]
    outcome = ranks(world_size).run(RUN_CASE, case, world_size, fault=f"{FAULTS}:evaluation_after_each_local_batch")
    assert differences(outcome, reference(case)) == []


def test_comparison_notices_gradients_wiped_by_evaluation(
    ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]
) -> None:
    case = pipelined(2, "1f1b", local=4, defer_fsdp_grad_sync=False)
    outcome = ranks(4).run(RUN_CASE, case, 4, fault=f"{FAULTS}:evaluation_wipes_gradients")
    assert differences(outcome, reference(case)) != []


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "v_schedule"])
def test_sequence_length_may_change_between_local_batches(schedule: str, ranks: Callable[[int], Ranks]) -> None:
    case = pipelined(2, schedule, TIED)
    with pipeline_faults.other_length_in_every_second_local_batch():
        reference = run_case(case, 1)
    outcome = ranks(2).run(RUN_CASE, case, 2, fault=f"{FAULTS}:other_length_in_every_second_local_batch")
    assert differences(outcome, reference) == []


def count_collectives(case: Case, world_size: int) -> tuple[float, float]:
    """Reduce-scatters and all-gathers of this rank in a training step."""
    counts = {"foreach_reduce": 0, "foreach_all_gather": 0}

    def counted(name: str) -> Any:
        original = getattr(param_group, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return mock.patch.object(param_group, name, call)

    with counted("foreach_reduce"), counted("foreach_all_gather"):
        run_case(case, world_size)
    return counts["foreach_reduce"] / case.steps, counts["foreach_all_gather"] / case.steps


@pytest.mark.parametrize(
    ("settings", "reduces"),
    [({}, 5), ({"defer_fsdp_grad_sync": False}, 10), ({"reshard_after_forward": True}, 5)],
    ids=["deferred", "each_local_batch", "zero3"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "v_schedule"])
def test_gradients_are_reduced_once_a_step(
    schedule: str, settings: dict[str, Any], reduces: int, ranks: Callable[[int], Ranks]
) -> None:
    """A stage of four layers has five groups (and so have two of two layers, with six), in two local batches."""
    case = pipelined(2, schedule, local=4, **settings)
    groups = 1.0 if schedule == "1f1b" else 6 / 5
    counted, _ = ranks(4).run("tests.parity.test_pipeline_steps:count_collectives", case, 4)
    assert counted == reduces * groups


def test_parameters_are_gathered_once_a_local_batch(ranks: Callable[[int], Ranks]) -> None:
    def gathers(**settings: Any) -> float:
        case = pipelined(2, "1f1b", local=4, **settings)
        return ranks(4).run("tests.parity.test_pipeline_steps:count_collectives", case, 4)[1]

    # Five groups, two local batches, and a part of the validation at the end.
    assert 10 <= gathers() < 20
    # Three of the five are freed after each forward and gathered again for each backward.
    assert gathers(reshard_after_forward=True) > 30


def test_error_inside_a_schedule_names_its_stage(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(RuntimeError, match=r"pipeline stage 1: ValueError: broken on purpose"):
        ranks(2).run(RUN_CASE, pipelined(2, "1f1b"), 2, fault=f"{FAULTS}:stage_1_fails_in_the_second_forward")
