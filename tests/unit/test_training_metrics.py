"""metrics.jsonl: names, exact numbers, one write a line."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from automodel.training.metrics import (
    MetricsFile,
    StepMetrics,
    ValidationMetrics,
    scalar_values,
)

STEP = StepMetrics(
    step=3,
    epoch=0,
    loss=0.1 + 0.2,
    grad_norm=1 / 3,
    lr=3e-3,
    num_label_tokens=4096,
    tokens_per_second=9812.25,
    step_time_s=0.21,
    peak_memory_bytes=2**31,
)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_have_the_names_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(STEP)
        file.write(ValidationMetrics(step=3, val_loss=2.5, val_num_label_tokens=100))
    step, validation = lines(path)
    assert list(step) == [
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "lr",
        "num_label_tokens",
        "tokens_per_second",
        "step_time_s",
        "peak_memory_bytes",
    ]
    assert validation == {"step": 3, "val_loss": 2.5, "val_num_label_tokens": 100}


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, 2.0**-1074 * 3, 123456789.123456789]
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for value in values:
            file.write(ValidationMetrics(1, value, 1))
    read = [line["val_loss"] for line in lines(path)]
    assert [struct.pack("d", value) for value in read] == [struct.pack("d", value) for value in values]


def test_each_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for count in (1, 2, 3):
        file.write(STEP)
        assert len(lines(path)) == count
    file.close()


def test_reopening_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with MetricsFile(path) as file:
            file.write(STEP)
    assert len(lines(path)) == 2


def test_optional_values_appear_when_they_are_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(StepMetrics(**{**vars(STEP), "mfu": 0.41, "sample_ids": [1, 5, 9]}))
    assert lines(path)[0]["mfu"] == 0.41
    assert lines(path)[0]["sample_ids"] == [1, 5, 9]


def test_a_value_that_json_lacks_is_an_error_and_leaves_no_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file, pytest.raises(ValueError, match="not JSON compliant"):
        file.write(ValidationMetrics(1, float("nan"), 1))
    assert path.read_bytes() == b""


def test_scalar_values_are_the_numbers_without_the_step() -> None:
    values = scalar_values(StepMetrics(**{**vars(STEP), "sample_ids": [1]}))
    assert values["loss"] == STEP.loss
    assert values["num_label_tokens"] == 4096.0
    assert not {"step", "sample_ids", "mfu"} & set(values)


def test_peak_memory_on_a_cpu_keeps_the_peak_of_this_process_alone() -> None:
    """A process that touches 200 MiB and frees them, started by one that holds 600 MiB."""
    program = (
        "from automodel.training.metrics import peak_memory_bytes\n"
        "before = peak_memory_bytes('cpu')\n"
        "block = b'x' * (200 * 2**20)\n"
        "del block\n"
        "print(before, peak_memory_bytes('cpu'))\n"
    )
    ballast = b"x" * (600 * 2**20)
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    del ballast
    before, after = map(int, output.split())
    assert before > 50 * 2**20
    assert 150 * 2**20 < after - before < 250 * 2**20
    if sys.platform == "linux":
        assert after < 650 * 2**20
