"""The order in which techniques are applied, whatever the order of the recipe's text."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """Components are replaced before they are converted, and converted before they are compiled. What only concerns
    the call comes last."""

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
