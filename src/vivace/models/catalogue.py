"""The catalogue: one entry per model, as data.

Revisions are pinned, so that a name always means the same weights. Sizes, steps, guidance and schedulers come from the
model cards and from diffusers' documentation; where a card gives several, a comment says which one is used. The
few-step LoRAs are less certain: two of them (LCM for SDXL, turbo for FLUX.1 [dev]) use "main", since their commits are
unknown, and the settings of turbo and of Hyper-SD for SD 1.5 and FLUX.1 [dev] were not checked against their cards.

SDXL's VAE overflows in fp16. Its config says so (force_upcast), and the pipeline then decodes in fp32. All SDXL models
here do this, since it gives the image as published. It costs time and about 4 GB at 1024x1024. Many people use
madebyollin/sdxl-vae-fp16-fix instead, which decodes in fp16 to slightly different pixels; these are other weights, and
so not part of a baseline.
"""

from __future__ import annotations

from vivace.architectures.entry import Embedded, Entry, FewSteps, Hub, SamplerEntry, StoredPart
from vivace.models.flow_catalogue import FLOW_ENTRIES, TAEF1
from vivace.models.prompts import NUM_DEFAULT, PROMPT_SETS

_VAE_FILES = ("config.json", "diffusion_pytorch_model.safetensors")
_TAESD = StoredPart(
    repo="madebyollin/taesd", revision="614f76814bbe30edbe2e627ace1c2234c81a2c0e", files=_VAE_FILES
)
_TAESDXL = StoredPart(
    repo="madebyollin/taesdxl", revision="b20258aaef75ef61e659c1e0f14f251cf0ad153e", files=_VAE_FILES
)

_RAIL = "CreativeML Open RAIL++-M"
_LIGHTNING = "c9a24f48e1c025556787b0c58dd67a091ece2e44"  # of ByteDance/SDXL-Lightning
_HYPER = "bc08d970a87c74c71209491d64e3525845698863"  # of ByteDance/Hyper-SD
_HALF_SDXL_BYTES = 6_940_000_000  # UNet 5.14 GB, text encoders 0.25 and 1.39, VAE 0.17


def _tiny(name: str, summary: str, **own: object) -> Entry:
    """Return the entry of a model that ships with vivace; docs/tinyworld.md describes its training and quality."""
    common = {
        "licence": "Apache-2.0",
        "height": 128,
        "width": 128,
        "max_size": 512,
        "cuda_dtype": "fp16",
        "threads": 1,
        "prompts": PROMPT_SETS["tinyworld"][:NUM_DEFAULT],
        "prompt_set": "tinyworld",
        "scorer": "tiny-clip",
    }
    return Entry.model_validate({"name": name, "summary": summary} | common | own)


def _sdxl_base(**parts: object) -> Hub:
    """Return the components of SDXL 1.0, with some replaced."""
    common = {
        "repo": "stabilityai/stable-diffusion-xl-base-1.0",
        "revision": "462165984030d82259a11f4367a4eed129e94a7b",
        "variants": ("fp16",),
        "tiny_vae": _TAESDXL,
        "download_bytes": _HALF_SDXL_BYTES,
    }
    return Hub.model_validate(common | parts)


def _sdxl(name: str, summary: str, **own: object) -> Entry:
    """Return an entry of SDXL's architecture: SDXL's settings, changed by `own`."""
    common = {
        "licence": _RAIL,
        "origin": _sdxl_base(),
        "pipeline": "StableDiffusionXLPipeline",
        "height": 1024,
        "width": 1024,
        "size_multiple": 8,
        "max_size": 2048,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "cuda_dtype": "fp16",
        "prompts": PROMPT_SETS["real"][:NUM_DEFAULT],
        "prompt_set": "real",
    }
    return Entry.model_validate({"name": name, "summary": summary} | common | own)


