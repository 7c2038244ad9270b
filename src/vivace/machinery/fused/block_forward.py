"""The forward of double and single blocks over their fused weights.

One buffer holds the residual stream of text and image: the text's tokens come first, so that a double block's products
read and write slices of it, and single blocks need no concatenation. Each branch's output is added to the stream by
the kernel that also makes the next branch's input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from vivace.machinery.compilation.stream_capture import MemsetsBeside
from vivace.machinery.fused import operations
from vivace.machinery.fused.block_weights import BlockWeights, FusedBlocks
from vivace.machinery.fused.kept_keys import SourceKeys, beside
from vivace.machinery.fused.modulations import OF_DOUBLE, OF_SINGLE
from vivace.machinery.fused.operations import AttentionPreparation, AttentionScales, Room, Rows, RowScaled
from vivace.machinery.fused.products import Product, room_for
from vivace.machinery.fused.scales import StepScales
from vivace.machinery.kernels.reference import Branch, Modulation, TokenLayout, to_joint


class Gathering(Protocol):
    """Keys and values of one attention; `own` are those of own tokens, (batch, own tokens, 2, heads, channels), to be
    written."""

    own: torch.Tensor

    def send(self) -> None:
        """Begin to send them, once they are written."""

    def wait(self) -> torch.Tensor:
        """Return keys and values (batch, all tokens, 2, heads, channels), once all are there."""


class Exchange(Protocol):
    """What processes that hold a part of the tokens each give each other."""

    def modulations(self, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return what the first process computes, which is like another tensor."""

    def gathering(self, queries: torch.Tensor) -> Gathering:
        """Begin an attention whose own keys and values are like these queries."""


@dataclass
class _AttentionInputs:
    """Queries of own tokens, a function that returns all tokens' keys and values, of which the first `num_kept` are of
    an earlier step, and scales; None in bf16."""

    queries: torch.Tensor
    keys_values: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    scales: AttentionScales | None
    num_kept: int = 0


@dataclass
class _Pending:
    """A branch's output that is not yet added to the stream, and the layout of its rows."""

    tokens: TokenLayout
    branch: Branch | None = None


@dataclass
class _Step:
    """State that all blocks of one forward share; no `scales` in bf16, no `mask` where all keys are there. The second
    row of modulations is for the image's last `num_still` tokens."""

    x: torch.Tensor
    modulations: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    tokens: TokenLayout
    scales: StepScales | None
    mask: torch.Tensor | None
    num_still: int
    num_keys: torch.Tensor | None


