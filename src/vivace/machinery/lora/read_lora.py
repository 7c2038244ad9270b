"""Read a LoRA for a pipeline, or merge it into the weights. Every tensor is used, adds zero, or is said to be unused.

Sources: kohya-ss/sd-scripts; LyCORIS; PEFT; diffusers, loaders/lora_conversion_utils.py; ComfyUI, comfy/lora.py.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.architectures import FAMILIES, Family, family_of
from vivace.architectures.entry import FewSteps
from vivace.errors import UnusableModel
from vivace.foundation.untrusted.files import open_plain, reading
from vivace.machinery.lora.by_diffusers import converted
from vivace.machinery.lora.changes import (
    UNUSABLE,
    BadForm,
    Group,
    LoraLayer,
    LoraLayers,
    WeightChange,
    form_of,
    has_no_effect,
    rows_of,
    sizes_of,
    split_key,
)
from vivace.machinery.lora.layer_names import LayerNames, LayerPlace, Named, size_of
from vivace.machinery.lora.lora_files import PeftSettings, read_settings, settings_for, settings_of_header
from vivace.machinery.technique import COMPONENTS, Component, attribute_of, component_of
from vivace.models.checkpoints.headers import read_header, read_metadata
from vivace.models.checkpoints.read_denoiser import has_original_names
from vivace.models.find import WEIGHTS
from vivace.models.hub import fetch_part

if TYPE_CHECKING:
    import torch

_METADATA = "lora_adapter_metadata"
"""Key of the header under which diffusers writes PEFT's configuration, with alphas and ranks."""
_MOST_OF_MODEL = 4
"""Most values of a file, as a multiple of the pipeline's: large ranks of small layers have more than the layers."""
_SMALL = 50_000_000


_NUM_NAMED = 3
_PLAIN = "vivace adds plain LoRAs, LoCon, LoHa, LoKr and differences: train or convert it as one of them"
_HEADER = ("modelspec.architecture", "ss_base_model_version", "base_model")


@dataclass(frozen=True)
class LoraFile:
    """The change that a file makes to a pipeline.

    Attributes:
        problems: why the part of a component cannot be used; those components' `layers` are not whole.
        num_without_effect: tensors that are not used since they add zero.
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
        written_as: the file's name of each of the `layers` that are used.
        foreign, foreign_zeros: groups for layers that a component lacks, and those of them that add zero.
        unusable: names of tensors by the kind of change, where that is not a sum.
        malformed, ill: what is wrong with groups in themselves, and with others for this pipeline.
        misfits: groups whose layers have other sizes.
        absent: names of tensors by the part that the pipeline lacks.
        has_alpha: the number of layers with one and without.
    """

    pipe: Any
    names: LayerNames
    settings: PeftSettings | None
    name: str
    metadata: Mapping[str, Any]
    num_tensors: int
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

    def closed(self) -> LoraFile:
        problems: dict[Component, str] = {}
        if not any((*self.layers.values(), self.unusable, self.foreign, self.malformed, self.ill)):
            self.foreign |= self.foreign_zeros  # there is nothing else in it
        foreign = [group for groups in self.foreign.values() for group in groups]
        others = foreign or self.misfits
        prefix = self.names.unknown_prefix([group.layer for group in foreign])
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
        where = "in the file" + (f" or in {self.settings.where}" if self.settings is not None else "")
        some = "" if without == num else f" for {without} of {num} layers"
        return f"alpha is assumed to be the rank{some}: there is none {where}"

    def _problem(self, component: Component, hint: str, prefix: str) -> str:
        """Describe the problem with a component's part, and what to do; without `prefix` its layers would be known."""
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


def read_lora(pipe: Any, path: Path, name: str = "") -> LoraFile:
    """Read a LoRA for a pipeline; `problems` say whether it fits. UnusableModel: damaged, or no LoRA."""
    from safetensors.torch import load

    header, metadata = read_header(path), read_metadata(path)  # they say what is wrong with a damaged file
    check_size(pipe, path, name)
    with reading(path, advice="copy or download it again"):
        # Not mapped into memory: a file that somebody truncates meanwhile would end this process with SIGBUS, and one
        # that is written anew would change tensors that are kept.
        with open_plain(path) as file:
            tensors = load(file.read())
        stored = {key: tensors[key] for key in sorted(header, key=lambda key: header[key]["data_offsets"])}
    for key, tensor in stored.items():
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise UnusableModel(f"{path} has values that are not finite ({key}); train or download it again")
    with reading(path, problem="is not a LoRA that vivace reads", advice="save or convert it again"):
        return _read(pipe, path, name or str(path), stored, metadata)


