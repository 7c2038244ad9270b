"""How techniques meet: traits of a component, which they provide, need or exclude. No technique names another.

A conflict between techniques of one recipe is found when the recipe is resolved, from declarations alone. The same
rules are checked again when a technique is applied, against what the pipeline's modules show: a user's own pipeline may
be compiled or cached already.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vivace.machinery.technique.anatomy import COMPONENTS, Component

if TYPE_CHECKING:
    from vivace.machinery.technique.target import Target
    from vivace.machinery.technique.technique import Technique


class Stage(IntEnum):
    """Components are replaced before they are converted, and converted before they are compiled. What only concerns the
    call comes last."""

    SWAP = 10
    """A component is replaced: a tiny VAE."""
    MERGE = 12
    """Weights are added to: before blocks are removed, which renumbers the others, and before weights are rounded."""
    PRUNE = 15
    """Blocks are removed, before anything is done to those that stay."""
    PRECISION = 20
    """The dtype, before quantisation reads the weights."""
    FUSE = 25
    """Layers are merged; before quantisation, because quantised weights cannot be merged."""
    QUANTIZE = 30
    """Weights are replaced by quantised ones."""
    ADAPT = 35
    """Layers are added beside others; after quantisation, which may replace those."""
    LAYOUT = 40
    """Memory formats; after quantisation, which may create new weights."""
    SHARD = 42
    """The denoiser is replicated on other GPUs. Techniques of later stages are applied to every replica."""
    SPLIT = 43
    """A component's work is cut into smaller pieces: tiles, slices."""
    CACHE = 45
    """Hooks that skip work between steps; before compiling, so that the graph is traced with them."""
    COMPILE = 50
    CAPTURE = 55
    """The (possibly compiled) forward is captured in a CUDA graph and replayed."""
    KERNEL = 60
    """Kernels are chosen by contexts around the (possibly compiled) forward."""
    SCHEDULE = 70
    """The call is changed: scheduler, steps, guidance, prompts."""
    OFFLOAD = 90
    """Where weights are stored; last, because every other technique needs the weights on their device."""


class Trait(StrEnum):
    """A property that a technique gives to a component and that matters to other techniques."""

    COMPILED = "compiled"
    """It runs compiled code, as a whole or by blocks."""
    COMPILED_WHOLE = "compiled as a whole"
    CAPTURED = "captured in CUDA graphs"
    """Graphs are replayed, which read weights at fixed addresses."""
    CAPTURED_BY_COMPILER = "captured by torch.compile"
    """torch.compile decides when to capture, separately in each process."""
    CACHED = "cached between steps"
    DECIDES_ON_HOST = "decided on the host in each step"
    """A value is read back from the GPU to decide what to compute."""
    MIXES_ROWS = "dependent on other rows of the batch"
    """The result of one batch row depends on others, or on state that every replica would keep for itself."""
    KEEPS_BLOCK_TENSORS = "keeping tensors inside of its blocks"
    """State is kept inside of the blocks, where each GPU has its own tokens."""
    KERNEL_CHOSEN = "run by a chosen attention kernel"
    SHARDED = "sharded over GPUs"
    HOOKED = "hooked"
    """Hooks are attached to its layers, which cannot be copied to another process."""
    QUANTIZED = "quantised"
    REPACKED = "stored in tensor subclasses"
    """Its weights are tensor subclasses whose meaning is lost if only their bytes are copied."""
    COPIES_FROM_HOST = "copying from host memory in its forward"
    PROJECTIONS_FUSED = "fused in its attention projections"
    """Query, key and value have one layer instead of three."""
    PRUNED = "pruned"
    """Some of its blocks are removed, so that the others may have other numbers."""
    FUSED = "run by fused kernels"
    """Its blocks are no longer modules of diffusers."""
    OFFLOADED = "offloaded"
    OFFLOADED_BY_LAYER = "offloaded by layer"
    MOVED = "moved between devices"
    """Its weights are moved while it is not needed, by something other than offloading."""
    ABSENT = "without its weights"
    """They are on the meta device: other libraries put them in place while a layer is computed."""
    IN_GROUPS = "offloaded in groups by diffusers"
    IN_8_BITS = "stored in 8 bits"
    CAST = "cast layer by layer"
    """diffusers casts each layer to a precision before it is computed, and back to 8 bits afterwards."""
    ADAPTED = "under adapters"
    """PEFT's layers stand in the places of its own."""
    PROCESS_WIDE = "under settings of the process"
    """A setting of the whole process while a call runs; processes of replicas need it too."""


@dataclass(frozen=True)
class Rule:
    """A trait that a technique needs or excludes on the components that it is aimed at, and why.

    Attributes:
        because: completes "A does not go with B: ...": the reason, and what to do instead.
        unless: another trait of the component that lifts the rule.
        components: where the rule holds; empty: wherever the technique works.
        earlier_only: the rule concerns only what was there before the technique is applied.
    """

    trait: Trait
    because: str
    unless: Trait | None = None
    components: tuple[Component, ...] = ()
    earlier_only: bool = False


