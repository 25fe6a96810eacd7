"""A pipeline schedule of the user's own, in torch's CSV format, read without torch.

One line a rank, one computation a cell: stage, kind, micro-batch, as in ``0F0``. Kinds are F (forward), B (backward),
I and W (its halves, for the inputs and for the weights); an empty cell waits. Communication is added by torch.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from automodel.config.errors import ConfigError

KEY = "distributed.pipeline.pp_schedule_csv"
_OVERLAP = ")OVERLAP_F_B"
_COMPUTATION = re.compile(r"(\d+)(F|B|I|W)(\d+)")


@dataclass(frozen=True)
class CsvSchedule:
    """What a file asks for.

    Attributes:
        stage_ranks: the pipeline rank of each stage.
        num_microbatches: of one schedule step.
        splits_backward: it has the kinds I and W.
    """

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    splits_backward: bool


def read_csv_schedule(path: str, pp_size: int) -> CsvSchedule:
    """Read and check a schedule.

    Raises:
        ConfigError: no such file, a cell that is no computation, a line too many or too few, a stage on two ranks, or
            a micro-batch whose forward or backward is missing.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(KEY, path, "there is no such file", "a file with a schedule in torch's CSV format, or none")
    with file.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.reader(lines) if row]
    if len(rows) != pp_size:
        raise _refusal(path, f"it has {len(rows)} lines, and there is one for each of pp_size={pp_size} ranks")
    ranks: dict[int, int] = {}
    seen: Counter[tuple[int, str, int]] = Counter()
    for rank, row in enumerate(rows):
        for cell in itertools.chain.from_iterable(map(_computations, row)):
            match = _COMPUTATION.fullmatch(cell)
            if match is None:
                raise _refusal(path, f"line {rank + 1} has the cell '{cell}', which is no computation")
            stage, kind, microbatch = int(match[1]), match[2], int(match[3])
            if ranks.setdefault(stage, rank) != rank:
                raise _refusal(path, f"stage {stage} is on rank {ranks[stage]} and on rank {rank}")
            seen[stage, kind, microbatch] += 1
    return _checked(path, ranks, seen)


def _computations(cell: str) -> list[str]:
    """The computations of one cell: none, one, or several that overlap, ``(0F1;3B0)OVERLAP_F_B``."""
    cell = cell.strip()
    if cell.startswith("(") and cell.endswith(_OVERLAP):
        return [part.strip() for part in cell[1 : -len(_OVERLAP)].split(";")]
    return [cell] if cell else []


def _checked(path: str, ranks: dict[int, int], seen: Counter[tuple[int, str, int]]) -> CsvSchedule:
    count = 1 + max((microbatch for _, _, microbatch in seen), default=-1)
    if not ranks or sorted(ranks) != list(range(len(ranks))):
        raise _refusal(path, f"it names the stages {sorted(ranks)}, and they are numbered from 0")
    for stage in ranks:
        for microbatch in range(count):
            kinds = sorted(kind for kind in "FBIW" for _ in range(seen[stage, kind, microbatch]))
            if kinds not in (["B", "F"], ["F", "I", "W"]):
                found = " ".join(f"{stage}{kind}{microbatch}" for kind in kinds) or "nothing"
                raise _refusal(
                    path, f"stage {stage} has {found} for micro-batch {microbatch}: one F, and one B or one I and one W"
                )
    splits = any(kind == "W" for _, kind, _ in seen)
    return CsvSchedule(tuple(ranks[stage] for stage in range(len(ranks))), count, splits)


def _refusal(path: str, rule: str) -> ConfigError:
    return ConfigError(KEY, path, rule, "one line a rank, cells such as 0F0, 0B0, 0I0, 0W0 (stage, kind, micro-batch)")