def check_size(pipe: Any, path: Path, name: str = "") -> None:
    """Raise UnusableModel for a file with more values than a LoRA of this pipeline can have, by its header."""
    modules = (each for each in pipe.components.values() if hasattr(each, "parameters"))
    own = sum(weights.numel() for module in modules for weights in module.parameters())
    given = sum(math.prod(entry["shape"]) for entry in read_header(path).values())
    if given > _MOST_OF_MODEL * own + _SMALL:
        raise UnusableModel(
            f"{name or path} has {given:,} values, and the whole pipeline {own:,}: it is no LoRA of this model"
        )


def _read(
    pipe: Any, path: Path, name: str, stored: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]
) -> LoraFile:
    groups = _groups(name, stored)
    if all(set(group.tensors) <= {"unknown", "replacement", "alpha"} for group in groups):
        raise UnusableModel(
            f"{name} has no LoRA layers ({listed(stored)}); give a LoRA in safetensors format"
        )
    config = settings_for(path, stored)
    settings = None if config is None else read_settings(config)
    if settings is not None and (problem := settings.problem()) is not None:
        raise UnusableModel(f"{name}: {problem}")
    now = Account(pipe, LayerNames(pipe), settings, name, metadata, len(stored))
    for group in groups:
        _read_group(now, group)
    _read_with_diffusers(now, groups)
    return now.closed()


def _groups(name: str, stored: Mapping[str, torch.Tensor]) -> list[Group]:
    groups: dict[str, Group] = {}
    for key, tensor in stored.items():
        layer, role = split_key(key)
        group = groups.setdefault(layer, Group(layer))
        if role in group.tensors and role in ("down", "up", "alpha"):
            raise UnusableModel(
                f"{name} has two adapters for {layer} ({group.keys[role][-1]}, {key}); save one of them alone"
            )
        group.tensors[role] = tensor
        group.keys[role].append(key)
    return list(groups.values())


def _read_group(now: Account, group: Group) -> None:
    if "trigger" in group.tensors:
        now.absent["embeddings of trigger words, which vivace does not load"] += group.all_keys
        return
    if set(group.tensors) == {"alpha"}:  # of matrices that are not there
        now.without_effect += group.all_keys
        return
    meanings = now.names.find(group.layer)
    unusable = next((role for role in UNUSABLE if role in group.tensors), None)
    named = meanings[0]
    change: LoraLayer | None = None
    problem = ""
    if unusable is None and named.component is not None and named.places:
        try:
            change = form_of(group, lambda rank: _scale(now, group, named, rank))
            if len(meanings) > 1:
                named = next((m for m in meanings if not _misfits(now, m, change)), named)
        except BadForm as error:
            problem = str(error)
    elif unusable is None and named.component is not None:
        try:
            form_of(group, lambda rank: 1.0)
        except BadForm as error:
            problem = str(error)
    misfit = _misfits(now, named, change) if change is not None else ""
    is_used = bool(named.places) and unusable is None
    if misfit and named.component is not None:
        layer = now.names.layers[named.component][named.places[0].layer]
        is_used = type(layer).__name__ != "Embedding"
    # A layer that reads the guidance scale, which this distilled model lacks: the LoRA is its sibling's.
    config = getattr(component_of(now.pipe, "denoiser"), "config", {})
    is_guidance = "guidance" in group.layer and config.get("guidance_embeds") is False
    if not is_used and has_no_effect(group):
        now.without_effect += group.all_keys
        if named.component is not None and not named.places:
            now.foreign_zeros[named.component].append(group)
    elif named.component is None:
        now.absent[f"{named.part}, which this pipeline does not have"] += group.all_keys
    elif problem:
        now.malformed[named.component].append(problem)
    elif unusable is not None:
        now.unusable[named.component].setdefault(UNUSABLE[unusable], []).extend(group.all_keys)
    elif not named.places and named.component == "denoiser" and is_guidance:
        now.absent["guidance, which this model does not take as an input"] += group.all_keys
    elif not named.places:
        now.foreign[named.component].append(group)
    elif misfit:
        now.ill[named.component].append(misfit)
        now.misfits.append(group)
    else:
        assert change is not None
        _add(now, named.component, named.places, change, group)


