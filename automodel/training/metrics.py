"""metrics.jsonl: what every run measures, one JSON object a line."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch


@dataclass(frozen=True)
class StepMetrics:
    """One training step, over the global batch.

    Attributes:
        step: from 1.
        epoch: from 0; the epoch of the step's first sample.
        loss: sum over trained tokens divided by their number.
        grad_norm: global norm before clipping.
        lr: the rate that the step used.
        num_label_tokens: trained tokens of the global batch.
        tokens_per_second: input tokens of the global batch, all ranks together, per second.
        step_time_s: seconds.
        peak_memory_bytes: of the largest rank.
        mfu: model FLOPs utilization, 0 to 1; None where the device's peak is not known.
        sample_ids: sorted; None unless asked for.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    num_label_tokens: int
    tokens_per_second: float
    step_time_s: float
    peak_memory_bytes: int
    mfu: float | None = None
    sample_ids: list[int] | None = None


@dataclass(frozen=True)
class ValidationMetrics:
    """One pass over the validation samples after ``step`` steps; ``val_loss`` is a mean over trained tokens."""

    step: int
    val_loss: float
    val_num_label_tokens: int


class MetricsFile:
    """Appends to a JSON-lines file; each line is one unbuffered write, whole or absent after a kill.

    Floats are written unrounded: reading the line gives back the same bits.

    Args:
        path: made if it is not there.
        keep_bytes: what a resumed run keeps of the file, the lines up to its checkpoint; None: all.

    Raises:
        ValueError: the file is shorter than that, so lines of finished steps are missing.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        if keep_bytes is not None:
            if self.size < keep_bytes:
                self._file.close()
                raise ValueError(f"{path} is shorter than when the checkpoint was saved: lines are missing")
            self._file.truncate(keep_bytes)

    @property
    def size(self) -> int:
        """Bytes written so far, those of earlier processes included."""
        return os.fstat(self._file.fileno()).st_size

    def write(self, metrics: StepMetrics | ValidationMetrics) -> None:
        """Append one line; fields that are None are left out.

        Raises:
            ValueError: a value is not finite; JSON has no such numbers.
            OSError: the disk did not take the whole line.
        """
        line = json.dumps(present_values(metrics), allow_nan=False).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            raise OSError(f"{self._file.name}: wrote {written} of {len(line)} bytes")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def present_values(metrics: StepMetrics | ValidationMetrics) -> dict[str, Any]:
    """Fields by name, in the order of the class, without those that are None."""
    return {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}


def scalar_values(metrics: StepMetrics | ValidationMetrics) -> dict[str, float]:
    """The numbers of a line for a metric logger, without the step, which loggers take by itself."""
    return {
        name: float(value)
        for name, value in present_values(metrics).items()
        if name != "step" and isinstance(value, (int, float))
    }


def peak_memory_bytes(device_type: str) -> int:
    """Peak memory of this process so far: allocated tensors on CUDA, resident memory on a CPU."""
    return torch.cuda.max_memory_allocated() if device_type == "cuda" else _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    # getrusage on Linux counts what the parent process had when it started this one, so that a small
    # run under a large test runner or sweep looks large. The kernel's own mark does not.
    if sys.platform == "linux":
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, others KiB.
    return peak if sys.platform == "darwin" else peak * 1024
