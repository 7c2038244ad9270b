"""A UNet's most alike picture tokens are averaged before self-attention, and get the same answer after it.

Why: self-attention costs the square of its tokens, and at a UNet's highest resolution there are thousands (SD 1.5 at
    512 px: 4,096) of which neighbours say nearly the same. With half of them merged that attention costs a quarter.
Costs: another picture. Finding the pairs is a product and a sort in every block, and where attention is fast already
    it may cost more than it saves: measure it. On tiny-sd it is no closer to the baseline than fewer steps of the same
    work (docs/step-curves.md); at what sizes it pays on a GPU has not been measured.
Needs: a UNet with attention (SD 1.5, SDXL). FLUX's tokens carry their place in each attention and cannot be averaged.
Source: Bolya and Hoffman, "Token Merging for Fast Stable Diffusion", arXiv 2303.17604; Bolya et al., arXiv 2210.09461.

One token of every two by two stays as a destination; of the others those that are most like a destination are merged
into it, by the cosine of what goes into the attention. The paper draws the destination of each square by lot; here it
is the first, so that a picture can be drawn again. Every sample of a batch has pairs of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from vivace.contract import Component, Effect, Stage, Target, Technique, knob
from vivace.errors import NoEffect


class TokenMerging(Technique):
    name: ClassVar[str] = "token_merging"
    summary: ClassVar[str] = "a UNet's most alike tokens share their self-attention"
    stage: ClassVar[Stage] = Stage.THIN
    owns: ClassVar[str] = "tokens"
    same_picture: ClassVar[bool] = False
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser",)
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    ratio: float = knob(
        0.5, gt=0, le=0.75, tune=[0.25, 0.5], about="share of the tokens that are merged away"
    )
    levels: int = knob(
        1, ge=1, le=4, tune=[1], about="resolutions whose attention is thinned, from the highest one down"
    )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if not hasattr(denoiser, "down_blocks") or not hasattr(denoiser, "up_blocks"):
            return f"tokens are merged in UNets, and {type(denoiser).__name__} is none"
        if not _by_level(denoiser):
            return f"{type(denoiser).__name__} has no attention over picture tokens"
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
            raise NoEffect("no self-attention was found in the blocks of these resolutions")
        return Effect(
            changed={"denoiser.thinned_attentions": num},
            evidence=lambda: {f"denoiser.tokens_of_{n}": kept for n, kept in sorted(merging.kept.items())},
            refuted=lambda _: None if merging.kept else "every self-attention saw all of its tokens",
        )


class Merging:
    """Self-attention over fewer tokens.

    kept: by the number of tokens that there were, the number that attention saw.
    """

    def __init__(self, ratio: float) -> None:
        self.kept: dict[int, int] = {}
        self._ratio = ratio

    def enter(self, transformer: Any) -> int:
        """Thin the self-attention of a `Transformer2DModel`'s blocks; their number."""
        import torch

        size = [0, 0]  # of the picture that the tokens are, height and width
        forward = transformer.forward

        def sized(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            size[0], size[1] = hidden_states.shape[-2], hidden_states.shape[-1]
            return forward(hidden_states, *args, **kwargs)

        # Runs while a graph is traced, once a place; the graph itself holds nothing of it.
        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def note(tokens: int, kept: int) -> int:
            self.kept[tokens] = kept
            return kept

        def thinned(attend: Callable[..., Any]) -> Callable[..., Any]:
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
                block.attn1.forward = thinned(block.attn1.forward)
                num += 1
        if num:
            transformer.forward = sized
        return num


def match(
    tokens: Any, height: int, width: int, ratio: float
) -> tuple[Callable[[Any], Any], Callable[[Any], Any], int]:
    """Which tokens are merged.

    Args:
        tokens: of shape (batch, height * width, channels), row by row.
        ratio: share of them to be merged away, up to all that are no destinations.

    Returns a function that merges (batch, height * width, c) to (batch, kept, c), one that undoes that by giving each
    token what it was merged into, and `kept`.
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
    alike = directions[:, sources] @ directions[:, destinations].transpose(1, 2)
    best, nearest = alike.max(dim=-1)
    ranking = best.argsort(dim=-1, descending=True, stable=True)
    merged, kept = ranking[:, :num_merged], ranking[:, num_merged:]
    into = nearest.gather(1, merged)

    # Where each token is found among the merged ones: those that were kept first, the destinations behind them.
    place = torch.empty(batch, num_sources, dtype=torch.long, device=tokens.device)
    place = place.scatter(1, kept, torch.arange(num_kept, device=tokens.device).expand(batch, num_kept))
    place = place.scatter(1, merged, num_kept + into)
    last = torch.arange(num_kept, num_kept + num_destinations, device=tokens.device).expand(batch, -1)
    place = torch.cat([place, last], dim=1)[:, torch.argsort(order)]

    def merge(x: Any) -> Any:
        of_sources, channels = x[:, sources], x.shape[-1]
        gone = of_sources.gather(1, merged.unsqueeze(-1).expand(-1, -1, channels))
        stay = of_sources.gather(1, kept.unsqueeze(-1).expand(-1, -1, channels))
        index = into.unsqueeze(-1).expand(-1, -1, channels)
        means = x[:, destinations].scatter_reduce(1, index, gone, "mean", include_self=True)
        return torch.cat([stay, means], dim=1)

    def unmerge(x: Any) -> Any:
        return x.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    return merge, unmerge, num_kept + num_destinations


def _by_level(unet: Any) -> dict[int, list[Any]]:
    """The blocks of attention by the factor by which their resolution lies below the latents'."""
    found: dict[int, list[Any]] = {}
    factor = 1

    def add(block: Any) -> None:
        for transformer in getattr(block, "attentions", None) or ():
            if hasattr(transformer, "transformer_blocks"):
                found.setdefault(factor, []).append(transformer)

    for block in unet.down_blocks:
        add(block)
        factor *= 2 if getattr(block, "downsamplers", None) else 1
    if getattr(unet, "mid_block", None) is not None:
        add(unet.mid_block)
    for block in unet.up_blocks:
        add(block)
        factor //= 2 if getattr(block, "upsamplers", None) else 1
    return found
