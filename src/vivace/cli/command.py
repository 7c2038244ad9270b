"""A command of settings: its options are their fields, whose help, range and default are written once, at the field."""

from __future__ import annotations

import inspect
import math
import shlex
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from vivace.cli.watched.failures import INTERRUPTED
from vivace.errors import UsageError
from vivace.foundation.spec.input_errors import InputErrors
from vivace.foundation.spec.recipe_syntax import BEST
from vivace.foundation.spec.settings import FILE, Option, Positional, Settings
from vivace.foundation.untrusted.destinations import check_writable, replace

if TYPE_CHECKING:
    from vivace.answers.answer import Answer

S = TypeVar("S", bound=Settings)
_ELSEWHERE = ("ray", "ray_address", "endpoint", "dry_run", "replicas")
_LOADS_NOTHING = ("study", "doctor", "techniques")
_RESOLVE_BEST = ("serve",)
"""Commands that resolve `best` themselves."""


class FiniteFloat(click.FloatRange):
    """A float in a range; click alone also takes nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def command(
    settings: type[S], kind: type[click.Command] = click.Command
) -> Callable[[Callable[[S], int]], click.Command]:
    """Return a decorator that makes a command of a function of settings."""

    def make(function: Callable[[S], int]) -> click.Command:
        name = function.__name__

        def run(**values: Any) -> int:
            made = _settings_of(settings, values)
            _check_first(name, made)
            return function(made if name in _RESOLVE_BEST else _with_best(made))

        parameters = [*_parameters(settings), _debug()]
        return kind(name, callback=run, params=parameters, help=inspect.cleandoc(function.__doc__ or ""))

    return make


def command_line() -> str:
    return shlex.join(["vivace", *sys.argv[1:]])


def interrupted(kept: str) -> int:
    """Say what is kept and how to go on; return the exit code."""
    click.echo(f"\ninterrupted; {kept}. To continue, run the same command:", err=True)
    click.echo(f"  {command_line()}", err=True)
    return INTERRUPTED


def _settings_of(kind: type[S], values: Mapping[str, Any]) -> S:
    fields: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if (nested := _nested(field)) is not None:
            fields[name] = _settings_of(nested, values)
        elif name in values:
            fields[name] = _value(field, values, name)
    with InputErrors():
        return kind(**fields)


def _value(field: FieldInfo, values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field: its option's, or what a second option reads from a file."""
    value = field.default if values[name] in (None, ()) and field.default in (None, (), "") else values[name]
    file = values.get(_file_of(name))
    if file is None:
        return value
    option = _rule(field, Option)
    if value is not None:
        raise click.UsageError(
            f"give {option.flags} {option.metavar} or {option.from_file[0]} FILE, not both."
        )
    return option.from_file[2](file)


def _file_of(name: str) -> str:
    return f"{name}_file"


def _nested(field: FieldInfo) -> type[Any] | None:
    """Return the class of a field that is settings itself, whose fields are options, too."""
    kind = field.annotation
    is_nested = isinstance(kind, type) and issubclass(kind, BaseModel) and _rule(field, Option) is None
    return kind if is_nested else None


def _rule(field: FieldInfo, kind: type[Any]) -> Any:
    """Return the last rule of a kind in a field's annotation; None without one."""
    return next((rule for rule in reversed(field.metadata) if isinstance(rule, kind)), None)


def _parameters(kind: type[BaseModel]) -> list[click.Parameter]:
    parameters: list[click.Parameter] = []
    for name in _own_first(kind):
        field = kind.model_fields[name]
        if (nested := _nested(field)) is not None:
            parameters += _parameters(nested)
        elif (argument := _rule(field, Positional)) is not None:
            parameters.append(_argument(name, field, argument))
        elif (option := _rule(field, Option)) is not None:
            parameters += _options(name, field, option)
    return parameters


def _own_first(kind: type[BaseModel]) -> list[str]:
    """Return the names of fields: the class's own, then those that it inherits."""
    names = [name for each in kind.__mro__ for name in vars(each).get("__annotations__", ())]
    return [name for name in dict.fromkeys(names) if name in kind.model_fields]


def _argument(name: str, field: FieldInfo, argument: Positional) -> click.Argument:
    attributes = _type_of(field, Option())
    if attributes.pop("multiple", False):
        attributes |= {"nargs": -1, "required": True}
    if not field.is_required():
        attributes |= {"required": False, "default": field.default or None}
    return click.Argument([name], metavar=argument.metavar, **attributes)


def _options(name: str, field: FieldInfo, option: Option) -> list[click.Parameter]:
    flags = option.flags.split() or ["--" + name.replace("_", "-")]
    attributes: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    attributes |= _type_of(field, option)
    default = option.default or field.default
    if field.is_required():
        attributes["required"] = True
    elif default not in (None, (), ""):
        attributes |= {"default": default, "show_default": default is not False and option.default != ""}
    if default is True:
        flags = [f"{flags[0]}/--no-{flags[0].removeprefix('--')}"]
    read = option.read or getattr(_rule(field, BeforeValidator), "func", None)
    if read is not None:
        attributes["callback"] = _callback(read)
    options: list[click.Parameter] = [click.Option([*flags, name], **attributes)]
    if option.from_file is not None:
        flag, words, _ = option.from_file
        options.append(click.Option([flag, _file_of(name)], type=click.Path(path_type=Path), help=words))
    return options


