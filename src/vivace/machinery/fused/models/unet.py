"""A UNet's transformers over their fused weights: each replaces one of diffusers'.

Activations are in bf16 and channels_last, so an image is rows of pixels without a copy: the transformers' tokens.
Each branch's output is added to the residual stream by the kernel that also normalises it for the next branch. In fp8,
the outputs of norms and of attention to the text have one scale, from a bound, and those of self-attention and GEGLU a
scale for each row.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModelOutput
from torch import nn

from vivace.errors import Unsupported
from vivace.machinery.fused import image_operations as images
from vivace.machinery.fused import operations
from vivace.machinery.fused.convolutions import Precision, fuse_convolutions, scale_of_norm, unsuited_resnet
from vivace.machinery.fused.lora_columns import name_layers
from vivace.machinery.fused.operations import Places, Rows, RowScaled
from vivace.machinery.fused.products import Product
from vivace.machinery.fused.scales import spread
from vivace.machinery.fused.text_projections import TextProjections, why_read_otherwise
from vivace.machinery.kernels.reference import Branch, Modulation, TokenLayout, scale_of

_PROCESSORS = ("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0")
"""diffusers' plain attention, with projections apart or fused."""


class FusedBlock(nn.Module):
    """A transformer block: self-attention, attention to the text, whose projections are `TextProjections`', and
    GEGLU."""

    def __init__(self, block: Any, quantize: bool) -> None:
        super().__init__()
        own, other = block.attn1, block.attn2
        self.quantize = quantize
        self.num_heads = own.heads
        self.eps = block.norm1.eps
        if getattr(own, "to_qkv", None) is not None:
            self.qkv = Product([[own.to_qkv]], quantize)
        else:
            self.qkv = Product([[own.to_q, own.to_k, own.to_v]], quantize)
        self.out = Product([[own.to_out[0]]], quantize, rows_are_scaled=True)
        self.query = Product([[other.to_q]], quantize)
        self.text_out = Product([[other.to_out[0]]], quantize, rows_are_scaled=True)
        self.up = Product([[block.ff.net[0].proj]], quantize)
        self.down = Product([[block.ff.net[2]]], quantize, rows_are_scaled=True)
        norms = [block.norm1, block.norm2, block.norm3]
        # As modulations: norms multiply by 1 + scale, and add a shift. The last vector is the gate.
        vectors = [vector for norm in norms for vector in (norm.bias.float(), norm.weight.float() - 1)]
        gate = torch.ones_like(norms[0].weight)
        self.register_buffer("vectors", torch.cat([*vectors, gate]).detach().float()[None])
        self.register_buffer("scales", _scales_of(norms) if quantize else None)
        unit_gate = spread(gate.new_ones(1, dtype=torch.float32))[0] if quantize else None
        self.register_buffer("one", unit_gate)

    def forward(
        self,
        x: torch.Tensor,
        pending: Branch | None,
        text: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        tokens: TokenLayout,
    ) -> Branch:
        """Change the stream x, and return the branch still to be added; `text`: keys, values, and in e4m3 their
        scale."""
        q, k, v = self._heads(self._normed(self.qkv, x, pending, 0, tokens), tokens, 3)
        attended = _attend(q, k, v).flatten(2).flatten(0, 1)
        branch = self._branch(self.out, self._rows(attended, self.out), tokens)
        (q,) = self._heads(self._normed(self.query, x, branch, 1, tokens), tokens, 1)
        branch = self._branch(self.text_out, self._attend_to_text(q, *text), tokens, text[2])
        up = self._normed(self.up, x, branch, 2, tokens)
        bias = self.up.left_bias
        active = images.geglu(up, None if bias is None else bias[0], self.quantize, self.down.room)
        return self._branch(self.down, active, tokens)

    def _normed(
        self, product: Product, x: torch.Tensor, branch: Branch | None, which: int, tokens: TokenLayout
    ) -> torch.Tensor:
        channels = x.shape[1]
        shift, scale = (Modulation(at * channels, at * channels) for at in (2 * which, 2 * which + 1))
        of_norm = None if self.scales is None else self.scales[which, :1]
        vectors = self.vectors.expand(tokens.batch, -1)
        rows = operations.add_and_norm(
            x, branch, vectors, (shift, scale), tokens, of_norm, self.eps, product.room
        )
        return product(rows, tokens)

    def _attend_to_text(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor | None
    ) -> RowScaled:
        """Return attention to a text; of one that is still to be quantised, each row has a scale."""
        if self.quantize and scale is None:
            return self._rows(images.cross_attention(q, k, v, None), self.text_out)
        return RowScaled(images.cross_attention(q, k, v, scale, self.text_out.room))

    def add(self, x: torch.Tensor, branch: Branch, tokens: TokenLayout) -> None:
        operations.add_and_norm(x, branch, self.vectors.expand(tokens.batch, -1), None, tokens, None)

    def _branch(
        self, product: Product, rows: RowScaled, tokens: TokenLayout, scale: torch.Tensor | None = None
    ) -> Branch:
        if scale is None and self.one is not None:
            scale = self.one[:1]
        made = product(Rows(rows.values, scale), tokens)
        gate = 6 * made.shape[1]
        return Branch(made, Modulation(gate, gate), product.left_bias, rows.scales)

    def _heads(self, made: torch.Tensor, tokens: TokenLayout, number: int) -> tuple[torch.Tensor, ...]:
        parts = made.view(tokens.batch, tokens.image, number, self.num_heads, -1)
        return tuple(parts.unbind(2))

    def _rows(self, rows: torch.Tensor, product: Product) -> RowScaled:
        return (
            images.quantized_rows(rows, product.room) if self.quantize else RowScaled(product.with_room(rows))
        )