_BEFORE = "apply the recipe before that"
_ON_WEIGHTS = frozenset(
    {Stage.MERGE, Stage.PRUNE, Stage.PRECISION, Stage.FUSE, Stage.QUANTIZE, Stage.ADAPT, Stage.LAYOUT, Stage.SHARD}
    | {Stage.CAPTURE, Stage.OFFLOAD}
)  # fmt: skip
_RULES: tuple[tuple[frozenset[Stage], Rule], ...] = (
    (
        _ON_WEIGHTS,
        Rule(
            Trait.ABSENT,
            "they are on the meta device, as accelerate's offloading leaves them, and what is written there is lost; "
            f"call pipe.remove_all_hooks() first, or {_BEFORE}",
        ),
    ),
    (_ON_WEIGHTS, Rule(Trait.IN_GROUPS, f"new weights would be in no group; {_BEFORE}, or take offload(group)")),
    (
        frozenset({Stage.MERGE, Stage.FUSE}),
        Rule(
            Trait.IN_8_BITS,
            f"sums and new layers would be rounded or not cast; {_BEFORE}",
            unless=Trait.FUSED,
        ),
    ),
    (frozenset({Stage.PRECISION}), Rule(Trait.CAST, f"hooks would go on casting to the former precision; {_BEFORE}")),
    (
        frozenset({Stage.FUSE}),
        Rule(
            Trait.ADAPTED,
            "new layers would leave out what the adapters add; merge them first, with pipe.fuse_lora() and "
            "pipe.unload_lora_weights(), or by the recipe: lora(PATH)",
        ),
    ),
)  # fmt: skip
"""What holds for all techniques of a stage, wherever the weights of a component are not plainly in it."""

_TRAITS: WeakKeyDictionary[Any, set[Trait]] = WeakKeyDictionary()
_HOOKS = {"group_offloading": Trait.IN_GROUPS, "layerwise_casting": Trait.CAST}
"""Names of diffusers' hooks."""


def give(module: Any, traits: frozenset[Trait]) -> None:
    """Record traits of a module, except those that can be read from the module itself: they may be undone."""
    _TRAITS.setdefault(module, set()).update(traits - _foreign(module))


def traits_by_techniques(module: Any) -> frozenset[Trait]:
    return frozenset(_TRAITS.get(module, ()))


def with_traits(module: Any, traits: frozenset[Trait]) -> None:
    """Set the recorded traits of a module to exactly these, after techniques were undone."""
    _TRAITS.pop(module, None)
    if traits:
        _TRAITS[module] = set(traits)


def traits_of(module: Any) -> frozenset[Trait]:
    """Return the traits that techniques gave to a module, and those that other libraries left on it."""
    return frozenset(_TRAITS.get(module, ())) | _foreign(module)


def exclusion(technique: Technique, target: Target) -> str | None:
    """Return why a technique cannot work with the traits that the pipeline's modules have; None if it can."""
    if target.pipe is None:
        return None
    other = "; or leave it out with @" if len(target.modules(technique.targets)) > 1 else ""
    for component, module in target.modules(technique.targets or COMPONENTS).items():
        traits = traits_of(module)
        if not target.model.has_weights:
            traits -= {Trait.ABSENT}
        for rule in (
            *technique.facts.excludes,
            *(rule for stages, rule in _RULES if technique.facts.stage in stages),
        ):
            applies = not rule.components or component in rule.components
            if applies and rule.trait in traits and rule.unless not in traits:
                return f"the {component} is {rule.trait}: {rule.because}{other}"
    return None


def is_compiled(module: Any) -> bool:
    """Whether calling this module runs compiled code as a whole, or would on a device (see `Technique.predict`)."""
    return Trait.COMPILED_WHOLE in _TRAITS.get(module, ()) or _runs_compiled_code(module)


def _runs_compiled_code(module: Any) -> bool:
    called = (getattr(module, "_compiled_call_impl", None), getattr(module, "forward", None))
    return any(hasattr(function, "_torchdynamo_orig_callable") for function in called)


def _foreign(module: Any) -> frozenset[Trait]:
    traits: set[Trait] = set()
    decoder = getattr(module, "decoder", None)
    if _runs_compiled_code(module) or _runs_compiled_code(decoder):
        traits |= {Trait.COMPILED, Trait.COMPILED_WHOLE}
    elif any(_runs_compiled_code(part) for part in module.modules()):
        traits.add(Trait.COMPILED)
    if getattr(module, "is_cache_enabled", False):
        traits |= {Trait.CACHED, Trait.DECIDES_ON_HOST}
    if getattr(module, "_parallel_config", None) is not None:
        traits.add(Trait.SHARDED)
    for part in module.modules():
        if (registry := vars(part).get("_diffusers_hook")) is not None:
            traits |= {Trait.HOOKED} | {trait for name, trait in _HOOKS.items() if name in registry.hooks}
        if "base_layer" in part._modules:
            traits.add(Trait.ADAPTED)
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and tensor.is_meta:
                traits.add(Trait.ABSENT)
            if tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize == 1:
                traits.add(Trait.IN_8_BITS)
    if hasattr(module, "_hf_hook"):
        traits.add(Trait.OFFLOADED)
    return frozenset(traits)
