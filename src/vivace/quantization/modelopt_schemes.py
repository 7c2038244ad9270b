"""NVIDIA ModelOpt's schemes: its layers in the place of Linear ones. An optional extra.

Each layer is quantised alone and then compressed, so that its weight really takes fewer bits: until then ModelOpt only
simulates. What it would simulate even so is not here: products in int8, for which it has no kernel, products in fp4,
for which it has one with TensorRT-LLM on Blackwell alone, and products in fp8 on a CPU. Nor is NF4, whose scales of
scales ModelOpt 0.47 fails to choose. diffusers 0.42's own class for ModelOpt writes a configuration that ModelOpt has
given up since, and quantises only what is being loaded; so ModelOpt is called directly.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

from vivace.errors import Unsupported
from vivace.quantization.meta_weights import Part, held
from vivace.quantization.scheme import Scheme, Settings
from vivace.quantization.torchao_schemes import fp8_lacks
from vivace.quantization.torchao_tensors import not_a_multiple

_PACKAGE = ("modelopt.torch", "nvidia-modelopt")
_INT4_GROUP = 128  # weights that share a scale
_NVFP4_BLOCK = 16  # weights that share a scale in fp8; a second one is for all
_FP8 = (4, 3)  # bits of exponent and mantissa
_LARGEST = 448.0  # of fp8
_Config = dict[str, Any]


def _change(weights: Callable[[Settings], _Config], parts: Callable[[Any, Settings], list[Part]]) -> Any:
    def change(layer: Any, settings: Settings) -> Any:
        if not settings.has_data:
            return held(layer, *parts(layer, settings))
        return _compressed(layer, {"*weight_quantizer": weights(settings)})

    return change


def _compressed(layer: Any, quantizers: dict[str, _Config], largest_input: Any = None) -> Any:
    """The layer as ModelOpt makes it, with these quantisers and no others."""
    import torch

    with _quietly():
        import modelopt.torch.quantization as mtq

        enabled = [{"quantizer_name": name, "cfg": cfg, "enable": True} for name, cfg in quantizers.items()]
        config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *enabled], "algorithm": "max"}
        box = torch.nn.Sequential(layer)  # it changes what is inside of a module

        def calibrate(_: Any) -> None:
            box[0].input_quantizer.amax = largest_input

        with torch.no_grad():
            mtq.quantize(box, config, calibrate if largest_input is not None else None)
            mtq.compress(box)
    return box[0].eval().requires_grad_(False)


@contextlib.contextmanager
def _quietly() -> Any:
    """It prints what it inserted, and warns of transformers' version, and that compressing is experimental."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _change_static(layer: Any, settings: Settings) -> Any:
    import torch

    if not settings.has_data:
        stored = (tuple(layer.weight.shape), torch.float8_e4m3fn)
        return held(layer, stored, *[((), layer.weight.dtype)] * 3, widens=False)
    config = {"num_bits": _FP8, "axis": None}
    largest = settings.scale.reshape(()).to(layer.weight.device) * _LARGEST
    made = _compressed(layer, {"*weight_quantizer": config, "*input_quantizer": config}, largest)
    from modelopt.torch.quantization.backends import gemm_registry

    if gemm_registry.find_match(made, made.weight) is None:
        raise Unsupported("quantize: ModelOpt has no product in fp8 for this GPU, and would simulate it")
    return made


def _by_row(layer: Any, stored: Any, settings: Settings) -> list[Part]:
    """The weight, its largest values and its scales."""
    shape, dtype = tuple(layer.weight.shape), layer.weight.dtype
    scales = (shape[0], 1) if settings.granularity == "row" else ()
    return [(shape, stored), (scales, dtype), (scales, dtype)]


def _int8_parts(layer: Any, settings: Settings) -> list[Part]:
    import torch

    return _by_row(layer, torch.int8, settings)


def _fp8_parts(layer: Any, settings: Settings) -> list[Part]:
    import torch

    return _by_row(layer, torch.float8_e4m3fn, settings)


def _int4_parts(layer: Any, settings: Settings) -> list[Part]:
    import torch

    rows, columns = layer.weight.shape
    groups = (rows * columns // _INT4_GROUP, 1)
    return [((rows, columns // 2), torch.uint8), (groups, torch.float32), (groups, layer.weight.dtype)]


def _nvfp4_parts(layer: Any, settings: Settings) -> list[Part]:
    import torch

    rows, columns = layer.weight.shape
    scales = ((rows, columns // _NVFP4_BLOCK), torch.float8_e4m3fn)
    return [((rows, columns // 2), torch.uint8), scales, ((), torch.float32), ((), layer.weight.dtype)]


def _fp8_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    if not settings.has_data:
        return None
    largest = layer.weight.abs().amax(dim=1 if settings.granularity == "row" else None)
    return "a row of zeros, which ModelOpt divides by zero" if bool((largest == 0).any()) else None


def _static_keeps(layer: Any, name: str, settings: Settings) -> str | None:
    if settings.has_data and not bool(layer.weight.any()):
        return "all its weights are zero, which ModelOpt refuses"
    return not_a_multiple(layer, 16)


def _static_lacks(settings: Settings) -> str | None:
    if not settings.machine.is_cuda:
        return (
            "ModelOpt multiplies in fp8 on a GPU alone, and simulates it on a CPU; fp8_weight stores in fp8 and "
            "computes as before"
        )
    return fp8_lacks(settings)


def _multiple_of(size: int) -> Callable[[Any, str, Settings], str | None]:
    def keeps(layer: Any, name: str, settings: Settings) -> str | None:
        return (
            None if layer.in_features % size == 0 else f"{layer.in_features} inputs are no multiple of {size}"
        )

    return keeps


MODELOPT: dict[str, Scheme] = {
    "int8": Scheme(
        _PACKAGE,
        "in int8, a scale per output row",
        "as before",
        _change(lambda settings: {"num_bits": 8, "axis": 0}, _int8_parts),
        keeps_dtype=True,
    ),
    "fp8_weight": Scheme(
        _PACKAGE,
        "in fp8 (e4m3)",
        "as before",
        _change(
            lambda settings: {"num_bits": _FP8, "axis": 0 if settings.granularity == "row" else None},
            _fp8_parts,
        ),
        _fp8_keeps,
        has_tensor_scales=True,
        keeps_dtype=True,
        hides_dtype=True,
    ),
    "fp8_static": Scheme(
        _PACKAGE,
        "in fp8 (e4m3), one scale",
        "in fp8, by inputs whose scale was chosen before by looking at what is drawn",
        _change_static,
        _static_keeps,
        _static_lacks,
        keeps_dtype=True,
        hides_dtype=True,
        is_calibrated=True,
    ),
    "int4": Scheme(
        _PACKAGE,
        "in int4, a scale per 128 weights",
        "as before",
        _change(lambda settings: {"num_bits": 4, "block_sizes": {-1: _INT4_GROUP}}, _int4_parts),
        _multiple_of(_INT4_GROUP),
        keeps_dtype=True,
        hides_dtype=True,
    ),
    "nvfp4": Scheme(
        _PACKAGE,
        "in fp4 (e2m1), a scale in fp8 per 16 weights and one for all",
        "as before",
        _change(
            lambda settings: {
                "num_bits": (2, 1),
                "block_sizes": {-1: _NVFP4_BLOCK, "type": "dynamic", "scale_bits": _FP8},
            },
            _nvfp4_parts,
        ),
        _multiple_of(_NVFP4_BLOCK),
        keeps_dtype=True,
        hides_dtype=True,
    ),
}
