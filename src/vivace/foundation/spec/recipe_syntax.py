"""The syntax of recipes. Names, knobs and slots are checked by `vivace.recipes.resolve`.

    recipe    = technique *( "+" technique )          baseline = the model as published, nothing applied
    technique = name [ ":" word | "(" arguments ")" ] [ "@" target *( "," target ) ]
    argument  = [ name "=" ] ( value | "[" value *( "," value ) "]" )
    value     = Python literal | bare word [A-Za-z0-9_.-]+

The text is parsed, never evaluated. `+`, `,` and `@` separate only outside quotes and brackets.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field

from vivace.errors import RecipeError
from vivace.foundation.spec.base import Spec

BASELINE = "baseline"
BEST = "best"
"""The word for the best known recipe of a model on this card; see `vivace.evidence.recommendation.best`."""
MAX_LENGTH = 4096
MAX_DEPTH = 8

KnobValue = bool | int | float | str | tuple[str, ...] | None
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_AS_NUMBERS = {r"\n": r"\x0a", r"\r": r"\x0d", r"\t": r"\x09"}
"""Escapes that are printed by their number, since people write C:\\new with a single backslash."""
_WORD = re.compile(r"[A-Za-z0-9_.-]+")
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_IDENTITY = "sha256"
_SHOWN_DIGITS = 4
_SUFFIX = ".safetensors"
_USUAL_STEM = "pytorch_lora_weights"


@dataclass(frozen=True)
class Argument:
    """One argument as written."""

    name: str | None
    value: object
    start: int
    length: int


@dataclass(frozen=True)
class ParsedTechnique:
    """One technique as written, with positions in the recipe's text for error messages."""

    name: str
    start: int
    arguments: tuple[Argument, ...]
    targets: tuple[tuple[str, int], ...]


class TechniqueCall(Spec):
    """One technique with the values of all knobs and its targets, as stored."""

    name: str
    knobs: dict[str, KnobValue]
    targets: tuple[str, ...]


class RecipeSpec(Spec):
    """A recipe as stored in Trials and Records. It stays readable if a technique no longer exists.

    Attributes:
        text: the canonical form, which is the recipe's identity.
        same_picture: whether every technique only reorders or rounds arithmetic.
    """

    text: str
    techniques: tuple[TechniqueCall, ...] = Field(default=())
    same_picture: bool = True

    @property
    def is_baseline(self) -> bool:
        return not self.techniques


def parse_recipe(text: str) -> tuple[ParsedTechnique, ...]:
    """Parse a recipe into techniques as written; "baseline" gives the empty tuple."""
    if len(text) > MAX_LENGTH:
        raise RecipeError(
            f"a recipe has at most {MAX_LENGTH} characters, this one has {len(text)}", text, MAX_LENGTH
        )
    if not text.strip():
        raise RecipeError("the recipe is empty; write 'baseline' for the model as published", text or " ", 0)
    parts = list(_split(text, 0, len(text), "+"))
    if len(parts) == 1 and text.strip().lower() == BASELINE:
        return ()
    return tuple(_parse_technique(text, lo, hi) for lo, hi in parts)


