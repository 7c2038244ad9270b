"""FLUX's tokens sharded among processes, with one or two collectives per attention, overlapped with computation.

Why: diffusers' ulysses takes four collectives per attention (query, key, value, output) and copies each tensor before
    and after; its ring computes attention in parts and merges them in fp32. Nothing is computed meanwhile. Here query,
    key and value travel as one tensor, attention is computed at once, and what does not depend on it is computed during
    a collective: in FLUX's single blocks, two thirds of all, the whole MLP.
Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509; Fang et al., xDiT, arXiv 2411.01738.

Every process has an equal shard of the text's and of the image's tokens, and of both rotary embeddings, from the
denoiser's input to its output. `Ulysses` exchanges tokens for heads before attention (all tokens of a process's own
heads), and back after it. `AllGather` keeps the queries of its own tokens and gathers all keys and values. Attention
does not depend on the tokens' order, so those of several processes are simply concatenated.

Layouts, with `num` processes. Ulysses: the first all-to-all sends (num, tokens, batch, 3, heads, channels) of own
tokens. What arrives is viewed with all tokens first; query, key and value are views of it. With a batch of one,
attention's result has tokens first and is sent as it is. What arrives then is reordered to heads first, the one copy,
into the input of the next matmul. All-gather: (tokens, batch, 2, heads, channels); what arrives has all tokens first,
and key and value are views of it.

Imported where a denoiser is sharded, since it imports torch and diffusers.
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

from vivace.machinery.fused.models.flux import FluxForward
from vivace.machinery.multi_gpu.collectives import (
    collective,
    collective_beside_linear,
    start_all_gather,
    wait,
)
from vivace.machinery.multi_gpu.fused_exchange import Sharding, exchange_of
from vivace.machinery.step_caching.block_residual import WHOLE_TOKENS

_TOKENS = -2
"""The dimension of tokens in each of `_SHARDED`: (batch, tokens, channels), or (tokens, 3) for ids."""
_SHARDED = ("hidden_states", "encoder_hidden_states", "img_ids", "txt_ids")


def can_shard(denoiser: nn.Module, mode: str, num: int) -> bool:
    """Return whether this is FLUX with diffusers' own attention, and heads that divide evenly if needed."""
    if type(denoiser) is not FluxTransformer2DModel:
        return False
    if mode == "ulysses" and denoiser.config.num_attention_heads % num:
        return False
    if _AttentionBackendRegistry.get_active_backend()[0] != AttentionBackendName.NATIVE:
        return False  # chosen by diffusers' own functions
    return all(
        type(attention.processor) is FluxAttnProcessor and attention.processor._attention_backend is None
        for attention in _modules_of_type(denoiser, FluxAttention)
    )


def shard(denoiser: nn.Module, mode: str, rank: int, num: int, group: str) -> Sharding:
    """Let this process compute its shard of the tokens; the forward takes and returns all. All processes call this."""
    memory = None
    if isinstance(denoiser.forward, FluxForward):
        exchange = denoiser.forward.exchange = exchange_of(rank, num, group, denoiser.device.type)
        num_collectives, memory = 1, exchange.memory
    else:
        processor = Ulysses(num, group) if mode == "ulysses" else AllGather(num, group)
        for attention in _modules_of_type(denoiser, FluxAttention):
            attention.set_processor(processor)
        for block in _modules_of_type(denoiser, transformer_flux.FluxSingleTransformerBlock):
            block.__class__ = FluxSingleTransformerBlock
        num_collectives = processor.num_collectives
    gather = functools.partial(_gather_tokens, num=num, group=group)
    setattr(denoiser, WHOLE_TOKENS, gather)
    denoiser.forward = _sharded_forward(denoiser, rank, num, gather)
    return Sharding(num_collectives, memory)


def _modules_of_type(denoiser: nn.Module, kind: type[Any]) -> list[Any]:
    return [module for module in denoiser.modules() if isinstance(module, kind)]


def _is_plain_linear(layer: nn.Module) -> bool:
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks
    return not has_hooks and type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def _gather_tokens(own: torch.Tensor, num: int, group: str) -> torch.Tensor:
    gathered = wait(start_all_gather(own.contiguous(), num, group))
    # From (num * batch, tokens, channels).
    return gathered.unflatten(0, (num, -1)).transpose(0, 1).flatten(1, 2)


