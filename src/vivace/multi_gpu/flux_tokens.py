"""FLUX's tokens shared among processes, with one or two messages an attention, sent while something is computed.

Why: diffusers' own ulysses sends four messages an attention (query, key, value, output) and copies each tensor before
    and after; its ring computes attention a part at a time and adds the parts up in fp32. Nothing is computed
    meanwhile. Here query, key and value travel as one, a ring's kernel sees all keys at once, and what attention does
    not need is computed while a message is under way: in FLUX's single blocks, two thirds of all, the whole MLP.
Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509; Liu et al., Ring Attention, arXiv 2310.01889; Fang et al.,
    xDiT, arXiv 2411.01738.

Every process has an equal part of the text's and of the image's tokens, and of both tables of rotary embeddings, from
the denoiser's input to its output. In attention, `Ulysses` exchanges tokens for heads: a process gets all tokens of its
own heads, and afterwards its own tokens of all heads. `Ring` gets all keys and values, for its own queries. Attention
does not mind that the tokens of several processes come one after the other. How messages travel is `messages`'.

Layouts, of `num` processes. Ulysses: before the first message (num, tokens, batch, 3, heads, channels), all of a
process's own. What arrives from each is put one after the other, so that its first two dimensions are all tokens, and
query, key and value are views of it. Attention's result has tokens first where the batch is one, and goes out as it is.
What arrives then is sorted by heads first, which takes the one copy, into the place that the next product reads. Ring:
(tokens, batch, 2, heads, channels); what arrives has all tokens first, and keys and values are views of it.

Imported where a denoiser is shared, since it imports torch and diffusers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import nn

from vivace.multi_gpu.collectives import gathering, message, message_beside_linear, waited
from vivace.step_caching.flux_residual import WHOLE_TOKENS

_TOKENS = -2
"""The dimension of tokens in each of `_SHARED`: (batch, tokens, channels), or (tokens, 3) for ids."""
_SHARED = ("hidden_states", "encoder_hidden_states", "img_ids", "txt_ids")


def can_share(denoiser: Any, mode: str, num: int) -> bool:
    """Whether this is FLUX with attention as diffusers builds it, and for ulysses heads that divide evenly."""
    if type(denoiser) is not FluxTransformer2DModel:
        return False
    if mode == "ulysses" and denoiser.config.num_attention_heads % num:
        return False
    if _AttentionBackendRegistry.get_active_backend()[0] != AttentionBackendName.NATIVE:
        return False  # somebody chose another kernel in diffusers' own way
    return all(
        type(attention.processor) is FluxAttnProcessor and attention.processor._attention_backend is None
        for attention in _of_kind(denoiser, FluxAttention)
    )


def share(denoiser: Any, mode: str, rank: int, num: int, group: str) -> int:
    """Let this process compute its own part of the tokens. All of the group do so.

    Args:
        denoiser: what `can_share` agrees to. Its forward takes what it took, and returns the whole result.
        group: the name of the process group.

    Returns:
        Messages that each attention takes.
    """
    processor = Ulysses(num, group) if mode == "ulysses" else Ring(num, group)
    for attention in _of_kind(denoiser, FluxAttention):
        attention.set_processor(processor)
    for block in _of_kind(denoiser, transformer_flux.FluxSingleTransformerBlock):
        block.__class__ = FluxSingleTransformerBlock
    whole = functools.partial(_whole, num=num, group=group)
    setattr(denoiser, WHOLE_TOKENS, whole)
    denoiser.forward = _forward(denoiser, rank, num, whole)
    return processor.messages


def _of_kind(denoiser: Any, kind: type[Any]) -> list[Any]:
    return [module for module in denoiser.modules() if isinstance(module, kind)]


def _is_plain(layer: Any) -> bool:
    """Whether a layer is a product of its weight and nothing else: not quantised, without hooks or adapters."""
    is_called_plainly = not layer._forward_hooks and not layer._forward_pre_hooks
    return is_called_plainly and type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def _whole(own: Any, num: int, group: str) -> Any:
    """(batch, all tokens, channels) of everybody's (batch, own tokens, channels)."""
    # By torch.distributed in any case: it is where everybody meets at the end of a forward (`Copies.restart`).
    gathered = waited(gathering(own.contiguous(), num, group))
    # From (num * batch, tokens, channels), the processes one after the other.
    return gathered.unflatten(0, (num, -1)).transpose(0, 1).flatten(1, 2)


