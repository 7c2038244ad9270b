"""Decode the image in overlapping tiles, and blend them where they overlap.

Why: the VAE's activations are the largest tensors of a call and grow with the image's area. With tiling, the decoder
    needs the memory of one tile, whatever the image's size.
Costs: an approximation. Group norms and attention see only one tile, so brightness and colours may differ slightly
    between tiles, more so with smaller tiles. Overlapping areas are computed twice or four times.
Needs: an image that is larger than a tile. The default tile is the model's own (its training size, 512 px for a tiny
    VAE), so that images of that size are not tiled.
Source: diffusers, `vae.enable_tiling`; Jimenez, Mixture of Diffusers, arXiv 2302.02412 (tiles and their blending).
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from vivace.errors import NoEffect
from vivace.machinery.technique import Effect, Stage, Target, Technique, TechniqueFacts, knob
from vivace.machinery.technique.script import Script, literal


class VaeTiling(Technique):
    name: ClassVar[str] = "vae_tiling"
    summary: ClassVar[str] = "the image is decoded in overlapping tiles"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SPLIT,
        owns="tiling",
        same_picture=False,
        targetable=("vae",),
        default_targets=("vae",),
        saves_memory=("vae_tiling", "vae_tiling(512)"),
    )

    tile: int | None = knob(
        None, ge=16, le=8192, tune=[512, 256], about="tile size in pixels; None: the model's own"
    )
    overlap: float | None = knob(
        None,
        gt=0,
        le=0.5,
        tune=[0.125, 0.25],
        about="overlap as a share of the tile size; None: the model's own",
    )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        vae = target.module("vae")
        if not hasattr(vae, "use_tiling") or not hasattr(vae, "tile_latent_min_size"):
            return f"diffusers cannot decode {type(vae).__name__} in tiles"
        tile, overlap, scale = self._sizes(vae)
        cells = overlap * tile / scale
        if tile % scale or cells < 1 or cells != int(cells):
            # diffusers would round sizes separately, and the tiles would not fit together.
            step = next(n for n in range(scale, tile + 8193, scale) if (overlap * n / scale).is_integer())
            return (
                f"tiles of {tile} px with an overlap of {overlap:g} are not made of whole latent cells of {scale} px; "
                f"with this overlap the tile size must be a multiple of {step} px"
            )
        return None

    def apply(self, target: Target) -> Effect:
        vae = target.module("vae")
        tile, overlap, scale = self._sizes(vae)
        if vae.use_tiling and (vae.tile_sample_min_size, vae.tile_overlap_factor) == (tile, overlap):
            raise NoEffect(f"the VAE already decodes in tiles of {tile} px", already_so=True)
        vae.enable_tiling()
        vae.tile_sample_min_size = tile
        vae.tile_latent_min_size = tile // scale
        vae.tile_overlap_factor = overlap
        counts = {"vae_decodes": 0, "vae_tiled_decodes": 0, "vae_largest_side_px": 0}
        name = "tiled_decode" if hasattr(vae, "tiled_decode") else "_tiled_decode"
        vae.decode = functools.partial(_decode_and_record, counts, scale, vae.decode)
        setattr(vae, name, functools.partial(_count_and_decode, counts, vae, getattr(vae, name)))

        def refuted(_: dict[str, Any]) -> str | None:
            if counts["vae_decodes"] and not counts["vae_tiled_decodes"]:
                side = counts["vae_largest_side_px"]
                return f"images of up to {side} px fit into one tile of {tile} px; use a smaller tile"
            return None

        return Effect(
            changed={"vae.tile_px": tile, "vae.overlap_px": int(overlap * tile)},
            evidence=lambda: dict(counts),
            refuted=refuted,
        )

    def script(self, target: Target) -> Script:
        lines = ["pipe.vae.enable_tiling()"]
        if self.tile is not None or self.overlap is not None:
            tile, overlap, scale = self._sizes(target.module("vae"))
            lines += [
                f"pipe.vae.tile_sample_min_size = {tile}  # pixels",
                f"pipe.vae.tile_latent_min_size = {tile // scale}  # the same in cells of the latents",
                f"pipe.vae.tile_overlap_factor = {literal(overlap)}",
            ]
        return Script(lines=tuple(lines))

    def _sizes(self, vae: Any) -> tuple[int, float, int]:
        """Return the tile size in pixels, its overlapping share, and the pixels per latent cell."""
        scale = round(vae.tile_sample_min_size / vae.tile_latent_min_size)
        tile = int(vae.tile_sample_min_size) if self.tile is None else self.tile
        return tile, float(vae.tile_overlap_factor) if self.overlap is None else self.overlap, scale


def _decode_and_record(
    counts: dict[str, int], scale: int, decode: Any, z: Any, *args: Any, **kwargs: Any
) -> Any:
    counts["vae_decodes"] += 1
    counts["vae_largest_side_px"] = max(counts["vae_largest_side_px"], scale * max(z.shape[-2:]))
    return decode(z, *args, **kwargs)


def _count_and_decode(
    counts: dict[str, int], vae: Any, decode: Any, z: Any, *args: Any, **kwargs: Any
) -> Any:
    # A tiny VAE gets here even if the image is a single tile.
    counts["vae_tiled_decodes"] += max(z.shape[-2:]) > vae.tile_latent_min_size
    return decode(z, *args, **kwargs)
