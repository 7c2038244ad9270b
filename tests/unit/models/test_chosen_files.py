"""Which files of a repository are taken: one whole set of safetensors, never pickles, never code."""

from typing import Any

import pytest

from vivace.errors import UnusableModel
from vivace.models.repository import choose

INDEX: dict[str, Any] = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.42.1",
    "requires_safety_checker": True,
    "image_encoder": [None, None],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
}
SMALL = (
    "model_index.json",
    "feature_extractor/preprocessor_config.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "unet/config.json",
)
TEXT = "text_encoder/model.safetensors"
UNET = "unet/diffusion_pytorch_model.safetensors"
SHARDS = (
    "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model-00002-of-00002.safetensors",
)


def test_one_set_of_weights_and_all_small_files() -> None:
    others = (
        "unet/diffusion_pytorch_model.bin",
        "unet/diffusion_pytorch_model.non_ema.safetensors",
        "v1-5.ckpt",
    )
    more = ("vae/diffusion_pytorch_model.safetensors", "unet/model.onnx", "unet/notes.md", "README.md")
    chosen = choose(INDEX, [*SMALL, TEXT, UNET, *others, *more], "org/model")
    assert set(chosen.small) == set(SMALL)
    assert set(chosen.weights) == {TEXT, UNET}
    assert chosen.variant is None
    assert chosen.missing is None


def of(name: str, variant: str) -> str:
    return name.replace(".safetensors", f".{variant}.safetensors")


def test_a_wanted_variant_where_there_is_one() -> None:
    names = [*SMALL, TEXT, UNET, of(UNET, "fp16"), of(UNET, "bf16")]
    assert choose(INDEX, names, "m").weights == (TEXT, UNET)
    assert choose(INDEX, names, "m", variants=["fp16"]).weights == (TEXT, of(UNET, "fp16"))
    assert choose(INDEX, names, "m", variants=["fp8", "bf16"]).variant == "bf16"
    assert choose(INDEX, names, "m", variants=["fp8"]).variant is None


def test_half_precision_as_the_denoisers_kind_runs_best() -> None:
    names = [*SMALL, TEXT, UNET, of(UNET, "fp16"), of(UNET, "bf16")]
    assert choose(INDEX, names, "m", variants=None).variant == "fp16"
    flux = {("transformer" if key == "unet" else key): value for key, value in INDEX.items()}
    assert (
        choose(flux, [n.replace("unet/", "transformer/") for n in names], "m", variants=None).variant
        == "bf16"
    )


@pytest.mark.parametrize(
    "shards",
    [
        SHARDS,
        tuple(name.replace("model-", "model.fp16-") for name in SHARDS),
        tuple(of(name, "fp16") for name in SHARDS),
    ],
)
def test_shards_come_with_their_index(shards: tuple[str, ...]) -> None:
    indices = {
        None: "unet/diffusion_pytorch_model.safetensors.index.json",
        "fp16": "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
    }
    chosen = choose(INDEX, [*SMALL, TEXT, *shards, *indices.values()], "m", variants=["fp16"])
    assert chosen.weights == (TEXT, *shards)
    assert set(chosen.small) == {*SMALL, indices[chosen.variant]}
    assert "has only some of its unet's weight files" in str(
        choose(INDEX, [*SMALL, TEXT, shards[0]], "m").missing
    )


def test_one_variant_alone_is_taken_unasked() -> None:
    names = [*SMALL, of(TEXT, "fp16"), of(UNET, "fp16")]
    assert choose(INDEX, names, "m").variant == "fp16"
    assert choose(INDEX, [*SMALL, TEXT, of(UNET, "fp16")], "m").weights == (TEXT, of(UNET, "fp16"))
    assert "its unet only as non_ema" in str(choose(INDEX, [*SMALL, TEXT, of(UNET, "non_ema")], "m").missing)
    mixed = choose(INDEX, [*SMALL, of(TEXT, "bf16"), of(UNET, "fp16")], "m")
    assert "vivace uses one variant" in str(mixed.missing)


def test_left_out_and_from_elsewhere() -> None:
    chosen = choose(INDEX, [*SMALL, TEXT], "m", without=["feature_extractor"], elsewhere=["unet"])
    assert chosen.weights == (TEXT,)
    assert "unet/config.json" in chosen.small, "its weights come from elsewhere, its shape does not"
    assert "feature_extractor/preprocessor_config.json" not in chosen.small


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            [TEXT, "unet/diffusion_pytorch_model.bin"],
            "no safetensors for its unet, only diffusion_pytorch_model.bin",
        ),
        (
            [UNET, "text_encoder/pytorch_model.bin"],
            "no safetensors for its text_encoder, only pytorch_model.bin",
        ),
        ([TEXT], "org/model has no weights for its unet"),
        ([TEXT, "diffusion_pytorch_model.safetensors"], "no weights for its unet"),
    ],
)
def test_what_has_no_safetensors(names: list[str], says: str) -> None:
    assert says in str(choose(INDEX, [*SMALL, *names], "org/model").missing)


@pytest.mark.parametrize("file", ["my_unet.py", "unet/my_unet.py"])
def test_what_brings_code(file: str) -> None:
    index = INDEX | {"unet": ["my_unet", "MyUNet"]}
    with pytest.raises(UnusableModel, match=r"its own code \(my_unet\.py for its unet\)"):
        choose(index, [*SMALL, TEXT, UNET, file], "org/model")
    own = INDEX | {"text_encoder": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    assert choose(own, [*SMALL, TEXT, UNET], "org/model").weights, "a module of diffusers' own"
