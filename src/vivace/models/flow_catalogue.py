"""Entries of the flow-matching transformers after FLUX.1; see `vivace.models.catalogue`.

The commits of their repositories are not known, and their cards could not be read: they use the main branch. Steps and
guidance are those of diffusers' documentation or, where it gives none, of the model's publishers; licences and whether
access must be requested are as the publishers announced them. Sizes of downloads are computed from the number of
parameters, in the precision in which the weights are published (bf16; SD 3.5 in fp16 files too).
"""

from __future__ import annotations

from vivace.architectures.entry import Entry, Hub, StoredPart
from vivace.models.prompts import NUM_DEFAULT, PROMPT_SETS

_VAE_FILES = ("config.json", "diffusion_pytorch_model.safetensors")
TAEF1 = StoredPart(
    repo="madebyollin/taef1", revision="b1b2d00e9e440cfbf3dedb34266864da86016ceb", files=_VAE_FILES
)
# Its commit is not known.
_TAESD3 = StoredPart(repo="madebyollin/taesd3", revision="main", files=_VAE_FILES)


def _entry(name: str, summary: str, pipeline: str, origin: Hub, **own: object) -> Entry:
    common = {
        "origin": origin,
        "pipeline": pipeline,
        "height": 1024,
        "width": 1024,
        "size_multiple": 16,
        "max_size": 2048,
        "cuda_dtype": "bf16",
        "prompts": PROMPT_SETS["real"][:NUM_DEFAULT],
        "prompt_set": "real",
    }
    return Entry.model_validate({"name": name, "summary": summary} | common | own)


def _sd35(name: str, summary: str, repo: str, download_bytes: int, **own: object) -> Entry:
    origin = Hub(repo=repo, tiny_vae=_TAESD3, download_bytes=download_bytes)
    common = {"licence": "Stability AI Community", "gated": True, "max_sequence_length": 256}
    return _entry(name, summary, "StableDiffusion3Pipeline", origin, **(common | own))


def _sana(name: str, summary: str, pipeline: str, repo: str, **own: object) -> Entry:
    origin = Hub(repo=repo, variants=("bf16",), download_bytes=9_060_000_000)
    # One latent cell has 32 x 32 pixels. Weights are NVIDIA's, the text encoder is Gemma 2 with terms of its own.
    common = {
        "licence": "NSCL v2, and Gemma",
        "size_multiple": 32,
        # Otherwise the pipeline draws the nearest of its sizes, of a million pixels each, and scales the image.
        "arguments": {"use_resolution_binning": False},
    }
    return _entry(name, summary, pipeline, origin, **(common | own))


def _qwen(name: str, summary: str, repo: str) -> Entry:
    # Guidance is a second call with a negative prompt: true_cfg_scale. The pipeline ignores a guidance scale.
    return _entry(
        name,
        summary,
        "QwenImagePipeline",
        Hub(repo=repo, download_bytes=57_700_000_000),
        licence="Apache-2.0",
        num_inference_steps=50,
        guidance_scale=1.0,
        ignores_guidance=True,
        arguments={"true_cfg_scale": 4.0, "negative_prompt": " "},
    )


def _qwen_edit(name: str, summary: str, pipeline: str, repo: str, **own: object) -> Entry:
    # Guidance as Qwen-Image's: a second call with a negative prompt. The pipeline ignores a guidance scale.
    common = {
        "licence": "Apache-2.0",
        "guidance_scale": 1.0,
        "ignores_guidance": True,
        "arguments": {"true_cfg_scale": 4.0, "negative_prompt": " "},
        "prompts": PROMPT_SETS["edit"][:NUM_DEFAULT],
        "prompt_set": "edit",
    }
    return _entry(name, summary, pipeline, Hub(repo=repo, download_bytes=57_700_000_000), **(common | own))


def _krea2(name: str, summary: str, repo: str, **own: object) -> Entry:
    origin = Hub(repo=repo, download_bytes=34_770_000_000)
    common = {"licence": "Krea 2 Community", "gated": True, "max_sequence_length": 512}
    return _entry(name, summary, "Krea2Pipeline", origin, **(common | own))


def _flux2(name: str, summary: str, pipeline: str, repo: str, download_bytes: int, **own: object) -> Entry:
    origin = Hub(repo=repo, download_bytes=download_bytes)
    return _entry(name, summary, pipeline, origin, max_sequence_length=512, **own)


