"""Images become bytes on the GPU, and only those are copied to the CPU.

Why: diffusers copies the VAE's output as it is and converts it on one CPU thread: to fp32, times 255, rounded, to
    bytes. The GPU has nothing to do meanwhile: 27 ms of each call at 1024 x 1024 (one H200), which is more of a call
    the faster the rest is; 10 ms are left with this. Half of the bytes or less is copied, to pinned memory. The GPU
    also puts the colours of a pixel side by side, as PIL wants them, which a CPU would do byte by byte.
Costs: nothing; the images are the same, byte for byte.
Needs: a GPU, and images returned as PIL images (`output_type="pil"`, diffusers' default). Other outputs are diffusers'.
Source: a profile of FLUX.1 [dev] (results/flux-fused-profiles.jsonl, docs/performance/flux.md).
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.machinery.technique import Effect, Stage, Target, Technique, TechniqueFacts
from vivace.machinery.technique.script import Script

_SCRIPT = (
    "# Images become bytes on the GPU, and only those are copied to the CPU.",
    "inherited = pipe.image_processor.postprocess",
    "",
    'def postprocess(image, output_type="pil", do_denormalize=None):',
    '    if output_type != "pil":',
    "        return inherited(image, output_type, do_denormalize)",
    '    image = inherited(image, "pt", do_denormalize).permute(0, 2, 3, 1).float()',
    "    images = (image * 255).round().byte().contiguous().cpu().numpy()",
    "    return [Image.fromarray(image) for image in images]",
    "",
    "pipe.image_processor.postprocess = postprocess",
)


class GpuPostprocess(Technique):
    name: ClassVar[str] = "gpu_postprocess"
    summary: ClassVar[str] = "images become bytes on the GPU instead of on the CPU"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SCHEDULE,
        owns="image conversion",
        same_picture=True,
        belongs_to_pipeline=True,
    )

    def unsupported(self, target: Target) -> str | None:
        if not target.machine.is_gpu:
            return "images are in the CPU's memory already; there is no GPU here"
        if target.pipe is not None and not hasattr(target.pipe, "image_processor"):
            return f"{type(target.pipe).__name__} has no image_processor, which turns tensors into images"
        return None

    def apply(self, target: Target) -> Effect:
        processor: Any = target.pipe.image_processor
        inherited = processor.postprocess
        counts = {"images_converted_on_gpu": 0}

        def postprocess(image: Any, output_type: str = "pil", do_denormalize: Any = None) -> Any:
            import torch
            from PIL import Image

            if output_type != "pil":
                return inherited(image, output_type, do_denormalize)
            scaled = inherited(image, "pt", do_denormalize).permute(0, 2, 3, 1).float()
            pixels = (scaled * 255).round().byte().contiguous()
            if pixels.device.type != "cpu":
                counts["images_converted_on_gpu"] += len(pixels)
                # New memory of the host is handed out page by page, 3 ms an image.
                pixels = torch.empty_like(pixels, device="cpu", pin_memory=True).copy_(pixels)
            return [Image.fromarray(image) for image in pixels.numpy()]

        processor.postprocess = postprocess

        def refuted(_: dict[str, Any]) -> str | None:
            if counts["images_converted_on_gpu"]:
                return None
            return "no image was converted on the GPU: none was asked for as a PIL image, or the VAE runs on the CPU"

        return Effect(
            changed={"images.converted_on": target.machine.device_name},
            evidence=lambda: dict(counts),
            refuted=refuted,
        )

    def script(self, target: Target) -> Script:
        return Script(imports=("PIL:Image",), lines=_SCRIPT)