def _lightning(num_steps: int) -> Entry:
    """Return a Lightning model's entry, by its card: Euler, trailing spacing, no guidance, the name's steps.

    The UNet, not the LoRA: its quality is better according to the card, and merged they cost the same.
    """
    unet = StoredPart(
        repo="ByteDance/SDXL-Lightning",
        revision=_LIGHTNING,
        files=(f"sdxl_lightning_{num_steps}step_unet.safetensors",),
    )
    return _sdxl(
        f"sdxl-lightning-{num_steps}step",
        f"SDXL, distilled adversarially to {num_steps} steps",
        origin=_sdxl_base(parts={"unet": unet}),
        scheduler=SamplerEntry(
            class_name="EulerDiscreteScheduler", overrides={"timestep_spacing": "trailing"}
        ),
        num_inference_steps=num_steps,
        guidance_scale=0.0,
    )


def _few_steps_of_sdxl() -> tuple[FewSteps, ...]:
    """From the cards. LCM: 2 to 8 steps, guidance off or 1 to 2. Lightning and Hyper-SD: as in `_lightning` and
    hyper-sdxl-4step, with as many steps as the file's name says.
    """
    trailing = {"timestep_spacing": "trailing"}
    return (
        _lcm(_lcm_lora("latent-consistency/lcm-lora-sdxl", "main")),
        *(
            FewSteps(
                kind="lightning",
                lora=StoredPart(
                    repo="ByteDance/SDXL-Lightning",
                    revision=_LIGHTNING,
                    files=(f"sdxl_lightning_{steps}step_lora.safetensors",),
                ),
                steps=(steps,),
                guidance_scale=0.0,
                scheduler=SamplerEntry(class_name="EulerDiscreteScheduler", overrides=trailing),
            )
            for steps in (4, 2, 8)
        ),
        *(_hyper(f"Hyper-SDXL-{steps}steps-lora.safetensors", steps) for steps in (4, 2, 8)),
    )


def _hyper(file: str, steps: int) -> FewSteps:
    return FewSteps(
        kind="hyper",
        lora=StoredPart(repo="ByteDance/Hyper-SD", revision=_HYPER, files=(file,)),
        steps=(steps,),
        guidance_scale=0.0,
        scheduler=SamplerEntry(class_name="DDIMScheduler", overrides={"timestep_spacing": "trailing"}),
    )


def _lcm_lora(repo: str, revision: str) -> StoredPart:
    return StoredPart(repo=repo, revision=revision, files=("pytorch_lora_weights.safetensors",))


def _lcm(lora: StoredPart | str) -> FewSteps:
    return FewSteps(
        kind="lcm",
        lora=lora,
        steps=(4, 2, 3, 5, 6, 7, 8),
        guidance_scale=1.0,
        scheduler=SamplerEntry(class_name="LCMScheduler"),
    )


def _few_steps_of_sd15() -> tuple[FewSteps, ...]:
    return (
        _lcm(_lcm_lora("latent-consistency/lcm-lora-sdv1-5", "d8c735b2d28c82270200ac4499ae88b03be2b23b")),
        *(_hyper(f"Hyper-SD15-{steps}steps-lora.safetensors", steps) for steps in (4, 2, 8)),
    )


def _few_steps_of_flux_dev() -> tuple[FewSteps, ...]:
    """Both keep FLUX.1 [dev]'s scheduler and its guidance, which is an input of the model."""
    own = SamplerEntry(class_name="FlowMatchEulerDiscreteScheduler")
    return (
        *(
            FewSteps(
                kind="hyper",
                lora=StoredPart(
                    repo="ByteDance/Hyper-SD",
                    revision=_HYPER,
                    files=(f"Hyper-FLUX.1-dev-{steps}steps-lora.safetensors",),
                ),
                steps=(steps,),
                guidance_scale=3.5,
                scheduler=own,
                scale=0.125,
            )
            for steps in (8, 16)
        ),
        FewSteps(
            kind="turbo",
            lora=StoredPart(
                repo="alimama-creative/FLUX.1-Turbo-Alpha",
                revision="main",
                files=("diffusion_pytorch_model.safetensors",),
            ),
            steps=(8,),
            guidance_scale=3.5,
            scheduler=own,
        ),
    )


