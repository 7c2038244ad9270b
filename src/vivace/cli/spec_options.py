"""Options that are fields of specs, and their collection into one argument.

Help, range and default are written once, where the field is. They are read when a command is used: specs need pydantic,
which `vivace --help` does not import.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

import click

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

F = TypeVar("F", bound=Callable[..., Any])
TIMING = "vivace.foundation.spec.timing:Timing"
WORKLOAD = "vivace.foundation.spec.study:WorkloadRequest"
QUALITY = "vivace.foundation.spec.study:QualityRequest"
STUDY = "vivace.foundation.spec.study:Study"
SETTINGS = "vivace.benchmark.run_settings:RunSettings"
IMAGES = "vivace.tuning.image_request:ImageRequest"
SEARCH = "vivace.tuning.search_settings:SearchSettings"
IMAGE_SETTINGS = "vivace.proofs.sides.drawing:Settings"
PROOF = "vivace.proofs.sides.prepare_sides:DrawRequest"
LOAD = "vivace.proofs.checks.side_loads:LoadRequest"


class FiniteFloat(click.FloatRange):
    """A float in a range; click alone also takes nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class SpecOption(click.Option):
    """Stands for the option of a spec's field until the command is used.

    Args:
        spec: MODULE:CLASS.
        attributes: of the option, which take precedence over the field's.
    """

    def __init__(self, spec: str, field: str, flags: Sequence[str], attributes: dict[str, Any]) -> None:
        super().__init__([*flags, field])
        self._spec, self._flags, self._attributes = spec, flags, attributes
        self._field = field

    def resolved(self) -> click.Option:
        """Return the option with the field's help, range and default."""
        field: FieldInfo = _class_at(self._spec).model_fields[self._field]
        attributes: dict[str, Any] = {"help": field.description} | _type_of(field)
        if field.default is not None:
            attributes |= {"default": field.default, "show_default": True}
        return click.Option([*self._flags, self._field], **attributes | self._attributes)


class SpecCommand(click.Command):
    """A command with options of specs, which are resolved when its parameters are first read."""

    _params: list[click.Parameter]

    @property
    def params(self) -> list[click.Parameter]:
        if any(isinstance(option, SpecOption) for option in self._params):
            self._params = [
                option.resolved() if isinstance(option, SpecOption) else option for option in self._params
            ]
        return self._params

    @params.setter
    def params(self, options: list[click.Parameter]) -> None:
        self._params = options

    def add(self, option: click.Option) -> None:
        """Add an option at the end."""
        self._params.append(option)


def command(kind: type[SpecCommand] = SpecCommand) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a command of a function, with options of specs."""
    return click.command(cls=kind)


def option(spec: str, field: str, *flags: str, **attributes: Any) -> Callable[[F], F]:
    """Return a decorator that adds the option of a spec's field.

    Args:
        flags: such as "--warmup"; default: the field's name.
        attributes: those of `click.option` that differ from the field's.
    """
    names = flags or ("--" + field.replace("_", "-"),)

    def add(function: F) -> F:
        options = function.__dict__.setdefault("__click_params__", [])
        options.append(SpecOption(spec, field, names, attributes))
        return function

    return add


def collect(**specs: str) -> Callable[[F], Callable[..., Any]]:
    """Return a decorator that passes the options that are fields of a class as one argument, an object of it.

    Lists become tuples.

    Args:
        specs: MODULE:CLASS by the name of the argument. Later ones may have earlier ones as fields.
    """

    def add(function: F) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_objects(*args: Any, **values: Any) -> Any:
            from vivace.foundation.spec.input_errors import InputErrors

            values |= values.pop("sources", {})
            values = {
                name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
            }
            for name, path in specs.items():
                kind = _class_at(path)
                fields = {field: values.pop(field) for field in _fields_of(kind) if field in values}
                with InputErrors():
                    values[name] = kind(**fields)
            return function(*args, **values)

        return with_objects

    return add


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _fields_of(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind.model_fields)


def _type_of(field: FieldInfo) -> dict[str, Any]:
    """Return the attributes of an option that restrict its values to those of a field."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, types.UnionType):  # a type or None
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Literal:
        return {"type": click.Choice(get_args(kind))}
    bounds = {
        name: getattr(rule, name)
        for rule in field.metadata
        for name in ("ge", "gt", "le")
        if hasattr(rule, name)
    }
    if kind is int:
        least = bounds.get("ge", bounds["gt"] + 1 if "gt" in bounds else None)
        return {"type": click.IntRange(least, bounds.get("le"))}
    if kind is float:
        least = bounds.get("ge", bounds.get("gt"))
        return {"type": FiniteFloat(least, bounds.get("le"), min_open="gt" in bounds)}
    return {} if kind is bool else {"type": kind}
