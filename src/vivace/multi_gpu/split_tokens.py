"""How a transformer's tokens are split among processes: FLUX's by `flux_tokens`, others' in diffusers' way."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Literal

from vivace.errors import Unsupported

Mode = Literal["guidance", "ulysses", "ring"]
_MESSAGES_OF_DIFFUSERS = {"ulysses": 4, "ring": 1}


def split_tokens(
    denoiser: Any, mode: Mode, num: int, device: str, by_diffusers: bool, by_copies: bool
) -> int | None:
    """Let each process of the group compute its own share of the tokens. All of them call this at the same time.

    Args:
        by_diffusers: in diffusers' way. One process decides, by `needs_diffusers`: it depends on what was set there.
        by_copies: how messages travel where it is not; see `messages`.

    Returns:
        Messages that each attention takes; None where they depend on what arrives.
    """
    import torch.distributed as dist

    if not by_diffusers:
        from vivace.multi_gpu.collectives import send_by_copies
        from vivace.multi_gpu.flux_tokens import share

        group, rank = dist.group.WORLD.group_name, dist.get_rank()
        if by_copies:
            send_by_copies(group, rank, num, device)
        return share(denoiser, mode, rank, num, group)
    _split_by_diffusers(denoiser, mode, num, device)
    is_padded = denoiser._parallel_config.context_parallel_config.ulysses_anything
    return None if is_padded else _MESSAGES_OF_DIFFUSERS[mode]


def needs_diffusers(denoiser: Any, mode: Mode, num: int) -> bool:
    """Whether the tokens are split in diffusers' way."""
    from vivace.multi_gpu.flux_tokens import can_share

    return mode == "guidance" or not can_share(denoiser, mode, num)


def _split_by_diffusers(denoiser: Any, mode: Mode, num: int, device: str) -> None:
    import warnings

    import torch
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import AttentionBackendName
    from torch.distributed.device_mesh import init_device_mesh

    # diffusers calls a function by its old name, in each forward.
    warnings.filterwarnings("ignore", ".*all_gather_tensor` is deprecated", FutureWarning)
    degrees: dict[str, Any] = {"ulysses_degree": num} if mode == "ulysses" else {"ring_degree": num}
    if mode == "ulysses" and (num_heads(denoiser) or num) % num:
        degrees["ulysses_anything"] = True  # pads the heads, at the price of more messages
    shape = (1, num) if mode == "ulysses" else (num, 1)
    with _groups_made_anew():
        config = ContextParallelConfig(
            **degrees, mesh=init_device_mesh(device, shape, mesh_dim_names=("ring", "ulysses"))
        )
    if mode == "ring":
        # PyTorch's own choice of a kernel tells no log-sum-exp, by which a ring adds its parts up.
        least = torch.cuda.get_device_capability() >= (9, 0)
        kernel = AttentionBackendName._NATIVE_CUDNN if least else AttentionBackendName._NATIVE_FLASH
        for processor in attentions_of(denoiser):
            processor._attention_backend = kernel
    if device == "cuda":
        with _groups_made_anew():
            denoiser.enable_parallelism(config=config)
        return
    # diffusers looks for an accelerator's number; the rest of what it does holds for a CPU as well.
    from diffusers import ParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel

    whole = ParallelConfig(context_parallel_config=config)
    whole.setup(torch.distributed.get_rank(), num, torch.device(device), mesh=config.mesh)
    denoiser._parallel_config = whole
    for processor in attentions_of(denoiser):
        processor._parallel_config = whole
    apply_context_parallel(denoiser, config, denoiser._cp_plan)


@contextlib.contextmanager
def _groups_made_anew() -> Iterator[None]:
    """PyTorch splits smaller groups off the group of all processes where that one is bound to a GPU, and in a process
    that was part of another group before, splitting ends it by a segmentation fault (pytorch/pytorch#192109). Off one
    that is not bound, they are made anew."""
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def attentions_of(denoiser: Any) -> list[Any]:
    """The processors of the attentions that diffusers can share."""
    found = [getattr(module, "processor", None) for module in denoiser.modules()]
    return [processor for processor in found if hasattr(processor, "_parallel_config")]


def num_heads(denoiser: Any) -> int | None:
    """Attention heads of a transformer, None where its configuration does not tell."""
    heads = getattr(denoiser.config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def can_pad(heads: int, num: int) -> bool:
    """Whether diffusers can fill the heads up to a multiple of `num`: only the last share may have empty ones."""
    missing = -heads % num
    return missing < (heads + missing) // num


def refuse_uneven(denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> None:
    """
    Raises:
        Unsupported: tokens that `num` processes cannot have equal shares of.
    """
    config = getattr(denoiser, "_parallel_config", None)
    if config is not None and config.context_parallel_config.ulysses_anything:
        return
    names = _names_of_arguments(type(denoiser).forward)
    known = dict(zip(names, args, strict=False)) | kwargs
    for name, how in (denoiser._cp_plan.get("") or {}).items():
        tensor, dim = known.get(name), getattr(how, "split_dim", None)
        if tensor is None or dim is None or tensor.ndim <= dim:
            continue
        if tensor.shape[dim] % num:
            raise Unsupported(
                f"parallel: {name} has {tensor.shape[dim]} tokens, of which {num} GPUs cannot have equal shares; "
                f"choose a size or a number of GPUs that divides them, e.g. a multiple of {16 * num} px"
            )


@functools.cache
def _names_of_arguments(forward: Any) -> list[str]:
    """Of the forward of a class of modules, in order."""
    return list(inspect.signature(forward).parameters)[1:]
