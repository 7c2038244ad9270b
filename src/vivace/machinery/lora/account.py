"""The used parts of a LoRA file, and the unused ones with the reasons."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vivace.architectures import family_of
from vivace.errors import UnusableModel
from vivace.machinery.lora.changes import LoraLayer, LoraLayers
from vivace.machinery.lora.forms import Group
from vivace.machinery.lora.layer_names import LayerNames
from vivace.machinery.technique import Component, attribute_of, component_of

_NUM_NAMED = 3
_PLAIN = "vivace adds plain LoRAs, LoCon, LoHa, LoKr and differences: train or convert it as one of them"
_HEADER = ("modelspec.architecture", "ss_base_model_version", "base_model")
_BY_WIDTH = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "SDXL"}
"""Models by the width of a UNet's text, which its second attentions read."""
_BY_NAME = (
    ("joint_blocks", "Stable Diffusion 3"),
    ("img_mod_1", "Qwen-Image"),
    ("stream_modulation", "FLUX.2"),
    ("img_mod_lin", "FLUX.1"),
    ("modulation_lin", "FLUX.1"),
    ("to_qkv_mlp_proj", "FLUX.2"),
    ("double_blocks", "FLUX"),
    ("single_blocks", "FLUX"),
    ("single_transformer_blocks", "FLUX"),
    ("feed_forward", "Z-Image"),
    ("caption_projection", "Sana"),
    ("output_blocks", "a UNet"),
    ("up_blocks", "a UNet"),
)


@dataclass(frozen=True)
class LoraFile:
    """The change that a file makes to a pipeline.

    Attributes:
        layers: what can be used.
        problems: why the part of a component cannot; those components' `layers` are not whole.
        num_tensors: in the file.
        num_without_effect: of them, those that are not used since they add zero.
        unused: which tensors are for nothing that the pipeline has; "" if there are none.
        notes: `unused` and what was assumed, for the user.
        alpha: "" if the file or the json beside it has alphas, else what is assumed.
    """

    layers: LoraLayers
    problems: Mapping[Component, str]
    num_tensors: int
    num_without_effect: int
    unused: str
    notes: tuple[str, ...]
    alpha: str

    def problem(self, components: Iterable[Component]) -> str | None:
        """Return why the parts of these components cannot be used as a whole; None if they can."""
        return next((self.problems[c] for c in components if c in self.problems), None)


