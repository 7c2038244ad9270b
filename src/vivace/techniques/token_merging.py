"""Merge a UNet's most similar image tokens before self-attention, and copy the result to all of them afterwards.

Why: self-attention is quadratic in the number of tokens, and a UNet's highest resolution has thousands (SD 1.5 at
    512 px: 4,096), whose neighbours are nearly equal. With half of them merged, that attention costs a quarter.
Costs: another image. Finding the pairs takes a matmul and a sort in every block, and with fast attention it may cost
    more than it saves: measure it. On tiny-sd it is no closer to the baseline than fewer steps of the same work
    (docs/step-curves.md); at which sizes it pays off on a GPU has not been measured.
Needs: a UNet with attention (SD 1.5, SDXL). FLUX's tokens have positions in each attention and cannot be averaged.
Source: Bolya and Hoffman, "Token Merging for Fast Stable Diffusion", arXiv 2303.17604; Bolya et al., arXiv 2210.09461.

One token of each 2 x 2 square is a destination. Of the others, those that are most similar to a destination are merged
into it, by the cosine of the attention's input. The paper chooses the destination of each square at random; here it is
the first, so that images are reproducible. Every sample of a batch has its own pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from vivace.errors import NoEffect
from vivace.machinery.technique import Component, Effect, Rule, Stage, Target, Technique, Trait, knob


class TokenMerging(Technique):
    name: ClassVar[str] = "token_merging"
    summary: ClassVar[str] = "a UNet's most similar tokens are merged in self-attention"
    stage: ClassVar[Stage] = Stage.THIN
    owns: ClassVar[str] = "tokens"
    same_picture: ClassVar[bool] = False
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser",)
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    ratio: float = knob(
        0.5, gt=0, le=0.75, tune=[0.25, 0.5], about="share of the tokens that are merged into others"
    )
    levels: int = knob(
        1, ge=1, le=4, tune=[1], about="number of resolutions whose tokens are merged, from the highest down"
    )

    @property
    def excludes(self) -> tuple[Rule, ...]:
        return (Rule(Trait.FUSED, "tokens are merged within diffusers' blocks, which fused replaces"),)

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if not hasattr(denoiser, "down_blocks") or not hasattr(denoiser, "up_blocks"):
            return f"tokens can be merged only in UNets, and {type(denoiser).__name__} is not one"
        if not _by_level(denoiser):
            return f"{type(denoiser).__name__} has no attention over image tokens"
        return None

    def apply(self, target: Target) -> Effect:
        denoiser = target.module("denoiser")
        by_level = _by_level(denoiser)
        merging = Merging(self.ratio)
        num = 0
        for level in sorted(by_level)[: self.levels]:
            for transformer in by_level[level]:
                num += merging.enter(transformer)
        if not num:
            raise NoEffect("there is no self-attention in the blocks of these resolutions")
        return Effect(
            changed={"denoiser.thinned_attentions": num},
            evidence=lambda: {f"denoiser.tokens_of_{n}": kept for n, kept in sorted(merging.kept.items())},
            refuted=lambda _: None if merging.kept else "no self-attention had tokens to merge",
        )


class Merging:
    """Self-attention over merged tokens.

    kept: number of tokens after merging, by their number before.
    """

    def __init__(self, ratio: float) -> None:
        self.kept: dict[int, int] = {}
        self._ratio = ratio

    def enter(self, transformer: Any) -> int:
        """Merge tokens in the self-attention of a `Transformer2DModel`'s blocks; return the number of blocks."""
        import torch

        size = [0, 0]  # height and width of the token grid
        forward = transformer.forward

        def sized(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            size[0], size[1] = hidden_states.shape[-2], hidden_states.shape[-1]
            return forward(hidden_states, *args, **kwargs)

        # Runs once per call site while a graph is traced; it is not part of the graph.
        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def note(tokens: int, kept: int) -> int:
            self.kept[tokens] = kept
            return kept

        def with_merging(attend: Callable[..., Any]) -> Callable[..., Any]:
            def attention(
                hidden_states: Any,
                encoder_hidden_states: Any = None,
                attention_mask: Any = None,
                **kwargs: Any,
            ) -> Any:
                tokens = hidden_states.shape[1]
                if (
                    encoder_hidden_states is not None
                    or attention_mask is not None
                    or tokens != size[0] * size[1]
                ):
                    return attend(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
                merge, unmerge, kept = match(hidden_states, size[0], size[1], self._ratio)
                note(tokens, kept)
                return unmerge(attend(merge(hidden_states), None, None, **kwargs))

            return attention

        num = 0
        for block in transformer.transformer_blocks:
            if getattr(block, "attn1", None) is not None and not getattr(
                block, "only_cross_attention", False
            ):
                block.attn1.forward = with_merging(block.attn1.forward)
                num += 1
        if num:
            transformer.forward = sized
        return num


def match(
    tokens: Any, height: int, width: int, ratio: float
) -> tuple[Callable[[Any], Any], Callable[[Any], Any], int]:
    """Find the tokens to merge.

    Args:
        tokens: shape (batch, height * width, channels), row by row.
        ratio: share of tokens to merge, up to all that are not destinations.

    Returns:
        A function that merges (batch, height * width, c) to (batch, kept, c), one that maps the merged tokens back to
        all tokens, and `kept`.
    """
    import torch

    batch, num, _ = tokens.shape
    rows, columns = torch.arange(height).view(-1, 1), torch.arange(width).view(1, -1)
    is_destination = ((rows % 2 == 0) & (columns % 2 == 0)).flatten()
    order = torch.argsort(is_destination.to(torch.int8), stable=True).to(tokens.device)
    num_destinations = ((height + 1) // 2) * ((width + 1) // 2)
    num_sources = num - num_destinations
    num_merged = min(int(ratio * num), num_sources)
    num_kept = num_sources - num_merged
    sources, destinations = order[:num_sources], order[num_sources:]

    directions = torch.nn.functional.normalize(tokens, dim=-1)
    similarity = directions[:, sources] @ directions[:, destinations].transpose(1, 2)
    best, nearest = similarity.max(dim=-1)
    ranking = best.argsort(dim=-1, descending=True, stable=True)
    merged, kept = ranking[:, :num_merged], ranking[:, num_merged:]
    into = nearest.gather(1, merged)

    # Index of each token among the merged ones: first the kept sources, then the destinations.
    index_of = torch.empty(batch, num_sources, dtype=torch.long, device=tokens.device)
    index_of = index_of.scatter(1, kept, torch.arange(num_kept, device=tokens.device).expand(batch, num_kept))
    index_of = index_of.scatter(1, merged, num_kept + into)
    last = torch.arange(num_kept, num_kept + num_destinations, device=tokens.device).expand(batch, -1)
    index_of = torch.cat([index_of, last], dim=1)[:, torch.argsort(order)]

    def merge(x: Any) -> Any:
        of_sources, channels = x[:, sources], x.shape[-1]
        gone = of_sources.gather(1, merged.unsqueeze(-1).expand(-1, -1, channels))
        stay = of_sources.gather(1, kept.unsqueeze(-1).expand(-1, -1, channels))
        index = into.unsqueeze(-1).expand(-1, -1, channels)
        means = x[:, destinations].scatter_reduce(1, index, gone, "mean", include_self=True)
        return torch.cat([stay, means], dim=1)

    def unmerge(x: Any) -> Any:
        return x.gather(1, index_of.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    return merge, unmerge, num_kept + num_destinations


def _by_level(unet: Any) -> dict[int, list[Any]]:
    """Return the attention blocks by downsampling factor relative to the latents."""
    levels: dict[int, list[Any]] = {}
    factor = 1

    def add(block: Any) -> None:
        for transformer in getattr(block, "attentions", None) or ():
            if hasattr(transformer, "transformer_blocks"):
                levels.setdefault(factor, []).append(transformer)

    for block in unet.down_blocks:
        add(block)
        factor *= 2 if getattr(block, "downsamplers", None) else 1
    if getattr(unet, "mid_block", None) is not None:
        add(unet.mid_block)
    for block in unet.up_blocks:
        add(block)
        factor //= 2 if getattr(block, "upsamplers", None) else 1
    return levels
