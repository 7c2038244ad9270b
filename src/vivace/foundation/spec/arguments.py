"""What callers of the Python API give: arguments of the types that a function names, and amounts with their units."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from vivace.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
_BYTES = {"": 1e9, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BYTES |= {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_NOTHING = object()
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_LEAST_BYTES, _MOST_BYTES = 1e6, 1e15
_SIMPLE: dict[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "Path": (os.PathLike, "a path"),
    "None": (type(None), "None"),
}


def parse_bytes(amount: str | float) -> float:
    """Return the bytes of e.g. "12GB", "8" or 8 (GB); GB are 10^9 bytes, GiB 2^30."""
    what = "an amount of memory; give for example 12GB or 12GiB, or a number of GB"
    number = _parse(str(amount), _BYTES, what)
    if not _LEAST_BYTES <= number <= _MOST_BYTES:
        raise UsageError(f"{amount!r} is {number:.3g} bytes, which is not {what}")
    return number


def parse_seconds(amount: str | float) -> float:
    """Return the seconds of e.g. "60s", "2min", "60" or 60."""
    return _parse(str(amount), _SECONDS, "a time such as 60s or 2min")


def _parse(text: str, units: dict[str, float], what: str) -> float:
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2].lower() not in units or float(match[1]) <= 0:
        raise UsageError(f"{text[:40]!r} is not {what}")
    return float(match[1]) * units[match[2].lower()]


def check_arguments(function: Function) -> Function:
    """Return a function of the Python API that checks its arguments against its annotations.

    Plain types, lists and dictionaries, `Literal`s and vivace's own data are checked; other objects are the function's.
    A path in the place of a text becomes one.

    Raises:
        UsageError: when called with an argument of another type.
    """
    checked_there = getattr(function, "settings", None)
    fields = () if checked_there is None else checked_there.model_fields
    every = inspect.signature(function).parameters
    parameters = {name: parameter for name, parameter in every.items() if name not in fields}
    own: dict[str, Any] = getattr(function, "__globals__", {})

    def checked_value(name: str, value: Any) -> Any:
        parameter = parameters.get(name)
        if parameter is None or parameter.kind is parameter.VAR_KEYWORD:
            return value
        kinds = _alternatives(str(parameter.annotation))
        if isinstance(value, os.PathLike) and "str" in kinds and "Path" not in kinds:
            return os.fspath(value)
        expected = [_expected(value, kind, own) for kind in kinds]
        if not all(expected):
            return value
        from vivace.foundation.spec.input_errors import shorten  # imports pydantic

        raise UsageError(
            f"vivace.{function.__name__}: {name}={shorten(repr(value))} must be {' or '.join(expected)}"
        )

    @functools.wraps(function)
    def with_checked(*args: Any, **kwargs: Any) -> Any:
        named = [checked_value(name, value) for name, value in zip(parameters, args, strict=False)]
        more = {name: checked_value(name, value) for name, value in kwargs.items()}
        return function(*named, *args[len(named) :], **more)

    return cast("Function", with_checked)


def _alternatives(annotation: str) -> list[str]:
    """Return the parts of "A | B[C | D]" that are separated outside of brackets."""
    parts, depth = [""], 0
    for character in annotation:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _expected(value: Any, kind: str, own: Mapping[str, Any]) -> str:
    """Return in words what an annotation asks for; "" if the value is that, or the annotation is not known here."""
    outer, _, inner = kind.removesuffix("]").partition("[")
    named = own.get(kind)
    if kind in _SIMPLE:
        types, words = _SIMPLE[kind]
        is_it = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
    elif outer == "Sequence":
        of = [_expected(_NOTHING, each, own) for each in _alternatives(inner)]
        words = f"a list of {' or '.join(of)}" if all(of) else "a list"
        is_it = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        is_it = is_it and all(
            any(not _expected(each, k, own) for k in _alternatives(inner)) for each in value
        )
    elif outer == "Mapping":
        words, is_it = "a dictionary", isinstance(value, Mapping)
    elif get_origin(named) is Literal:
        words, is_it = f"one of {', '.join(map(repr, get_args(named)))}", value in get_args(named)
    elif isinstance(named, type) and (is_dataclass(named) or hasattr(named, "model_fields")):
        words, is_it = f"a {kind}", isinstance(value, named)
    else:
        return ""
    return "" if is_it else words
