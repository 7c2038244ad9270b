"""All techniques. To add one: write its file, and put it on this list; or see `vivace.plugins`."""

from __future__ import annotations

from vivace.errors import nearest
from vivace.machinery.technique import Technique
from vivace.plugins import PROBLEMS, added
from vivace.techniques.attention import Attention
from vivace.techniques.cfg_cutoff import CfgCutoff
from vivace.techniques.channels_last import ChannelsLast
from vivace.techniques.compile import Compile
from vivace.techniques.cuda_graph import CudaGraph
from vivace.techniques.deepcache import Deepcache
from vivace.techniques.distilled import Distilled
from vivace.techniques.dtype import Dtype
from vivace.techniques.dual_block_cache import DualBlockCache
from vivace.techniques.faster_cache import FasterCache
from vivace.techniques.first_block_cache import FirstBlockCache
from vivace.techniques.fuse_qkv import FuseQkv
from vivace.techniques.fused import Fused
from vivace.techniques.gpu_postprocess import GpuPostprocess
from vivace.techniques.guidance import Guidance
from vivace.techniques.inference_mode import InferenceMode
from vivace.techniques.layerwise_casting import LayerwiseCasting
from vivace.techniques.lora import Lora
from vivace.techniques.magcache import Magcache
from vivace.techniques.offload import Offload
from vivace.techniques.parallel import Parallel
from vivace.techniques.prompt_cache import PromptCache
from vivace.techniques.prune import Prune
from vivace.techniques.pyramid_attention import PyramidAttention
from vivace.techniques.quantize import Quantize
from vivace.techniques.reference_cache import ReferenceCache
from vivace.techniques.scheduler import Scheduler
from vivace.techniques.seacache import Seacache
from vivace.techniques.steps import Steps
from vivace.techniques.taylorseer import Taylorseer
from vivace.techniques.teacache import Teacache
from vivace.techniques.tf32 import Tf32
from vivace.techniques.tiny_vae import TinyVae
from vivace.techniques.trim_text import TrimText
from vivace.techniques.vae_slicing import VaeSlicing
from vivace.techniques.vae_tiling import VaeTiling

TECHNIQUES: dict[str, type[Technique]] = {
    technique.name: technique
    for technique in (
        Distilled,
        TinyVae,
        Lora,
        Prune,
        TrimText,
        Dtype,
        FuseQkv,
        Fused,
        Quantize,
        LayerwiseCasting,
        ChannelsLast,
        Parallel,
        VaeSlicing,
        VaeTiling,
        FirstBlockCache,
        DualBlockCache,
        Teacache,
        Seacache,
        Magcache,
        Taylorseer,
        PyramidAttention,
        Deepcache,
        FasterCache,
        ReferenceCache,
        Compile,
        CudaGraph,
        Attention,
        Tf32,
        Scheduler,
        Steps,
        Guidance,
        CfgCutoff,
        PromptCache,
        InferenceMode,
        GpuPostprocess,
        Offload,
    )
}
TECHNIQUES |= {each.name: each for each in added("techniques", Technique, frozenset(TECHNIQUES))}

ALIASES: dict[str, tuple[str, str | None]] = {
    # The field's short name: (technique, value of its first knob, if the name says one).
    "fp32": ("dtype", "fp32"),
    "fp16": ("dtype", "fp16"),
    "bf16": ("dtype", "bf16"),
    "fa2": ("attention", "flash"),
    "int8": ("quantize", "int8"),
    "int8_dynamic": ("quantize", "int8_dynamic"),
    "int4": ("quantize", "int4"),
    "int4_gemm": ("quantize", "int4_gemm"),
    "nf4": ("quantize", "nf4"),
    "nvfp4": ("quantize", "nvfp4"),
    "mxfp8": ("quantize", "mxfp8"),
    "fp8": ("quantize", "fp8"),
    "fp8_weight": ("quantize", "fp8_weight"),
    "fp8_static": ("quantize", "fp8_static"),
    "fp8_w": ("quantize", "fp8_weight"),
    "fbcache": ("first_block_cache", None),
    "dbcache": ("dual_block_cache", None),
}

_GONE = ("token_merging", "progressive_resolution")
"""Techniques that were removed, and that recipes and records may still name."""


def missing(name: str, *more: str) -> str:
    """Return why there is no technique of this name, and what to do.

    Args:
        more: other words that would be right in its place.
    """
    if name.lower() in _GONE:
        return (
            f"{name} was removed on 2026-11-28, before 0.1.0: at the same speed fewer plain steps keep as much of the "
            "image, or more; use steps(N) in its place"
        )
    known = [*TECHNIQUES, *ALIASES, *more]
    broken = "".join(f"; {problem}" for problem in PROBLEMS)
    return f"no technique '{name}'{nearest(name, known)} (`vivace techniques` lists all{broken})"


__all__ = ["ALIASES", "TECHNIQUES", "missing"]
