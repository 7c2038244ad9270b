"""Count the floating-point operations of a forward pass while it runs, or on meta tensors, without computing.

One multiply-add is 2 FLOP. As usual, only matmuls, convolutions and attention are counted; everything else is
memory-bound. Attention is counted in full even with a causal mask.

PyTorch's FlopCounterMode cannot tell attention from GEMMs: on meta tensors attention is decomposed into the same `bmm`
as `linear` on transposed inputs (three layers of every VAE), and the CPU's flash kernel is not counted at all. So
attention is counted at its call, from the shapes of its inputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["gemm", "conv", "attention"]


def kind_of(operator: object) -> Kind:
    """Return the kind of an operator that PyTorch counts; matmuls may still be those of attention."""
    name = str(operator)
    return "attention" if "fused_attention" in name else "conv" if "convolution" in name else "gemm"


@dataclass(frozen=True)
class Flops:
    """FLOP by kind: matmuls of linear layers, convolutions, and the two matmuls of attention."""

    gemm: int
    conv: int
    attention: int

    @property
    def total(self) -> int:
        return self.gemm + self.conv + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.gemm + other.gemm, self.conv + other.conv, self.attention + other.attention)

    def __sub__(self, other: Flops) -> Flops:
        return Flops(self.gemm - other.gemm, self.conv - other.conv, self.attention - other.attention)


@dataclass(frozen=True)
class Calls:
    """The calls of one module.

    Attributes:
        dtype: of most of its parameters, while it was called last.
        weights_bytes: of its parameters then, without tables that a call reads in part.
    """

    number: int = 0
    flops: Flops = Flops(0, 0, 0)
    dtype: str = ""
    weights_bytes: int = 0


def count_flops(call: Callable[[], Any], of: Any = None) -> Flops:
    """Run `call` once without gradients, and count its FLOP.

    Args:
        of: count only calls of this module, including its forward hooks.
    """
    if of is not None:
        return count_calls(call, {"": of})[""].flops
    with _counting() as so_far:
        call()
        return so_far()


def count_calls(
    call: Callable[[], Any], modules: Mapping[str, Any], *, stateless: Collection[str] = ()
) -> dict[str, Calls]:
    """Run `call` once without gradients, and count the operations of each of these modules.

    Args:
        modules: by name; none inside another. Their forward hooks count as well.
        stateless: names of modules that compute the same whenever their inputs have the same shapes. Each shape is
            computed once, and its count and output are used again: for tensors without values.
    """
    calls = {name: Calls() for name in modules}

    def add(name: str, flops: Flops) -> None:
        before, (dtype, num_bytes) = calls[name], weights_of(modules[name])
        calls[name] = Calls(before.number + 1, before.flops + flops, dtype, num_bytes)

    with _counting() as so_far, ExitStack() as stack:
        for name, module in modules.items():
            repeated = stack.enter_context(_remembering(module, so_far)) if name in stateless else _none
            stack.enter_context(_watching(module, so_far, repeated, functools.partial(add, name)))
        call()
    return calls


def _none() -> Flops:
    return Flops(0, 0, 0)


@contextmanager
def _remembering(module: Any, so_far: Callable[[], Flops]) -> Iterator[Callable[[], Flops]]:
    """Compute the module's forward once for inputs of the same shapes; yield the FLOP that were not computed again."""
    from torch.utils._pytree import tree_leaves

    counted: dict[tuple[str, ...], tuple[Any, Flops]] = {}
    saved = _none()
    forward = module.forward

    def remembered(*args: Any, **kwargs: Any) -> Any:
        nonlocal saved
        named = [*args, *(part for item in sorted(kwargs.items()) for part in item)]
        key = tuple(map(shape_text, tree_leaves(named)))
        if key in counted:
            output, flops = counted[key]
            saved += flops
            return output
        before = so_far()
        output = forward(*args, **kwargs)
        counted[key] = output, so_far() - before
        return output

    module.forward = remembered
    try:
        yield lambda: saved
    finally:
        module.forward = forward


def shape_text(value: Any) -> str:
    """Return an input's shape, or the value itself if it is not a tensor."""
    return f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "dtype") else repr(value)


