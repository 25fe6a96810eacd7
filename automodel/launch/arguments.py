"""The command line, as Hydra reads it: which kind of call is this?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from automodel.config.errors import ConfigError, nearest

# Options of Hydra that print something and run nothing.
_QUERIES = ("hydra_help", "version", "cfg", "info", "shell_completion")


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        argv: the words to hand to Hydra, with paths made absolute.
        overrides: ``key=value`` words.
        config_path: the folder of configs, absolute.
        config_dir: a further folder to search, absolute, or None.
        help: ``--help``.
        query: asks Hydra to print something instead of running.
        multirun: a sweep.
    """

    argv: tuple[str, ...]
    overrides: tuple[str, ...]
    config_path: Path
    config_name: str
    config_dir: Path | None
    help: bool
    query: bool
    multirun: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        options = sorted(option for action in self._actions for option in action.option_strings)
        wrong = message.rsplit(" ", 1)[-1]
        raise ConfigError("command line", message, "this is not an option", options, nearest(wrong, options))


def parse_arguments(argv: Sequence[str], config_path: Path) -> Arguments:
    """Parse the words after the program's name.

    Args:
        config_path: the folder of configs where ``--config-path`` does not say another; a relative
            ``--config-path`` starts from this folder's parent.

    Raises:
        ConfigError: an unknown option.
    """
    parsed = _parser().parse_intermixed_args(list(argv))
    path = config_path.parent.joinpath(parsed.config_path) if parsed.config_path else config_path
    multirun = parsed.multirun or any(word.lstrip("+").lower() == "hydra.mode=multirun" for word in parsed.overrides)
    return Arguments(
        argv=tuple(_options_first(_without_config_path(argv), parsed.overrides)),
        overrides=tuple(parsed.overrides),
        config_path=path.resolve(),
        config_name=parsed.config_name or "train",
        config_dir=Path(parsed.config_dir).resolve() if parsed.config_dir else None,
        help=parsed.help,
        query=any(getattr(parsed, name) for name in _QUERIES) or bool(parsed.experimental_rerun),
        multirun=multirun,
    )


def _parser() -> argparse.ArgumentParser:
    """Hydra's options; its own parser is private."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for option, short in (
        ("help", "h"),
        ("hydra-help", None),
        ("version", None),
        ("resolve", None),
        ("run", "r"),
        ("multirun", "m"),
        ("shell-completion", "sc"),
    ):
        parser.add_argument(f"--{option}", *([f"-{short}"] if short else []), action="store_true")
    for option, short in (("package", "p"), ("config-path", "cp"), ("config-name", "cn"), ("config-dir", "cd")):
        parser.add_argument(f"--{option}", f"-{short}")
    parser.add_argument("--experimental-rerun")
    parser.add_argument("--cfg", "-c")
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser


def _options_first(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """``a=1 -m b=2`` as ``-m a=1 b=2``: Hydra does not understand an option between two overrides."""
    rest = list(overrides)
    options = []
    for word in argv:
        if word in rest:
            rest.remove(word)
        else:
            options.append(word)
    return [*options, *overrides]


def _without_config_path(argv: Sequence[str]) -> list[str]:
    """Drop ``--config-path``, whose relative values Hydra would start from this package's folder."""
    words = list(argv)
    kept: list[str] = []
    while words:
        word = words.pop(0)
        if word in ("--config-path", "-cp"):
            words = words[1:]
        elif not word.startswith(("--config-path=", "-cp=")):
            kept.append(word)
    return kept
