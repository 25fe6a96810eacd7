"""What the benchmarks share: tables, medians, and the memory of a process tree.

Every figure of merit is a ratio within one run. Variants take turns, so that a busy machine slows all of them, and
work is counted in CPU-seconds, which other programs on the machine disturb less than they disturb the clock.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

MEBIBYTE = 2**20


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table whose columns line up in a terminal too."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines), flush=True)


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """``0.97 (0.95-0.99)``: the median and the extremes, so that a table shows its own noise."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def describe_machine() -> str:
    """Processor and load, one line: a ratio from a machine with other jobs is worth less."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    load = Path("/proc/loadavg").read_text().split()[0] if Path("/proc/loadavg").exists() else "unknown"
    name = models[0] if models else platform.machine()
    return f"{len(models) or '?'} x {name}, Python {platform.python_version()}, load {load} at the start"


def process_tree(root: int) -> list[int]:
    """``root`` and all processes that descend from it. Linux."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold spaces; the parent is the second field after it.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    tree, pending = [], [root]
    while pending:
        process = pending.pop()
        tree.append(process)
        pending += children.get(process, [])
    return tree


def resident_bytes(process: int) -> tuple[int, int]:
    """(RSS, PSS) of a process now; PSS counts a page shared by n processes as 1/n. (0, 0) once it is gone."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return sizes.get("Rss", 0), sizes.get("Pss", 0)
