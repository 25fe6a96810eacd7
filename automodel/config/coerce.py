"""From a plain mapping to typed dataclasses, with errors that name the key.

YAML and the command line bring ``none`` and ``"2"`` as strings; every optional field takes
none/None/null alike, and a quoted number is a number.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from automodel.config.errors import ConfigError, unknown_key

T = TypeVar("T")
NONE_STRINGS = frozenset({"none", "null", "~"})


def is_none(value: Any) -> bool:
    """True for None and for the strings that stand for it."""
    return value is None or (isinstance(value, str) and value.strip().lower() in NONE_STRINGS)


def from_mapping(cls: type[T], mapping: Mapping[str, Any] | None, prefix: str = "") -> T:
    """Build dataclass ``cls`` from ``mapping``.

    Args:
        cls: a dataclass; missing keys take its defaults.
        mapping: plain containers only.
        prefix: dotted name of the mapping, for error messages.

    Raises:
        ConfigError: unknown key (with the nearest name) or a value of the wrong type.
    """
    mapping = {} if mapping is None else mapping
    if not isinstance(mapping, Mapping):
        raise ConfigError(prefix, mapping, "this is a section and takes nested keys", _names(cls))
    hints = typing.get_type_hints(cls)
    for name, value in mapping.items():
        if name not in hints:
            raise unknown_key(prefix, str(name), value, _names(cls))
    values = {
        str(name): coerce(value, hints[name], f"{prefix}.{name}" if prefix else str(name))
        for name, value in mapping.items()
    }
    return cls(**values)


def coerce(value: Any, hint: Any, key: str) -> Any:
    """Convert ``value`` to the type ``hint``.

    Raises:
        ConfigError: the value is not of that type.
    """
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_mapping(hint, value, key)
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, get_args(hint), key)
    if origin is typing.Literal:
        return _coerce_literal(value, get_args(hint), key)
    if origin in (list, tuple):
        return _coerce_sequence(value, hint, key)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(key, value, "a mapping of names to values")
        item = get_args(hint)[1]
        return {str(name): coerce(v, item, f"{key}.{name}") for name, v in value.items()}
    return _coerce_scalar(value, hint, key)


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _wrong(key: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(key, value, f"the value has the wrong type ({type(value).__name__})", wanted)


def _coerce_union(value: Any, options: tuple[Any, ...], key: str) -> Any:
    optional = type(None) in options
    rest = [option for option in options if option is not type(None)]
    if optional and is_none(value):
        return None
    legal: list[str] = []
    for option in rest:
        try:
            return coerce(value, option, key)
        except ConfigError as error:
            # A dataclass option knows its own keys: its error says more than "wrong type".
            if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
                raise
            legal.append(error.legal)
    raise _wrong(key, value, " or ".join(legal + (["none"] if optional else [])))


def _coerce_literal(value: Any, options: tuple[Any, ...], key: str) -> Any:
    for option in options:
        same = value == option and isinstance(value, bool) == isinstance(option, bool)
        if same or (isinstance(value, str) and value.lower() == str(option).lower()):
            return option
    words = [str(option).lower() if isinstance(option, bool) else str(option) for option in options]
    raise ConfigError(key, value, "the value is not one of the choices", words)


def _coerce_sequence(value: Any, hint: Any, key: str) -> Any:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise _wrong(key, value, "a list")
    args = get_args(hint)
    if get_origin(hint) is list:
        return [coerce(item, args[0], f"{key}[{i}]") for i, item in enumerate(value)]
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(coerce(item, args[0], f"{key}[{i}]") for i, item in enumerate(value))
    if len(value) != len(args):
        raise ConfigError(key, value, f"the list must have {len(args)} entries", f"{len(args)} entries")
    return tuple(coerce(item, arg, f"{key}[{i}]") for i, (item, arg) in enumerate(zip(value, args, strict=True)))


def _coerce_scalar(value: Any, hint: Any, key: str) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise _wrong(key, value, "true, false")
    if hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, str):
            try:
                return int(value.strip())
            except ValueError:
                pass
        raise _wrong(key, value, "a whole number")
    if hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value.strip())
            except ValueError:
                pass
        raise _wrong(key, value, "a number")
    if hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        raise _wrong(key, value, "a string")
    raise TypeError(f"{key}: no conversion to {hint}")
