"""Hydra, called so that its errors are ours: compose a config, or run a task in a run folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from automodel.config.coerce import is_none
from automodel.config.errors import ConfigError
from automodel.config.hydra_errors import translate
from automodel.config.schema import register
from automodel.launch.arguments import Arguments


def compose_container(arguments: Arguments) -> dict[str, Any]:
    """Compose the config as plain containers, interpolations resolved. Makes no folder.

    Raises:
        ConfigError: the config cannot be composed.
    """

    def to_plain(composed: Any, run_dir: Path) -> dict[str, Any]:
        check_run_folder(run_dir, composed)
        return to_container(composed, arguments.overrides)

    return _compose(arguments, to_plain)


def compose_unresolved(arguments: Arguments) -> dict[str, Any]:
    """The same with interpolations as they are written, as Hydra records it in a run folder.

    Raises:
        ConfigError: the config cannot be composed.
    """
    from omegaconf import OmegaConf

    return _compose(arguments, lambda composed, _: OmegaConf.to_container(composed, resolve=False))


def _compose(arguments: Arguments, to_plain: Callable[[Any, Path], Any]) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict, read_write

    register()
    overrides = list(arguments.overrides)
    if arguments.config_dir:
        overrides.append(f"hydra.searchpath=['file://{arguments.config_dir}']")
    try:
        with initialize_config_dir(str(arguments.config_path), job_name="train", version_base="1.3"):
            composed = compose(arguments.config_name, overrides, return_hydra_config=True)
        # So that a config that refers to ${hydra:...} resolves as it will in the run.
        with read_write(composed.hydra), open_dict(composed.hydra):
            composed.hydra.runtime.output_dir = composed.hydra.run.dir
        run_dir = Path(composed.hydra.run.dir)
        HydraConfig.instance().set_config(composed)
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
        plain: dict[str, Any] = to_plain(composed, run_dir)
        return plain
    except (TypeError, AttributeError, KeyError) as error:
        # Hydra trips over some values before it checks them, such as a list for the choice of a group.
        raise translated(error, arguments.overrides, beyond_hydra=True) from error
    except Exception as error:
        raise translated(error, arguments.overrides) from error
    finally:
        HydraConfig.instance().cfg = None


def check_run_folder(run_dir: Path, composed: Any) -> None:
    """The folder can be made, and holds no earlier run that this one would mix with.

    Raises:
        ConfigError: names ``hydra.run.dir``.
    """
    existing = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        what = "cannot be written to" if existing.is_dir() else "is not a folder"
        raise ConfigError(
            "hydra.run.dir", run_dir, f"{existing} {what}", "a folder that is new, in one you can write to"
        )
    if is_none(composed.checkpoint.resume) and any(
        (run_dir / name).exists() for name in ("metrics.jsonl", "checkpoints")
    ):
        raise ConfigError(
            "hydra.run.dir",
            run_dir,
            "it holds a run already, and two runs must not mix in one folder",
            "another folder, or checkpoint.resume=auto to go on with that run",
        )


def run_hydra(task: Callable[[Any], Any], arguments: Arguments) -> None:
    """Have Hydra do what the command line asks, in its own way: run, sweep or print.

    Raises:
        ConfigError: Hydra refused the request.
        Exception: whatever ``task`` raised.
    """
    import hydra

    register()
    saved = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *arguments.argv]
    # Hydra then raises its errors instead of printing them and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        run = hydra.main(version_base="1.3", config_path=str(arguments.config_path), config_name="train")(task)
        run()
    except Exception as error:
        raise translated(error, arguments.overrides) from error
    finally:
        sys.argv = saved[0]
        del os.environ["HYDRA_FULL_ERROR"]
        if saved[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = saved[1]


def to_container(composed: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """A composed config as plain containers, interpolations resolved.

    Args:
        overrides: the command line's, for the error.

    Raises:
        ConfigError: a value is missing or refers to nothing.
    """
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except Exception as error:
        raise translated(error, overrides) from error


def translated(error: Exception, overrides: Sequence[str], beyond_hydra: bool = False) -> Exception:
    """``error`` as a ConfigError where it is one of Hydra's refusals, else itself.

    Args:
        beyond_hydra: also where Hydra has no error of its own and failed while composing.
    """
    if isinstance(error, ConfigError):
        return error
    refusal = translate(error, overrides)
    if refusal is None and beyond_hydra:
        rule = f"Hydra cannot compose these words: {error}"
        return ConfigError("command line", " ".join(overrides), rule, "group=choice and key=value; see --help")
    return refusal or error
