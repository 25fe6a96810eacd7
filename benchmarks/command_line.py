"""How long ``train.py`` takes to answer what needs no training.

    python -m benchmarks.command_line [--rounds 7]

The commands take turns. How to read the table:

- *seconds*: from the command to its end, median and in brackets the smallest and the largest.
- *CPU seconds*: what the command itself computed, median: about the time that it takes on a machine without other work.
  The check against the model's class runs in a process of its own, which is not in this figure.
- *exit code*: 0, or 2 for a request that is refused.

The aims: one second for all that the settings alone decide, six where the model's class is needed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import describe_machine, median_and_range, print_table

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "the list of options": ["--help"],
    "the composed config": ["--cfg", "job"],
    "refused: a size that does not fit": ["distributed.tp_size=3"],
    "refused: a misspelled key": ["training.max_step=5"],
    "refused: files that do not exist": ["data=text", "data.files=nothing/*.txt"],
    "refused by the model's class": ["model.config.hiden_size=64", "launch.device=cpu"],
}
SECOND_TIER = "refused by the model's class"


def answer(words: list[str], folder: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds and exit code of ``python train.py words`` in an empty folder."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    return seconds, usage.ru_utime + usage.ru_stime, process.returncode


def measure(rounds: int) -> None:
    """Run all commands in turns and print the table."""
    print(describe_machine(), flush=True)
    results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        # Once before the rounds, so that the first command is not the one that fills the disk cache.
        for words in COMMANDS.values():
            answer(words, folder)
        for _ in range(rounds):
            for name, words in COMMANDS.items():
                results[name].append(answer(words, folder))
    rows = []
    for name, words in COMMANDS.items():
        seconds, cpu_seconds, codes = zip(*results[name], strict=True)
        cpu = "" if name == SECOND_TIER else f"{statistics.median(cpu_seconds):.2f}"
        rows.append([name, " ".join(words), median_and_range(seconds), cpu, ", ".join(map(str, sorted(set(codes))))])
    print_table(["", "train.py ...", "seconds", "CPU seconds", "exit code"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    measure(parser.parse_args().rounds)
