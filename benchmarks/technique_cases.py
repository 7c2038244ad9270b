"""What `benchmarks.every_technique` measures: models, their baselines, and recipes in canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vivace.architectures import CATALOGUE
from vivace.errors import RecipeError
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.recipes.resolve import resolve

RESULTS = Path(__file__).parents[1] / "results"

FAMILIES = ("sd15", "sdxl", "flux-dev")

STEPS = 8

COMMON = {"sd15": "cuda_graph", "sdxl": "cuda_graph"}
"""The baseline of a model, which its recipes have too where they can; none: as published."""

ALONE = (
    "inference_mode",
    "gpu_postprocess",
    "channels_last",
    "fuse_qkv",
    "attention(efficient)",
    "attention(flash)",
    "attention(cudnn)",
    "attention(flex)",
    "attention(flash3)",
    "attention(flash4)",
    "attention(sage)",
    "attention(xformers)",
    "cuda_graph",
    "int8",
    "int8_dynamic",
    "fp8_weight",
    "fp8",
    "fp8_static",
    "nf4",
    "int4",
    "int4_gemm",
    "quantize(q8_0, backend=gguf)",
    "quantize(int8, backend=sdnq)",
    "layerwise_casting",
    "offload(model)",
    "offload(group)",
    "offload(group, stream=True)",
    "vae_tiling",
    "vae_slicing",
    "prompt_cache",
    "tiny_vae",
    "fp16",
    "bf16",
    "attention(math)",
    "offload(sequential)",
    "tf32+fp32",
    "fp32",
)
"""The slow ones last. Other backends than torchao want their packages: pip install '.[gguf,sdnq]'."""

_HALF_GB = {"sd15": 0.9, "sdxl": 2.6, "flux-dev": 12}
"""Half of the denoiser's weights, as an example of what `offload` can keep on the GPU."""

COMPILED = (
    "compile",
    "compile(blocks=repeated)",
    "compile(dynamic=True)",
    "compile(reduce-overhead)",
    "fuse_qkv+channels_last+compile",
    "int8+compile",
    "int8_dynamic+compile",
    "fp8_weight+compile",
    "fp8+compile",
    "fp8_static+compile",
    "nf4+compile",
    "int4+compile",
)
"""`compile` alone, and with techniques that depend on it."""

_ALL = "denoiser,text_encoder_2,vae"

CONFIGURATIONS = (
    "compile",
    "compile@denoiser,vae",
    f"compile@{_ALL}",
    "int8",
    "int8+compile",
    "int8@denoiser,text_encoder_2",
    "int8@denoiser,text_encoder_2+compile",
    "int8@denoiser,text_encoder_2+compile@denoiser,vae",
    f"int8@{_ALL}+compile@{_ALL}",
)
"""With the baseline, the ten configurations of the first study: 8-bit weights and compile on the denoiser, T5 and VAE.
SD 1.5 has no second text encoder and uses `text_encoder` instead."""

Key = tuple[str, int]  # recipe, steps


def record_file(name: str) -> Path:
    return RESULTS / f"techniques-{name}.json"


def first_calls_file(record: Path) -> Path:
    """Return the path of the first calls of `--compile`."""
    return record.with_name(f"{record.stem}-compiling.json")


def full_length(name: str) -> int:
    return CATALOGUE[name].num_inference_steps


def baseline(name: str) -> str:
    """The recipe that a model's rows are compared with, canonical."""
    return resolve(COMMON.get(name, BASELINE)).text


def recipe_of(name: str, text: str) -> str:
    """Return a recipe in canonical form, with the baseline's techniques added if they go with it."""
    common = COMMON.get(name)
    if common is None or text == BASELINE:
        return resolve(text).text
    try:
        return resolve(f"{text}+{common}").text
    except RecipeError:
        return resolve(text).text


def alone(name: str) -> list[str]:
    """Return ALONE in canonical form for this model; first the eager model, where that is not the baseline."""
    halved = f"offload(group, stream=True, keep={_HALF_GB[name]})"
    texts = [_own_precision(name, text) for text in (*ALONE, halved)]
    return [BASELINE, *(text for text in texts if text != baseline(name))] if name in COMMON else texts


def compiled(name: str) -> list[str]:
    """Return COMPILED in canonical form for this model."""
    return [_own_precision(name, text) for text in COMPILED]


def _own_precision(name: str, text: str) -> str:
    """Add bf16 where it is needed: fp8 with a scale per row needs bf16, and UNets default to fp16."""
    needs_bf16 = text in ("fp8", "fp8+compile") and CATALOGUE[name].cuda_dtype != "bf16"
    return recipe_of(name, f"bf16+{text}" if needs_bf16 else text)


def configurations(name: str) -> list[str]:
    """Return the study's configurations in canonical form for this model."""
    texts: tuple[str, ...] = CONFIGURATIONS
    if name == "sd15":
        texts = tuple(text.replace("text_encoder_2", "text_encoder") for text in texts)
    return [resolve(text).text for text in texts]


def cases(name: str, part: str = "all", only: Sequence[str] = (), steps: int = STEPS) -> list[Key]:
    """Return the cases of this model, slow ones last; if `only` is given, these recipes over `steps` steps."""
    if only:
        return list(dict.fromkeys((recipe_of(name, text), steps) for text in only))
    listed: list[Key] = []
    if part in ("alone", "all"):
        listed += [(text, STEPS) for text in alone(name)]
    if part in ("compiled", "all"):
        listed += [(text, STEPS) for text in compiled(name)]
    if part in ("configurations", "all") and name not in COMMON:
        listed += [(text, full_length(name)) for text in configurations(name)]
    return list(dict.fromkeys(listed))
