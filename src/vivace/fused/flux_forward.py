"""The forward of a FLUX transformer over its fused weights.

One buffer holds the residual stream of text and image: the text's tokens come first, so that a double block's products
read and write slices of it, and single blocks need no concatenation. Each branch's output is added to the stream by
the kernel that also makes the next branch's input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vivace.errors import Unsupported
from vivace.fused import operations
from vivace.fused.flux_weights import OF_DOUBLE, OF_SINGLE
from vivace.fused.operations import AttentionScales, Rows
from vivace.fused.rope import tables

if TYPE_CHECKING:
    import torch

    from vivace.kernels.reference import Bounds, Branch, Modulation, Tokens

Attention = Literal["bf16", "fp8"]


@dataclass
class _Pending:
    """A branch's output that is not yet added to the stream, and the layout of its rows."""

    tokens: Tokens
    branch: Branch | None = None


@dataclass
class _Step:
    """What all blocks of one forward share."""

    x: torch.Tensor
    modulations: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    tokens: Tokens
    bounds: torch.Tensor


class FluxForward:
    """Replaces a transformer's forward; arguments and result are those of diffusers'.

    Its small layers stay diffusers' own: the embedders, the last norm and projection.

    Args:
        fused: see `vivace.fused.flux_weights`.
    """

    def __init__(self, transformer: Any, fused: Any) -> None:
        self.num_calls = 0
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
        import torch
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        from vivace.kernels.reference import Tokens

        _refuse_extras(joint_attention_kwargs, controlnet_block_samples, controlnet_single_block_samples)
        transformer, fused = self._transformer, self._fused
        self.num_calls += 1
        image = transformer.x_embedder(hidden_states.bfloat16())
        text = transformer.context_embedder(encoder_hidden_states.bfloat16())
        tokens = Tokens(image.shape[0], text.shape[1], image.shape[1])
        asked, embedding = self.inputs_of(timestep, guidance, pooled_projections, hidden_states.dtype)
        ids = torch.cat([_flat(txt_ids), _flat(img_ids)])
        step = _Step(
            x=torch.cat([text.flatten(0, 1), image.flatten(0, 1)]),
            modulations=fused.modulations(asked, embedding),
            rope=tables(ids, fused.frequency, fused.axis),
            tokens=tokens,
            bounds=torch.zeros(
                len(fused.doubles) + len(fused.singles), dtype=torch.float32, device=image.device
            ),
        )
        self._blocks(step)
        image = step.x.unflatten(0, (tokens.batch, tokens.length))[:, tokens.text :]
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
        import torch

        timestep = timestep.to(dtype)
        pooled = pooled.bfloat16()
        embed = self._transformer.time_text_embed
        if guidance is None:
            embedding = embed(timestep * 1000, pooled)
            scale = torch.zeros_like(timestep)
        else:
            scale = guidance.to(dtype)
            embedding = embed(timestep * 1000, scale * 1000, pooled)
        asked = torch.cat([timestep[:, None].float(), scale[:, None].float(), pooled.float()], dim=1)
        return asked, embedding

    def _blocks(self, step: _Step) -> None:
        from vivace.kernels.reference import to_joint

        pending, at = _Pending(step.tokens), 0
        for index, block in enumerate(self._fused.doubles):
            pending = self._double(block, step, step.bounds[index : index + 1], pending, at)
            at += OF_DOUBLE * self._channels
        if step.tokens.batch > 1:
            # From here on text and image share their weights, so rows need not be sorted by them.
            self._norm(step, pending, None, quantize=False)
            step.x = to_joint(step.x, step.tokens).flatten(0, 1)
            pending = _Pending(step.tokens.joined)
        step.tokens = step.tokens.joined
        for index, block in enumerate(self._fused.singles, start=len(self._fused.doubles)):
            pending = self._single(block, step, step.bounds[index : index + 1], pending, at)
            at += OF_SINGLE * self._channels
        self._norm(step, pending, None, quantize=False)

    def _double(self, block: Any, step: _Step, bound: torch.Tensor, pending: _Pending, at: int) -> _Pending:
        import torch

        from vivace.kernels.reference import Branch

        quantize = block.qkv.scale is not None
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._of_double(at)
        rows = self._norm(step, pending, (shift, scale), quantize, _bounds(block.limits, bound))
        qkv = block.qkv(rows, step.tokens)
        attended = self._attend(qkv, block.qkv.left_bias, block.norms, step, bound, quantize)
        branch = Branch(block.out(attended, step.tokens), gate, block.out.left_bias)
        scales = step.x.new_empty((len(step.x), 1), dtype=torch.float32) if quantize else None
        bounds = _bounds(block.mlp_limits, row_scales=scales)
        rows = self._norm(step, _Pending(step.tokens, branch), (mlp_shift, mlp_scale), quantize, bounds)
        hidden = block.up(rows, step.tokens)
        onto = Rows(torch.empty_like(hidden, dtype=torch.float8_e4m3fn), scales) if quantize else None
        active = operations.activate(hidden, block.up.left_bias, step.tokens, onto)
        branch = Branch(block.down(active, step.tokens), mlp_gate, block.down.left_bias)
        return _Pending(step.tokens, branch)

    def _single(self, block: Any, step: _Step, bound: torch.Tensor, pending: _Pending, at: int) -> _Pending:
        import torch

        from vivace.kernels.reference import Branch

        quantize = block.entry.scale is not None
        shift, scale, gate = self._of_single(at)
        rows = self._norm(step, pending, (shift, scale), quantize, _bounds(block.limits, bound))
        both = block.entry(rows, step.tokens)
        bias, tokens = block.entry.left_bias, step.tokens
        hidden = both[:, 3 * self._channels :]
        if not quantize:
            attended = self._attend(both, bias, block.norms, step, bound, quantize)
            active = operations.activate(hidden, bias, tokens)
            out = block.out(attended, tokens)
            return _Pending(tokens, Branch(block.down(active, tokens, onto=out), gate))
        # Attention and MLP share a scale, so that their outputs, side by side, are the input of one product.
        shape = (len(both), self._channels + hidden.shape[1])
        joined = Rows(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=both.device),
            both.new_empty((len(both), 1), dtype=torch.float32),
        )
        mlp_bias = None if bias is None else bias[:, 3 * self._channels :]
        right = Rows(joined.values[:, self._channels :], joined.scale)
        operations.activate(hidden, mlp_bias, tokens, right, bound)
        left = Rows(joined.values[:, : self._channels], joined.scale)
        self._attend(both, bias, block.norms, step, bound, quantize, onto=left)
        return _Pending(tokens, Branch(block.out(joined, tokens), gate, block.out.left_bias))

    def _norm(
        self,
        step: _Step,
        pending: _Pending,
        norm: tuple[Modulation, Modulation] | None,
        quantize: bool,
        bounds: Bounds | None = None,
    ) -> Rows:
        # One picture's rows are in the same order in either layout.
        return operations.add_and_norm(
            step.x, pending.branch, step.modulations, norm, pending.tokens, quantize, bounds
        )

    def _attend(
        self,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        norms: Any,
        step: _Step,
        bound: torch.Tensor,
        quantize: bool,
        onto: Rows | None = None,
    ) -> Rows:
        """Attention's output as rows of tokens, (rows, channels).

        Args:
            onto: where to write it, in e4m3, with these scales: those of `bound`.
        """
        import torch

        tokens, scales = step.tokens, None
        if norms.scales is not None:
            values = qkv.new_empty(2, dtype=torch.float32)
            rows = onto.scale if onto is not None else None
            if rows is None:
                rows = qkv.new_empty((tokens.num_rows, 1), dtype=torch.float32)
            scales = AttentionScales(norms.scales, bound, values, rows)
        q, k, v = operations.attention_inputs(
            qkv, bias, norms.weight, step.rope, tokens, self._num_heads, scales
        )
        if scales is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            )
            attended = _as_rows(out.transpose(1, 2), tokens)
            return operations.quantized(attended, onto) if quantize else Rows(attended)
        eight = torch.empty_like(q)
        if onto is not None:
            eight = onto.values.unflatten(-1, q.shape[2:]).unflatten(0, q.shape[:2])
        if not q.is_meta:
            from vivace.attention_backends.cudnn_fp8 import attend

            attend(q, k, v, scales.queries_keys, scales.values, eight)
        if onto is not None:
            return onto
        return Rows(_as_rows(eight.view(torch.uint8), tokens).view(torch.float8_e4m3fn), scales.rows)

    def _of_double(self, at: int) -> list[Modulation]:
        from vivace.kernels.reference import Modulation

        image = [at + k * self._channels for k in range(OF_DOUBLE // 2)]
        return [Modulation(text=start + OF_DOUBLE // 2 * self._channels, image=start) for start in image]

    def _of_single(self, at: int) -> list[Modulation]:
        from vivace.kernels.reference import Modulation

        return [Modulation(at + k * self._channels, at + k * self._channels) for k in range(OF_SINGLE)]


def _bounds(
    limits: torch.Tensor | None, largest: torch.Tensor | None = None, row_scales: torch.Tensor | None = None
) -> Bounds | None:
    """Return the bounds to compute; None where the weights have no limits, in bf16."""
    from vivace.kernels.reference import Bounds

    return None if limits is None else Bounds(limits, largest, row_scales)


def _as_rows(joint: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """(batch, tokens, heads, channels) as rows (rows, heads * channels)."""
    from vivace.kernels.reference import from_joint

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
