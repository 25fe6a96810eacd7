"""Devices of this host, counted without torch; and the device a run asks for."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from automodel.config.errors import ConfigError

DeviceType = Literal["cpu", "cuda"]


def count_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs that torch would see, as far as files and variables tell. 0 with a CPU build of torch.

    A first answer within a millisecond, for refusals that must not wait for torch's import; the
    count that starts processes comes from torch itself.

    Args:
        environ: where CUDA_VISIBLE_DEVICES is looked up.
        root: root of the file system.
    """
    if _is_cpu_build():
        return 0
    present = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    if present == 0:
        present = sum(1 for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if present == 0 or "CUDA_VISIBLE_DEVICES" not in environ:
        return present
    visible = 0
    for name in environ["CUDA_VISIBLE_DEVICES"].split(","):
        # CUDA stops at the first entry that names no device.
        if not name.strip() or name.strip().startswith("-"):
            break
        visible += 1
    return visible


def choose_device(requested: Literal["auto", "cpu", "cuda"], num_gpus: int) -> DeviceType:
    """The device type of a run.

    Raises:
        ConfigError: CUDA is asked for and there is no GPU.
    """
    if requested == "cpu" or (requested == "auto" and num_gpus == 0):
        return "cpu"
    if num_gpus == 0:
        raise ConfigError("launch.device", requested, "no CUDA device is visible on this host", "cpu, auto")
    return "cuda"


def _is_cpu_build() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
