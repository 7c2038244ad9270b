"""FLUX's tokens shared among processes, with two messages an attention.

Why: diffusers' own way sends four messages an attention (query, key, value, output) and copies each tensor before and
    after; each is launched by the CPU, which may be what bounds FLUX's step once several GPUs share its work. Here
    query, key and value travel as one.
Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.

Every process has an equal part of the text's and of the image's tokens, and of both tables of rotary embeddings, from
the denoiser's input to its output. In attention it exchanges tokens for heads: it gets all tokens of its own heads, and
afterwards its own tokens of all heads. Attention does not mind that the tokens of several processes come one after the
other. The messages are functional collectives, which torch.compile sees as operators of its graph.

Layouts, of `num` processes: before the first message (num, tokens, batch, 3, heads, channels), all of a process's own.
What arrives from each is put one after the other, so that its first two dimensions are all tokens, and query, key and
value are views of it. Attention's result has tokens first where the batch is one, and goes out as it is. What arrives
then is sorted by heads first, which takes the one copy, into the place that the next product reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

MESSAGES = 2  # an attention
_TOKENS = -2
"""The dimension of tokens in each of `_SHARED`: (batch, tokens, channels), or (tokens, 3) for ids."""
_SHARED = ("hidden_states", "encoder_hidden_states", "img_ids", "txt_ids")


def can_share(denoiser: Any, num: int) -> bool:
    """Whether this is FLUX with attention as diffusers builds it, and heads that divide evenly."""
    from diffusers import FluxTransformer2DModel
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    if type(denoiser) is not FluxTransformer2DModel or denoiser.config.num_attention_heads % num:
        return False
    if _AttentionBackendRegistry.get_active_backend()[0] != AttentionBackendName.NATIVE:
        return False  # somebody chose another kernel in diffusers' own way
    return all(
        type(attention.processor) is FluxAttnProcessor and attention.processor._attention_backend is None
        for attention in _attentions(denoiser)
    )


def share(denoiser: Any, rank: int, num: int, group: str) -> None:
    """Let this process compute its own part of the tokens. All of the group do so.

    Args:
        denoiser: what `can_share` agrees to. Its forward takes what it took, and returns the whole result.
        group: the name of the process group.
    """
    processor = UlyssesFluxProcessor(num, group)
    for attention in _attentions(denoiser):
        attention.set_processor(processor)
    denoiser.forward = _forward(denoiser, rank, num, group)


def _attentions(denoiser: Any) -> list[Any]:
    from diffusers.models.transformers.transformer_flux import FluxAttention

    return [module for module in denoiser.modules() if isinstance(module, FluxAttention)]


def _forward(denoiser: Any, rank: int, num: int, group: str) -> Callable[..., Any]:
    """The denoiser's forward of its own part of the tokens, from and to all tokens."""
    import torch

    whole = denoiser.forward
    names = list(inspect.signature(type(denoiser).forward).parameters)[1:]
    collectives = torch.ops._c10d_functional

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in _SHARED:
            if given.get(name) is not None:
                given[name] = given[name].chunk(num, _TOKENS)[rank]
        output = whole(**given)
        own = output[0].contiguous()
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(own, num, group))
        # From (num * batch, tokens, channels), the processes one after the other.
        sample = gathered.unflatten(0, (num, -1)).transpose(0, 1).flatten(1, 2)
        return (sample,) if isinstance(output, tuple) else type(output)(sample=sample)

    return forward


class UlyssesFluxProcessor:
    """Attention of a FLUX block, double or single, whose input is a process's own tokens.

    Args:
        num: processes, of which each has as many tokens and takes as many heads.
        group: the name of their group.
    """

    def __init__(self, num: int, group: str) -> None:
        self.num = num
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """
        Args:
            hidden_states, encoder_hidden_states: (batch, tokens, channels), the latter in double blocks alone.
            attention_mask: none, as FLUX has it.
            image_rotary_emb: cosines and sines, each (tokens of both, channels of a head).

        Raises:
            ValueError: there is a mask.
        """
        import torch
        from diffusers.models.embeddings import apply_rotary_emb
        from diffusers.models.transformers.transformer_flux import _get_qkv_projections

        if attention_mask is not None:
            raise ValueError(
                "parallel(ulysses) shares FLUX's attention without a mask, and one was given; leave out attention_mask "
                "of joint_attention_kwargs, or draw on one GPU"
            )
        own, added = _both_projections(_get_qkv_projections(attn, hidden_states, encoder_hidden_states), attn)
        query, key, value = own
        query, key = attn.norm_q(query), attn.norm_k(key)
        if added is not None:
            query = torch.cat([attn.norm_added_q(added[0]), query], dim=1)
            key = torch.cat([attn.norm_added_k(added[1]), key], dim=1)
            value = torch.cat([added[2], value], dim=1)
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
            key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        query, key, value = self._all_tokens(query, key, value)
        # Looked up at each call: `attention` may have put another in its place.
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        out = self._all_heads(out.to(query.dtype))
        if added is None:
            return out
        text = encoder_hidden_states.shape[1]
        context, image = out[:, :text], out[:, text:]
        image = attn.to_out[1](attn.to_out[0](image.contiguous()))
        return image, attn.to_add_out(context.contiguous())

    def _all_tokens(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """From (batch, own tokens, heads, channels) to (batch, own heads, tokens, channels)."""
        import torch

        parts = [
            each.unflatten(2, (self.num, -1)).permute(2, 1, 0, 3, 4)  # to whom it goes, tokens, batch, ...
            for each in (query, key, value)
        ]
        sent = torch.stack(parts, dim=3)
        arrived = self._exchange(sent).flatten(0, 1)  # tokens, batch, ...
        # The one row of a batch viewed as such has the strides by which kernels know three packed in one.
        rows = arrived.view(1, -1, *arrived.shape[2:]) if arrived.shape[1] == 1 else arrived.transpose(0, 1)
        query, key, value = (each.transpose(1, 2) for each in rows.unbind(2))
        return query, key, value

    def _all_heads(self, out: Any) -> Any:
        """From (batch, own heads, tokens, channels) to (batch, own tokens, heads * channels)."""
        sent = out.permute(2, 0, 1, 3).unflatten(0, (self.num, -1))  # to whom it goes, tokens, batch, ...
        return self._exchange(sent).permute(2, 1, 0, 3, 4).flatten(2)

    def _exchange(self, sent: Any) -> Any:
        """Give the k-th part of the first dimension to the k-th process, and get one from each in its place."""
        import torch

        # The operators themselves: around them PyTorch would wrap what is under way in a tensor of a class of its own,
        # which costs the CPU more than it saves where the next line waits.
        collectives = torch.ops._c10d_functional
        flat = sent.flatten()  # in order of its dimensions, whatever layout torch.compile chose
        sizes = [flat.shape[0] // self.num] * self.num
        arrived = collectives.all_to_all_single(flat, sizes, sizes, self.group)
        return collectives.wait_tensor(arrived).view(sent.shape)


def _both_projections(projections: tuple[Any, ...], attn: Any) -> tuple[list[Any], list[Any] | None]:
    """Query, key and value of the image, or of both in single blocks, and of the text, by heads."""
    own, added = projections[:3], projections[3:]

    def by_heads(each: Any) -> Any:
        return each.unflatten(-1, (-1, attn.head_dim))

    has_text = attn.added_kv_proj_dim is not None
    return [by_heads(each) for each in own], [by_heads(each) for each in added] if has_text else None
