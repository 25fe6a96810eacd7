"""The table of models in docs/ is what a walk over all of them gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.pipeline_walk import TABLE, examine, planned_types
from tests.parity.ranks import Ranks

RESULTS = dict(line.strip("| ").split(" | ", 1) for line in TABLE.read_text().splitlines() if line.startswith("| "))
MODELS = {name: result for name, result in RESULTS.items() if name != "model type"}


def test_no_model_in_the_table_is_wrong() -> None:
    assert set(MODELS) <= set(planned_types())
    assert not [name for name, result in MODELS.items() if result.startswith("wrong")]
    assert sum(result == "exact" for result in MODELS.values()) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("model_type", planned_types())
def test_the_table_says_what_the_walk_finds(model_type: str, ranks: Callable[[int], Ranks]) -> None:
    assert MODELS[model_type] == examine(model_type, ranks(2))