def _forward(denoiser: Any, rank: int, num: int, whole: Callable[[Any], Any]) -> Callable[..., Any]:
    """The denoiser's forward of its own part of the tokens, from and to all tokens."""
    of_own = denoiser.forward
    names = list(inspect.signature(type(denoiser).forward).parameters)[1:]

    @functools.wraps(of_own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in _SHARED:
            if given.get(name) is not None:
                given[name] = given[name].chunk(num, _TOKENS)[rank]
        output = of_own(**given)
        sample = whole(output[0])
        return (sample,) if isinstance(output, tuple) else type(output)(sample=sample)

    return forward


class _Tokens:
    """Attention of a FLUX block, double or single, whose input is a process's own tokens.

    Args:
        num: processes, of which each has as many tokens.
        group: the name of their group.
    """

    messages: int

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
        if attention_mask is not None:
            raise ValueError(
                "parallel shares FLUX's attention without a mask, and one was given; leave out attention_mask of "
                "joint_attention_kwargs, or draw on one GPU"
            )
        out = self.attended(attn, hidden_states, encoder_hidden_states, image_rotary_emb)
        if attn.added_kv_proj_dim is None:
            return out
        text = encoder_hidden_states.shape[1]
        context, image = out[:, :text], out[:, text:]
        image = attn.to_out[1](attn.to_out[0](image.contiguous()))
        return image, attn.to_add_out(context.contiguous())

    def attended(self, attn: Any, hidden_states: Any, text: Any, rotary: Any) -> Any:
        """Own tokens, the text's first, of all heads: (batch, tokens, heads * channels)."""
        raise NotImplementedError

    def single(self, block: Any, normed: Any, rotary: Any) -> Any:
        """Attention and MLP of a single block, through the product that brings both together.

        Args:
            normed: (batch, own tokens, channels), what both are computed of.
        """
        raise NotImplementedError


class Ulysses(_Tokens):
    """Tokens are exchanged for heads, which must divide evenly, and back."""

    messages = 2

    def attended(self, attn: Any, hidden_states: Any, text: Any, rotary: Any) -> Any:
        sent = self._packed(*_query_key_value(attn, hidden_states, text, rotary))
        out = self._attention(self._exchange(sent.flatten()).view(sent.shape))
        sent = self._by_tokens(out)
        return self._by_heads(self._exchange(sent.flatten()).view(sent.shape))

    def single(self, block: Any, normed: Any, rotary: Any) -> Any:
        # The first message goes beside the MLP's first layer, the second one beside that part of its last layer that
        # knows nothing of attention.
        mlp, out = block.proj_mlp, block.proj_out
        sent = self._packed(*_query_key_value(block.attn, normed, None, rotary))
        arrived, hidden = message_beside_linear(
            sent.flatten(), False, self.num, self.group, normed, mlp.weight, mlp.bias
        )
        sent = self._by_tokens(self._attention(arrived.view(sent.shape)))
        width = block.attn.inner_dim
        arrived, rest = message_beside_linear(
            sent.flatten(),
            False,
            self.num,
            self.group,
            block.act_mlp(hidden),
            out.weight[:, width:],
            out.bias,
        )
        attended = self._by_heads(arrived.view(sent.shape))
        both = torch.addmm(rest.flatten(0, 1), attended.flatten(0, 1), out.weight[:, :width].t())
        return both.unflatten(0, rest.shape[:2])

    def _exchange(self, flat: Any) -> Any:
        return message(flat, False, self.num, self.group)

    def _packed(self, *three: Any) -> Any:
        """Of three times (batch, own tokens, heads, channels), one tensor, by those who get it."""
        parts = [each.unflatten(2, (self.num, -1)).permute(2, 1, 0, 3, 4) for each in three]
        return torch.stack(parts, dim=3)  # to whom it goes, tokens, batch, which of the three, ...

    def _attention(self, arrived: Any) -> Any:
        """(batch, own heads, all tokens, channels), of what arrived for them."""
        arrived = arrived.flatten(0, 1)  # tokens, batch, ...
        # The one row of a batch viewed as such has the strides by which kernels know three packed in one.
        rows = arrived.view(1, -1, *arrived.shape[2:]) if arrived.shape[1] == 1 else arrived.transpose(0, 1)
        return _scaled_dot_product_attention(*(each.transpose(1, 2) for each in rows.unbind(2)))

    def _by_tokens(self, out: Any) -> Any:
        """To whom it goes, tokens, batch, own heads, channels."""
        return out.permute(2, 0, 1, 3).unflatten(0, (self.num, -1))

    def _by_heads(self, arrived: Any) -> Any:
        return arrived.permute(2, 1, 0, 3, 4).flatten(2)


class Ring(_Tokens):
    """Everybody gets all keys and values."""

    messages = 1

    def attended(self, attn: Any, hidden_states: Any, text: Any, rotary: Any) -> Any:
        if text is None or attn.fused_projections or not _is_plain(attn.to_q):
            query, key, value = _query_key_value(attn, hidden_states, text, rotary)
            arrived = message(self._packed(key, value), True, self.num, self.group)
        else:
            # The image's query, of which nobody else needs to know, is computed while keys and values travel.
            key, value = _rotated_key_value(attn, hidden_states, text, rotary)
            layer = attn.to_q
            arrived, own = message_beside_linear(
                self._packed(key, value), True, self.num, self.group, hidden_states, layer.weight, layer.bias
            )
            query = _rotated_query(attn, own, text, rotary)
        return self._attention(query, arrived)

    def single(self, block: Any, normed: Any, rotary: Any) -> Any:
        query, key, value = _query_key_value(block.attn, normed, None, rotary)
        arrived, hidden = message_beside_linear(
            self._packed(key, value),
            True,
            self.num,
            self.group,
            normed,
            block.proj_mlp.weight,
            block.proj_mlp.bias,
        )
        attended = self._attention(query, arrived)
        return block.proj_out(torch.cat([attended, block.act_mlp(hidden)], dim=2))

    def _packed(self, key: Any, value: Any) -> Any:
        """Of two times (batch, own tokens, heads, channels), one tensor with tokens first."""
        return torch.stack([each.transpose(0, 1) for each in (key, value)], dim=2).contiguous()

    def _attention(self, query: Any, arrived: Any) -> Any:
        key, value = (
            each.permute(1, 2, 0, 3) for each in arrived.unbind(2)
        )  # batch, heads, tokens, channels
        out = _scaled_dot_product_attention(query.transpose(1, 2), key, value)
        return out.transpose(1, 2).flatten(2)


class FluxSingleTransformerBlock(transformer_flux.FluxSingleTransformerBlock):  # type: ignore[misc]
    """diffusers' block, with the MLP beside attention's messages.

    A class in the place of diffusers' own, and not a forward of each block, since torch.compile makes code for a class
    once. It is found by its name among the blocks that a model repeats.
    """

    def forward(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any,
        temb: Any,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: Any = None,
    ) -> tuple[Any, Any]:
        if joint_attention_kwargs or not (_is_plain(self.proj_mlp) and _is_plain(self.proj_out)):
            return super().forward(  # type: ignore[no-any-return]
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
        text = encoder_hidden_states.shape[1]
        before = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        normed, gate = self.norm(before, emb=temb)
        after = before + gate.unsqueeze(1) * self.attn.processor.single(self, normed, image_rotary_emb)
        if after.dtype == torch.float16:
            after = after.clip(-65504, 65504)
        return after[:, :text], after[:, text:]


def _scaled_dot_product_attention(query: Any, key: Any, value: Any) -> Any:
    # Looked up at each call: `attention` may have put another in its place.
    return nn.functional.scaled_dot_product_attention(query, key, value).to(query.dtype)


def _query_key_value(attn: Any, hidden_states: Any, text: Any, rotary: Any) -> tuple[Any, Any, Any]:
    """Query, key and value of own tokens, the text's first if there are any, each (batch, tokens, heads, channels)."""
    if not attn.fused_projections:
        query = _rotated_query(attn, attn.to_q(hidden_states), text, rotary)
        return query, *_rotated_key_value(attn, hidden_states, text, rotary)
    query, key, value = _by_heads(attn, *attn.to_qkv(hidden_states).chunk(3, dim=-1))
    query, key = attn.norm_q(query), attn.norm_k(key)
    if attn.added_kv_proj_dim is not None:
        of_text = _by_heads(attn, *attn.to_added_qkv(text).chunk(3, dim=-1))
        query = torch.cat([attn.norm_added_q(of_text[0]), query], dim=1)
        key = torch.cat([attn.norm_added_k(of_text[1]), key], dim=1)
        value = torch.cat([of_text[2], value], dim=1)
    return _rotated(query, rotary), _rotated(key, rotary), value


def _rotated_query(attn: Any, projected: Any, text: Any, rotary: Any) -> Any:
    (query,) = _by_heads(attn, projected)
    query = attn.norm_q(query)
    if attn.added_kv_proj_dim is not None:
        (of_text,) = _by_heads(attn, attn.add_q_proj(text))
        query = torch.cat([attn.norm_added_q(of_text), query], dim=1)
    return _rotated(query, rotary)


def _rotated_key_value(attn: Any, hidden_states: Any, text: Any, rotary: Any) -> tuple[Any, Any]:
    key, value = _by_heads(attn, attn.to_k(hidden_states), attn.to_v(hidden_states))
    key = attn.norm_k(key)
    if attn.added_kv_proj_dim is not None:
        of_text = _by_heads(attn, attn.add_k_proj(text), attn.add_v_proj(text))
        key = torch.cat([attn.norm_added_k(of_text[0]), key], dim=1)
        value = torch.cat([of_text[1], value], dim=1)
    return _rotated(key, rotary), value


def _by_heads(attn: Any, *projected: Any) -> list[Any]:
    return [each.unflatten(-1, (-1, attn.head_dim)) for each in projected]


def _rotated(each: Any, rotary: Any) -> Any:
    return each if rotary is None else apply_rotary_emb(each, rotary, sequence_dim=1)
