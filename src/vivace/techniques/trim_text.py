"""Leave out what nothing reads of a language model that encodes the text: last layers, words' probabilities, padding.

Why: FLUX.2 reads the states behind layers 9, 18 and 27 of 36 ([klein]), or 10, 20 and 30 of 40 ([dev]), and its
    pipelines compute all layers. FLUX.2 and Qwen-Image also have their language model predict the next word behind
    each of the prompt's, among 130,000 to 152,000, and throw that away: a tenth of the text encoder's operations.
    Z-Image pads each prompt to 512 tokens, and reads the states of its own, some 20 to 100.
Costs: nothing: prompt embeddings have the same bits. Z-Image's have the same values within a rounding of bf16, since
    matrix products of fewer rows may add in another order. The model can no longer write text
    (`caption_upsample_temperature` of FLUX.2 [dev]), or give states behind later layers (`text_encoder_out_layers`);
    both are refused.
Needs: a pipeline of FLUX.2, Qwen-Image or Z-Image.
Source: Schuster et al., "Confident Adaptive Language Modeling", arXiv 2207.07061 (early exits; this one is fixed).

It frees the memory of a quarter of the layers: of [dev]'s text encoder 11 of 48 GB. On an H100
[klein] 4B's peak falls from 12.9 to 10.7 GB, and its 0.18 s hardly change
(results/fused-model-flux2-klein-4b-h100.json).
Of Z-Image's text encoder all layers are left, and padding stays where the encoder is compiled, which would compile for
each length. With `cuda_graph@text_encoder`, prompts are padded again to one of a few lengths.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from vivace.architectures import FAMILIES, Pipeline, pipeline_named
from vivace.errors import NoEffect, Unsupported
from vivace.machinery.technique import Effect, Facts, Stage, Target, Technique, TechniqueFacts
from vivace.machinery.technique.anatomy import component_of
from vivace.machinery.technique.traits import is_compiled


class TrimText(Technique):
    name: ClassVar[str] = "trim_text"
    summary: ClassVar[str] = "layers and padding of the text encoder that nothing reads are left out"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.PRUNE,
        owns="layers",
        same_picture=True,
        targetable=("text_encoder",),
        default_targets=("text_encoder",),
        is_stored=True,
    )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None or _last_state(target.pipe) is not None or _reads_no_padding(target.pipe):
            return None
        known = [family.name for family in FAMILIES if any(map(_is_known, family.pipelines))]
        return (
            f"it is not known which layers of its text encoder {type(target.pipe).__name__} reads; known are the "
            f"pipelines of {', '.join(known)}"
        )

    def apply(self, target: Target) -> Effect:
        pipe = target.pipe
        last = _last_state(pipe)
        if last is None:
            padding = _leave_out_padding(component_of(pipe, "text_encoder"))
            return Effect(
                changed={"text_encoder.padding": "left out"},
                evidence=lambda: {
                    "text_encoder.tokens": padding.num_tokens,
                    "text_encoder.tokens_left_out": padding.num_left_out,
                },
                refuted=lambda _: padding.never(),
            )
        encoder = component_of(pipe, "text_encoder")
        before = sum(p.numel() for p in encoder.parameters())
        num_layers = _trim(encoder, last)
        if num_layers is None:
            raise NoEffect("those layers are left out already", already_so=True)
        _refuse_other_uses(pipe, last)
        after = sum(p.numel() for p in encoder.parameters())
        return Effect(
            changed={
                "text_encoder.layers_left_out": num_layers,
                "text_encoder.parameters_less": f"{1 - after / before:.1%}",
            }
        )

    def rebuild(self, target: Target, changed: Facts) -> None:
        if "text_encoder.padding" in changed:
            return
        encoder, num_layers = (
            target.module("text_encoder"),
            int(changed.get("text_encoder.layers_left_out", 0)),
        )
        _trim(encoder, len(_decoder(encoder).layers) - num_layers if num_layers else -1)

    def resume(self, target: Target) -> None:
        if (last := _last_state(target.pipe)) is not None:
            _refuse_other_uses(target.pipe, last)
        elif _reads_no_padding(target.pipe):
            _leave_out_padding(target.module("text_encoder"))


def _is_known(pipeline: Pipeline) -> bool:
    return pipeline.last_text_state is not None or not pipeline.reads_padding


def _last_state(pipe: Any) -> int | None:
    """Return the last of the layers' states that a pipeline reads, -1: that of all layers; None: unknown."""
    known = pipeline_named(type(pipe).__name__)
    return None if known is None else known.last_text_state


