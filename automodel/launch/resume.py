"""``checkpoint.resume=<run folder>``: the command line of that run, with its config, continued inside its folder.

This must happen before Hydra composes for good: group choices and the run folder are decided there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from automodel.config.coerce import is_none
from automodel.config.errors import ConfigError
from automodel.config.hydra_errors import split_override
from automodel.launch.arguments import Arguments
from automodel.launch.compose import compose_container, compose_unresolved
from automodel.training.checkpoint.folder import RESUME, find_named, step_of

RUN_DIR = "hydra.run.dir"


def compose_continued(arguments: Arguments) -> tuple[Arguments, dict[str, Any]]:
    """Compose the config; where it resumes a run folder, that run's config with this command line on top.

    The run's own words come from its newest whole checkpoint. Where the files in ``conf/`` have changed since, the
    values of that time hold.

    Returns:
        the command line for Hydra, and the composed config as plain containers.

    Raises:
        ConfigError: the config cannot be composed, or the folder has no whole checkpoint.
    """
    container = compose_container(arguments)
    resume = (container.get("checkpoint") or {}).get("resume")
    if is_none(resume) or resume == "auto" or step_of(Path(str(resume))) is not None:
        return arguments, container
    run_dir = Path(str(resume)).resolve()
    index = find_named(str(resume)).index
    if index["overrides"] is None:
        raise ConfigError(
            RESUME,
            resume,
            "the run was not started through train.py and has no config of its own",
            f"one of its step folders, such as {run_dir}/checkpoints/step_{index['step']}",
        )
    typed = [word for word in arguments.overrides if not _is_run_dir(word, run_dir)]
    recorded = [word for word in index["overrides"] if _key(word) != RESUME]
    as_recorded = compose_unresolved(_with_overrides(arguments, recorded))
    words = [word for word in recorded if _key(word) not in {_key(other) for other in typed}]
    words += changed_since(index["composed"], as_recorded)
    continued = _with_overrides(arguments, [*words, *typed, f"{RUN_DIR}={quoted(str(run_dir))}"])
    return continued, compose_container(continued)


def changed_since(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Override words that bring back the values of ``then`` where ``now`` has others; what is new stays."""
    present = dict(_leaves(now))
    return [
        f"++{key}={quoted(value)}"
        for key, value in _leaves(then)
        if key != RESUME and (key not in present or present[key] != value)
    ]


def quoted(value: Any) -> str:
    """A plain value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, Sequence):
        return f"[{','.join(quoted(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{quoted(item)}' for key, item in value.items())}}}"
    return repr(value)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _with_overrides(arguments: Arguments, overrides: Sequence[str]) -> Arguments:
    options = arguments.argv[: len(arguments.argv) - len(arguments.overrides)]
    return dataclasses.replace(arguments, argv=(*options, *overrides), overrides=tuple(overrides))


def _key(word: str) -> str:
    return split_override(word)[1]


def _is_run_dir(word: str, run_dir: Path) -> bool:
    """Whether a word names the run folder; another folder cannot be meant.

    Raises:
        ConfigError: it names another folder.
    """
    _, key, value = split_override(word)
    if key != RUN_DIR:
        return False
    if Path(value.strip("'\"")).resolve() != run_dir:
        raise ConfigError(
            RUN_DIR,
            value,
            f"checkpoint.resume={run_dir} goes on inside that folder",
            "leave it out; or for a new folder, checkpoint.resume=<one of the step_<N> folders>",
        )
    return True
