"""Quantising as lines of a plain script: what a scheme does to a layer, in public calls of its library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vivace.contract import COMPONENTS, Component, Stage, Target
from vivace.contract.script import Script, literal, written_call
from vivace.quantization.layers import NUMBER, Choice
from vivace.quantization.scheme import Settings
from vivace.quantization.torchao_four_bits import is_packed

_INDENT = " " * 12  # a function, a loop, a condition
_QUANTIZE = "torchao.quantization:quantize_"
_PARAMETER = "layer.weight = torch.nn.Parameter(weight, requires_grad=False)"
# bitsandbytes' layers take the place of Linear ones.
_PUT = (
    "made.bias = layer.bias",
    'parent, _, last = name.rpartition(".")',
    "setattr(model.get_submodule(parent), last, made)",
    "layer.weight = None  # the list of modules holds the layer still",
)
_LEAST = "least = 448 * torch.finfo(layer.weight.dtype).tiny  # so that rows of zeros have a scale"


@dataclass(frozen=True)
class _Written:
    """What is done to one Linear, which is called `layer`.

    imports: as in `Script`.
    config: torchao's configuration that does it.
    lines: statements that do it, where no configuration does; `name` and `model` are there too.
    unless_stage: as in `Script`.
    on_host: the lines do on a CPU what they would do on the GPU.
    """

    imports: tuple[str, ...]
    config: str = ""
    lines: tuple[str, ...] = ()
    unless_stage: int | None = None
    on_host: bool = True


def script_of(
    target: Target, scheme: tuple[str, str], settings: Settings, choices: Mapping[Component, Choice]
) -> Script | None:
    """The lines that quantise what was chosen, or None where public calls cannot.

    Where the pipeline waits in the host's memory they bring each layer to the GPU alone, as vivace does.

    Args:
        scheme: backend and name.
    """
    modules = target.modules(COMPONENTS)
    if settings.convolutions:
        return None
    made = _written(*scheme, settings, is_packed(settings))
    if made is _INT8 and target.machine.is_cuda and any(_is_bfloat16(modules[c]) for c in choices):
        # Compiled, torchao's own product becomes one for a few rows; see `int8_tensor`.
        made = replace(made, unless_stage=Stage.COMPILE)
    is_offloaded = target.machine.is_cuda and target.where.home == "cpu"
    if made is None or (is_offloaded and not made.on_host):
        return None
    brings = target.where.on_host and not is_offloaded
    kept = {component: _patterns(choice, modules[component]) for component, choice in choices.items()}
    if made.config and not any(kept.values()):
        device = {"device": '"cuda"'} if brings else {}
        calls = [written_call("quantize_", target.path(c), made.config, **device) for c in choices]
        lines = [line for call in calls for line in call.splitlines()]
        imports = {_QUANTIZE, *made.imports}
    else:
        function = f"quantize_to_{scheme[1]}"
        has_kept = any(kept.values())
        lines = [*_function(function, made, has_kept, brings), "", ""]
        for component in choices:
            names = f"{{{', '.join(map(literal, kept[component]))}}}" if kept[component] else "set()"
            lines += _call(function, target.path(component), kept[component], names if has_kept else "")
        imports = {"torch", *made.imports, *(["re"] if has_kept else [])}
        imports |= {_QUANTIZE} if made.config else set()
    return Script(
        imports=tuple(sorted(imports)),
        lines=tuple(lines),
        from_host=brings,
        unless_stage=made.unless_stage,
    )


def _function(name: str, made: _Written, has_kept: bool, brings: bool) -> list[str]:
    lines = [
        f"def {name}(model{', kept' if has_kept else ''}):",
        "    for name, layer in list(model.named_modules()):",
    ]
    condition = "isinstance(layer, torch.nn.Linear)"
    if has_kept:
        lines += [
            "        # In the names of layers that are kept as they are a * stands for a number.",
            r'        names = {name, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)}',
        ]
        condition += " and not names & kept"
    body = (f"quantize_(layer, {made.config})",) if made.config else made.lines
    if brings:
        body = ('layer.to("cuda")', *body)
    if not any("name" in line for line in body) and not has_kept:
        lines[1] = "    for layer in list(model.modules()):"
    return [*lines, f"        if {condition}:", *(f"{_INDENT}{line}" for line in body)]


def _call(function: str, path: str, kept: list[str], names: str) -> list[str]:
    if not names:
        return [f"{function}({path})"]
    line = f"{function}({path}, {names})"
    if len(line) <= 88:
        return [line]
    inside = [f"        {literal(name)}," for name in kept]
    return [f"{function}(", f"    {path},", "    {", *inside, "    },", ")"]


def _is_bfloat16(module: Any) -> bool:
    import torch

    return any(tensor.dtype == torch.bfloat16 for tensor in module.parameters())


def _patterns(choice: Choice, module: Any) -> list[str]:
    """The Linear layers that are left alone: a pattern where it names no other, else each name."""
    import torch

    kept = [name for name in choice.kept if isinstance(module.get_submodule(name), torch.nn.Linear)]
    taken = {NUMBER.sub("*", name) for name in choice.taken}
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in kept:
        by_pattern[NUMBER.sub("*", name)].append(name)
    return [
        name
        for pattern, names in by_pattern.items()
        for name in (names if pattern in taken or len(names) == 1 else [pattern])
    ]


def _written(backend: str, scheme: str, settings: Settings, packed: bool) -> _Written | None:
    if backend == "bitsandbytes":
        return {"int8": _LLM_INT8, "nf4": _qlora_nf4(settings)}[scheme]
    if backend != "torchao":
        return None
    if scheme in {"fp8", "fp8_weight"}:
        return _fp8(settings, has_inputs=scheme == "fp8")
    return {
        "int8": _INT8,
        "int8_dynamic": _INT8_DYNAMIC,
        "nf4": _NF4,
        "int4": None if packed else _INT4,
    }.get(scheme)


def _ao(*names: str) -> tuple[str, ...]:
    return tuple(f"torchao.quantization:{name}" for name in names)


_INT8 = _Written(_ao("Int8WeightOnlyConfig"), "Int8WeightOnlyConfig(set_inductor_config=False)")
_INT8_DYNAMIC = _Written(
    _ao("Int8DynamicActivationInt8WeightConfig"),
    "Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)",
    unless_stage=Stage.CAPTURE,  # torchao's own product, uncompiled, copies to the host
)
_INT4 = _Written(
    ("torch", *_ao("IntxWeightOnlyConfig", "PerGroup")),
    "IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))",
)
_NF4 = _Written(
    ("math", *_ao("NF4Tensor")),
    lines=(
        "scales = math.gcd(layer.weight.numel() // 64, 256)  # that share a second scale",
        "weight = NF4Tensor.from_tensor(layer.weight.detach(), 64, scales)",
        _PARAMETER,
    ),
)


def _fp8(settings: Settings, has_inputs: bool) -> _Written:
    granularity = "PerRow" if settings.granularity == "row" else "PerTensor"
    imports = _ao("Float8Tensor", granularity)
    given = [f"granularity={granularity}(),", "hp_value_lb=least,"]
    before: tuple[str, ...] = ()
    if has_inputs:
        imports += (
            "torchao.float8.inference:Float8MMConfig",
            "torchao.quantization.quantize_.workflows:QuantizeTensorToFloat8Kwargs",
        )
        before = (
            "products = Float8MMConfig(use_fast_accum=True)",
            "inputs = QuantizeTensorToFloat8Kwargs(",
            "    torch.float8_e4m3fn,",
            f"    {granularity}(),",
            "    products,",
            "    hp_value_lb=least,",
            ")",
        )
        given += ["mm_config=products,", "act_quant_kwargs=inputs,"]
    lines = (
        _LEAST,
        *before,
        "weight = Float8Tensor.from_hp(",
        "    layer.weight.detach(),",
        *(f"    {argument}" for argument in given),
        ")",
        _PARAMETER,
    )
    return _Written(imports, lines=lines)


_LLM_INT8 = _Written(
    (
        "bitsandbytes.functional:int8_vectorwise_quant",
        "bitsandbytes.nn:Int8Params",
        "bitsandbytes.nn:Linear8bitLt",
    ),
    lines=(
        "made = Linear8bitLt(",
        "    layer.in_features,",
        "    layer.out_features,",
        "    bias=layer.bias is not None,",
        "    has_fp16_weights=False,",
        "    threshold=6.0,",
        '    device="meta",',
        ")",
        "weight = layer.weight.detach().to(torch.float16)",
        "values, scales, _ = int8_vectorwise_quant(weight)",
        "made.weight = Int8Params(",
        "    values,",
        "    requires_grad=False,",
        "    has_fp16_weights=False,",
        "    CB=values,",
        "    SCB=scales,",
        ")",
        *_PUT,
    ),
    on_host=False,
)


def _qlora_nf4(settings: Settings) -> _Written:
    twice = literal(settings.double_quantization)
    return _Written(
        ("bitsandbytes.nn:Linear4bit", "bitsandbytes.nn:Params4bit"),
        lines=(
            "made = Linear4bit(",
            "    layer.in_features,",
            "    layer.out_features,",
            "    bias=layer.bias is not None,",
            "    compute_dtype=layer.weight.dtype,",
            f"    compress_statistics={twice},",
            '    quant_type="nf4",',
            '    device="meta",',
            ")",
            "weight = Params4bit(",
            "    layer.weight.detach(),",
            "    requires_grad=False,",
            "    blocksize=64,",
            f"    compress_statistics={twice},",
            '    quant_type="nf4",',
            "    module=made,",
            ")",
            "made.weight = weight.to(layer.weight.device)  # quantises",
            *_PUT,
        ),
        on_host=False,
    )
