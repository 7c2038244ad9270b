"""The picture is decoded in overlapping tiles, which are blended where they meet.

Why: the VAE's activations are the largest tensors of a call and grow with the picture's area. In tiles they grow no
    more: whatever the picture's size, the decoder takes the memory of one tile.
Costs: an approximation. A tile's group norms and attention see that tile alone, so brightness and colours may
    differ a little from tile to tile: smaller tiles, more so. What overlaps is computed twice or four times.
Needs: a picture that is larger than a tile. Without a size the model's own is taken (its training size, 512 px for a
    tiny VAE), which leaves pictures of that size in one piece.
Source: diffusers, `vae.enable_tiling`; Jimenez, Mixture of Diffusers, arXiv 2302.02412 (tiles and their blending).
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.contract import Component, Effect, MemoryAdvice, Stage, Target, Technique, knob
from vivace.contract.script import Script, literal
from vivace.errors import NoEffect


class VaeTiling(Technique):
    name: ClassVar[str] = "vae_tiling"
    summary: ClassVar[str] = "the picture is decoded in overlapping tiles"
    stage: ClassVar[Stage] = Stage.SPLIT
    owns: ClassVar[str] = "tiling"
    same_picture: ClassVar[bool] = False
    targetable: ClassVar[tuple[Component, ...]] = ("vae",)
    default_targets: ClassVar[tuple[Component, ...]] = ("vae",)
    memory_advice: ClassVar[MemoryAdvice] = MemoryAdvice(saving=("vae_tiling", "vae_tiling(512)"))

    tile: int | None = knob(
        None, ge=16, le=8192, tune=[512, 256], about="a tile's side in pixels; None: the model's own"
    )
    overlap: float | None = knob(
        None,
        gt=0,
        le=0.5,
        tune=[0.125, 0.25],
        about="share of a tile's side that overlaps; None: the model's own",
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
            # diffusers would round each side for itself, and the tiles would not meet.
            step = next(n for n in range(scale, tile + 8193, scale) if (overlap * n / scale).is_integer())
            return (
                f"tiles of {tile} px that overlap by {overlap:g} of it do not meet in whole cells of {scale} px; "
                f"with this overlap a tile is a multiple of {step} px"
            )
        return None

    def apply(self, target: Target) -> Effect:
        vae = target.module("vae")
        tile, overlap, scale = self._sizes(vae)
        if vae.use_tiling and (vae.tile_sample_min_size, vae.tile_overlap_factor) == (tile, overlap):
            raise NoEffect(f"the VAE decodes in tiles of {tile} px already", already_so=True)
        vae.enable_tiling()
        vae.tile_sample_min_size = tile
        vae.tile_latent_min_size = tile // scale
        vae.tile_overlap_factor = overlap
        seen = {"vae_decodes": 0, "vae_tiled_decodes": 0, "vae_largest_side_px": 0}
        decode = vae.decode
        name = "tiled_decode" if hasattr(vae, "tiled_decode") else "_tiled_decode"
        in_tiles = getattr(vae, name)

        def decode_and_look(z: Any, *args: Any, **kwargs: Any) -> Any:
            seen["vae_decodes"] += 1
            seen["vae_largest_side_px"] = max(seen["vae_largest_side_px"], scale * max(z.shape[-2:]))
            return decode(z, *args, **kwargs)

        def count_and_decode(z: Any, *args: Any, **kwargs: Any) -> Any:
            # A tiny VAE takes this way even when the picture is a single tile.
            seen["vae_tiled_decodes"] += max(z.shape[-2:]) > vae.tile_latent_min_size
            return in_tiles(z, *args, **kwargs)

        vae.decode = decode_and_look
        setattr(vae, name, count_and_decode)

        def refuted(_: dict[str, Any]) -> str | None:
            if seen["vae_decodes"] and not seen["vae_tiled_decodes"]:
                side = seen["vae_largest_side_px"]
                return f"pictures of up to {side} px fit into one tile of {tile} px; a smaller tile would be needed"
            return None

        return Effect(
            changed={"vae.tile_px": tile, "vae.overlap_px": int(overlap * tile)},
            evidence=lambda: dict(seen),
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
        """A tile's side in pixels, the share of it that overlaps, and the pixels of one cell of the latents."""
        scale = round(vae.tile_sample_min_size / vae.tile_latent_min_size)
        tile = int(vae.tile_sample_min_size) if self.tile is None else self.tile
        return tile, float(vae.tile_overlap_factor) if self.overlap is None else self.overlap, scale
