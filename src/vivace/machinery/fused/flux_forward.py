"""The forward of a FLUX transformer over its fused weights.

One buffer holds the residual stream of text and image: the text's tokens come first, so that a double block's products
read and write slices of it, and single blocks need no concatenation. Each branch's output is added to the stream by
the kernel that also makes the next branch's input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from vivace.errors import Unsupported
from vivace.machinery.compilation.stream_capture import MemsetsBeside
from vivace.machinery.fused import operations
from vivace.machinery.fused.flux_weights import FusedFlux
from vivace.machinery.fused.modulations import OF_DOUBLE, OF_SINGLE
from vivace.machinery.fused.operations import AttentionPreparation, AttentionScales, Rows
from vivace.machinery.fused.rope import tables
from vivace.machinery.fused.scales import StepScales
from vivace.machinery.kernels.reference import Branch, Modulation, TokenLayout, from_joint, to_joint

Attention = Literal["bf16", "fp8"]


class Exchange(Protocol):
    """What processes that hold a part of the tokens each give each other."""

    def modulations(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return what the first process computes, which is like another tensor."""

    def gathering(self, queries: torch.Tensor) -> Gathering:
        """Begin an attention whose own keys and values are like these queries."""


class Gathering(Protocol):
    """Keys and values of one attention.

    Attributes:
        own: of own tokens, (batch, own tokens, 2, heads, channels), to be written.
    """

    own: torch.Tensor

    def send(self) -> None:
        """Begin to send them, once they are written."""

    def wait(self) -> torch.Tensor:
        """Return keys and values (batch, all tokens, 2, heads, channels), once all are there."""


@dataclass
class _AttentionInputs:
    """Queries of own tokens, and a function that returns keys and values of all.

    scales: None in bf16.
    """

    queries: torch.Tensor
    keys_values: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    scales: AttentionScales | None


@dataclass
class _Pending:
    """A branch's output that is not yet added to the stream, and the layout of its rows."""

    tokens: TokenLayout
    branch: Branch | None = None


@dataclass
class _Step:
    """What all blocks of one forward share. scales: None in bf16."""

    x: torch.Tensor
    modulations: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    tokens: TokenLayout
    scales: StepScales | None