class BlockForward:
    """Computes all blocks; where the tokens given are this process's part of them, it has an `exchange`. Its
    `source_keys` are those of source images that a step takes, or is given."""

    def __init__(self, blocks: FusedBlocks, channels: int, num_heads: int) -> None:
        self.exchange: Exchange | None = None
        self.source_keys = SourceKeys()
        # cuDNN clears three numbers before its kernel. Among four GPUs this takes 12 us, in the way of attention; on
        # one, where the graph has no other branches, nothing is gained.
        self._attentions = MemsetsBeside()
        self._blocks = blocks
        self._architecture = blocks.architecture
        self._channels = channels
        self._num_heads = num_heads

    def __call__(
        self,
        text: torch.Tensor,
        image: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        modulations: torch.Tensor,
        mask: torch.Tensor | None = None,
        num_still: int = 0,
        num_keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the image's tokens behind the last block, (batch, tokens, channels).

        Args:
            text, image: tokens (batch, tokens, channels), in bf16. Where the text is the last stream, the image comes
                first here, and in all that has both.
            rope: cosines and sines (text and image tokens, pairs), in fp32.
            modulations: (batch, vectors * channels): see `FusedArchitecture`.
            mask: of the tokens of text and image, see `operations.attend`; attention is in bf16 then. None: all.
            num_still: the image's last tokens, which the second row of modulations is for; of a batch of one, where the
                text is the last stream.
            num_keys: see `operations.attend`.
        """
        blocks, (batch, num_image) = self._blocks, image.shape[:2]
        scales = None if blocks.bounds is None else blocks.bounds(modulations, self._channels)
        step = _Step(
            x=torch.cat([text.flatten(0, 1), image.flatten(0, 1)]),
            modulations=modulations,
            rope=rope,
            tokens=TokenLayout(batch, text.shape[1], num_image),
            scales=self.source_keys.cover_kept(scales),
            mask=mask,
            num_still=num_still,
            num_keys=num_keys,
        )
        self._compute(step)
        if self._architecture.text_last:
            return step.x[: step.tokens.num_text_rows].unflatten(0, (batch, -1))
        if step.tokens.text:
            return step.x[step.tokens.num_text_rows :].unflatten(0, (batch, num_image))
        return step.x.unflatten(0, (batch, -1))[:, -num_image:]

    def rope(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._blocks.rope(ids)

    def _compute(self, step: _Step) -> None:
        pending = _Pending(step.tokens)
        for index, block in enumerate(self._blocks.doubles):
            pending = self._double(block, index, step, pending)
        if not len(self._blocks.singles):
            self._norm(step, pending, None)
            return
        if step.tokens.batch > 1:
            # From here on text and image share their weights, so rows need not be sorted by them.
            self._norm(step, pending, None)
            step.x = to_joint(step.x, step.tokens).flatten(0, 1)
            pending = _Pending(step.tokens.joined)
        num_text = step.tokens.text
        step.tokens = step.tokens.joined
        last = len(self._blocks.singles) - 1
        for index, block in enumerate(self._blocks.singles):
            # After the last block only the image's tokens are read; in a batch they do not lie together.
            dropped = num_text if index == last and step.tokens.batch == 1 else 0
            pending = self._single(block, index, step, pending, dropped)
        self._norm(step, pending, None)

    def _double(self, block: BlockWeights, index: int, step: _Step, pending: _Pending) -> _Pending:
        scales, tokens = step.scales, step.tokens
        start = self._architecture.double_start(index)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._of_double(start)
        of_inputs: Any = (None, None) if scales is None else scales.doubles[index]
        of_values = None if scales is None else scales.values[index]
        assert block.up is not None
        assert block.down is not None
        rows = self._norm(step, pending, (shift, scale), of_inputs[0], block.qkv.room)
        beside = self._second_attention(index, step)
        inputs, _ = self._attention_inputs(rows, block, index, step, of_values, queries_last=True)
        onto = block.out.room_if_needed(tokens.num_rows, rows.values.dtype)
        attended = self._attend(inputs, step, of_values, onto)
        of_mlp, of_hidden = (
            of_inputs[1],
            None if scales is None or scales.hidden is None else scales.hidden[index],
        )
        if block.ends_text:
            num_text, tokens = tokens.num_text_rows, tokens.image_alone
            step.x, step.tokens = step.x[num_text:], tokens
            attended = Rows(attended.values[num_text:], attended.scale)
            of_mlp, of_hidden = (None if each is None else each[..., 1:] for each in (of_mlp, of_hidden))
        branch = Branch(block.out(attended, tokens), gate, block.out.left_bias)
        rows = self._norm(step, _Pending(tokens, branch), (mlp_shift, mlp_scale), of_mlp, block.up.room)
        if beside is not None:
            self._add_to_image(beside, step, (mlp_shift, mlp_scale), rows)
        if self._architecture.activation == "swiglu":
            active = operations.swiglu(block.up(rows, tokens), scales is not None, room=block.down.room)
            return _Pending(tokens, self._row_scaled(block.down, active, tokens, mlp_gate))
        made = block.down.room_if_needed(tokens.num_rows, rows.values.dtype)
        hidden = block.up.activated(rows, tokens, of_hidden, made)
        return _Pending(tokens, Branch(block.down(hidden, tokens), mlp_gate, block.down.left_bias))

    def _second_attention(self, index: int, step: _Step) -> Branch | None:
        """Return what a second attention, of the stream before the first is added, adds to the image."""
        blocks, scales = self._blocks, step.scales
        if (place := blocks.second_at.get(index)) is None:
            return None
        weights, num_doubles = blocks.seconds[place], len(blocks.doubles)
        shift, scale, gate = self._of_single(self._architecture.single_start(place, num_doubles))
        tokens = step.tokens.image_alone
        cos, sin = (angles[step.tokens.text :] for angles in step.rope)
        alone = replace(step, x=step.x[step.tokens.num_text_rows :], tokens=tokens, rope=(cos, sin))
        of_input = None if scales is None else scales.singles[place : place + 1]
        of_values = None if scales is None else scales.values[num_doubles + place]
        rows = self._norm(alone, _Pending(tokens), (shift, scale), of_input, weights.qkv.room)
        inputs, _ = self._attention_inputs(rows, weights, None, alone, of_values)
        onto = weights.out.room_if_needed(tokens.num_rows, rows.values.dtype)
        attended = self._attend(inputs, alone, of_values, onto)
        return Branch(weights.out(attended, tokens), gate, weights.out.left_bias)

    def _add_to_image(
        self, branch: Branch, step: _Step, norm: tuple[Modulation, Modulation], rows: Rows
    ) -> None:
        own = slice(step.tokens.num_text_rows, None)
        scale = None if rows.scale is None else rows.scale[-1:]
        operations.add_and_norm(
            step.x[own],
            branch,
            step.modulations,
            norm,
            step.tokens.image_alone,
            scale,
            room=lambda *_, **__: rows.values[own],
        )

    def _single(
        self, block: BlockWeights, index: int, step: _Step, pending: _Pending, dropped: int
    ) -> _Pending:
        scales, num_doubles = step.scales, len(self._blocks.doubles)
        shift, scale, gate = self._of_single(self._architecture.single_start(index, num_doubles))
        of_input = None if scales is None else scales.singles[index : index + 1]
        consumers = (block.qkv,) if block.up is None else (block.qkv, block.up)
        rows = self._norm(step, pending, (shift, scale), of_input, room_for(*consumers))
        tokens = step.tokens
        if dropped:
            step.x, tokens = step.x[dropped:], TokenLayout(1, 0, tokens.image - dropped)
        of_values = None if scales is None else scales.values[num_doubles + index]
        compute = self._gated_single if self._architecture.activation == "swiglu" else self._gelu_single
        return _Pending(tokens, compute(block, num_doubles + index, rows, step, of_values, gate, tokens))

    def _gelu_single(
        self,
        block: BlockWeights,
        index: int,
        rows: Rows,
        step: _Step,
        shared: torch.Tensor | None,
        gate: Modulation,
        tokens: TokenLayout,
    ) -> Branch:
        """Attention beside an MLP with GELU, whose outputs `shared` scales: side by side they are one product's
        input."""
        assert block.up is not None
        kept = slice(len(rows.values) - tokens.num_rows, None)
        of_kept = Rows(rows.values[kept], rows.scale)
        joined = block.out.room((len(rows.values), block.out.num_inputs), dtype=rows.values.dtype)
        # What is gathered arrives during the MLP.
        inputs, _ = self._attention_inputs(rows, block, index, step, shared)
        of_hidden = None if shared is None else shared[:, None]
        block.up.activated(of_kept, tokens, of_hidden, joined[kept, self._channels :])
        self._attend(inputs, step, shared, joined[:, : self._channels])
        out = block.out(Rows(joined[kept], None if shared is None else shared[:1]), tokens)
        return Branch(out, gate, block.out.left_bias)

    def _gated_single(
        self,
        block: BlockWeights,
        index: int,
        rows: Rows,
        step: _Step,
        of_values: torch.Tensor | None,
        gate: Modulation,
        tokens: TokenLayout,
    ) -> Branch:
        kept = slice(len(rows.values) - tokens.num_rows, None)
        inputs, projected = self._attention_inputs(rows, block, index, step, of_values)
        # Without a scale attention's output stays in bf16 here: it is rounded with the MLP's, by row.
        attended = self._attend(inputs, step, None)
        active = operations.swiglu(
            projected[kept, 3 * self._channels :],
            step.scales is not None,
            Rows(attended.values[kept], attended.scale),
            room=block.out.room,
        )
        return self._row_scaled(block.out, active, tokens, gate)

    def _row_scaled(self, product: Product, rows: RowScaled, tokens: TokenLayout, gate: Modulation) -> Branch:
        unit = None if rows.scales is None else self._blocks.unit[:1]
        return Branch(product(Rows(rows.values, unit), tokens), gate, product.left_bias, rows.scales)

    def _norm(
        self,
        step: _Step,
        pending: _Pending,
        norm: tuple[Modulation, Modulation] | None,
        scale: torch.Tensor | None = None,
        room: Room | None = None,
    ) -> Rows:
        # One image's rows are in the same order in either layout.
        x, branch, tokens = step.x, pending.branch, pending.tokens
        if not step.num_still:
            return operations.add_and_norm(x, branch, step.modulations, norm, tokens, scale, room=room)
        dtype = x.dtype if scale is None else torch.float8_e4m3fn
        made = x if norm is None else (room or x.new_empty)(x.shape, dtype=dtype)
        # The image comes first here, in the text's place of the layout.
        moving, still = TokenLayout(1, tokens.text - step.num_still, 0), TokenLayout(1, step.num_still, 0)
        start = 0
        for row, part in ((0, moving), (1, still), (0, tokens.image_alone)):
            rows = slice(start, start + part.num_rows)
            start += part.num_rows
            own, onto = None if branch is None else branch.of(rows), made[rows]
            operations.add_and_norm(
                x[rows],
                own,
                step.modulations[row : row + 1],
                norm,
                part,
                scale,
                room=lambda _, dtype, onto=onto: onto,
            )
        return Rows(made, scale)

    def _attention_inputs(
        self,
        rows: Rows,
        block: BlockWeights,
        index: int | None,
        step: _Step,
        of_values: torch.Tensor | None,
        queries_last: bool = False,
    ) -> tuple[_AttentionInputs, torch.Tensor]:
        """Return attention's inputs, of own rows, and the whole product; queries last: while keys and values are sent.
        `index` is the block's among all; None: of a second attention, which no source image has a part in."""
        qkv_product, norms = block.qkv, block.norms
        scales = norms.attention_scales(of_values, is_bf16=step.mask is not None)
        preparation = AttentionPreparation(
            qkv_product.left_bias, norms.weight, step.rope, step.tokens, self._num_heads, scales
        )
        if self.exchange is None:
            qkv = qkv_product(rows, step.tokens)
            sources = self.source_keys
            if index is not None and sources.are_given:
                kept = sources.kept[index]
                q = torch.empty(preparation.shape, dtype=preparation.dtype(qkv), device=qkv.device)
                pair, own = beside(kept, q, scales, kept_first=True)
                operations.write_attention_inputs(qkv, preparation, (q, *own))
                return _AttentionInputs(q, lambda: pair, scales, kept[0].shape[1]), qkv
            q, k, v = operations.attention_inputs(qkv, preparation)
            if index is not None and sources.number:
                sources.take(qkv, preparation, (k, v), self._architecture.text_last)
            return _AttentionInputs(q, lambda: (k, v), scales), qkv
        qkv = qkv_product.empty(rows)
        q = torch.empty(preparation.shape, dtype=preparation.dtype(qkv), device=qkv.device)
        gathering = self.exchange.gathering(q)
        own_keys, own_values = gathering.own.unbind(2)

        def write(outputs: slice, q: Any, k: Any, v: Any) -> None:
            qkv_product.write(rows, step.tokens, qkv, outputs)
            operations.write_attention_inputs(qkv, preparation, (q, k, v))

        width = 3 * self._channels
        if queries_last:
            write(slice(self._channels, width), None, own_keys, own_values)
            gathering.send()
            write(slice(self._channels), q, None, None)
        else:
            write(slice(width), q, own_keys, own_values)
            gathering.send()
        if qkv.shape[1] > width:  # the MLP's part, while keys and values travel
            qkv_product.write(rows, step.tokens, qkv, slice(width, None))
        return _AttentionInputs(q, lambda: gathering.wait().unbind(2), scales), qkv

    def _attend(
        self,
        inputs: _AttentionInputs,
        step: _Step,
        values: torch.Tensor | None,
        onto: torch.Tensor | None = None,
    ) -> Rows:
        k, v = inputs.keys_values()
        launch = None if self.exchange is None else self._attentions.launch
        mask, num_keys, num_kept = step.mask, step.num_keys, inputs.num_kept
        if num_kept:
            mask = None if mask is None else torch.nn.functional.pad(mask, (num_kept, 0), value=True)
            num_keys = None if num_keys is None else num_keys + num_kept
        return operations.attend(
            (inputs.queries, k, v), inputs.scales, step.tokens, values, onto, mask, launch, num_keys
        )

    def _of_double(self, vector: int) -> list[Modulation]:
        half = OF_DOUBLE // 2
        image = [(vector + k) * self._channels for k in range(half)]
        return [Modulation(text=start + half * self._channels, image=start) for start in image]

    def _of_single(self, vector: int) -> list[Modulation]:
        starts = [(vector + k) * self._channels for k in range(OF_SINGLE)]
        return [Modulation(start, start) for start in starts]


class FusedForward:
    """Replaces a transformer's forward over its blocks' fused weights; its small layers stay diffusers'."""

    def __init__(self, transformer: Any, fused: FusedBlocks) -> None:
        self.num_calls = 0
        self._transformer = transformer
        self._blocks = BlockForward(fused, transformer.inner_dim, transformer.config.num_attention_heads)
        self.source_keys = self._blocks.source_keys

    def _predicted(self, image: torch.Tensor, embedding: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.num_calls += 1
        last = self._transformer
        predicted: torch.Tensor = last.proj_out(last.norm_out(image, embedding)).to(dtype)
        return predicted
