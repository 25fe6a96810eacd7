"""Pipeline parallelism against the reference run: initial weights, losses, norms, every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.cases import TINY_LLAMA, Case, Outcome
from tests.parity.compare import differences
from tests.parity.ranks import Ranks

LLAMA = {**TINY_LLAMA, "num_hidden_layers": 8}
TIED = {**LLAMA, "tie_word_embeddings": True}
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "v_schedule", "dualpipe_v", "zero_bubble")


def pipelined(pp_size: int, schedule: str, model: dict[str, Any] = LLAMA, local: int = 8, **distributed: Any) -> Case:
    """``local`` micro-batches of one sample; the global batch of 16 makes 16 / (local * dp) local batches."""
    pipeline = {"pp_schedule": schedule, **distributed.pop("pipeline", {})}
    return Case(
        model=model,
        distributed={"pp_size": pp_size, "pipeline": pipeline, **distributed},
        settings={"training": {"local_batch_size": local}},
    )


# name -> (world size, case)
LAYOUTS: dict[str, tuple[int, Case]] = {
    **{f"pp2_{schedule}": (2, pipelined(2, schedule)) for schedule in SCHEDULES},
    **{f"pp4_{schedule}": (4, pipelined(4, schedule)) for schedule in SCHEDULES},
    **{f"pp2_dp2_{schedule}": (4, pipelined(2, schedule, local=4)) for schedule in SCHEDULES},
    **{f"pp2_{schedule}_tied": (2, pipelined(2, schedule, TIED)) for schedule in SCHEDULES},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_matches_reference_run(name: str, ranks: Callable[[int], Ranks], reference: Callable[[Case], Outcome]) -> None:
    world_size, case = LAYOUTS[name]
    outcome = ranks(world_size).run("tests.parity.cases:run_case", case, world_size)
    assert differences(outcome, reference(case)) == []