def _split(text: str, lo: int, hi: int, separator: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of text[lo:hi] between separators outside quotes and brackets."""
    start = lo
    for i, depth in _scan(text, lo, hi):
        if depth == 0 and text[i] == separator:
            yield start, i
            start = i + 1
    yield start, hi


def _scan(text: str, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Yield (index, bracket depth) of the characters outside quotes. A closing bracket has the outer depth."""
    open_brackets: list[tuple[str, int]] = []
    i = lo
    while i < hi:
        c = text[i]
        if c in "'\"":
            end = i + 1
            while end < hi and text[end] != c:
                end += 2 if text[end] == "\\" else 1
            if end >= hi:
                raise RecipeError(f"this quote ({c}) is not closed", text, i)
            i = end + 1
            continue
        if c in _CLOSES:
            open_brackets.append((_CLOSES[c], i))
            if len(open_brackets) > MAX_DEPTH:
                raise RecipeError(f"brackets nest deeper than {MAX_DEPTH}", text, i)
        elif c in ")]}":
            if not open_brackets:
                raise RecipeError(f"'{c}' without its opening bracket", text, i)
            expected, _ = open_brackets.pop()
            if c != expected:
                raise RecipeError(f"expected '{expected}', found '{c}'", text, i)
        yield i, len(open_brackets)
        i += 1
    if open_brackets:
        expected, position = open_brackets[-1]
        raise RecipeError(f"this bracket is not closed; add '{expected}'", text, position)


def _strip(text: str, lo: int, hi: int) -> tuple[int, int]:
    while lo < hi and text[lo].isspace():
        lo += 1
    while hi > lo and text[hi - 1].isspace():
        hi -= 1
    return lo, hi


def _parse_technique(text: str, lo: int, hi: int) -> ParsedTechnique:
    lo, hi = _strip(text, lo, hi)
    if lo == hi:
        position = min(lo, max(0, len(text) - 1))
        raise RecipeError("a technique is missing here (there is nothing between two '+')", text, position)
    halves = list(_split(text, lo, hi, "@"))
    if len(halves) > 2:
        raise RecipeError(
            "one '@' per technique; separate targets with ','", text, halves[1][1], hi - halves[1][1]
        )
    head_lo, head_hi = _strip(text, *halves[0])
    match = _NAME.match(text, head_lo, head_hi)
    if match is None:
        raise RecipeError("expected a technique's name", text, head_lo, max(1, head_hi - head_lo))
    name = match.group().lower()
    arguments = _parse_arguments(text, *_strip(text, match.end(), head_hi), head_lo)
    targets = _parse_targets(text, *halves[1]) if len(halves) == 2 else ()
    return ParsedTechnique(name, head_lo, arguments, targets)


def _parse_arguments(text: str, lo: int, hi: int, name_at: int) -> tuple[Argument, ...]:
    if lo == hi:
        return ()
    if text[lo] == ":":
        lo, hi = _strip(text, lo + 1, hi)
        if _WORD.fullmatch(text, lo, hi) is None:
            raise RecipeError(
                "expected one plain word after ':'; for other values use brackets, name(value)",
                text,
                lo,
                max(1, hi - lo),
            )
        return (Argument(None, _value(text, lo, hi), lo, hi - lo),)
    if text[lo] != "(":
        hint = (
            f"; did you mean '{text[name_at:lo].strip()}({text[lo:hi]})'?"
            if _WORD.fullmatch(text, lo, hi)
            else ""
        )
        raise RecipeError(f"expected '(', ':', '@' or '+'{hint}", text, lo, hi - lo)
    close = next(i for i, depth in _scan(text, lo, hi) if depth == 0)
    if close != hi - 1:
        raise RecipeError("expected '@' or '+'", text, close + 1, hi - close - 1)
    if not text[lo + 1 : close].strip():
        return ()
    arguments = [_parse_argument(text, *span) for span in _split(text, lo + 1, close, ",")]
    names: set[str] = set()
    for argument in arguments:
        if argument.name is None and names:
            raise RecipeError(
                "a positional argument after a named one", text, argument.start, argument.length
            )
        if argument.name is not None:
            if argument.name in names:
                raise RecipeError(f"'{argument.name}' is given twice", text, argument.start, argument.length)
            names.add(argument.name)
    return tuple(arguments)


def _parse_argument(text: str, lo: int, hi: int) -> Argument:
    lo, hi = _strip(text, lo, hi)
    if lo == hi:
        raise RecipeError("an argument is missing here", text, min(lo, len(text) - 1))
    name = None
    start = lo
    match = _NAME.match(text, lo, hi)
    if match is not None:
        after_name = _strip(text, match.end(), hi)[0]
        if after_name < hi and text[after_name] == "=":
            name = match.group().lower()
            lo, hi = _strip(text, after_name + 1, hi)
            if lo == hi:
                raise RecipeError(f"expected a value after '{name}='", text, start, after_name + 1 - start)
    return Argument(name, _value(text, lo, hi), start, hi - start)


def _value(text: str, lo: int, hi: int) -> object:
    source = text[lo:hi]
    if source.startswith("[") and source.endswith("]") and source[1:-1].strip():
        return _list(text, lo + 1, hi - 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python accepts "1if" and the like as literals, with a warning
            value = ast.literal_eval(source)
    except (ValueError, TypeError, SyntaxError, Warning, MemoryError, RecursionError):
        pass
    else:
        if isinstance(value, str) and _has_other_escapes(source):
            raise _backslash(text, lo, hi)
        return value
    if source[:1] in ("'", '"') and "\\" in source:
        raise _backslash(text, lo, hi)
    if _WORD.fullmatch(source):
        return {"true": True, "false": False, "none": None}.get(source.lower(), source)
    quoted = f"; if it is a path, quote it: {source!r}" if "/" in source or "\\" in source else ""
    raise RecipeError(
        f"expected a number, True, False, None, a quoted text or a plain word{quoted}", text, lo, hi - lo
    )


def _has_other_escapes(source: str) -> bool:
    """Whether a quoted text has escapes besides those that it is printed with: C:\\new would have a new line."""
    return any(
        match[0][1:] not in ("\\", "'", '"')
        and (len(match[0]) < 4 or ast.literal_eval(f"'{match[0]}'").isprintable())
        for match in _ESCAPE.finditer(source)
    )


def _backslash(text: str, lo: int, hi: int) -> RecipeError:
    instead = re.sub("(?<=[^'\"])//", "/", text[lo:hi].replace("\\", "/"))
    return RecipeError(f"in a quoted text write a backslash twice, or as /: {instead}", text, lo, hi - lo)


def _list(text: str, lo: int, hi: int) -> tuple[object, ...]:
    values = []
    for span in _split(text, lo, hi, ","):
        start, end = _strip(text, *span)
        if start == end:
            raise RecipeError("a value is missing here", text, min(start, len(text) - 1))
        values.append(_value(text, start, end))
    return tuple(values)


def _parse_targets(text: str, lo: int, hi: int) -> tuple[tuple[str, int], ...]:
    targets = []
    for part in _split(text, lo, hi, ","):
        start, end = _strip(text, *part)
        if _NAME.fullmatch(text, start, end) is None:
            raise RecipeError(
                "expected a target: denoiser, text_encoder, text_encoder_2, text_encoder_3 or vae",
                text,
                min(start, len(text) - 1),
                max(1, end - start),
            )
        targets.append((text[start:end].lower(), start))
    return tuple(targets)


def unpinned(text: str) -> str:
    """Return a recipe without the identities of its files, as it was written before it was stored."""
    return _without_identities(text, by_name=False)


def short_form(text: str) -> str:
    """Return a recipe as tables show it: a file by its name and the first digits of its sha256, without its folders. It
    need not parse; other text is returned unchanged."""
    return _without_identities(text, by_name=True)


def _without_identities(text: str, *, by_name: bool) -> str:
    try:
        techniques = parse_recipe(text)
    except RecipeError:
        return text
    for technique in reversed(techniques):
        identity = next((a for a in technique.arguments if a.name == _IDENTITY), None)
        for argument in reversed(technique.arguments):
            end = argument.start + argument.length
            if argument is identity:
                comma = text.rfind(",", technique.start, argument.start)
                text = text[: argument.start if comma < 0 else comma] + text[end:]
            elif (
                by_name
                and argument.name is None
                and isinstance(argument.value, str)
                and _is_file(argument.value)
            ):
                digits = f"@{str(identity.value)[:_SHOWN_DIGITS]}" if identity is not None else ""
                text = text[: argument.start] + _stem(argument.value) + digits + text[end:]
    return text


def _is_file(value: str) -> bool:
    return "/" in value or "\\" in value or value.endswith(_SUFFIX)


def _stem(path: str) -> str:
    parts = [part for part in re.split(r"[/\\]", path.partition("@")[0]) if part]
    last = parts[-1].removesuffix(_SUFFIX) if parts else path
    return parts[-2] if last == _USUAL_STEM and len(parts) > 1 else last


def print_value(value: KnobValue) -> str:
    """Write a knob's value as in the canonical form. Parsing the text gives the value back."""
    if isinstance(value, str):
        bare = _WORD.fullmatch(value) is not None and value == value.lower()
        if bare and _value(value, 0, len(value)) == value:
            return value
        return _ESCAPE.sub(lambda match: _AS_NUMBERS.get(match[0], match[0]), repr(value))
    if isinstance(value, tuple):
        return f"[{', '.join(map(print_value, value))}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


def print_call(name: str, arguments: list[tuple[str | None, KnobValue]], targets: tuple[str, ...]) -> str:
    """Write one technique as in the canonical form."""
    inside = ", ".join(print_value(v) if k is None else f"{k}={print_value(v)}" for k, v in arguments)
    return name + (f"({inside})" if inside else "") + (f"@{','.join(targets)}" if targets else "")
