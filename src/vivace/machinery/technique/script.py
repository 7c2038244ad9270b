"""Lines of a plain Python script, and how values are written in it. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WIDTH = 88
"""Characters of a line: a longer call is written with one argument a line."""


@dataclass(frozen=True)
class Script:
    """A technique, or the loading of a model, in public calls of diffusers, torch and torchao.

    imports: "torch" for `import torch`, "diffusers:AutoencoderKL" for `from diffusers import AutoencoderKL`.
    lines: statements about the pipeline, which is called `pipe`, with comments where they are surprising.
    call: arguments of the pipeline's call, by name, as values.
    around: an expression for a context manager around the call, e.g. "torch.inference_mode()".
    places_weights: the lines decide where weights lie, so the pipeline need not be moved to the GPU before.
    from_host: the lines take weights from the host's memory, make them smaller and leave them on the GPU, so the rest
        of the pipeline is moved there after them.
    unless_stage: the script is not for pipelines that a technique of this stage is applied to as well; the technique is
        then vivace's own.
    """

    imports: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    call: Mapping[str, object] = field(default_factory=dict)
    around: str | None = None
    places_weights: bool = False
    from_host: bool = False
    unless_stage: int | None = None

    @property
    def is_call_only(self) -> bool:
        """Whether it concerns nothing but the call's arguments, so that its place among others does not matter."""
        return not self.lines and self.around is None


def literal(value: object) -> str:
    """Write a text, number, None, or tuple, list or dictionary of them for a script: `repr`, in double quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    text = repr(value)
    if isinstance(value, str) and text[0] == "'" and '"' not in text:
        return f'"{text[1:-1]}"'
    return text


def written_call(start: str, *arguments: str, end: str = ")", **named: str) -> str:
    """Write a call on one line, or, if that is too long, with one argument a line, from `start` to `end`."""
    parts = [*arguments, *(f"{name}={value}" for name, value in named.items())]
    line = f"{start}({', '.join(parts)}{end}"
    if len(line) <= WIDTH or not parts:
        return line
    return "\n".join([f"{start}(", *(f"    {part}," for part in parts), end])
