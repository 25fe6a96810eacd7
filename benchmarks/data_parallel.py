"""One process, FSDP2 and DDP of this product against a bare PyTorch loop on the same model.

    python -m benchmarks.data_parallel [--seconds 200]

Every variant has processes of its own that live for the whole run and take turns of one step, with the bare loop
before and after every two: a ratio compares a turn with the bare turns around it. How to read the table:

- *tokens per CPU-second*: tokens of a step divided by the CPU time of all its ranks, all threads included.
- *ratio*: median over the rounds, and in brackets the smallest and the largest, which tell how quiet the machine was.
- *two bare loops* run at once and exchange nothing. What they lose is lost to the machine (caches, memory, sibling
  threads), so no variant with two ranks can be expected to reach more.
- *parameters + gradients*: the most bytes of whole or sharded parameters and their gradients that a rank held at once
  during a step, counted from the tensors' storages; buffers of a running collective are not in it.
- *peak RSS*: the largest rank's, libraries included, over the whole run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.measure import MEBIBYTE, describe_machine, median_and_range, print_table

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Variant:
    """A line of the table.

    Attributes:
        distributed: the ``distributed`` section; None: the bare loop.
        world_size: ranks; bare loops do not talk to one another.
    """

    name: str
    world_size: int
    distributed: dict[str, Any] | None


BARE = Variant("bare PyTorch loop", 1, None)
VARIANTS = (
    Variant("two bare loops", 2, None),
    Variant("this product, one process", 1, {"strategy": "fsdp2"}),
    Variant("FSDP2, 2 ranks (default)", 2, {"strategy": "fsdp2"}),
    Variant("FSDP2, defer_fsdp_grad_sync=false", 2, {"strategy": "fsdp2", "defer_fsdp_grad_sync": False}),
    Variant("FSDP2, gather_once_per_step=true", 2, {"strategy": "fsdp2", "gather_once_per_step": True}),
    Variant("DDP, 2 ranks", 2, {"strategy": "ddp"}),
)


def rank_main(variant: Variant, rank: int, meeting: str, connection: Connection) -> None:
    """Build the loop, then make a step and tell its CPU-seconds whenever asked."""
    import torch
    import torch.distributed as dist

    from automodel.training.metrics import peak_memory_bytes
    from benchmarks.loops import TOKENS_PER_STEP, BareLoop, HeldBytes, Loop, ProductLoop

    torch.set_num_threads(1)
    if variant.distributed is not None and variant.world_size > 1:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=variant.world_size)
    loop: Loop = BareLoop() if variant.distributed is None else ProductLoop(variant.distributed, variant.world_size)
    held = HeldBytes(loop.model)
    for _ in range(WARM_UP_STEPS):
        loop.step()
    held.close()
    connection.send(TOKENS_PER_STEP)
    while connection.recv():
        started = time.process_time()
        loop.step()
        connection.send(time.process_time() - started)
    connection.send((held.peak, peak_memory_bytes("cpu")))
    connection.recv()


@dataclass
class Ranks:
    """The living processes of a variant."""

    variant: Variant
    tokens_per_step: int = 0
    processes: list[BaseProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def start(self, meeting: str) -> None:
        """Start them and wait until they have warmed up."""
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.variant.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(self.variant, rank, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        self.tokens_per_step = self._answers()[0]

    def _answers(self) -> list[Any]:
        return [connection.recv() for connection in self.connections]

    def tokens_per_cpu_second(self) -> float:
        """Of one step, all ranks together."""
        for connection in self.connections:
            connection.send(True)
        loops = self.variant.world_size if self.variant.distributed is None else 1
        return self.tokens_per_step * loops / sum(self._answers())

    def finish(self) -> tuple[int, int]:
        """Bytes of parameters and gradients, and peak RSS, of the largest rank; ends the processes."""
        for connection in self.connections:
            connection.send(False)
        held, resident = zip(*self._answers(), strict=True)
        for process in self.processes:
            process.kill()
            process.join()
        return max(held), max(resident)


def take_turns(bare: Ranks, others: Sequence[Ranks], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Rounds for about ``seconds``; for each variant its (tokens per CPU-second, ratio) of each round."""
    results: dict[str, list[tuple[float, float]]] = {ranks.variant.name: [] for ranks in (bare, *others)}
    end = time.monotonic() + seconds
    before = bare.tokens_per_cpu_second()
    while time.monotonic() < end:
        for pair in (others[start : start + 2] for start in range(0, len(others), 2)):
            speeds = [ranks.tokens_per_cpu_second() for ranks in pair]
            after = bare.tokens_per_cpu_second()
            around = (before + after) / 2
            results[bare.variant.name].append((after, after / around))
            for ranks, speed in zip(pair, speeds, strict=True):
                results[ranks.variant.name].append((speed, speed / around))
            before = after
    return results


def measure(variants: Sequence[Variant], seconds: float) -> None:
    """Run all variants in turns and print the table."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.loops"])
    print(describe_machine(), flush=True)
    everyone = [Ranks(variant) for variant in (BARE, *variants)]
    with tempfile.TemporaryDirectory() as folder:
        for number, ranks in enumerate(everyone):
            ranks.start(f"file://{folder}/{number}")
        results = take_turns(everyone[0], everyone[1:], seconds)
        rows = []
        for ranks in everyone:
            speeds, ratios = zip(*results[ranks.variant.name], strict=True)
            held, resident = ranks.finish()
            speed, ratio = f"{statistics.median(speeds):.0f}", median_and_range(ratios)
            rows.append([ranks.variant.name, speed, ratio, f"{held / MEBIBYTE:.1f}", f"{resident / MEBIBYTE:.0f}"])
    print(f"{len(results[variants[0].name])} rounds", flush=True)
    memory = ("parameters + gradients, MiB a rank", "peak RSS, MiB a rank")
    print_table(["", "tokens per CPU-second", "ratio", *memory], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0, help="how long the rounds go on")
    measure(VARIANTS, parser.parse_args().seconds)