def _flux(name: str, summary: str, repo: str, revision: str, **own: object) -> Entry:
    common = {
        "origin": Hub(repo=repo, revision=revision, tiny_vae=TAEF1, download_bytes=33_740_000_000),
        "pipeline": "FluxPipeline",
        "height": 1024,
        "width": 1024,
        "size_multiple": 16,
        "max_size": 2048,
        "cuda_dtype": "bf16",
        "prompts": PROMPT_SETS["real"][:NUM_DEFAULT],
        "prompt_set": "real",
        "gated": True,
    }
    return Entry.model_validate({"name": name, "summary": summary} | common | own)


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _tiny(
            "tiny-sd",
            "Stable Diffusion's architecture, small: coloured shapes on plain backgrounds",
            origin=Embedded(folder="tiny-sd", tiny_vae="tiny-sd-tiny-vae"),
            pipeline="StableDiffusionPipeline",
            size_multiple=32,
            num_inference_steps=25,
            guidance_scale=4.0,
            few_steps=(_lcm("tiny-sd-lcm/pytorch_lora_weights.safetensors"),),
        ),
        _tiny(
            "tiny-flux",
            "FLUX.1-dev's architecture, small: the same shapes, guidance distilled",
            origin=Embedded(folder="tiny-flux", tiny_vae="tiny-flux-tiny-vae"),
            pipeline="FluxPipeline",
            size_multiple=16,
            num_inference_steps=28,
            guidance_scale=3.5,
            max_sequence_length=32,
        ),
        _tiny(
            "tiny-flux-schnell",
            "FLUX.1-schnell's architecture, small: tiny-flux distilled to 4 steps",
            origin=Embedded(folder="tiny-flux-schnell", base="tiny-flux", tiny_vae="tiny-flux-tiny-vae"),
            pipeline="FluxPipeline",
            size_multiple=16,
            num_inference_steps=4,
            guidance_scale=0.0,
            max_sequence_length=32,
        ),
        Entry(
            name="sd15",
            summary="Stable Diffusion 1.5",
            licence="CreativeML OpenRAIL-M",
            origin=Hub(
                repo="stable-diffusion-v1-5/stable-diffusion-v1-5",
                revision="451f4fe16113bff5a5d2269ed5ad43b0592e9a14",
                variants=("fp16",),
                # A classifier that blackens images: not part of the model, and 1.2 GB.
                without=("safety_checker", "feature_extractor"),
                tiny_vae=_TAESD,
                download_bytes=2_130_000_000,
            ),
            pipeline="StableDiffusionPipeline",
            height=512,
            width=512,
            size_multiple=8,
            max_size=2048,
            num_inference_steps=50,
            guidance_scale=7.5,
            cuda_dtype="fp16",
            prompts=PROMPT_SETS["real"][:NUM_DEFAULT],
            prompt_set="real",
            few_steps=_few_steps_of_sd15(),
        ),
        _sdxl("sdxl", "Stable Diffusion XL 1.0", few_steps=_few_steps_of_sdxl()),
        # Uses its repository's scheduler: ancestral Euler with trailing spacing. The card's example has one step; the
        # card says 1 to 4.
        _sdxl(
            "sdxl-turbo",
            "SDXL, distilled adversarially to 1 to 4 steps at 512x512",
            licence="Stability AI Non-Commercial Research Community",
            origin=Hub(
                repo="stabilityai/sdxl-turbo",
                revision="71153311d3dbb46851df1931d3ca6e939de83304",
                variants=("fp16",),
                tiny_vae=_TAESDXL,
                download_bytes=_HALF_SDXL_BYTES,
            ),
            height=512,
            width=512,
            num_inference_steps=1,
            guidance_scale=0.0,
        ),
        _lightning(2),
        _lightning(4),
        # From its card: DDIM with trailing spacing for the checkpoints of 2, 4 and 8 steps, no guidance. For four steps
        # there is no UNet, only a LoRA.
        _sdxl(
            "hyper-sdxl-4step",
            "SDXL with Hyper-SD's LoRA of 4 steps merged in",
            origin=_sdxl_base(
                lora=StoredPart(
                    repo="ByteDance/Hyper-SD",
                    revision=_HYPER,
                    files=("Hyper-SDXL-4steps-lora.safetensors",),
                ),
                download_bytes=_HALF_SDXL_BYTES + 790_000_000,
            ),
            scheduler=SamplerEntry(class_name="DDIMScheduler", overrides={"timestep_spacing": "trailing"}),
            num_inference_steps=4,
            guidance_scale=0.0,
        ),
        # Guidance is an input of this UNet, not a second call. 8 is from diffusers' documentation, in the range of its
        # distillation (3 to 13); its card has 1 to 2.
        _sdxl(
            "lcm-sdxl",
            "SDXL, distilled to a latent consistency model of 2 to 8 steps",
            origin=_sdxl_base(
                parts={
                    "unet": StoredPart(
                        repo="latent-consistency/lcm-sdxl",
                        revision="843cb4058e2bb79edc70a6d8002e1a96feddfd14",
                        files=("config.json", "diffusion_pytorch_model.fp16.safetensors"),
                    )
                }
            ),
            scheduler=SamplerEntry(class_name="LCMScheduler"),
            num_inference_steps=4,
            guidance_scale=8.0,
        ),
        # Its author asks for "clip skip 2", counted from 1: the last layer but one. SDXL pipelines use that layer by
        # default, so in diffusers' count it is 0. Ancestral Euler and 25 steps come from the author too, who gives no
        # guidance; 7 is usual. The author published a single file elsewhere; this repository is the best known one in
        # diffusers' format.
        _sdxl(
            "pony",
            "Pony Diffusion V6 XL, a finetune of SDXL; likes prompts that begin with score_9, score_8_up, ...",
            licence="Fair AI Public 1.0-SD, modified",
            origin=Hub(
                repo="kitty7779/ponyDiffusionV6XL",
                revision="b0b14dd9f27190bdff916493e0bef66471f9764a",
                tiny_vae=_TAESDXL,
                download_bytes=_HALF_SDXL_BYTES,
            ),
            scheduler=SamplerEntry(class_name="EulerAncestralDiscreteScheduler"),
            num_inference_steps=25,
            guidance_scale=7.0,
            clip_skip=0,
            few_steps=_few_steps_of_sdxl(),
        ),
        # The pipeline needs the repository's scheduler (EDMDPMSolverMultistepScheduler), and the latents' mean and
        # standard deviation from its VAE's config, which SDXL's tiny VAE does not support.
        _sdxl(
            "playground",
            "Playground v2.5, SDXL's architecture trained with EDM's noise",
            licence="Playground v2.5 Community",
            origin=Hub(
                repo="playgroundai/playground-v2.5-1024px-aesthetic",
                revision="1e032f13f2fe6db2dc49947dbdbd196e753de573",
                variants=("fp16",),
                download_bytes=_HALF_SDXL_BYTES,
            ),
            guidance_scale=3.0,
        ),
        # The card uses 50 steps; the pipeline's default is 28.
        _flux(
            "flux-dev",
            "FLUX.1 [dev], 12 B parameters, guidance distilled into the transformer",
            "black-forest-labs/FLUX.1-dev",
            "3de623fc3c33e44ffbe2bad470d0f45bccf2eb21",
            licence="FLUX.1 [dev] Non-Commercial",
            num_inference_steps=28,
            guidance_scale=3.5,
            max_sequence_length=512,
            few_steps=_few_steps_of_flux_dev(),
        ),
        _flux(
            "flux-schnell",
            "FLUX.1 [schnell], distilled to 1 to 4 steps",
            "black-forest-labs/FLUX.1-schnell",
            "741f7c3ce8b383c54771c7003378a50191e9efe9",
            licence="Apache-2.0",
            num_inference_steps=4,
            guidance_scale=0.0,
            max_sequence_length=256,
        ),
        # Its transformer has FLUX.1 [dev]'s shape, and takes the image's latents as further tokens. Guidance from the
        # example in diffusers, steps from the pipeline's default. Its commit is not known, and its card was not read:
        # size and access are those of FLUX.1 [dev].
        _flux(
            "flux-kontext",
            "FLUX.1 Kontext [dev], 12 B parameters: edits an image as the prompt says",
            "black-forest-labs/FLUX.1-Kontext-dev",
            "main",
            licence="FLUX.1 [dev] Non-Commercial",
            pipeline="FluxKontextPipeline",
            num_inference_steps=28,
            guidance_scale=2.5,
            max_sequence_length=512,
            prompts=PROMPT_SETS["edit"][:NUM_DEFAULT],
            prompt_set="edit",
        ),
        *FLOW_ENTRIES,
    )
}
