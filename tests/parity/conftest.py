from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import dataclasses
import json

import pytest
import torch

from tests.parity.cases import Case, Outcome, run_case
from tests.parity.ranks import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """World size -> its ranks, started once a session."""
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        return started.setdefault(world_size, Ranks(world_size))

    yield get
    for group in started.values():
        group.close()


@pytest.fixture(scope="session")
def reference() -> Callable[[Case], Outcome]:
    """Case -> its reference run R1: the same settings on one process; each is run once a session."""
    known: dict[str, Outcome] = {}

    def get(case: Case) -> Outcome:
        alone = dataclasses.replace(case, distributed={}, fault=None)
        key = json.dumps(dataclasses.asdict(alone), sort_keys=True)
        if key not in known:
            known[key] = run_case(alone, 1)
        return known[key]

    return get