@dataclass
class Account:
    """The destinations of a file's tensors, recorded as it is read.

    Attributes:
        pipe: the pipeline.
        name: what messages call the file.
        metadata: of its header.
        num_tensors: in it.
        layers: what is used.
        written_as: the file's name of each of them.
        foreign: groups for layers that a component lacks.
        foreign_zeros: those of them that add zero.
        unusable: names of tensors by the kind of change, where that is not a sum.
        malformed: what is wrong with groups in themselves.
        ill: what is wrong with others for this pipeline.
        misfits: groups whose layers have other sizes.
        absent: names of tensors by the part that the pipeline lacks.
        without_effect: names of tensors that are not used since they add zero.
        has_alpha: the number of layers with one and without.
        num_zero_alphas: the number of layers whose alpha is 0.
        settings_are_in: the json beside the file, or "".
    """

    pipe: Any
    name: str
    metadata: Mapping[str, Any]
    num_tensors: int
    settings_are_in: str = ""
    layers: dict[Component, dict[str, LoraLayer]] = field(default_factory=lambda: defaultdict(dict))
    written_as: dict[tuple[Component, str], str] = field(default_factory=dict)
    foreign: dict[Component, list[Group]] = field(default_factory=lambda: defaultdict(list))
    foreign_zeros: dict[Component, list[Group]] = field(default_factory=lambda: defaultdict(list))
    unusable: dict[Component, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(dict))
    malformed: dict[Component, list[str]] = field(default_factory=lambda: defaultdict(list))
    ill: dict[Component, list[str]] = field(default_factory=lambda: defaultdict(list))
    misfits: list[Group] = field(default_factory=list)
    absent: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    without_effect: list[str] = field(default_factory=list)
    has_alpha: Counter[bool] = field(default_factory=Counter)
    num_zero_alphas: int = 0

    def closed(self, names: LayerNames) -> LoraFile:
        """Return the finished file.

        Args:
            names: of the pipeline's layers.

        Raises:
            UnusableModel: nothing in it is for this pipeline.
        """
        problems: dict[Component, str] = {}
        if not any((*self.layers.values(), self.unusable, self.foreign, self.malformed, self.ill)):
            self.foreign |= self.foreign_zeros  # there is nothing else in it
        foreign = [group for groups in self.foreign.values() for group in groups]
        others = foreign or self.misfits
        prefix = names.unknown_prefix([group.layer for group in foreign])
        hint = made_for(self.metadata, self.pipe, foreign, self.misfits) if others and not prefix else ""
        for component in dict.fromkeys((*self.unusable, *self.foreign, *self.malformed, *self.ill)):
            problems[component] = self._problem(component, hint, prefix)
        unused = [key for keys in self.absent.values() for key in keys]
        unused_note = ""
        if unused:
            reasons = "; ".join(self.absent)
            unused_note = (
                f"{len(unused)} of {self.num_tensors} tensors are not used: {listed(unused)} ({reasons})"
            )
        notes = [unused_note] if unused_note else []
        alpha = self._assumed_alpha()
        if alpha and (
            self.has_alpha[True] or any(key.startswith("base_model.") for key in self.written_as.values())
        ):
            notes.append(alpha)
        if self.num_zero_alphas:
            notes.append(
                f"alpha is 0 for {self.num_zero_alphas} of {self.has_alpha.total()} layers, which adds nothing"
            )
        if not any(self.layers.values()) and not problems:
            zeros = f"all of its tensors add zero ({listed(self.without_effect)})"
            raise UnusableModel(
                f"{self.name} has no LoRA layers for this pipeline: {'; '.join(notes) or zeros}"
            )
        return LoraFile(
            {c: dict(layers) for c, layers in self.layers.items() if layers},
            problems,
            self.num_tensors,
            len(self.without_effect),
            unused_note,
            tuple(notes),
            alpha,
        )

    def _assumed_alpha(self) -> str:
        without, num = self.has_alpha[False], self.has_alpha.total()
        if not without:
            return ""
        where = "in the file" if not self.settings_are_in else f"in the file or in {self.settings_are_in}"
        some = "" if without == num else f" for {without} of {num} layers"
        return f"alpha is assumed to be the rank{some}: there is none {where}"

    def _problem(self, component: Component, hint: str, prefix: str) -> str:
        """Describe the problem with the part of a component, and what to do.

        Args:
            prefix: without which the names of its layers would be known.
        """
        part = attribute_of(self.pipe, component)
        advice = (
            "give the LoRA of this model"
            if component == "denoiser"
            else f"give the LoRA of this model, or leave the {part} out with @denoiser"
        )
        for words, keys in self.unusable[component].items():
            share = f"{len(keys)} of {self.num_tensors} tensors"
            other = "" if component == "denoiser" else f", or leave the {part} out with @denoiser"
            return f"{self.name} is {words} ({share}: {listed(keys)}); {_PLAIN}{other}"
        if groups := self.foreign[component]:
            num = sum(len(group.all_keys) for group in groups)
            names = listed([group.layer for group in groups])
            if prefix:
                return (
                    f"{self.name} has a prefix that vivace does not know before the names of its layers, {prefix!r} "
                    f"({names}); without it they are this {part}'s: rename its tensors without it"
                )
            return (
                f"{self.name} is not a LoRA for this {part}, which has no layer {names} "
                f"({num} of {self.num_tensors} tensors){hint}; {advice}"
            )
        if malformed := self.malformed[component]:
            more = "" if len(malformed) == 1 else f" (and {len(malformed) - 1} more)"
            return (
                f"{self.name} is not a LoRA that vivace reads: {malformed[0]}{more}; save or convert it again"
            )
        ill = self.ill[component]
        more = "" if len(ill) == 1 else f" (and {len(ill) - 1} more)"
        return f"{ill[0]}{more}{hint}; {advice}"


def listed(names: Iterable[str]) -> str:
    """Return the first names, and "..." for the others."""
    every = list(names)
    return ", ".join(name[:120] for name in every[:_NUM_NAMED]) + (", ..." if len(every) > _NUM_NAMED else "")


def made_for(
    metadata: Mapping[str, Any], pipe: Any, foreign: Sequence[Group], misfits: Sequence[Group]
) -> str:
    """Return ": it was made for X, and this is Y", or "" if unknown.

    Args:
        metadata: of the file's header.
        foreign: the groups whose layers the pipeline lacks.
        misfits: those whose layers have other sizes.
    """
    stated = next((str(metadata[name])[:80] for name in _HEADER if metadata.get(name)), "")
    if stated and _letters(_this(pipe)) not in _letters(stated):
        return f": its header says {stated}, and this is {_this(pipe)}"
    model = _by_width([*foreign, *misfits]) or _by_name(foreign)
    denoiser = type(component_of(pipe, "denoiser")).__name__
    if not model or _this(pipe).startswith(model) or (model == "a UNet" and model[2:] in denoiser):
        return ""
    return f": its layers are those of {model}, and this is {_this(pipe)}"


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _by_width(groups: Sequence[Group]) -> str:
    for group in groups:
        name = group.layer.replace(".", "_")
        down = group.tensors.get("down")
        if name.endswith(("attn2_to_k", "attn2_to_v")) and down is not None and down.dim() >= 2:
            return _BY_WIDTH.get(down.shape[1], "")
    return ""


def _by_name(groups: Sequence[Group]) -> str:
    names = [group.layer.replace(".", "_") for group in groups]
    return next((model for part, model in _BY_NAME if any(part in name for name in names)), "")


def _this(pipe: Any) -> str:
    denoiser = component_of(pipe, "denoiser")
    family = family_of(denoiser)
    if family is None:
        return f"a {type(denoiser).__name__}"
    width = getattr(denoiser, "config", {}).get("cross_attention_dim")
    return str(_BY_WIDTH.get(width, family.name) if isinstance(width, int) else family.name)
