"""Saving and loading a checkpoint against a plain ``torch.save``, and the stall of a step by an asynchronous save.

    python benchmarks/checkpoint.py                      200 million parameters, a minute on a quiet machine
    python benchmarks/checkpoint.py --parameters 20e6 --folder /scratch

One process, fp32 weights and both moments of AdamW: 12 bytes a parameter. Every file is synced to the disk before the
clock stops, that of ``torch.save``, too. Loads read files that the save has left in the kernel's cache. The second
asynchronous save reuses the buffers of the first, as all later ones of a run do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from automodel.config.schema import CheckpointConfig
from automodel.training.checkpoint.folder import read_checkpoint, step_folder
from automodel.training.checkpoint.loader import load_checkpoint
from automodel.training.checkpoint.saver import CheckpointSaver, SaveRequest

NUM_LAYERS = 24


def build(num_parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of about this size, and AdamW after one step."""
    width = round((num_parameters / NUM_LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def plain_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with open(path, "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def plain_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=200e6)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the temporary folder")
    arguments = parser.parse_args()
    model, optimizer = build(int(arguments.parameters))
    count = sum(parameter.numel() for parameter in model.parameters())
    state_bytes = 12 * count
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    description = {"world_size": 1, "optimizer": "adamw"}

    def saver(asynchronous: bool) -> CheckpointSaver:
        config = CheckpointConfig(async_save=asynchronous)
        return CheckpointSaver(config, folder, model, optimizer, 0, 1, None, description)

    def request(step: int) -> SaveRequest:
        return SaveRequest(step, {}, metrics_offset=0, val_loss=None)

    try:
        plain = folder / "plain.pt"
        plain_write = seconds(lambda: plain_save(plain, model, optimizer))
        plain_read = seconds(lambda: plain_load(plain, model, optimizer))
        plain.unlink()
        write = seconds(lambda: saver(False).save(request(1)))
        read = seconds(lambda: load_checkpoint(read_checkpoint(step_folder(folder, 1)), model, optimizer, 0, 1, None))
        written = sum(path.stat().st_size for path in step_folder(folder, 1).iterdir())
        background = saver(True)
        background.save(request(2), final=True)
        stall = seconds(lambda: background.save(request(3)))
        rest = seconds(background.wait)
    finally:
        shutil.rmtree(folder)
    print(f"{count / 1e6:.0f} M parameters, {state_bytes / 2**20:,.0f} MiB of weights and moments")
    print(f"{'':28} {'seconds':>8}  ratio")
    print(f"{'torch.save, synced':28} {plain_write:8.2f}   1.00")
    print(f"{'save':28} {write:8.2f} {write / plain_write:6.2f}  of torch.save")
    print(f"{'torch.load':28} {plain_read:8.2f}   1.00")
    print(f"{'load, checksums verified':28} {read:8.2f} {read / plain_read:6.2f}  of torch.load")
    print(f"{'stall by an async save':28} {stall:8.2f} {stall / write:6.2f}  of a save")
    print(f"{'its rest, in the background':28} {rest:8.2f}")
    print(f"bytes written / bytes of state: {written / state_bytes:.4f}")


if __name__ == "__main__":
    main()
