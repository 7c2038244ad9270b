"""Read a LoRA file for a pipeline. Every tensor is used, has no effect, or is said to be unused and why.

Sources: kohya-ss/sd-scripts; LyCORIS; PEFT; diffusers, loaders/lora_conversion_utils.py; ComfyUI, comfy/lora.py.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.contract import Component, attribute_of, component_of
from vivace.errors import UnusableModel
from vivace.foreign.reading import reading
from vivace.lora.changes import Change, LoraLayer, LoraLayers, rows_of, sizes_of
from vivace.lora.files import settings_for
from vivace.lora.forms import BadForm, Group, form_of, has_no_effect
from vivace.lora.keys import UNUSABLE, split_key
from vivace.lora.layer_names import LayerNames, Named, Place, shape_of, size_of
from vivace.lora.made_for import made_for
from vivace.lora.peft_settings import Settings, read_settings, settings_of_header
from vivace.models.headers import read_header

if TYPE_CHECKING:
    import torch

_METADATA = "lora_adapter_metadata"
"""What diffusers writes into the header: PEFT's configuration, with alphas and ranks."""
_NUM_NAMED = 3
_PLAIN = "vivace adds plain LoRAs, LoCon, LoHa, LoKr and differences: train or convert it as one of them"


@dataclass(frozen=True)
class LoraFile:
    """What a file adds to a pipeline.

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
class _Reading:
    """What is known of a file while its groups are read."""

    pipe: Any
    name: str
    names: LayerNames
    settings: Settings | None
    metadata: Mapping[str, Any]
    num_tensors: int
    layers: dict[Component, dict[str, LoraLayer]] = field(default_factory=lambda: defaultdict(dict))
    written_as: dict[tuple[Component, str], str] = field(default_factory=dict)
    foreign: dict[Component, list[Group]] = field(default_factory=lambda: defaultdict(list))
    unusable: dict[Component, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(dict))
    ill: dict[Component, list[str]] = field(default_factory=lambda: defaultdict(list))
    suspects: list[Group] = field(default_factory=list)
    absent: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    without_effect: list[str] = field(default_factory=list)
    foreign_zeros: dict[Component, list[Group]] = field(default_factory=lambda: defaultdict(list))
    has_alpha: Counter[bool] = field(default_factory=Counter)


def read_lora(pipe: Any, path: Path, name: str = "") -> LoraFile:
    """Read a LoRA for a pipeline of this class and these configurations. Whether it fits, its `problems` say.

    Args:
        name: what messages call it; "" for its path.

    Raises:
        UnusableModel: it is damaged, or no LoRA.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    read_header(path)  # says what is wrong with a damaged file
    with reading(path, advice="copy or download it again"):
        stored = load_file(path)
        with safe_open(str(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
    for key, tensor in stored.items():
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise UnusableModel(f"{path} has values that are not finite ({key}); train or download it again")
    with reading(path, problem="is not a LoRA that vivace reads", advice="give the LoRA of this model"):
        return _read(pipe, path, name or str(path), stored, metadata)


def _read(
    pipe: Any, path: Path, name: str, stored: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]
) -> LoraFile:
    groups = _groups(name, stored)
    if all(set(group.tensors) <= {"unknown", "replacement", "alpha"} for group in groups):
        raise UnusableModel(
            f"{name} has no LoRA layers ({_listed(stored)}); give a LoRA in safetensors format"
        )
    config = settings_for(path, stored)
    settings = None if config is None else read_settings(config)
    if settings is not None and (problem := settings.problem()) is not None:
        raise UnusableModel(f"{name}: {problem}")
    now = _Reading(pipe, name, LayerNames(pipe), settings, metadata, len(stored))
    for group in groups:
        _read_group(now, group)
    return _file(now)


def _groups(name: str, stored: Mapping[str, torch.Tensor]) -> list[Group]:
    """Return the tensors by the layers that the file names."""
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


def _read_group(now: _Reading, group: Group) -> None:
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
            named = next((m for m in meanings if not _misfits(now, m, change)), named)
        except BadForm as error:
            problem = f"{now.name} is not a LoRA that vivace reads: {error}"
    elif unusable is None and named.component is not None:
        try:
            form_of(group, lambda rank: 1.0)
        except BadForm as error:
            problem = f"{now.name} is not a LoRA that vivace reads: {error}"
    misfit = _misfits(now, named, change) if change is not None else ""
    is_used = bool(named.places) and unusable is None
    if has_no_effect(group) and (not is_used or (misfit and _is_embedding(now, named))):
        now.without_effect += group.all_keys
        if named.component is not None and not named.places:
            now.foreign_zeros[named.component].append(group)
    elif named.component is None:
        now.absent[f"{named.part}, which this pipeline does not have"] += group.all_keys
    elif problem:
        now.ill[named.component].append(problem)
    elif unusable is not None:
        now.unusable[named.component].setdefault(UNUSABLE[unusable], []).extend(group.all_keys)
    elif not named.places:
        now.foreign[named.component].append(group)
        now.suspects.append(group)
    elif misfit:
        now.ill[named.component].append(misfit)
        now.suspects.append(group)
    else:
        assert change is not None
        _add(now, named.component, named.places, change, group)


def _add(
    now: _Reading, component: Component, places: tuple[Place, ...], change: LoraLayer, group: Group
) -> None:
    """Take a group's change into its layers."""
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


def _part(change: Change | None, place: Place) -> Change | None:
    return change if change is None or place.rows is None else rows_of(change, place.rows)


def _equal(one: LoraLayer, other: LoraLayer) -> bool:
    import torch

    for a, b in ((one.weight, other.weight), (one.bias, other.bias)):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None:
            left, right = a.values("cpu").flatten(), b.values("cpu").flatten()
            if left.shape != right.shape or not torch.allclose(left, right, rtol=1e-3, atol=1e-6):
                return False
    return True


def _misfits(now: _Reading, named: Named, change: LoraLayer) -> str:
    """Return why a change is not one for these layers; "" if it is."""
    assert named.component is not None
    module = component_of(now.pipe, named.component)
    part = attribute_of(now.pipe, named.component)
    layers = {place.layer: module.get_submodule(place.layer) for place in named.places}
    shapes = {name: shape_of(layer) for name, layer in layers.items()}
    sizes = [size_of(shape) for shape in shapes.values() if shape is not None]
    rows = sum(size[0] for size in sizes)
    name, shape = next(iter(shapes.items()))
    assert shape is not None
    if change.weight is not None and change.weight.size() != (rows, sizes[0][1]):
        what = (
            "x".join(map(str, shape))
            if len(shapes) == 1
            else f"{rows}x{sizes[0][1]} (with {len(shapes) - 1} more)"
        )
        return f"{now.name} is not a LoRA for this {part}: {name} is {what}, and the LoRA's {change.weight.sizes()}"
    if change.bias is not None:
        without = [name for name, layer in layers.items() if getattr(layer, "bias", None) is None]
        if without:
            return f"{now.name} is not a LoRA for this {part}: it changes the bias of {without[0]}, which has none"
        if change.bias.size() != (rows, 1):
            sizes = f"{name} has a bias of {rows}, and the LoRA's {change.bias.sizes()}"
            return f"{now.name} is not a LoRA for this {part}: {sizes}"
    return ""


def _is_embedding(now: _Reading, named: Named) -> bool:
    import torch

    assert named.component is not None
    module = component_of(now.pipe, named.component)
    return isinstance(module.get_submodule(named.places[0].layer), torch.nn.Embedding)


def _scale(now: _Reading, group: Group, named: Named, rank: int) -> float:
    """Return alpha / rank, from the file's tensors or from PEFT's configuration.

    Raises:
        BadForm: an alpha is not one number, or contradicts the json beside the file.
    """
    assert named.component is not None
    settings = now.settings or _header_settings(now, named.component)
    stated: float | None = None
    if settings is not None:
        names = (group.layer.removeprefix("base_model.model."), named.places[0].layer)
        try:
            stated = settings.scale(names, rank)
        except ValueError as error:
            raise BadForm(f"{now.name} does not go with {settings.where}, which {error}") from None
    alpha = group.tensors.get("alpha")
    if not rank:  # there is nothing that an alpha would be divided by
        return 1.0 if stated is None else stated
    now.has_alpha[alpha is not None or stated is not None] += 1
    if alpha is None:
        return 1.0 if stated is None else stated
    if alpha.numel() != 1:
        raise BadForm(f"{now.name} has an alpha for {group.layer} that is not one number ({sizes_of(alpha)})")
    return float(alpha) / rank


def _header_settings(now: _Reading, component: Component) -> Settings | None:
    text = now.metadata.get(_METADATA)
    if not text:
        return None
    with reading(now.name, problem="has a damaged header", advice="copy or download it again"):
        return settings_of_header(json.loads(text), attribute_of(now.pipe, component))


def _file(now: _Reading) -> LoraFile:
    problems: dict[Component, str] = {}
    if not any((*now.layers.values(), now.unusable, now.foreign, now.ill)):
        now.foreign |= now.foreign_zeros  # there is nothing else in it
    hint = made_for(now.metadata, now.pipe, now.suspects) if now.suspects else ""
    for component in dict.fromkeys((*now.unusable, *now.foreign, *now.ill)):
        problems[component] = _problem(now, component, hint)
    unused = [key for keys in now.absent.values() for key in keys]
    unused_note = ""
    if unused:
        reasons = "; ".join(now.absent)
        unused_note = (
            f"{len(unused)} of {now.num_tensors} tensors are not used: {_listed(unused)} ({reasons})"
        )
    notes = [unused_note] if unused_note else []
    alpha = _assumed_alpha(now)
    if alpha and (
        now.has_alpha[True] or any(key.startswith("base_model.") for key in now.written_as.values())
    ):
        notes.append(alpha)
    if not any(now.layers.values()) and not problems:
        zeros = f"all of its tensors add zero ({_listed(now.without_effect)})"
        raise UnusableModel(f"{now.name} has no LoRA layers for this pipeline: {'; '.join(notes) or zeros}")
    return LoraFile(
        {c: dict(layers) for c, layers in now.layers.items() if layers},
        problems,
        now.num_tensors,
        len(now.without_effect),
        unused_note,
        tuple(notes),
        alpha,
    )


def _assumed_alpha(now: _Reading) -> str:
    without, num = now.has_alpha[False], now.has_alpha.total()
    if not without:
        return ""
    where = "in the file" if now.settings is None else f"in the file or in {now.settings.where}"
    some = "" if without == num else f" for {without} of {num} layers"
    return f"alpha is assumed to be the rank{some}: there is none {where}"


def _problem(now: _Reading, component: Component, hint: str) -> str:
    """Say what is wrong with the part of a component, and what to do."""
    part = attribute_of(now.pipe, component)
    advice = (
        "give the LoRA of this model"
        if component == "denoiser"
        else f"give the LoRA of this model, or leave the {part} out with @denoiser"
    )
    for words, keys in now.unusable[component].items():
        num = f"{len(keys)} of {now.num_tensors} tensors"
        other = "" if component == "denoiser" else f", or leave the {part} out with @denoiser"
        return f"{now.name} is {words} ({num}: {_listed(keys)}); {_PLAIN}{other}"
    if groups := now.foreign[component]:
        num = sum(len(group.all_keys) for group in groups)
        names = _listed([group.layer for group in groups])
        return (
            f"{now.name} is not a LoRA for this {part}, which has no layer {names} "
            f"({num} of {now.num_tensors} tensors){hint}; {advice}"
        )
    ill = now.ill[component]
    more = "" if len(ill) == 1 else f" (and {len(ill) - 1} more)"
    return f"{ill[0]}{more}{hint}; {advice}"


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(name[:120] for name in every[:_NUM_NAMED]) + (", ..." if len(every) > _NUM_NAMED else "")
