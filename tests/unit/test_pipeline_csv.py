"""A schedule of the user's own: what is read from it and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel.config import ConfigError
from automodel.config.distributed import parse_distributed_section
from automodel.config.pipeline_csv import read_csv_schedule
from automodel.config.pipeline_rules import check_pipeline, check_stages

GPIPE = "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n"


def write(folder: Path, text: str) -> str:
    path = folder / "schedule.csv"
    path.write_text(text)
    return str(path)


def test_placement_and_micro_batches_are_read(tmp_path: Path) -> None:
    schedule = read_csv_schedule(write(tmp_path, GPIPE), 2)
    assert (schedule.stage_ranks, schedule.num_microbatches, schedule.splits_backward) == ((0, 1), 2, False)


def test_overlapping_and_split_computations_are_read(tmp_path: Path) -> None:
    text = "0F0,3F0,3I0,(3W0;0I0)OVERLAP_F_B,0W0\n1F0,2F0,2B0,1B0\n"
    schedule = read_csv_schedule(write(tmp_path, text), 2)
    assert (schedule.stage_ranks, schedule.num_microbatches, schedule.splits_backward) == ((0, 1, 1, 0), 1, True)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0F0,0B0\n", "1 lines"),
        ("0F0,0B0\n1F0,1X0\n", "'1X0', which is no computation"),
        ("0F0,0B0\n1F0,1RECV_F0,1B0\n", "'1RECV_F0'"),
        ("0F0,0B0,1B0\n1F0\n", "stage 1 is on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", "numbered from 0"),
        ("0F0,0B0\n1F0\n", "stage 1 has 1F0 for micro-batch 0"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0\n", "stage 1 has nothing for micro-batch 1"),
        ("0F0,0B0\n1F0,1I0\n", "stage 1 has 1F0 1I0"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "stage 0 has 0B0 0F0 0F0"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_csv_schedule(write(tmp_path, text), 2)
    assert refused.value.key == "distributed.pipeline.pp_schedule_csv"
    assert rule in refused.value.rule


def test_the_local_batch_must_have_its_micro_batches(tmp_path: Path) -> None:
    pipeline = {"pp_schedule_csv": write(tmp_path, GPIPE), "pp_microbatch_size": 2}
    section = parse_distributed_section({"pp_size": 2, "pipeline": pipeline})
    check_pipeline(section, 4, 8)
    with pytest.raises(ConfigError) as refused:
        check_pipeline(section, 8, 8)
    assert (refused.value.key, refused.value.legal) == ("training.local_batch_size", "4")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"module_fqns_per_model_part": [["a"], ["b"], ["c"]]}, "module_fqns_per_model_part"),
        ({"layers_per_stage": 1}, "layers_per_stage"),
    ],
)
def test_its_stages_hold_against_explicit_ones(settings: dict[str, object], key: str, tmp_path: Path) -> None:
    pipeline = {"pp_schedule_csv": write(tmp_path, GPIPE), **settings}
    with pytest.raises(ConfigError) as refused:
        check_stages(parse_distributed_section({"pp_size": 2, "pipeline": pipeline}), 8)
    assert refused.value.key == f"distributed.pipeline.{key}"