FLOW_ENTRIES: tuple[Entry, ...] = (
    # Steps and guidance from the announcement in diffusers' blog ("Diffusers welcomes Stable Diffusion 3.5 Large").
    _sd35(
        "sd35-large",
        "Stable Diffusion 3.5 Large, 8 B parameters",
        "stabilityai/stable-diffusion-3.5-large",
        27_440_000_000,
        num_inference_steps=28,
        guidance_scale=3.5,
    ),
    # The card's example has 40 steps and guidance 4.5; not checked.
    _sd35(
        "sd35-medium",
        "Stable Diffusion 3.5 Medium, 2.2 B parameters",
        "stabilityai/stable-diffusion-3.5-medium",
        15_820_000_000,
        num_inference_steps=40,
        guidance_scale=4.5,
    ),
    # Steps and guidance from diffusers' documentation.
    _sana(
        "sana-1600m",
        "Sana 1.6B at 1024x1024: linear attention, latents 32 times smaller than the image",
        "SanaPipeline",
        "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
        num_inference_steps=20,
        guidance_scale=4.5,
    ),
    # Steps and guidance are the defaults of its pipeline. Guidance is an input of the transformer.
    _sana(
        "sana-sprint-1600m",
        "Sana 1.6B, distilled to 1 to 4 steps",
        "SanaSprintPipeline",
        "Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers",
        num_inference_steps=2,
        guidance_scale=4.5,
    ),
    # Distilled to 8 steps, without guidance. Its card asks for 9, and says that the transformer is called 8 times;
    # diffusers 0.42.1 calls it 9 times.
    _entry(
        "z-image-turbo",
        "Z-Image-Turbo, 6 B parameters, distilled to 8 steps",
        "ZImagePipeline",
        Hub(repo="Tongyi-MAI/Z-Image-Turbo", tiny_vae=TAEF1, download_bytes=20_520_000_000),
        licence="Apache-2.0",
        num_inference_steps=9,
        guidance_scale=0.0,
        max_sequence_length=512,
    ),
    _qwen(
        "qwen-image",
        "Qwen-Image, 20 B parameters, true classifier-free guidance in two calls a step",
        "Qwen/Qwen-Image",
    ),
    # As Qwen-Image, of which its publishers call it the update; its card was not checked.
    _qwen("qwen-image-2512", "Qwen-Image of December 2025, 20 B parameters", "Qwen/Qwen-Image-2512"),
    # Steps of the first from diffusers' example; 40 steps and the guidance of both from memory of the cards, which were
    # not checked.
    _qwen_edit(
        "qwen-image-edit",
        "Qwen-Image-Edit, 20 B parameters: edits an image, which its text encoder sees too",
        "QwenImageEditPipeline",
        "Qwen/Qwen-Image-Edit",
        num_inference_steps=50,
    ),
    _qwen_edit(
        "qwen-image-edit-2509",
        "Qwen-Image-Edit of September 2025, whose text encoder sees a smaller copy",
        "QwenImageEditPlusPipeline",
        "Qwen/Qwen-Image-Edit-2509",
        num_inference_steps=40,
    ),
    # As 2509; its card was not checked.
    _qwen_edit(
        "qwen-image-edit-2511",
        "Qwen-Image-Edit of November 2025, which modulates the tokens of its sources apart",
        "QwenImageEditPlusPipeline",
        "Qwen/Qwen-Image-Edit-2511",
        num_inference_steps=40,
    ),
    # Steps, and no guidance, are the defaults of its pipeline, which diffusers' documentation calls Qwen's values. The
    # licence is that of the model's page; the download is counted from the parameters, the VAE's in fp32.
    _entry(
        "qwen-image-2.1",
        "Qwen-Image 2.1, 7 B parameters, one stream of text and image; drawn without guidance",
        "QwenImage21Pipeline",
        Hub(repo="Qwen/Qwen-Image-2.1", download_bytes=33_120_000_000),
        licence="Qwen Research",
        size_multiple=32,
        num_inference_steps=40,
        guidance_scale=1.0,
        ignores_guidance=True,
    ),
    _flux2(
        "flux2-klein-4b",
        "FLUX.2 [klein] 4B, distilled to 4 steps",
        "Flux2KleinPipeline",
        "black-forest-labs/FLUX.2-klein-4B",
        15_960_000_000,
        licence="Apache-2.0",
        num_inference_steps=4,
        guidance_scale=1.0,
        ignores_guidance=True,
    ),
    _flux2(
        "flux2-klein-9b",
        "FLUX.2 [klein] 9B, distilled to 4 steps",
        "Flux2KleinPipeline",
        "black-forest-labs/FLUX.2-klein-9B",
        34_710_000_000,
        licence="FLUX Non-Commercial",
        gated=True,
        num_inference_steps=4,
        guidance_scale=1.0,
        ignores_guidance=True,
    ),
    # Guidance is an input of the transformer. The card's example has 50 steps, and says that 28 are a good compromise.
    _flux2(
        "flux2-dev",
        "FLUX.2 [dev], 32 B parameters, guidance distilled into the transformer",
        "Flux2Pipeline",
        "black-forest-labs/FLUX.2-dev",
        112_640_000_000,
        licence="FLUX Non-Commercial",
        gated=True,
        num_inference_steps=50,
        guidance_scale=4.0,
    ),
    # Steps and guidance from diffusers' example, the licence from the model's page; the download is counted from the
    # parameters in bf16.
    _entry(
        "cogview4-6b",
        "CogView4, 6 B parameters, guidance in a second call, prompts in English or Chinese",
        "CogView4Pipeline",
        Hub(repo="THUDM/CogView4-6B", download_bytes=31_140_000_000),
        licence="Apache-2.0",
        num_inference_steps=50,
        guidance_scale=3.5,
    ),
    # Steps and guidance of both from diffusers' documentation; the card of the second is quoted with 52 steps and
    # guidance 3.5. The licence is that of their pages, access as others report it; the download is counted from the
    # parameters in bf16.
    _krea2(
        "krea-2-turbo",
        "Krea 2 Turbo, 12.8 B parameters, one stream of text and image, distilled to 8 steps",
        "krea/Krea-2-Turbo",
        num_inference_steps=8,
        guidance_scale=0.0,
    ),
    # Its velocity is that with the prompt, and the scale times what it differs from that without: 4.5 is 5.5 elsewhere.
    _krea2(
        "krea-2-raw",
        "Krea 2 Raw, 12.8 B parameters, guidance in a second call",
        "krea/Krea-2-Raw",
        num_inference_steps=28,
        guidance_scale=4.5,
        arguments={"negative_prompt": ""},
    ),
)
