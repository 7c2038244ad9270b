"""How a transformer's tokens are sharded: FLUX's by `flux_tokens`, other models' by diffusers' context parallelism."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from vivace.errors import Unsupported

if TYPE_CHECKING:
    import torch

    from vivace.machinery.multi_gpu.fused_exchange import Sharding


Mode = Literal["cfg", "ulysses", "all_gather", "ring"]
_COLLECTIVES_OF_DIFFUSERS = {"ulysses": 4, "ring": 1}


def split_tokens(
    denoiser: torch.nn.Module, mode: Mode, num: int, device: str, by_diffusers: bool
) -> Sharding:
    """Let each process compute its shard of the tokens; all call this together, `by_diffusers` as the primary says."""
    import torch.distributed as dist

    from vivace.machinery.multi_gpu.fused_exchange import Sharding

    if not by_diffusers:
        from vivace.machinery.multi_gpu.flux_tokens import shard

        return shard(denoiser, mode, dist.get_rank(), num, dist.group.WORLD.group_name)
    _split_by_diffusers(denoiser, mode, num, device)
    pads_heads = denoiser._parallel_config.context_parallel_config.ulysses_anything
    return Sharding(None if pads_heads else _COLLECTIVES_OF_DIFFUSERS[mode])


def needs_diffusers(denoiser: torch.nn.Module, mode: Mode, num: int) -> bool:
    """Return whether diffusers' implementation is needed: always for ring, which only diffusers has."""
    from vivace.machinery.multi_gpu.flux_tokens import can_shard

    return mode == "ring" or not can_shard(denoiser, mode, num)


def _split_by_diffusers(denoiser: torch.nn.Module, mode: Mode, num: int, device: str) -> None:
    import warnings

    import torch
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import AttentionBackendName
    from torch.distributed.device_mesh import init_device_mesh

    # diffusers calls a function by its old name, in each forward.
    warnings.filterwarnings("ignore", ".*all_gather_tensor` is deprecated", FutureWarning)
    degrees: dict[str, Any] = {"ulysses_degree": num} if mode == "ulysses" else {"ring_degree": num}
    if mode == "ulysses" and (num_heads(denoiser) or num) % num:
        degrees["ulysses_anything"] = True  # pads the heads, at the price of more collectives
    shape = (1, num) if mode == "ulysses" else (num, 1)
    with _world_group_unbound():
        config = ContextParallelConfig(
            **degrees, mesh=init_device_mesh(device, shape, mesh_dim_names=("ring", "ulysses"))
        )
    if mode == "ring":
        # Ring attention merges partial results by their log-sum-exp, which PyTorch's default backend does not return.
        has_cudnn = torch.cuda.get_device_capability() >= (9, 0)
        backend = AttentionBackendName._NATIVE_CUDNN if has_cudnn else AttentionBackendName._NATIVE_FLASH
        for processor in attention_processors(denoiser):
            processor._attention_backend = backend
    if device == "cuda":
        with _world_group_unbound():
            denoiser.enable_parallelism(config=config)
        return
    # enable_parallelism looks for an accelerator's index; the rest works on a CPU as well.
    from diffusers import ParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel

    whole = ParallelConfig(context_parallel_config=config)
    whole.setup(torch.distributed.get_rank(), num, torch.device(device), mesh=config.mesh)
    denoiser._parallel_config = whole
    for processor in attention_processors(denoiser):
        processor._parallel_config = whole
    apply_context_parallel(denoiser, config, denoiser._cp_plan)


@contextlib.contextmanager
def _world_group_unbound() -> Iterator[None]:
    """Let subgroups be created from scratch instead of split off the world group.

    PyTorch splits them off a world group that is bound to a GPU. In a process that was part of another group before,
    that is a segmentation fault (pytorch/pytorch#192109).
    """
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def attention_processors(denoiser: torch.nn.Module) -> list[Any]:
    processors = [getattr(module, "processor", None) for module in denoiser.modules()]
    return [processor for processor in processors if hasattr(processor, "_parallel_config")]


def num_heads(denoiser: torch.nn.Module) -> int | None:
    """Return a transformer's number of attention heads, None if its configuration does not have it."""
    heads = getattr(denoiser.config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def can_pad_heads(heads: int, num: int) -> bool:
    """Return whether diffusers can pad the heads to a multiple of `num`: only the last shard may have empty ones."""
    missing = -heads % num
    return missing < (heads + missing) // num


def check_even_tokens(
    denoiser: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num: int
) -> None:
    """Raise Unsupported unless `num` processes can have equal shards of the tokens."""
    config = getattr(denoiser, "_parallel_config", None)
    if config is not None and config.context_parallel_config.ulysses_anything:
        return
    names = _argument_names(type(denoiser).forward)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    for name, split in (denoiser._cp_plan.get("") or {}).items():
        tensor, dim = arguments.get(name), getattr(split, "split_dim", None)
        if tensor is None or dim is None or tensor.ndim <= dim:
            continue
        if tensor.shape[dim] % num:
            raise Unsupported(
                f"parallel: {name} has {tensor.shape[dim]} tokens, which cannot be split evenly among {num} GPUs; "
                f"choose a size or a number of GPUs that divides them, e.g. a multiple of {16 * num} px"
            )


@functools.cache
def _argument_names(forward: Any) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]