def _sharded_forward(
    denoiser: nn.Module, rank: int, num: int, gather: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    of_own_tokens = denoiser.forward
    names = list(inspect.signature(type(denoiser).forward).parameters)[1:]

    @functools.wraps(of_own_tokens, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        for name in _SHARDED:
            if arguments.get(name) is not None:
                arguments[name] = arguments[name].chunk(num, _TOKENS)[rank]
        output = of_own_tokens(**arguments)
        sample = gather(output[0])
        return (sample,) if isinstance(output, tuple) else type(output)(sample=sample)

    return forward


class _ShardedAttention:
    """Attention processor of a FLUX block, double or single, whose input is a process's own tokens: as many in each."""

    num_collectives: int

    def __init__(self, num: int, group: str) -> None:
        self.num = num
        self.group = group

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Attend (batch, tokens, channels), the text's in double blocks alone; there is no mask in FLUX."""
        if attention_mask is not None:
            raise ValueError(
                "parallel shards its attention without a mask, and one was given; leave out attention_mask of "
                "joint_attention_kwargs, or use one GPU"
            )
        out = self.attend(attn, hidden_states, encoder_hidden_states, image_rotary_emb)
        if attn.added_kv_proj_dim is None:
            return out
        assert encoder_hidden_states is not None
        text = encoder_hidden_states.shape[1]
        context, image = out[:, :text], out[:, text:]
        image = attn.to_out[1](attn.to_out[0](image.contiguous()))
        return image, attn.to_add_out(context.contiguous())

    def attend(
        self, attn: nn.Module, hidden_states: torch.Tensor, text: torch.Tensor | None, rotary: Any
    ) -> torch.Tensor:
        """Return attention's result for own tokens, the text's first: (batch, tokens, heads * channels)."""
        raise NotImplementedError

    def single_block(self, block: nn.Module, normed: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Return attention and MLP of a single block, projected together, of `normed`, the input of both."""
        raise NotImplementedError


class Ulysses(_ShardedAttention):
    """An all-to-all exchanges tokens for heads, which must divide evenly; a second one exchanges them back."""

    num_collectives = 2

    def attend(
        self, attn: nn.Module, hidden_states: torch.Tensor, text: torch.Tensor | None, rotary: Any
    ) -> torch.Tensor:
        sent = self._pack(*_query_key_value(attn, hidden_states, text, rotary))
        out = self._attention(self._exchange(sent.flatten()).view(sent.shape))
        sent = self._by_tokens(out)
        return self._by_heads(self._exchange(sent.flatten()).view(sent.shape))

    def single_block(self, block: nn.Module, normed: torch.Tensor, rotary: Any) -> torch.Tensor:
        # The first all-to-all overlaps with the MLP's first layer, the second with that part of the last layer which
        # does not depend on attention.
        mlp, out = block.proj_mlp, block.proj_out
        sent = self._pack(*_query_key_value(block.attn, normed, None, rotary))
        received, hidden = collective_beside_linear(
            sent.flatten(), False, self.num, self.group, normed, mlp.weight, mlp.bias
        )
        sent = self._by_tokens(self._attention(received.view(sent.shape)))
        width = block.attn.inner_dim
        received, partial = collective_beside_linear(
            sent.flatten(),
            False,
            self.num,
            self.group,
            block.act_mlp(hidden),
            out.weight[:, width:],
            out.bias,
        )
        attended = self._by_heads(received.view(sent.shape))
        both = torch.addmm(partial.flatten(0, 1), attended.flatten(0, 1), out.weight[:, :width].t())
        return both.unflatten(0, partial.shape[:2])

    def _exchange(self, flat: torch.Tensor) -> torch.Tensor:
        return collective(flat, False, self.num, self.group)

    def _pack(self, *qkv: torch.Tensor) -> torch.Tensor:
        """Pack three tensors (batch, own tokens, heads, channels) into one, with the receiving process first."""
        parts = [each.unflatten(2, (self.num, -1)).permute(2, 1, 0, 3, 4) for each in qkv]
        return torch.stack(parts, dim=3)  # receiving process, tokens, batch, 3, heads, channels

    def _attention(self, received: torch.Tensor) -> torch.Tensor:
        received = received.flatten(0, 1)  # tokens, batch, ...
        # With a batch of one, this view has the strides by which attention kernels recognise packed qkv.
        is_single = received.shape[1] == 1
        rows = received.view(1, -1, *received.shape[2:]) if is_single else received.transpose(0, 1)
        return _scaled_dot_product_attention(*(each.transpose(1, 2) for each in rows.unbind(2)))

    def _by_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Reorder attention's result to (receiving process, tokens, batch, own heads, channels)."""
        return out.permute(2, 0, 1, 3).unflatten(0, (self.num, -1))

    def _by_heads(self, received: torch.Tensor) -> torch.Tensor:
        return received.permute(2, 1, 0, 3, 4).flatten(2)


class AllGather(_ShardedAttention):
    """Every process gathers all keys and values."""

    num_collectives = 1

    def attend(
        self, attn: nn.Module, hidden_states: torch.Tensor, text: torch.Tensor | None, rotary: Any
    ) -> torch.Tensor:
        if text is None or attn.fused_projections or not _is_plain_linear(attn.to_q):
            query, key, value = _query_key_value(attn, hidden_states, text, rotary)
            received = collective(self._pack(key, value), True, self.num, self.group)
        else:
            # The image's query, which no other process needs, is computed during the all-gather.
            key, value = _rotated_key_value(attn, hidden_states, text, rotary)
            layer = attn.to_q
            received, projected = collective_beside_linear(
                self._pack(key, value), True, self.num, self.group, hidden_states, layer.weight, layer.bias
            )
            query = _rotated_query(attn, projected, text, rotary)
        return self._attention(query, received)

    def single_block(self, block: nn.Module, normed: torch.Tensor, rotary: Any) -> torch.Tensor:
        query, key, value = _query_key_value(block.attn, normed, None, rotary)
        received, hidden = collective_beside_linear(
            self._pack(key, value),
            True,
            self.num,
            self.group,
            normed,
            block.proj_mlp.weight,
            block.proj_mlp.bias,
        )
        attended = self._attention(query, received)
        return block.proj_out(torch.cat([attended, block.act_mlp(hidden)], dim=2))

    def _pack(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Pack two tensors (batch, own tokens, heads, channels) into one, with tokens first."""
        return torch.stack([each.transpose(0, 1) for each in (key, value)], dim=2).contiguous()

    def _attention(self, query: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        key, value = (each.permute(1, 2, 0, 3) for each in received.unbind(2))
        # query, key, value: batch, heads, tokens, channels
        out = _scaled_dot_product_attention(query.transpose(1, 2), key, value)
        return out.transpose(1, 2).flatten(2)


class FluxSingleTransformerBlock(transformer_flux.FluxSingleTransformerBlock):  # type: ignore[misc]
    """diffusers' block, with the MLP overlapped with attention's collectives.

    A class that replaces diffusers' own, not a forward per block, since torch.compile compiles a class once. It has the
    same name, by which diffusers finds the blocks that a model repeats.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if joint_attention_kwargs or not (
            _is_plain_linear(self.proj_mlp) and _is_plain_linear(self.proj_out)
        ):
            return super().forward(  # type: ignore[no-any-return]
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
        text = encoder_hidden_states.shape[1]
        before = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        normed, gate = self.norm(before, emb=temb)
        after = before + gate.unsqueeze(1) * self.attn.processor.single_block(self, normed, image_rotary_emb)
        if after.dtype == torch.float16:
            after = after.clip(-65504, 65504)
        return after[:, :text], after[:, text:]


def _scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    # Looked up at each call: the technique `attention` may have replaced it.
    return nn.functional.scaled_dot_product_attention(query, key, value).to(query.dtype)


def _query_key_value(
    attn: nn.Module, hidden_states: torch.Tensor, text: torch.Tensor | None, rotary: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not attn.fused_projections:
        query = _rotated_query(attn, attn.to_q(hidden_states), text, rotary)
        return query, *_rotated_key_value(attn, hidden_states, text, rotary)
    query, key, value = _split_heads(attn, *attn.to_qkv(hidden_states).chunk(3, dim=-1))
    query, key = attn.norm_q(query), attn.norm_k(key)
    if attn.added_kv_proj_dim is not None:
        of_text = _split_heads(attn, *attn.to_added_qkv(text).chunk(3, dim=-1))
        query = torch.cat([attn.norm_added_q(of_text[0]), query], dim=1)
        key = torch.cat([attn.norm_added_k(of_text[1]), key], dim=1)
        value = torch.cat([of_text[2], value], dim=1)
    return _rotated(query, rotary), _rotated(key, rotary), value


def _rotated_query(
    attn: nn.Module, projected: torch.Tensor, text: torch.Tensor | None, rotary: Any
) -> torch.Tensor:
    (query,) = _split_heads(attn, projected)
    query = attn.norm_q(query)
    if attn.added_kv_proj_dim is not None:
        (of_text,) = _split_heads(attn, attn.add_q_proj(text))
        query = torch.cat([attn.norm_added_q(of_text), query], dim=1)
    return _rotated(query, rotary)


def _rotated_key_value(
    attn: nn.Module, hidden_states: torch.Tensor, text: torch.Tensor | None, rotary: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = _split_heads(attn, attn.to_k(hidden_states), attn.to_v(hidden_states))
    key = attn.norm_k(key)
    if attn.added_kv_proj_dim is not None:
        of_text = _split_heads(attn, attn.add_k_proj(text), attn.add_v_proj(text))
        key = torch.cat([attn.norm_added_k(of_text[0]), key], dim=1)
        value = torch.cat([of_text[1], value], dim=1)
    return _rotated(key, rotary), value


def _split_heads(attn: nn.Module, *projected: torch.Tensor) -> list[torch.Tensor]:
    return [each.unflatten(-1, (-1, attn.head_dim)) for each in projected]


def _rotated(each: torch.Tensor, rotary: Any) -> torch.Tensor:
    return each if rotary is None else apply_rotary_emb(each, rotary, sequence_dim=1)
