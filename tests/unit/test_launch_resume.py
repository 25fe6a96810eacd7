"""The words that bring a run's own config back."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from automodel.launch.resume import changed_since, quoted


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.5,
        1e-05,
        "none",
        "a b=c, [d] {e}",
        "it's",
        "1",
        [1, "two", None],
        {"a": 1, "b": [True]},
        [],
        {},
    ],
)
def test_a_value_survives_the_grammar_of_overrides(value: object) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"++key={quoted(value)}"])
    assert override.value() == value
    assert type(override.value()) is type(value)


def test_only_what_differs_is_brought_back() -> None:
    then = {"a": {"same": 1, "changed": 2, "gone": 3}, "checkpoint": {"resume": "old"}, "list": [1, 2], "empty": {}}
    now = {"a": {"same": 1, "changed": 5, "new": 7}, "checkpoint": {"resume": None}, "list": [1], "empty": {}}
    assert changed_since(then, now) == ["++a.changed=2", "++a.gone=3", "++list=[1,2]"]
