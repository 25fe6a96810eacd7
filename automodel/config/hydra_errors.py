"""Hydra's and OmegaConf's own errors, told in the format of :class:`ConfigError`."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from automodel.config.errors import ConfigError, nearest
from automodel.config.help import group_choices
from automodel.config.schema import TrainConfig

_PREFIXES = "+~"
_NOT_TYPED = "(not on the command line)"
_CONF = Path(__file__).resolve().parents[2] / "conf"


def translate(exception: BaseException, overrides: Sequence[str]) -> ConfigError | None:
    """The :class:`ConfigError` that says what ``exception`` means, or None if it is no error of the config.

    Args:
        exception: what composing or resolving the config raised.
        overrides: the command line's overrides as typed; errors that carry no value take it from here.
    """
    if isinstance(exception, ConfigError):
        return exception
    if isinstance(exception, OverrideParseException):
        return _unreadable(exception)
    if isinstance(exception, MissingConfigException):
        return _missing_choice(exception, overrides)
    if isinstance(exception, yaml.YAMLError):
        return _bad_yaml(exception)
    causes = list(_chain(exception))
    for cause in causes:
        # The innermost error knows the key best; those that Hydra wraps around it repeat it.
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return _omegaconf(cause, overrides)
    for cause in causes:
        if isinstance(cause, OmegaConfBaseException):
            return _without_key(cause, overrides)
    if isinstance(exception, ConfigCompositionException):
        return _composition(exception, overrides)
    if isinstance(exception, ValueError) and "Config group override must be" in str(exception):
        return _not_a_choice(overrides)
    return None


def split_override(override: str) -> tuple[str, str, str]:
    """``+a.b=3`` as (``+``, ``a.b``, ``3``)."""
    name, _, value = override.partition("=")
    key = name.lstrip(_PREFIXES)
    return name[: len(name) - len(key)], key.strip(), value.strip()


def _chain(exception: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = exception
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _value_of(key: str, overrides: Sequence[str]) -> str | None:
    """What the last override of ``key``, or of something inside it, set."""
    for override in reversed(overrides):
        _, name, value = split_override(override)
        if name == key or name.startswith((f"{key}.", f"{key}@")):
            return value
    return None


def _unreadable(exception: OverrideParseException) -> ConfigError:
    override = str(exception.override)
    prefix, key, value = split_override(override)
    if "=" not in override and not override.startswith("~"):
        return ConfigError(
            override,
            "(none)",
            "an override is a key and a value",
            f"{override}=<value>",
        )
    reason = next((line.strip() for line in exception.message.splitlines() if line.strip()), "")
    if reason.startswith("LexerNoViableAltException"):
        reason = "a character has no meaning where it stands"
    return ConfigError(
        prefix + key,
        value,
        f"Hydra cannot read this override ({reason})",
        "key=value, key=[a,b], key={a:1}; quotes around other special characters",
        f"""for a value with special characters: '{key}="{value}"'""" if not {'"', "'"} & set(value) else None,
    )


def _missing_choice(exception: MissingConfigException, overrides: Sequence[str]) -> ConfigError:
    missing = exception.missing_cfg_file or ""
    group, _, choice = missing.rpartition("/")
    options = sorted(exception.options or [])
    if not group:
        return ConfigError("--config-name", missing or "(none)", "there is no such config file", options or "train")
    typed = _value_of(group, overrides)
    rule = "there is no such choice in this group"
    if typed is None:
        # Another file names it: an experiment or a preset.
        rule = f"there is no such choice in this group ({str(exception).splitlines()[0]})"
    return ConfigError(group, choice if choice else "(empty)", rule, options, nearest(choice, options))


def _not_a_choice(overrides: Sequence[str]) -> ConfigError:
    """``logger=null``, ``model=3``: Hydra does not say which group it was."""
    for override in overrides:
        _, key, value = split_override(override)
        choices = _choices(key)
        if not key:
            return ConfigError(override, value, "an override is a key and a value", "key=value")
        if choices and value not in choices:
            return ConfigError(
                key, value, "a config group takes the name of one of its choices", choices, nearest(value, choices)
            )
    return ConfigError(
        "config",
        " ".join(overrides),
        "a config group takes the name of one of its choices",
        "see python train.py --help",
    )


def _bad_yaml(exception: yaml.YAMLError) -> ConfigError:
    mark = getattr(exception, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}" if mark is not None else _NOT_TYPED
    problem = getattr(exception, "problem", None) or str(exception)
    return ConfigError("config file", where, f"the file is not valid YAML ({problem})", "YAML with every key once")


def _omegaconf(cause: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError:
    key = str(cause.full_key)
    typed = _value_of(key, overrides)
    value = _NOT_TYPED if typed is None else typed
    reason = str(cause).splitlines()[0].strip()
    if isinstance(cause, MissingMandatoryValue):
        return ConfigError(key, "???", "this value must be given", f"{key}=<value>")
    if isinstance(cause, GrammarParseError):
        return ConfigError(key, value, f"the reference cannot be read ({reason})", "${key} of an existing key")
    if isinstance(cause, InterpolationResolutionError):
        legal = "${key} of an existing key, or a plain value"
        return ConfigError(key, value, f"the reference cannot be resolved ({reason})", legal)
    if isinstance(cause, (ConfigKeyError, AttributeError)):
        return _unknown_key(cause, key, value)
    if f"~{key}" in [override.partition("=")[0] for override in overrides]:
        return ConfigError(
            f"~{key}", value or "(none)", "a setting cannot be taken out", f"{key}=none, where none is legal"
        )
    if key == "model.config":
        legal = "fields of the model's configuration class, such as model.config.num_hidden_layers=4"
        return ConfigError(key, value, "this is a section and takes nested keys", legal)
    names = _section_names(key)
    if names:
        return ConfigError(key, value, "this is a section and takes nested keys", names)
    return ConfigError(key, value, f"the value has the wrong type ({reason})", "a value of the type that the key has")


def _section_names(key: str) -> list[str]:
    """The keys of a section of the schema; empty where ``key`` is no section."""
    node: typing.Any = TrainConfig
    for name in key.split("."):
        node = typing.get_type_hints(node).get(name) if dataclasses.is_dataclass(node) else None
    return sorted(field.name for field in dataclasses.fields(node)) if dataclasses.is_dataclass(node) else []


def _unknown_key(cause: OmegaConfBaseException, key: str, value: str) -> ConfigError:
    section, _, name = key.rpartition(".")
    names = _keys(cause.parent_node)
    if not section:
        groups = _groups()
        names = sorted({*names, *groups} - {"hydra"})
    if not names:
        return ConfigError(
            key, value, f"{section or key} is a single value and has no nested keys", f"{section}=<value>"
        )
    where = f" in {section}" if section else ""
    return ConfigError(key, value, f"there is no setting or group of this name{where}", names, nearest(name, names))


def _without_key(cause: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError:
    reason = str(cause).splitlines()[0].strip()
    for override in overrides:
        prefix, key, value = split_override(override)
        if "${" in value:
            return ConfigError(
                prefix + key, value, f"the reference cannot be read: {reason}", "${key} of an existing key"
            )
    return ConfigError("config", " ".join(overrides) or "(none)", reason, "see python train.py --cfg job")


def _composition(exception: ConfigCompositionException, overrides: Sequence[str]) -> ConfigError:
    message = str(exception).strip() or type(exception).__name__
    quoted = re.findall(r"'([^']*)'", message)
    for override in overrides:
        prefix, key, value = split_override(override)
        named = key in quoted or any(split_override(item)[1] == key for item in quoted)
        if not (named or override in message or message.startswith((f"{key} appears", f"Multiple values for {key}."))):
            continue
        return _composition_of(message, prefix, key, value)
    first = message.splitlines()[0]
    return ConfigError("config", " ".join(overrides) or "(none)", first, "see python train.py --help")


def _composition_of(message: str, prefix: str, key: str, value: str) -> ConfigError:
    """The rule that one override broke, told from Hydra's message."""
    choices = _choices(key.partition("@")[0])
    if "Ambiguous value" in message or "requires --multirun" in message:
        return ConfigError(
            key,
            value,
            "several values are a sweep, which -m asks for",
            f"one value; or -m; or a list: '{key}=[{value}]'",
        )
    if "Sweeping over Hydra's configuration" in message:
        return ConfigError(key, value, "Hydra's own settings cannot be swept over", "one value")
    if prefix == "~":
        rule = "there is nothing of this name, or not with this value, to take out"
        names = choices or sorted(_groups())
        return ConfigError(f"~{key}", value or "(none)", rule, names, nearest(value if choices else key, names))
    if choices and "@" not in key:
        return ConfigError(prefix + key, value, "this group is there already and takes one choice", f"{key}={value}")
    if prefix.startswith("+"):
        return ConfigError(prefix + key, value, "this key is there already", f"{key}={value}")
    groups = sorted(_groups())
    group = key.partition("@")[0].partition("/")[0]
    return ConfigError(key, value, "there is no such config group", groups, nearest(group, groups))


def _keys(node: object) -> list[str]:
    try:
        return sorted(str(name) for name in node.keys())  # type: ignore[attr-defined]  # noqa: SIM118
    except (AttributeError, OmegaConfBaseException):  # a single value, or a missing one
        return []


def _groups() -> list[str]:
    """The config groups, from Hydra's search path while it is set, else from the project's folder."""
    if GlobalHydra.instance().is_initialized():
        return [name for name in GlobalHydra.instance().config_loader().list_groups("") if name != "hydra"]
    return list(group_choices(_CONF)) if _CONF.is_dir() else []


def _choices(group: str) -> list[str]:
    """A group's choices, the same way; empty where it is no group."""
    if GlobalHydra.instance().is_initialized():
        try:
            return list(GlobalHydra.instance().config_loader().get_group_options(group)) if group else []
        except HydraException:
            return []
    return group_choices(_CONF).get(group, []) if _CONF.is_dir() else []
