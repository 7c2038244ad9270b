"""Quantisation as lines of a plain script: a scheme's work on a layer, in public calls of its library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vivace.machinery.quantization.layers import NUMBER, LayerChoice
from vivace.machinery.quantization.scheme import SchemeSettings
from vivace.machinery.quantization.torchao_schemes import is_packed
from vivace.machinery.technique import COMPONENTS, Component, Stage, Target
from vivace.machinery.technique.script import Script, literal, written_call

if TYPE_CHECKING:
    import torch

_INDENT = " " * 12  # a function, a loop, a condition
_QUANTIZE = "torchao.quantization:quantize_"
_PARAMETER = "layer.weight = torch.nn.Parameter(weight, requires_grad=False)"
# bitsandbytes replaces Linear layers by its own.
_REPLACE = (
    "new_layer.bias = layer.bias",
    'parent, _, last = name.rpartition(".")',
    "setattr(model.get_submodule(parent), last, new_layer)",
    "layer.weight = None  # the list of modules still holds the layer",
)
_LOWER_BOUND = "lower_bound = 448 * torch.finfo(layer.weight.dtype).tiny  # for rows of zeros"


@dataclass(frozen=True)
class _LayerScript:
    """Lines for one Linear, called `layer`: torchao's configuration, or statements, which may use `name` and
    `model`."""

    imports: tuple[str, ...]
    config: str = ""
    lines: tuple[str, ...] = ()
    unless_stage: int | None = None
    on_host: bool = True


def script_of(
    target: Target,
    scheme: tuple[str, str],
    settings: SchemeSettings,
    choices: Mapping[Component, LayerChoice],
) -> Script | None:
    """Return the lines that quantise the chosen layers, or None where public calls cannot."""
    modules = target.modules(COMPONENTS)
    if settings.convolutions or settings.rotation != "none":
        return None
    layer_script = _layer_script(*scheme, settings, is_packed(settings))
    if layer_script is _INT8 and target.machine.is_cuda and any(_has_bfloat16(modules[c]) for c in choices):
        # Compiled, torchao's own matmul becomes one for a few rows; see `int8_weight_tensor`.
        layer_script = replace(layer_script, unless_stage=Stage.COMPILE)
    is_offloaded = target.machine.is_gpu and target.where.home == "cpu"
    if layer_script is None or (is_offloaded and not layer_script.on_host):
        return None
    moves_layers = target.where.on_host and not is_offloaded
    skipped = {
        component: _skipped_patterns(choice, modules[component]) for component, choice in choices.items()
    }
    if layer_script.config and not any(skipped.values()):
        device = {"device": literal(target.machine.device)} if moves_layers else {}
        calls = [written_call("quantize_", target.path(c), layer_script.config, **device) for c in choices]
        lines = [line for call in calls for line in call.splitlines()]
        imports = {_QUANTIZE, *layer_script.imports}
    else:
        function = f"quantize_to_{scheme[1]}"
        has_skipped = any(skipped.values())
        moved_to = target.machine.device if moves_layers else None
        lines = [*_function(function, layer_script, has_skipped, moved_to), "", ""]
        for component in choices:
            names = f"{{{', '.join(map(literal, skipped[component]))}}}" if skipped[component] else "set()"
            lines += _call(function, target.path(component), skipped[component], names if has_skipped else "")
        imports = {"torch", *layer_script.imports, *(["re"] if has_skipped else [])}
        imports |= {_QUANTIZE} if layer_script.config else set()
    return Script(
        imports=tuple(sorted(imports)),
        lines=tuple(lines),
        from_host=moves_layers,
        unless_stage=layer_script.unless_stage,
    )


def _function(name: str, layer_script: _LayerScript, has_skipped: bool, moved_to: str | None) -> list[str]:
    lines = [
        f"def {name}(model{', skipped' if has_skipped else ''}):",
        "    for name, layer in list(model.named_modules()):",
    ]
    condition = "isinstance(layer, torch.nn.Linear)"
    if has_skipped:
        lines += [
            "        # In the names of skipped layers a * stands for a number.",
            r'        names = {name, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)}',
        ]
        condition += " and not names & skipped"
    body = (f"quantize_(layer, {layer_script.config})",) if layer_script.config else layer_script.lines
    if moved_to is not None:
        body = (f"layer.to({literal(moved_to)})", *body)
    if not any("name" in line for line in body) and not has_skipped:
        lines[1] = "    for layer in list(model.modules()):"
    return [*lines, f"        if {condition}:", *(f"{_INDENT}{line}" for line in body)]


def _call(function: str, path: str, skipped: list[str], names: str) -> list[str]:
    if not names:
        return [f"{function}({path})"]
    line = f"{function}({path}, {names})"
    if len(line) <= 88:
        return [line]
    inside = [f"        {literal(name)}," for name in skipped]
    return [f"{function}(", f"    {path},", "    {", *inside, "    },", ")"]


def _has_bfloat16(module: torch.nn.Module) -> bool:
    import torch

    return any(tensor.dtype == torch.bfloat16 for tensor in module.parameters())


def _skipped_patterns(choice: LayerChoice, module: torch.nn.Module) -> list[str]:
    import torch

    skipped = [name for name in choice.skipped if isinstance(module.get_submodule(name), torch.nn.Linear)]
    chosen = {NUMBER.sub("*", name) for name in choice.chosen}
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in skipped:
        by_pattern[NUMBER.sub("*", name)].append(name)
    return [
        name
        for pattern, names in by_pattern.items()
        for name in (names if pattern in chosen or len(names) == 1 else [pattern])
    ]


def _layer_script(backend: str, scheme: str, settings: SchemeSettings, packed: bool) -> _LayerScript | None:
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


_INT8 = _LayerScript(_ao("Int8WeightOnlyConfig"), "Int8WeightOnlyConfig(set_inductor_config=False)")
_INT8_DYNAMIC = _LayerScript(
    _ao("Int8DynamicActivationInt8WeightConfig"),
    "Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)",
    unless_stage=Stage.CAPTURE,  # torchao's own matmul, uncompiled, copies to the host
)
_INT4 = _LayerScript(
    ("torch", *_ao("IntxWeightOnlyConfig", "PerGroup")),
    "IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))",
)
_NF4 = _LayerScript(
    ("math", *_ao("NF4Tensor")),
    lines=(
        "scales = math.gcd(layer.weight.numel() // 64, 256)  # that share a second scale",
        "weight = NF4Tensor.from_tensor(layer.weight.detach(), 64, scales)",
        _PARAMETER,
    ),
)


def _fp8(settings: SchemeSettings, has_inputs: bool) -> _LayerScript:
    granularity = "PerRow" if settings.granularity == "row" else "PerTensor"
    imports = _ao("Float8Tensor", granularity)
    arguments = [f"granularity={granularity}(),", "hp_value_lb=lower_bound,"]
    before: tuple[str, ...] = ()
    if has_inputs:
        imports += (
            "torchao.float8.inference:Float8MMConfig",
            "torchao.quantization.quantize_.workflows:QuantizeTensorToFloat8Kwargs",
        )
        before = (
            "mm_config = Float8MMConfig(use_fast_accum=True)",
            "inputs = QuantizeTensorToFloat8Kwargs(",
            "    torch.float8_e4m3fn,",
            f"    {granularity}(),",
            "    mm_config,",
            "    hp_value_lb=lower_bound,",
            ")",
        )
        arguments += ["mm_config=mm_config,", "act_quant_kwargs=inputs,"]
    lines = (
        _LOWER_BOUND,
        *before,
        "weight = Float8Tensor.from_hp(",
        "    layer.weight.detach(),",
        *(f"    {argument}" for argument in arguments),
        ")",
        _PARAMETER,
    )
    return _LayerScript(imports, lines=lines)


_LLM_INT8 = _LayerScript(
    (
        "bitsandbytes.functional:int8_vectorwise_quant",
        "bitsandbytes.nn:Int8Params",
        "bitsandbytes.nn:Linear8bitLt",
    ),
    lines=(
        "new_layer = Linear8bitLt(",
        "    layer.in_features,",
        "    layer.out_features,",
        "    bias=layer.bias is not None,",
        "    has_fp16_weights=False,",
        "    threshold=6.0,",
        '    device="meta",',
        ")",
        "weight = layer.weight.detach().to(torch.float16)",
        "values, scales, _ = int8_vectorwise_quant(weight)",
        "new_layer.weight = Int8Params(",
        "    values,",
        "    requires_grad=False,",
        "    has_fp16_weights=False,",
        "    CB=values,",
        "    SCB=scales,",
        ")",
        *_REPLACE,
    ),
    on_host=False,
)


def _qlora_nf4(settings: SchemeSettings) -> _LayerScript:
    twice = literal(settings.double_quantization)
    return _LayerScript(
        ("bitsandbytes.nn:Linear4bit", "bitsandbytes.nn:Params4bit"),
        lines=(
            "new_layer = Linear4bit(",
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
            "    module=new_layer,",
            ")",
            "new_layer.weight = weight.to(layer.weight.device)  # quantises",
            *_REPLACE,
        ),
        on_host=False,
    )