def _read_with_diffusers(now: Account, groups: list[Group]) -> None:
    """Read the denoiser's part through diffusers, if only it knows the names and it uses every tensor."""
    denoiser = component_of(now.pipe, "denoiser")
    if not now.foreign.get("denoiser") or has_original_names(denoiser):
        return
    own = [group for group in groups if now.names.find(group.layer)[0].component == "denoiser"]
    tensors = {group.keys[role][0]: tensor for group in own for role, tensor in group.tensors.items()}
    try:
        layers, used = converted(now.pipe, tensors)
    except UnusableModel:
        return
    changes = {name: LoraLayer(matrices) for name, matrices in layers.items()}
    fits = all(
        name in now.names.shapes["denoiser"]
        and not _misfits(now, Named("denoiser", "", (LayerPlace(name),)), change)
        for name, change in changes.items()
    )
    if changes and fits and used == set(tensors):
        now.layers["denoiser"] = changes
        for problems in (now.foreign, now.ill, now.malformed):
            problems.pop("denoiser", None)


def _add(
    now: Account, component: Component, places: tuple[LayerPlace, ...], change: LoraLayer, group: Group
) -> None:
    for place in places:
        own = LoraLayer(_part(change.weight, place), _part(change.bias, place))
        before = now.layers[component].get(place.layer)
        if before is None:
            now.layers[component][place.layer] = own
            now.written_as[component, place.layer] = group.layer
        elif not _equal(before, own):
            now.ill[component].append(
                f"{now.name} names {place.layer} twice with different values, as "
                f"{now.written_as[component, place.layer]} and as {group.layer}: two LoRAs in one file"
            )


def _part(change: WeightChange | None, place: LayerPlace) -> WeightChange | None:
    return change if change is None or place.rows is None else rows_of(change, place.rows)


def _equal(layer: LoraLayer, other: LoraLayer) -> bool:
    import torch

    for a, b in ((layer.weight, other.weight), (layer.bias, other.bias)):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None:
            left, right = a.values("cpu").flatten(), b.values("cpu").flatten()
            if left.shape != right.shape or not torch.allclose(left, right, rtol=1e-3, atol=1e-6):
                return False
    return True


def _misfits(now: Account, named: Named, change: LoraLayer) -> str:
    assert named.component is not None
    part = attribute_of(now.pipe, named.component)
    shapes = {place.layer: now.names.shapes[named.component][place.layer] for place in named.places}
    sizes = [size_of(shape) for shape in shapes.values()]
    rows = sum(size[0] for size in sizes)
    name, shape = next(iter(shapes.items()))
    if change.weight is not None and change.weight.size() != (rows, sizes[0][1]):
        what = (
            "x".join(map(str, shape))
            if len(shapes) == 1
            else f"{rows}x{sizes[0][1]} (with {len(shapes) - 1} more)"
        )
        return f"{now.name} is not a LoRA for this {part}: {name} is {what}, and the LoRA's {change.weight.sizes()}"
    if change.bias is not None:
        layers = now.names.layers[named.component]
        without = [name for name in shapes if getattr(layers[name], "bias", None) is None]
        if without:
            return f"{now.name} is not a LoRA for this {part}: it changes the bias of {without[0]}, which has none"
        if change.bias.size() != (rows, 1):
            both = f"{name} has a bias of {rows}, and the LoRA's {change.bias.sizes()}"
            return f"{now.name} is not a LoRA for this {part}: {both}"
    return ""


def _scale(now: Account, group: Group, named: Named, rank: int) -> float:
    """Return alpha / rank, from the tensors or PEFT's json; BadForm where both contradict, or one is no number."""
    assert named.component is not None
    settings = now.settings or _header_settings(now, named.component)
    stated: float | None = None
    if settings is not None:
        names = (group.layer.removeprefix("base_model.model."), named.places[0].layer)
        try:
            stated = settings.scale(names, rank)
        except ValueError as error:
            raise BadForm(f"it does not go with {settings.where}, which {error}") from None
    alpha = group.tensors.get("alpha")
    if not rank:  # there is nothing that an alpha would be divided by
        return 1.0 if stated is None else stated
    now.has_alpha[alpha is not None or stated is not None] += 1
    if alpha is None:
        return 1.0 if stated is None else stated
    if alpha.numel() != 1:
        raise BadForm(f"it has an alpha for {group.layer} that is not one number ({sizes_of(alpha)})")
    now.num_zero_alphas += not bool(alpha)
    return float(alpha) / rank


def _header_settings(now: Account, component: Component) -> PeftSettings | None:
    text = now.metadata.get(_METADATA)
    if not text:
        return None
    with reading(now.name, problem="has a damaged header", advice="copy or download it again"):
        return settings_of_header(json.loads(text), attribute_of(now.pipe, component))