def _callback(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def convert(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value is None:
            return None
        try:
            return read(value)
        except ValueError as error:
            raise click.BadParameter(f"{str(error).removesuffix('.')}.", context, parameter) from None

    return convert


def _type_of(field: FieldInfo, option: Option) -> dict[str, Any]:
    """Return the attributes of an option that restrict its values to those of a field."""
    kinds = _alternatives(field.annotation)
    if _rule(field, BeforeValidator) is not None and not (option.multiple or kinds == [bool]):
        return {"type": str, "multiple": bool(option.multiple)}
    kind = kinds[0]
    if get_origin(kind) is Literal:
        return {"type": click.Choice(get_args(kind))}
    inner = get_args(kind)
    if get_origin(kind) is tuple and inner[-1] is not Ellipsis:
        return {"type": tuple(click.Path(path_type=Path) if each is Path else each for each in inner)}
    if inner:  # a list
        each = FieldInfo(annotation=inner[0])
        each.metadata = field.metadata
        return {**_type_of(each, option), "multiple": True}
    if kind is bool:
        return {"is_flag": True}
    if kind is Path:
        return {"type": click.Path(path_type=Path, **option.path)}
    if kind not in (int, float):
        return {"type": str}
    return {"type": _range(kind, field.metadata)}


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types of an annotation, without None and without what is annotated."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [
            kind for each in get_args(annotation) for kind in _alternatives(each) if kind is not type(None)
        ]
    return [annotation]


def _range(kind: type[Any], rules: Sequence[Any]) -> click.IntRange | FiniteFloat:
    bounds = {
        name: getattr(rule, name) for rule in rules for name in ("ge", "gt", "le") if hasattr(rule, name)
    }
    least = bounds.get("ge", bounds.get("gt"))
    if kind is int:
        return click.IntRange(least, bounds.get("le"), min_open="gt" in bounds)
    return FiniteFloat(least, bounds.get("le"), min_open="gt" in bounds)


def _debug() -> click.Option:
    """Return the option for tracebacks, which every command has."""

    def remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and context.obj is not None:
            context.obj["debug"] = True

    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Print the traceback of an error.",
    )


def _check_first(name: str, settings: Settings) -> None:
    """Say at once if this machine lacks the device, or cannot load the model.

    Commands that end elsewhere, on a cluster or at an endpoint, or load nothing, are left alone; `tune` asks for more.
    """
    values = dict(settings)
    device = values.get("device")
    if device is None or name == "tune" or any(values.get(each) for each in _ELSEWHERE):
        return
    from vivace.architectures import CATALOGUE
    from vivace.tuning.readiness import check_runs_here

    sides = [str(values[side]).partition(":")[0] for side in ("a", "b") if side in values]
    several = values.get("models") or ()  # of which one that cannot run is a row that says so
    models = [values.get("model"), *(several if len(several) == 1 else ())]
    models += [side for side in sides if side in CATALOGUE]
    for model in models if name not in _LOADS_NOTHING else [None]:
        check_runs_here(model, device)


def _with_best(settings: S) -> S:
    """Return settings whose recipes have the best known one in the place of `best`; what it is goes to stderr."""
    values = dict(settings)
    names = ("recipe", "recipes", "against", "start", "a", "b")
    # Of a server's rows, `against` is a file.
    asked = {name: values[name] for name in names if isinstance(values.get(name), str | tuple | list)}
    if not any(
        BEST in text for value in asked.values() for text in ([value] if isinstance(value, str) else value)
    ):
        return settings
    from vivace.evidence.recommendation.best import best_recipe, is_best

    models = values.get("models") or [values.get("model")]
    gpu = values.get("gpu") or getattr(values.get("card"), "name", None)

    def resolved(text: str, is_side: bool) -> str:
        model, separator, recipe = text.rpartition(":") if is_side else (models[0], "", text)
        if not is_best(recipe) or (is_side and not separator):
            return text
        if len(models) > 1:
            raise UsageError(f"{BEST} depends on the model, and {len(models)} are given; give one")
        best = best_recipe(
            recipe, model, device=values.get("device") or "auto", gpu=gpu, task=values.get("task")
        )
        click.echo(str(best), err=True)
        return f"{model}{separator}{best.recipe}" if is_side else best.recipe

    return settings.model_copy(
        update={
            name: resolved(value, name in ("a", "b"))
            if isinstance(value, str)
            else tuple(resolved(each, False) for each in value)
            for name, value in asked.items()
        }
    )


RecipeName = Annotated[str, Option("Recipe to apply.", metavar="R")]
ResultsFormat = Annotated[
    Literal["table", "json", "csv", "md", "latex"],
    Option("Format of the results on standard output.", "--format"),
]
AsJson = Annotated[bool, Option("Print JSON.", "--json")]
Why = Annotated[
    bool, Option("Also print what the answer rests on, the alternatives, and what to measure next.")
]
Rerun = Annotated[bool, Option("Measure again what the store already has.")]


class CiFiles(Settings):
    junit: Annotated[
        Path | None,
        Option("Also write the result as JUnit's XML, for CI servers.", metavar="FILE", path=FILE),
    ] = None
    summary: Annotated[
        Path | None,
        Option(
            'Also write the result as Markdown, e.g. to "$GITHUB_STEP_SUMMARY".', metavar="FILE", path=FILE
        ),
    ] = None

    def check_ci_files(self) -> None:
        """Raise OutputError, before anything is measured, for a file that cannot be written."""
        for path in (self.junit, self.summary):
            if path is not None:
                check_writable(path)

    def write_ci_files(self, answer: Answer) -> None:
        from vivace.answers.data import junit_of
        from vivace.answers.markdown import markdown_of

        for path, write in ((self.junit, junit_of), (self.summary, markdown_of)):
            if path is not None:
                replace(path, write(answer).encode())