class FluxForward:
    """Replaces a transformer's forward; arguments and result are those of diffusers'.

    Its small layers stay diffusers' own: the embedders, the last norm and projection.

    Args:
        fused: see `vivace.machinery.fused.flux_weights`.

    Attributes:
        exchange: where the tokens given are this process's part of them; None: they are all.
    """

    def __init__(self, transformer: Any, fused: FusedFlux) -> None:
        self.num_calls = 0
        self.exchange: Exchange | None = None
        # cuDNN clears three numbers before its kernel. Among four GPUs this takes 12 us, in the way of attention; on
        # one, where the graph has no other branches, nothing is gained.
        self._attentions = MemsetsBeside()
        self._transformer = transformer
        self._fused = fused
        self._channels = transformer.inner_dim
        self._num_heads = transformer.config.num_attention_heads

    def __call__(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        pooled_projections: torch.Tensor,
        timestep: torch.Tensor,
        img_ids: torch.Tensor,
        txt_ids: torch.Tensor,
        guidance: torch.Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: Any = None,
        controlnet_single_block_samples: Any = None,
        return_dict: bool = True,
        controlnet_blocks_repeat: bool = False,
    ) -> Any:
        _refuse_extras(joint_attention_kwargs, controlnet_block_samples, controlnet_single_block_samples)
        transformer, fused = self._transformer, self._fused
        self.num_calls += 1
        image = transformer.x_embedder(hidden_states.bfloat16())
        text = transformer.context_embedder(encoder_hidden_states.bfloat16())
        tokens = TokenLayout(image.shape[0], text.shape[1], image.shape[1])
        conditions, embedding = self.inputs_of(timestep, guidance, pooled_projections, hidden_states.dtype)
        ids = torch.cat([_flat(txt_ids), _flat(img_ids)])
        modulations = self._modulations(conditions, embedding)
        step = _Step(
            x=torch.cat([text.flatten(0, 1), image.flatten(0, 1)]),
            modulations=modulations,
            rope=tables(ids, fused.frequency, fused.axis),
            tokens=tokens,
            scales=None if fused.bounds is None else fused.bounds(modulations, self._channels),
        )
        self._blocks(step)
        image = step.x.unflatten(0, (tokens.batch, -1))[:, -tokens.image :]
        image = transformer.proj_out(transformer.norm_out(image, embedding)).to(hidden_states.dtype)
        return Transformer2DModelOutput(sample=image) if return_dict else (image,)

    def inputs_of(
        self,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None,
        pooled: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the modulations' table is searched for (batch, inputs), and the embeddings (batch, channels).

        Args:
            dtype: of the latents, to which diffusers rounds time and guidance.
        """
        timestep = timestep.to(dtype)
        pooled = pooled.bfloat16()
        embed = self._transformer.time_text_embed
        if guidance is None:
            embedding = embed(timestep * 1000, pooled)
            scale = torch.zeros_like(timestep)
        else:
            scale = guidance.to(dtype)
            embedding = embed(timestep * 1000, scale * 1000, pooled)
        conditions = torch.cat([timestep[:, None].float(), scale[:, None].float(), pooled.float()], dim=1)
        return conditions, embedding

    def _modulations(self, conditions: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        modulations = self._fused.modulations
        if self.exchange is None:
            return modulations(conditions, embedding)
        like = modulations.bias.expand(len(conditions), -1)
        return self.exchange.modulations(lambda: modulations(conditions, embedding), like)

    def _blocks(self, step: _Step) -> None:
        pending = _Pending(step.tokens)
        for index, block in enumerate(self._fused.doubles):
            pending = self._double(block, index, step, pending)
        if step.tokens.batch > 1:
            # From here on text and image share their weights, so rows need not be sorted by them.
            self._norm(step, pending, None)
            step.x = to_joint(step.x, step.tokens).flatten(0, 1)
            pending = _Pending(step.tokens.joined)
        num_text = step.tokens.text
        step.tokens = step.tokens.joined
        last = len(self._fused.singles) - 1
        for index, block in enumerate(self._fused.singles):
            # After the last block only the image's tokens are read; in a batch they do not lie together.
            dropped = num_text if index == last and step.tokens.batch == 1 else 0
            pending = self._single(block, index, step, pending, dropped)
        self._norm(step, pending, None)

    def _double(self, block: Any, index: int, step: _Step, pending: _Pending) -> _Pending:
        scales, tokens = step.scales, step.tokens
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._of_double(index * OF_DOUBLE)
        of_inputs: Any = (None, None) if scales is None else scales.doubles[index]
        of_values, of_hidden = (
            (None, None) if scales is None else (scales.values[index], scales.hidden[index])
        )
        rows = self._norm(step, pending, (shift, scale), of_inputs[0])
        inputs = self._attention_inputs(rows, block, step, of_values, queries_last=True)
        attended = self._attend(inputs, tokens, of_values)
        branch = Branch(block.out(attended, tokens), gate, block.out.left_bias)
        rows = self._norm(step, _Pending(tokens, branch), (mlp_shift, mlp_scale), of_inputs[1])
        active = block.up.activated(rows, tokens, of_hidden)
        return _Pending(tokens, Branch(block.down(active, tokens), mlp_gate, block.down.left_bias))

    def _single(self, block: Any, index: int, step: _Step, pending: _Pending, dropped: int) -> _Pending:
        """dropped: first rows whose output is not needed; they are attended to all the same."""
        scales, tokens, num_doubles = step.scales, step.tokens, len(self._fused.doubles)
        shift, scale, gate = self._of_single(num_doubles * OF_DOUBLE + index * OF_SINGLE)
        of_input = None if scales is None else scales.singles[index : index + 1]
        rows = self._norm(step, pending, (shift, scale), of_input)
        kept = slice(dropped, None)
        of_kept = Rows(rows.values[kept], rows.scale)
        if dropped:
            step.x, tokens = step.x[kept], TokenLayout(1, 0, tokens.image - dropped)
        # The outputs of attention and MLP, side by side, are the input of one product; in e4m3 they share a scale.
        shared = None if scales is None else scales.values[num_doubles + index]
        width = self._channels + block.up.weight.shape[1]
        joined = torch.empty((len(rows.values), width), dtype=rows.values.dtype, device=rows.values.device)
        inputs = self._attention_inputs(rows, block, step, shared)  # what is gathered arrives during the MLP
        of_hidden = None if shared is None else shared[:, None]
        block.up.activated(of_kept, tokens, of_hidden, joined[kept, self._channels :])
        self._attend(inputs, step.tokens, shared, joined[:, : self._channels])
        out = block.out(Rows(joined[kept], None if shared is None else shared[:1]), tokens)
        return _Pending(tokens, Branch(out, gate, block.out.left_bias))

    def _norm(
        self,
        step: _Step,
        pending: _Pending,
        norm: tuple[Modulation, Modulation] | None,
        scale: torch.Tensor | None = None,
    ) -> Rows:
        # One image's rows are in the same order in either layout.
        return operations.add_and_norm(step.x, pending.branch, step.modulations, norm, pending.tokens, scale)

    def _attention_inputs(
        self,
        rows: Rows,
        block: Any,
        step: _Step,
        of_values: torch.Tensor | None,
        queries_last: bool = False,
    ) -> _AttentionInputs:
        """Return what a block attends with, of its rows.

        Args:
            of_values: (2,), the scale of values and attention's output, and its inverse; None in bf16.
            queries_last: compute them while keys and values are sent, where the caller has nothing else to do.
        """
        qkv_product, norms, scales = block.qkv, block.norms, None
        if norms.scales is not None:
            assert of_values is not None
            scales = AttentionScales(norms.scales, of_values)
        preparation = AttentionPreparation(
            qkv_product.left_bias, norms.weight, step.rope, step.tokens, self._num_heads, scales
        )
        if self.exchange is None:
            q, k, v = operations.attention_inputs(qkv_product(rows, step.tokens), preparation)
            return _AttentionInputs(q, lambda: (k, v), scales)
        qkv = qkv_product.empty(rows)
        q = torch.empty(preparation.shape, dtype=preparation.dtype(qkv), device=qkv.device)
        gathering = self.exchange.gathering(q)
        own_keys, own_values = gathering.own.unbind(2)

        def write(outputs: slice, q: Any, k: Any, v: Any) -> None:
            qkv_product.write(rows, step.tokens, qkv, outputs)
            operations.write_attention_inputs(qkv, preparation, (q, k, v))

        if queries_last:
            write(slice(self._channels, None), None, own_keys, own_values)
            gathering.send()
            write(slice(self._channels), q, None, None)
        else:
            write(slice(None), q, own_keys, own_values)
            gathering.send()
        return _AttentionInputs(q, lambda: gathering.wait().unbind(2), scales)

    def _attend(
        self,
        inputs: _AttentionInputs,
        tokens: TokenLayout,
        values: torch.Tensor | None,
        onto: torch.Tensor | None = None,
    ) -> Rows:
        """Attention's output as rows of tokens, (rows, channels), in e4m3 if a scale is given.

        Args:
            values: see `_attention_inputs`.
            onto: where to write it.
        """
        q, scales = inputs.queries, inputs.scales
        k, v = inputs.keys_values()
        if scales is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            )
            attended = _as_rows(out.transpose(1, 2), tokens)
            if values is not None:
                return operations.quantized(attended, values[:1], onto)
            return Rows(attended if onto is None else onto.copy_(attended))
        eight = torch.empty_like(q)
        if onto is not None:
            eight = onto.unflatten(-1, q.shape[2:]).unflatten(0, q.shape[:2])
        if not q.is_meta:
            from vivace.machinery.attention_backends.cudnn_fp8 import attend

            launch = functools.partial(attend, q, k, v, scales.queries_keys, scales.values, eight)
            if self.exchange is None:
                launch()
            else:
                self._attentions.launch(torch.cuda.current_stream().cuda_stream, launch)
        if onto is None:
            onto = _as_rows(eight.view(torch.uint8), tokens).view(torch.float8_e4m3fn)
        return Rows(onto, scales.values[:1])

    def _of_double(self, vector: int) -> list[Modulation]:
        """Where the modulations of a double block are, whose first is this vector."""
        half = OF_DOUBLE // 2
        image = [(vector + k) * self._channels for k in range(half)]
        return [Modulation(text=start + half * self._channels, image=start) for start in image]

    def _of_single(self, vector: int) -> list[Modulation]:
        starts = [(vector + k) * self._channels for k in range(OF_SINGLE)]
        return [Modulation(start, start) for start in starts]


def _as_rows(joint: torch.Tensor, tokens: TokenLayout) -> torch.Tensor:
    """(batch, tokens, heads, channels) as rows (rows, heads * channels)."""
    return from_joint(joint.flatten(2), tokens)


def _flat(ids: torch.Tensor) -> torch.Tensor:
    return ids[0] if ids.ndim == 3 else ids


def _refuse_extras(attention_kwargs: dict[str, Any] | None, *samples: Any) -> None:
    """Refuse what the fused blocks do not compute.

    Raises:
        Unsupported: there is any.
    """
    if any(sample is not None for sample in samples):
        raise Unsupported(
            "fused: the fused blocks take no ControlNet; leave fused out, or call without control images"
        )
    extras = [name for name, value in (attention_kwargs or {}).items() if (name, value) != ("scale", 1.0)]
    if extras:
        raise Unsupported(
            f"fused: the fused blocks take no joint_attention_kwargs ({', '.join(extras)}); leave fused out, or call "
            "without adapters"
        )
