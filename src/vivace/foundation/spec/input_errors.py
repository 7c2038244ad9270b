"""Describe pydantic's errors about a user's values in words."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from pydantic import ValidationError

from vivace.errors import UsageError

_MAX_SHOWN = 60  # characters of the given value
# By pydantic's type of error. Names in braces are in the error's context.
_WORDS = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "literal_error": "must be one of {expected}",
    "string_too_long": "must have at most {max_length:,} characters",
    "string_unicode": "must be valid Unicode text",
    "too_short": "must not be empty",
    "missing": "must be given",
    "is_instance_of": "must be a {class}",
    "path_type": "must be a path",
    "model_type": "must be a {class_name}",
    "extra_forbidden": "is not known",
}
_KINDS = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be True or False",
    "string": "must be text",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be an object",
}


def expectation_of(error: ValidationError) -> str:
    """Return what the first wrong value must be: "must be at least 1"."""
    problem = error.errors()[0]
    kind = str(problem["type"])
    if kind == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if kind in _WORDS:
        return _WORDS[kind].format(**problem.get("ctx", {}))
    return _KINDS.get(kind.partition("_")[0], "is not valid")


def name_of(error: ValidationError) -> str:
    """Return the field of the first wrong value."""
    return next((str(part) for part in error.errors()[0]["loc"] if isinstance(part, str)), "")


def place(error: ValidationError) -> str:
    """Return the field of the first wrong value, as an option of the command line: "--guidance-scale"."""
    field = name_of(error)
    return "--" + field.replace("_", "-") if field else ""


def in_words(error: ValidationError) -> str:
    """Return one line about the first wrong value: "--height 0 must be at least 1"."""
    input_text = shorten(repr(error.errors()[0].get("input")))
    return " ".join(part for part in (place(error), input_text, expectation_of(error)) if part)


def shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


@dataclass(frozen=True)
class InputErrors(AbstractContextManager[None, None]):
    """Raise pydantic's errors about a user's values as `kind`, in words."""

    kind: type[UsageError] = UsageError

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValidationError):
            raise self.kind(in_words(error)) from None
