"""How long a run takes from the command to its first step, and what its processes hold in memory.

    python -m benchmarks.startup [--rounds 4]

Real ``python train.py`` runs of the default model on its default data, with 1, 2, 4 and 8 ranks on this host in turns;
the eight samples of a step are short and are shared out, so all of them train equally much. How to read the tables:

- *seconds to the first step*: from the command to the line of step 1 in metrics.jsonl, written after the first update;
  median, and in brackets the smallest and the largest. Composing, checking, importing torch and transformers, reading
  and tokenising the corpus, and building the model are in it.
- *ratio*: to one rank in the same round; median, smallest and largest. More ranks than cores take turns on them.
- *RSS*, *PSS*: summed over the launcher, the fork server and the ranks after the second step. PSS counts a page that n
  processes share once, not n times, so it is what the run takes from the machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import MEBIBYTE, describe_machine, median_and_range, print_table, process_tree, resident_bytes

ROOT = Path(__file__).resolve().parents[1]
WORLD_SIZES = (1, 2, 4, 8)
TIMEOUT_SECONDS = 240.0
SETTINGS = (
    "precision=fp32",
    "launch.device=cpu",
    "training.global_batch_size=8",
    "training.local_batch_size=1",
    "training.seq_length=32",
    "training.val_at_end=false",
    "training.generate_tokens=0",
)


class Run:
    """One ``python train.py``; a context manager that leaves no process behind."""

    def __init__(self, world_size: int, max_steps: int) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.run_dir = Path(self._folder.name, "run")
        words = (
            f"distributed.dp_size={world_size}",
            f"training.max_steps={max_steps}",
            f"hydra.run.dir={self.run_dir}",
        )
        self._errors = Path(self._folder.name, "errors.txt")
        self.started = time.perf_counter()
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *SETTINGS, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        # The ranks end with their launcher.
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()

    def seconds_to_step(self, step: int) -> float:
        """Wait for the line of ``step``.

        Raises:
            RuntimeError: the run ended before it, or took too long.
        """
        metrics = self.run_dir / "metrics.jsonl"
        while True:
            ended = self.process.poll() is not None
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
                return time.perf_counter() - self.started
            if ended or time.perf_counter() - self.started > TIMEOUT_SECONDS:
                self.process.kill()
                raise RuntimeError(f"no step {step}:\n{self._errors.read_text()}")
            time.sleep(0.01)


def measure(rounds: int) -> None:
    """Start all world sizes in turns, then look at the memory of each once; print the tables."""
    print(describe_machine(), flush=True)
    seconds: dict[int, list[float]] = {world_size: [] for world_size in WORLD_SIZES}
    for number in range(rounds + 1):
        for world_size in WORLD_SIZES:
            with Run(world_size, max_steps=1) as run:
                elapsed = run.seconds_to_step(1)
            # The first round fills the disk cache.
            if number > 0:
                seconds[world_size].append(elapsed)
    rows = []
    for world_size in WORLD_SIZES:
        ratios = [own / one for own, one in zip(seconds[world_size], seconds[1], strict=True)]
        rows.append([str(world_size), median_and_range(seconds[world_size], 1), median_and_range(ratios)])
    print_table(["ranks", "seconds to the first step", "ratio"], rows)
    print()
    rows = []
    for world_size in WORLD_SIZES:
        with Run(world_size, max_steps=100_000) as run:
            run.seconds_to_step(2)
            sizes = [resident_bytes(process) for process in process_tree(run.process.pid)]
        rss, pss = (sum(column) for column in zip(*sizes, strict=True))
        rows.append([str(world_size), str(len(sizes)), f"{rss / MEBIBYTE:.0f}", f"{pss / MEBIBYTE:.0f}"])
    print_table(["ranks", "processes", "RSS, MiB", "PSS, MiB"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds; one more goes before them")
    measure(parser.parse_args().rounds)