def listed(names: Iterable[str]) -> str:
    """Return the first names, and "..." for the others."""
    every = list(names)
    return ", ".join(name[:120] for name in every[:_NUM_NAMED]) + (", ..." if len(every) > _NUM_NAMED else "")


def made_for(
    metadata: Mapping[str, Any], pipe: Any, foreign: Sequence[Group], misfits: Sequence[Group]
) -> str:
    stated = next((str(metadata[name])[:80] for name in _HEADER if metadata.get(name)), "")
    if stated and _letters(_this(pipe)) not in _letters(stated):
        return f": its header says {stated}, and this is {_this(pipe)}"
    if width := _text_width([*foreign, *misfits]):
        named = [name for family in FAMILIES if (name := family.by_text_width.get(width))]
        model = "" if _this(pipe) in named else "".join(named[:1])
    else:
        families = _families_of(foreign)
        is_own = family_of(component_of(pipe, "denoiser")) in families
        names = [family.name if family.is_transformer else "a UNet" for family in families]
        model = "" if is_own else " or ".join(names)
    return f": its layers are those of {model}, and this is {_this(pipe)}" if model else ""


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _text_width(groups: Sequence[Group]) -> int:
    for group in groups:
        name = group.layer.replace(".", "_")
        down = group.tensors.get("down")
        if name.endswith(("attn2_to_k", "attn2_to_v")) and down is not None and down.dim() >= 2:
            return int(down.shape[1])
    return 0


def _families_of(groups: Sequence[Group]) -> list[Family]:
    """Return the families that have a layer of such a name; those of a part that one alone has come first."""
    names = [group.layer.replace(".", "_") for group in groups]
    owners: dict[str, list[Family]] = defaultdict(list)
    for family in FAMILIES:
        for part in family.lora_layers:
            owners[part].append(family)
    parts = sorted(owners, key=lambda part: (len(owners[part]), -len(part)))
    return next((owners[part] for part in parts if any(part in name for name in names)), [])


def _this(pipe: Any) -> str:
    denoiser = component_of(pipe, "denoiser")
    family = family_of(denoiser)
    if family is None:
        return f"a {type(denoiser).__name__}"
    width = getattr(denoiser, "config", {}).get("cross_attention_dim")
    return family.by_text_width.get(width, family.name) if isinstance(width, int) else family.name


def few_steps_file(few_steps: FewSteps) -> Path:
    lora = few_steps.lora
    return WEIGHTS / lora if isinstance(lora, str) else fetch_part(lora)


# Merged, a LoRA adds no cost per step. The sum of all LoRAs is computed in fp32 and rounded once.
# Source: Hu et al., LoRA, arXiv 2106.09685.
def merge(pipe: Any, path: Path, amount: float = 1.0) -> int:
    """Merge the LoRA in `path`, scaled; return the number of changed layers. UnusableModel: it is not for this one."""
    lora = read_lora(pipe, path)
    if (problem := lora.problem(COMPONENTS)) is not None:
        raise UnusableModel(problem)
    if lora.unused:
        raise UnusableModel(f"{path}: {lora.unused}; give the LoRA of this model")
    return sum(merge_all(pipe, [(lora.layers, amount)]).values())


def merge_all(pipe: Any, loras: Sequence[tuple[LoraLayers, float]]) -> Counter[Component]:
    """Merge several LoRAs, each with its factor, rounding each weight once; return the changed layers by component."""
    changed: Counter[Component] = Counter()
    for component in COMPONENTS:
        parts = [(layers[component], amount) for layers, amount in loras if component in layers]
        modules = dict(component_of(pipe, component).named_modules()) if parts else {}
        for name in dict.fromkeys(name for layers, _ in parts for name in layers):
            for kind in ("weight", "bias"):  # which RMSNorms and embeddings lack
                own = [(getattr(layers[name], kind), amount) for layers, amount in parts if name in layers]
                if changes := [(change, amount) for change, amount in own if change is not None]:
                    _sum(getattr(modules[name], kind), changes)
            changed[component] += 1
    return changed


def _sum(tensor: torch.Tensor, changes: Sequence[tuple[WeightChange, float]]) -> None:
    import torch

    with torch.no_grad():
        total = tensor.float()
        for change, amount in changes:
            total = total + amount * change.values(tensor.device).reshape(tensor.shape)
        tensor.copy_(total.to(tensor.dtype))
