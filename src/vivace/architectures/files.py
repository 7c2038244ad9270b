"""Schema of what a family says of single files: by which tensors they are known, and what their authors call layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Names = dict[str, tuple[str, ...]]
Sizes = tuple[tuple[str, int, int], ...]
"""Lengths of dimensions: the tensor, the dimension, the length."""
UNET_PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class FilePart:
    """A VAE or text encoder in a file of a whole pipeline, by the prefix of its tensors' names; the pipeline may lack
    the last layer, which is in the file."""

    component: str
    prefix: str
    lacks_last: bool = False


@dataclass(frozen=True)
class Signature:
    """Tensors by which a file is known as one of a family, or as one that vivace does not read.

    Attributes:
        what: what such a file is; follows "FILE is ".
        has: names of tensors, without their denoiser's prefix. A `*` at either end stands for anything.
        sizes: of some of them.
        entry: catalogue name of the model with the same configuration; None for a file that is refused. A model that
            the catalogue lacks needs its configuration beside the file.
        component: the only component that is read from the file; None for a whole pipeline.
        parts: of a whole pipeline, all components but the denoiser.
        tells_prediction: whether such a file may predict v instead of the noise, and says so.
        advice: what to do with a file that is refused, in which {folder} and {supported} stand for what is said of any;
            "" for that alone.
        note: what is assumed.
        notes_by_name: what is assumed if the file's name has a word.
    """

    what: str
    has: tuple[str, ...]
    sizes: Sizes = ()
    entry: str | None = None
    component: str | None = None
    parts: tuple[FilePart, ...] = ()
    tells_prediction: bool = False
    advice: str = ""
    note: str = ""
    notes_by_name: Mapping[str, str] = field(default_factory=dict)


def refuse(advice: str, *rows: tuple[str, tuple[str, ...]], sizes: Sizes = ()) -> tuple[Signature, ...]:
    """Return signatures of files that are refused with the same advice."""
    return tuple(Signature(what, has, sizes, advice=advice) for what, has in rows)


@dataclass(frozen=True)
class SingleFiles:
    """The single files of a family.

    Attributes:
        signatures: the first that fits counts, so that those with the most tensors come first.
        supported: names of the models whose files are read.
        contains: names of families whose signatures its files fit too.
        modules: beginnings of the names of the denoiser's tensors in a file without a prefix; () for all others'.
        plain_prefixes, plain_sizes: those with which diffusers reads a file as it is; `is_plain_alone`: also without.
        unused: tensors that files have and the authors' code does not use.
    """

    signatures: tuple[Signature, ...]
    supported: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    plain_prefixes: tuple[str, ...] = ()
    plain_sizes: Sizes = ()
    is_plain_alone: bool = False
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class OriginalNames:
    """What a denoiser's authors call its layers; many trainers of LoRAs keep these names.

    Where the original has one layer for several of diffusers', its rows are theirs, one after the other.

    Attributes:
        layers: diffusers' layers, by the original name. `#` is a block's number.
        of_layer: the original name of a layer of diffusers, or None, by the classes of all modules and the
            configuration; for names that a table cannot list.
        tensors: original names of tensors of no layer, by diffusers' names.
        keeps_others: whether all other tensors have the same names in both.
    """

    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    of_layer: Callable[[str, Mapping[str, str], Any], str | None] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    keeps_others: bool = False


def in_block(block: str, original: str, names: Names) -> Names:
    return {f"{original}.{old}": tuple(f"{block}.{new}" for new in news) for old, news in names.items()}
