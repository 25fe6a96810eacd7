"""Errors of configuration: what a person asked for cannot be done, and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(Exception):
    """An impossible request. ``train.py`` prints it on one screen and exits with code 2.

    Args:
        key: dotted name of the setting as the user writes it, e.g. ``distributed.tp_size``.
        value: what it was set to.
        rule: one sentence that states the rule which the value breaks.
        legal: the legal values, as a list or a phrase.
        hint: optional closing sentence, e.g. the nearest name of a misspelled key.
    """

    def __init__(self, key: str, value: Any, rule: str, legal: Iterable[Any] | str, hint: str | None = None) -> None:
        self.key = key
        self.value = value
        self.rule = rule
        self.legal = legal if isinstance(legal, str) else ", ".join(str(item) for item in legal)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [
            "impossible request, nothing was started",
            f"  key    {self.key}",
            f"  value  {shortened(str(self.value))}",
            f"  rule   {self.rule}",
            f"  legal  {self.legal}",
        ]
        if self.hint:
            lines.append(f"  hint   {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Any, ...]]:
        # Exceptions pickle by their args, which here is the finished text; checks run in another
        # process must come back with their fields.
        return ConfigError, (self.key, str(self.value), self.rule, self.legal, self.hint)


def shortened(text: str, limit: int = 400) -> str:
    """``text``, or its beginning where it would fill the screen."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text)} characters)"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The legal name most like a misspelled one, as a hint sentence, or None."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else None


def unknown_key(prefix: str, name: str, value: Any, names: Iterable[str]) -> ConfigError:
    """The error for a key that no dataclass field reads."""
    names = sorted(names)
    return ConfigError(
        f"{prefix}.{name}" if prefix else name,
        value,
        f"there is no setting of this name{f' in {prefix}' if prefix else ''}",
        names,
        nearest(name, names),
    )