@contextmanager
def _counting() -> Iterator[Callable[[], Flops]]:
    """Count operations inside the context, without gradients; yield a function that returns the FLOP so far."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    attention = _attention_mode(counter.get_total_flops)

    def so_far() -> Flops:
        by_kind: Counter[Kind] = Counter()
        for operator, flop in counter.get_flop_counts().get("Global", {}).items():
            by_kind[kind_of(operator)] += flop
        gemm = by_kind["gemm"] - attention.counted_below
        return Flops(gemm, by_kind["conv"], attention.flop + by_kind["attention"])

    with torch.no_grad(), counter, attention:
        yield so_far


@contextmanager
def _watching(
    module: Any,
    so_far: Callable[[], Flops],
    repeated: Callable[[], Flops],
    called: Callable[[Flops], None],
) -> Iterator[None]:
    """Call `called` at the end of each call of the module with the increase of `so_far` and `repeated`."""
    before = _none()

    def begin(*_: Any) -> None:
        nonlocal before
        before = so_far() + repeated()

    def end(*_: Any) -> None:
        called(so_far() + repeated() - before)

    # Around all other hooks: techniques may compute in theirs.
    hooks = [module.register_forward_pre_hook(begin, prepend=True), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def weights_of(module: Any) -> tuple[str, int]:
    """Return the dtype of most of a module's parameters, e.g. "float16", and their bytes without embeddings' tables."""
    import torch

    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    read = [p for p in module.parameters() if id(p) not in tables]
    sizes: Counter[str] = Counter()
    for parameter in read:
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    num_bytes = sum(p.numel() * p.element_size() for p in read)
    return (sizes.most_common(1)[0][0] if sizes else ""), num_bytes


def count_denoiser(
    denoiser: Any, *, height: int, width: int, text_length: int, batch: int = 1, vae_factor: int = 8
) -> Flops:
    """Count one call (one step) of a UNet2DConditionModel or FluxTransformer2DModel.

    Args:
        denoiser: the module, on any device; on "meta" this takes seconds and no memory.
        height, width: size of the image in pixels.
        text_length: number of prompt tokens that the denoiser attends to.
        batch: rows of the call; one image with classifier-free guidance has 2.
        vae_factor: width of a latent cell in pixels.
    """
    inputs = denoiser_inputs(
        denoiser, height=height, width=width, text_length=text_length, batch=batch, vae_factor=vae_factor
    )
    return count_flops(lambda: denoiser(**inputs))


def denoiser_inputs(
    denoiser: Any, *, height: int, width: int, text_length: int, batch: int = 1, vae_factor: int = 8
) -> dict[str, Any]:
    """Return zeros as inputs for one call, with the arguments of `count_denoiser`, on the denoiser's device."""
    cells = (height // vae_factor, width // vae_factor)
    make = _flux_inputs if hasattr(denoiser.config, "joint_attention_dim") else _unet_inputs
    return make(denoiser, cells, text_length, batch)


def _unet_inputs(unet: Any, cells: tuple[int, int], text_length: int, batch: int) -> dict[str, Any]:
    config = unet.config
    zeros = next(unet.parameters()).new_zeros
    inputs: dict[str, Any] = {
        "sample": zeros(batch, config.in_channels, *cells),
        "timestep": zeros(batch),
        "encoder_hidden_states": zeros(batch, text_length, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        # SDXL's conditioning: the pooled text, and six numbers for sizes and crops.
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": zeros(batch, pooled), "time_ids": zeros(batch, 6)}
    if config.time_cond_proj_dim:
        inputs["timestep_cond"] = zeros(batch, config.time_cond_proj_dim)
    return inputs


def _flux_inputs(transformer: Any, cells: tuple[int, int], text_length: int, batch: int) -> dict[str, Any]:
    config = transformer.config
    zeros = next(transformer.parameters()).new_zeros
    tokens = (cells[0] // 2) * (cells[1] // 2)  # the pipeline packs 2x2 cells into one token
    return {
        "hidden_states": zeros(batch, tokens, config.in_channels),
        "encoder_hidden_states": zeros(batch, text_length, config.joint_attention_dim),
        "pooled_projections": zeros(batch, config.pooled_projection_dim),
        "timestep": zeros(batch),
        "img_ids": zeros(tokens, 3),
        "txt_ids": zeros(text_length, 3),
        "guidance": zeros(batch) if config.guidance_embeds else None,
    }


def _attention_mode(total: Callable[[], int]) -> Any:
    """Return a mode that counts attention from its inputs, and the increase of `total` inside (`counted_below`)."""
    import torch
    from torch.overrides import TorchFunctionMode

    fused = {torch.nn.functional.scaled_dot_product_attention}
    # Unfused attention multiplies two tensors of (batch, heads, tokens, channels); linear layers never do.
    matmuls = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}

    class CountAttention(TorchFunctionMode):  # type: ignore[misc]
        flop = 0
        counted_below = 0

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in fused:
                query, key, value = (
                    args[i] if i < len(args) else kwargs[n] for i, n in enumerate(("query", "key", "value"))
                )
                flop = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            elif func in matmuls and args[0].dim() == 4 and args[1].dim() == 4:
                flop = 2 * args[0].numel() * args[1].shape[-1]
            else:
                return func(*args, **kwargs)
            before = total()
            result = func(*args, **kwargs)
            self.flop += flop
            self.counted_below += total() - before
            return result

    return CountAttention()