def _reads_no_padding(pipe: Any) -> bool:
    """Return whether a pipeline reads nothing behind a prompt's own tokens, on which padding has no influence."""
    from vivace.machinery.compilation.prompt_lengths import is_causal_language_model

    known = pipeline_named(type(pipe).__name__)
    return (
        known is not None
        and not known.reads_padding
        and is_causal_language_model(component_of(pipe, "text_encoder"))
    )


def _trim(encoder: Any, last: int) -> int | None:
    """Return how many layers are left out; None: there were none to leave out."""
    import torch

    class NoWords(torch.nn.Module):  # type: ignore[misc]
        """Replaces the layer that predicts words."""

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states[..., :0]

    trims = False
    if isinstance(getattr(encoder, "lm_head", None), torch.nn.Linear):
        encoder.lm_head, trims = NoWords(), True
    num_left_out = 0
    if last >= 0:
        model = _decoder(encoder)
        num_left_out = max(0, len(model.layers) - last)
        if num_left_out:
            del model.layers[last:]
            # The state behind the last layer is read as it is: in the whole model no norm follows this one.
            model.norm, trims = torch.nn.Identity(), True
    return num_left_out if trims else None


def _decoder(encoder: Any) -> Any:
    """Return the part of a language model that has its layers."""
    return next(part for part in encoder.modules() if hasattr(part, "embed_tokens"))


def _refuse_other_uses(pipe: Any, last: int) -> None:
    """Let a pipeline's methods refuse uses of its text encoder that need the dropped parts."""
    encode = pipe.encode_prompt

    @functools.wraps(encode)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        layers = kwargs.get("text_encoder_out_layers") or ()
        if last >= 0 and any(not 0 <= layer <= last for layer in layers):
            raise Unsupported(
                f"trim_text: text_encoder_out_layers={tuple(layers)} reads layers that were left out; those up to "
                f"{last} are there. Leave trim_text out, or read those"
            )
        return encode(*args, **kwargs)

    def upsample_prompt(*_: Any, **__: Any) -> Any:
        raise Unsupported(
            "trim_text: the text encoder has no layers left to write text with (caption_upsample_temperature); leave "
            "trim_text out, or do not upsample"
        )

    pipe.encode_prompt = encode_prompt
    if hasattr(pipe, "upsample_prompt"):
        pipe.upsample_prompt = upsample_prompt


class _Padding:
    """Leaves out the tokens behind all prompts of a call, and returns zeros as their states.

    Hooks stand outside of a captured forward, whose graphs are for a few lengths.

    Attributes:
        num_tokens, num_left_out: counts so far, of all prompts.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_left_out = 0
        self._rows = (0, 0)
        self._num_behind = 0

    def never(self) -> str | None:
        """Return why nothing was left out, or None."""
        if not self.num_tokens or self.num_left_out:
            return None
        return (
            "no prompt had padding behind it: they are longer than 512 tokens, or the tokenizer pads in front"
        )

    def before(
        self, encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        import torch

        self._num_behind = 0
        mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
        if mask is None or ids is None or mask.shape != ids.shape or mask.is_meta or is_compiled(encoder):
            return None
        batch, length = ids.shape
        used = int((mask.bool().any(dim=0) * torch.arange(1, length + 1, device=mask.device)).max())
        self._rows, self._num_behind = (batch, used), length - used
        self.num_tokens += batch * length
        self.num_left_out += batch * self._num_behind
        own = {
            name: value[:, :used] if isinstance(value, torch.Tensor) and value.shape == ids.shape else value
            for name, value in kwargs.items()
        }
        return args, own

    def after(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        def whole(value: Any) -> Any:
            is_of_tokens = isinstance(value, torch.Tensor) and value.shape[:2] == self._rows
            more = (0, 0) * (value.ndim - 2) + (0, self._num_behind) if is_of_tokens else ()
            return torch.nn.functional.pad(value, more) if is_of_tokens else value

        return tree_map(whole, output) if self._num_behind else output


def _leave_out_padding(encoder: Any) -> _Padding:
    padding = _Padding()
    encoder.register_forward_pre_hook(padding.before, with_kwargs=True)
    encoder.register_forward_hook(padding.after, with_kwargs=True)
    return padding
