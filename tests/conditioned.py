"""Embedded and small pipelines with what people add to them: IP-Adapters, ControlNets, T2I-Adapters, images."""

from typing import Any

import diffusers
import torch
from PIL import Image

from tests.families import build

SIDE = 64


def picture(seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return an image of random pixels."""
    pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy()).convert(mode)


def as_pipeline(pipe: Any, name: str, **more: Any) -> Any:
    """Return a pipeline of another class with the components of this one."""
    kind = getattr(diffusers, name)
    own = {k: v for k, v in pipe.components.items() if k in kind._get_signature_keys(kind)[0]}
    made = kind(**own | more)
    made.set_progress_bar_config(disable=True)
    return made


def add_ip_adapter(pipe: Any, width: int = 16) -> dict[str, Any]:
    """Give a UNet an IP-Adapter of random weights, and return the arguments of a call for one image."""
    torch.manual_seed(1)
    unet = pipe.unet
    text = unet.config.cross_attention_dim
    projection = {
        "proj.weight": 0.1 * torch.randn(4 * text, width),
        "proj.bias": torch.zeros(4 * text),
        "norm.weight": torch.ones(text),
        "norm.bias": torch.zeros(text),
    }
    layers: dict[str, torch.Tensor] = {}
    index = 1
    for name in unet.attn_processors:
        if "attn2" not in name:
            continue
        inner = unet.get_submodule(name.removesuffix(".processor")).inner_dim
        for part in ("k", "v"):
            layers[f"{index}.to_{part}_ip.weight"] = 0.3 * torch.randn(inner, text)
        index += 2
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": layers}])
    return {"ip_adapter_image_embeds": [torch.randn(2, 1, width)]}


def controlnet(unet: Any, seed: int = 0) -> Any:
    """Return a ControlNet of a UNet's encoder whose residuals are not zero, as they are before training."""
    torch.manual_seed(seed)
    made = diffusers.ControlNetModel.from_unet(unet)
    for layer in (*made.controlnet_down_blocks, made.controlnet_mid_block):
        torch.nn.init.normal_(layer.weight, std=0.1)
    torch.nn.init.normal_(made.controlnet_cond_embedding.conv_out.weight, std=0.3)
    return made.eval().requires_grad_(False)


def with_controlnets(pipe: Any, number: int, kind: str = "StableDiffusionControlNetPipeline") -> Any:
    nets = [controlnet(pipe.unet, seed) for seed in range(number)]
    return as_pipeline(pipe, kind, controlnet=nets if number > 1 else nets[0])


def wider(pipe: Any, channels: int) -> Any:
    """Return the pipeline with a UNet of random weights that takes more channels than those of the latents."""
    torch.manual_seed(2)
    made = diffusers.UNet2DConditionModel.from_config(dict(pipe.unet.config) | {"in_channels": channels})
    pipe.unet = made.eval().requires_grad_(False)
    return pipe


def t2i_adapter(unet: Any) -> Any:
    torch.manual_seed(3)
    made = diffusers.T2IAdapter(
        channels=list(unet.config.block_out_channels),
        num_res_blocks=1,
        downscale_factor=8,
        adapter_type="full_adapter",
    )
    return made.eval().requires_grad_(False)


def case(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a pipeline and the arguments of a call, besides the prompt and what all pipelines take."""
    none: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
    match name:
        case "ip_adapter":
            pipe = build("sd")
            return pipe, add_ip_adapter(pipe)
        case "sdxl_ip_adapter":
            pipe = build("sdxl")
            return pipe, add_ip_adapter(pipe)
        case "controlnet":
            return with_controlnets(build("sd"), 1), {"image": picture()}
        case "guess_mode":
            return with_controlnets(build("sd"), 1), {"image": picture(), "guess_mode": True}
        case "two_controlnets":
            return with_controlnets(build("sd"), 2), {"image": [picture(), picture(1)]}
        case "two_controlnets_ip_adapter_img2img":
            made = with_controlnets(build("sd"), 2, "StableDiffusionControlNetImg2ImgPipeline")
            more = add_ip_adapter(made)
            return made, {
                "image": picture(2),
                "control_image": [picture(), picture(1)],
                "strength": 0.9,
            } | more
        case "sdxl_two_controlnets":
            made = with_controlnets(build("sdxl"), 2, "StableDiffusionXLControlNetPipeline")
            return made, {"image": [picture(), picture(1)]}
        case "controlnet_inpaint":
            made = with_controlnets(build("sd"), 1, "StableDiffusionControlNetInpaintPipeline")
            return made, {"image": picture(), "mask_image": picture(1, "L"), "control_image": picture(2)}
        case "img2img":
            return as_pipeline(build("sd"), "StableDiffusionImg2ImgPipeline", **none), {
                "image": picture(),
                "strength": 0.8,
            }
        case "inpaint_nine_channels":
            made = as_pipeline(wider(build("sd"), 9), "StableDiffusionInpaintPipeline", **none)
            return made, {"image": picture(), "mask_image": picture(1, "L")}
        case "t2i_adapter":
            pipe = build("sd")
            made = as_pipeline(pipe, "StableDiffusionAdapterPipeline", adapter=t2i_adapter(pipe.unet), **none)
            return made, {"image": picture()}
        case "pix2pix":
            made = as_pipeline(wider(build("sd"), 8), "StableDiffusionInstructPix2PixPipeline", **none)
            return made, {"image": picture(), "image_guidance_scale": 1.5}
    raise AssertionError(name)


CASES = (
    "ip_adapter", "sdxl_ip_adapter", "controlnet", "guess_mode", "two_controlnets",
    "two_controlnets_ip_adapter_img2img", "sdxl_two_controlnets", "controlnet_inpaint", "img2img",
    "inpaint_nine_channels", "t2i_adapter", "pix2pix",
)  # fmt: skip


def draw(session: Any, call: dict[str, Any], images: int = 1, **more: Any) -> Any:
    """Return images (n, height, width, 3) in [0, 1]."""
    torch.set_num_threads(1)
    arguments: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0, "output_type": "np"}
    if "height" in session.defaults or type(session.pipe).__name__.endswith(
        ("DiffusionPipeline", "XLPipeline")
    ):
        arguments |= {"height": SIDE, "width": SIDE}
    generators = [torch.Generator().manual_seed(seed) for seed in range(images)]
    arguments |= {"num_images_per_prompt": images, "generator": generators if images > 1 else generators[0]}
    return session(prompt="a red circle", **arguments | call | more).images