class FusedUNetTransformer(nn.Module):
    """Replaces diffusers' `Transformer2DModel`. Its blocks give up their weights one by one; `texts` takes the
    text's."""

    takes_layers = True

    def __init__(self, transformer: Any, quantize: bool, texts: TextProjections) -> None:
        super().__init__()
        self.norm = transformer.norm
        self.project_in = Product([[_linear(transformer.proj_in)]], quantize, adds_bias=True)
        self.register_buffer("scale", spread(scale_of_norm(self.norm))[0] if quantize else None)
        self.project_out = Product([[_linear(transformer.proj_out)]], False)
        self._texts = (texts,)  # a module of the model, not of this transformer
        self._share = texts.fill(transformer.transformer_blocks)
        self.blocks = nn.ModuleList()
        while len(transformer.transformer_blocks):
            self.blocks.append(FusedBlock(transformer.transformer_blocks[0], quantize))
            del transformer.transformer_blocks[0]

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        timestep: Any = None,
        added_cond_kwargs: Any = None,
        class_labels: Any = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Take diffusers' arguments; the text may be its keys and values; masks and attention's are Unsupported."""
        _refuse_extras(cross_attention_kwargs, attention_mask, encoder_attention_mask)
        assert encoder_hidden_states is not None
        pixels = images.channels_last(hidden_states)
        batch, _, height, width = pixels.shape
        tokens = TokenLayout(batch, 0, height * width)
        scale = None if self.scale is None else self.scale[:1]
        normed = images.group_norm(
            pixels, self.norm, None, silu=False, scale=scale, room=self.project_in.room
        )
        x = self.project_in(Rows(images.pixels(normed).flatten(0, 1), scale), tokens)
        # (batch, words, blocks, keys and values, heads, channels of a head)
        texts, scales = self._texts[0].of(encoder_hidden_states, self._share)
        texts = texts.unflatten(-1, (len(self.blocks), 2, self.blocks[0].num_heads, -1))
        pending = None
        for index, block in enumerate(self.blocks):
            keys, values = texts[:, :, index].unbind(2)
            scale = None if scales is None else scales[index]
            pending = block(x, pending, (keys, values, scale), tokens)
        assert pending is not None
        self.blocks[-1].add(x, pending, tokens)
        out = self.project_out(
            Rows(self.project_out.with_room(x)), tokens, onto=images.pixels(pixels).flatten(0, 1)
        )
        made = out.view(batch, height, width, -1).permute(0, 3, 1, 2)
        return Transformer2DModelOutput(sample=made) if return_dict else (made,)


def fuse_unet(model: Any, quantize: bool, convolutions: Precision, enlarges: bool, places: Places) -> int:
    """Replace the transformers and residual blocks of a UNet in bf16; return the number of transformer blocks."""
    name_layers(model)
    fuse_convolutions(model, convolutions, enlarges, places)
    # By name: a list of modules would keep the blocks, and with them their weights, until all are fused.
    names = [name for name, part in model.named_modules() if type(part).__name__ == "Transformer2DModel"]
    texts = TextProjections([model.get_submodule(name) for name in names], quantize, places)
    model.add_module("vivace_text_projections", texts)
    number = 0
    for name in names:
        fused = FusedUNetTransformer(model.get_submodule(name).to(places.work), quantize, texts)
        model.set_submodule(name, fused.eval().requires_grad_(False).to(places.home))
        number += len(fused.blocks)
    return number


def unsuited(model: Any) -> str | None:
    if model.config.encoder_hid_dim_type is not None:
        kind = model.config.encoder_hid_dim_type
        return (
            f"the fused blocks take the text alone, as it is, and this UNet has a projection of it ({kind})"
        )
    num_blocks = 0
    for name, part in model.named_modules():
        kind, reason = type(part).__name__, None
        if kind == "BasicTransformerBlock":
            num_blocks += 1
            reason = _unsuited_block(part)
        elif kind == "ResnetBlock2D":
            reason = unsuited_resnet(part)
        if reason is not None:
            return f"{name}: {reason}"
    if not num_blocks:
        return "the fused kernels are for transformer blocks, and this UNet has none"
    return why_read_otherwise(model)


def _unsuited_block(block: Any) -> str | None:
    plain = (
        block.norm_type == "layer_norm"
        and block.attn2 is not None
        and type(block.ff.net[0]).__name__ == "GEGLU"
        and not block.only_cross_attention
        and block.pos_embed is None
        and all(norm.elementwise_affine for norm in (block.norm1, block.norm2, block.norm3))
    )
    if not plain:
        return "a transformer block of another form than those of Stable Diffusion"
    for attention in (block.attn1, block.attn2):
        kind = type(attention.processor).__name__
        if kind not in _PROCESSORS:
            return f"its attention is computed by {kind}, which has no fused form"
        if any(
            getattr(attention, name, None) is not None and getattr(attention, name).bias is not None
            for name in ("to_q", "to_k", "to_v", "to_qkv", "to_kv")
        ):
            return "its queries, keys or values have biases"
        if (
            attention.norm_q is not None
            or attention.norm_cross is not None
            or attention.residual_connection
            or attention.rescale_output_factor != 1
        ):
            return "an attention of another form than those of Stable Diffusion"
    return None


def _scales_of(norms: list[Any]) -> torch.Tensor:
    """Return the scales of norms' outputs, (norms, 4); the first is used: see `vivace.machinery.fused.scales`."""
    reach = len(norms[0].weight) ** 0.5
    bounds = [(reach * norm.weight.float().abs() + norm.bias.float().abs()).amax() for norm in norms]
    return spread(scale_of(torch.stack(bounds).detach()))


def _linear(layer: Any) -> Any:
    name = getattr(layer, "vivace_name", "")
    return SimpleNamespace(weight=layer.weight.flatten(1), bias=layer.bias, vivace_name=name)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    made = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return made.transpose(1, 2)


def _refuse_extras(attention_kwargs: dict[str, Any] | None, *masks: Any) -> None:
    extras = [name for name, value in (attention_kwargs or {}).items() if (name, value) != ("scale", 1.0)]
    if extras:
        raise Unsupported(
            f"fused: the fused blocks take no cross_attention_kwargs ({', '.join(extras)}); leave fused out, or call "
            "without them"
        )
    if any(mask is not None for mask in masks):
        raise Unsupported(
            "fused: the fused blocks take no attention mask; leave fused out, or call without one"
        )
