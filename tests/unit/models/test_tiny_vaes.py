"""Tiny VAEs that diffusers has no class for: their published files, and what pipelines make of them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.flow_models import PROMPT, draw, session
from tests.hub_server import Hub, Repository
from tests.narrow import SIDE
from vivace.architectures import CATALOGUE
from vivace.architectures.entry import TAEF2_FILES, TAEW21_FILES
from vivace.architectures.entry import Hub as Origin
from vivace.errors import NoEffect, Unsupported, UnusableModel
from vivace.models.load import load_tiny_vae, read_tiny_vae, tiny_vae_arguments
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.saved import write_pipeline
from vivace.techniques.tiny_vae import TinyVae

TAEQI21_FILES: Any = CATALOGUE["qwen-image-2.1"].origin.tiny_vae
Shapes = dict[str, tuple[int, ...]]


def _conv(name: str, inputs: int, outputs: int, *, bias: bool = True, side: int = 3) -> Shapes:
    weight: Shapes = {f"{name}.weight": (outputs, inputs, side, side)}
    return weight | ({f"{name}.bias": (outputs,)} if bias else {})


def _blocks(prefix: str, places: Any, width: int, *, pooled: bool = False, frames: int = 1) -> Shapes:
    made: Shapes = {}
    for place in places:
        name = f"{prefix}.{place}"
        made |= _conv(f"{name}.conv.0", frames * width, width)
        made |= _conv(f"{name}.conv.2", width, width) | _conv(f"{name}.conv.4", width, width)
        if pooled:
            made |= _conv(f"{name}.pool.0", width, 4 * width, bias=False, side=1)
            made |= {f"{name}.pool.1.weight": (4 * width,), f"{name}.pool.1.bias": (4 * width,)}
            made |= _conv(f"{name}.pool.3", 4 * width, width, bias=False, side=1)
    return made


def _taef2() -> Shapes:
    e, d = "encoder.layers", "decoder.layers"
    made = (
        _conv(f"{e}.0", 3, 64) | _conv(f"{e}.14", 64, 32) | _conv(f"{d}.0", 32, 64) | _conv(f"{d}.18", 64, 3)
    )
    for name in (f"{e}.2", f"{e}.6", f"{e}.10", f"{d}.6", f"{d}.11", f"{d}.16"):
        made |= _conv(name, 64, 64, bias=False)
    made |= _blocks(e, (1, 3, 4, 5, 7, 8, 9), 64) | _blocks(e, (11, 12, 13), 64, pooled=True)
    return made | _blocks(d, (2, 3, 4), 64, pooled=True) | _blocks(d, (7, 8, 9, 12, 13, 14, 17), 64)


def _taeqi21() -> Shapes:
    e, d = "encoder.layers", "decoder.layers"
    made = _conv(f"{e}.1", 16, 64) | _conv(f"{e}.16", 256, 64) | _conv(f"{d}.0", 64, 256)
    made |= _conv(f"{d}.18", 64, 16) | _blocks(e, (3,), 64) | _blocks(d, (17,), 64)
    for place, inputs, outputs in ((4, 64, 64), (8, 64, 128), (12, 128, 256)):
        made |= _conv(f"{e}.{place}", inputs, outputs, bias=False)
        made |= _blocks(e, range(place + 1, place + 4), outputs)
    for place, inputs, outputs in ((6, 256, 128), (11, 128, 64), (16, 64, 64)):
        made |= _conv(f"{d}.{place}", inputs, outputs, bias=False)
        made |= _blocks(d, range(place - 4, place - 1), inputs)
    return made


def _taew21() -> Shapes:
    made = _conv("encoder.0", 3, 64) | _conv("encoder.17", 64, 16)
    made |= _conv("decoder.1", 16, 256) | _conv("decoder.22", 64, 3)
    for place, factor in ((2, 2), (7, 2), (12, 1)):
        made |= _conv(f"encoder.{place}.conv", 64 * factor, 64, bias=False, side=1)
        made |= _conv(f"encoder.{place + 1}", 64, 64, bias=False)
        made |= _blocks("encoder", range(place + 2, place + 5), 64, frames=2)
    for place, inputs, outputs, factor in ((3, 256, 128, 1), (9, 128, 64, 2), (15, 64, 64, 2)):
        made |= _blocks("decoder", range(place, place + 3), inputs, frames=2)
        made |= _conv(f"decoder.{place + 4}.conv", inputs, inputs * factor, bias=False, side=1)
        made |= _conv(f"decoder.{place + 5}", inputs, outputs, bias=False)
    return made


PUBLISHED = {
    TAEF2_FILES: (_taef2, 1_338_499),
    TAEQI21_FILES: (_taeqi21, 7_644_560),
    TAEW21_FILES: (_taew21, 9_844_611),
}
"""The names and shapes of each file, and how many values the decoder has."""


def write(folder: Path, part: Any) -> Path:
    """Write a file as published, in half precision, with random values that keep activations in range."""
    torch.manual_seed(0)
    shapes = PUBLISHED[part][0]()
    state = {
        name: torch.randn(shape) * (0.02 if len(shape) == 1 else (1.5 / np.prod(shape[1:])) ** 0.5)
        for name, shape in shapes.items()
    }
    path = folder / part.files[0]
    save_file({name: tensor.half() for name, tensor in state.items()}, path)
    return path


@pytest.mark.parametrize("part", PUBLISHED, ids=lambda part: part.class_name)
def test_a_published_file_is_read_from_the_hub_tensor_by_tensor(
    part: Any, client: Hub, tmp_path: Path
) -> None:
    stored = load_file(write(tmp_path, part))
    client.repositories[part.repo] = Repository({part.revision: tmp_path})
    vae = load_tiny_vae(part)
    assert type(vae).__name__ == part.class_name
    assert sum(parameter.numel() for parameter in vae.decoder.parameters()) == PUBLISHED[part][1]
    own = vae.state_dict()
    assert len(own) == len(stored)
    for name, tensor in stored.items():
        mine = own[name if part is not TAEW21_FILES else name.replace(".", ".layers.", 1)]
        assert torch.equal(mine, tensor.float()), name
    assert not vae.training
    assert {parameter.requires_grad for parameter in vae.parameters()} == {False}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decoder.layers.3.pool.0.weight": None}, "pool.0.weight is not there, and should be of the shape"),
        ({"decoder.layers.0.weight": (64, 16, 3, 3)}, r"\[64, 16, 3, 3\], and should be .*\[64, 32, 3, 3\]"),
        ({"decoder.layers.19.bias": (3,)}, "layers.19.bias is of the shape .3., and should be not there"),
    ],
)
def test_a_file_of_another_network_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = write(tmp_path, TAEF2_FILES)
    state = load_file(path) | {name: torch.zeros(shape or 1) for name, shape in change.items()}
    save_file({name: tensor for name, tensor in state.items() if change.get(name, 1) is not None}, path)
    with pytest.raises(UnusableModel, match=says):
        read_tiny_vae(path, "AutoencoderTinyFlux2")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UnusableModel, match="truncated"):
        read_tiny_vae(path, "AutoencoderTinyFlux2")


def _patches(tokens: torch.Tensor, channels: int) -> torch.Tensor:
    """Return latents (1, channels, rows, columns) of tokens of 2 x 2 cells, channels outermost."""
    side = int(tokens.shape[1] ** 0.5)
    cells = tokens.view(1, side, side, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return cells.reshape(1, channels, 2 * side, 2 * side)


LATENTS = {
    "flux2-klein-4b": lambda tokens: _patches(tokens, 32),
    "flux2-dev": lambda tokens: _patches(tokens, 32),
    "ernie-image-turbo": lambda grid: _patches(grid.flatten(2).transpose(1, 2), 32),
    "qwen-image-2512": lambda tokens: _patches(tokens, 16),
    "krea-2-turbo": lambda tokens: _patches(tokens, 16),
    "qwen-image-2.1": lambda tokens: tokens.transpose(1, 2).unflatten(2, (SIDE // 16, SIDE // 16)),
}
"""What each model's transformer makes, as the decoder takes it."""


@pytest.mark.parametrize("model", LATENTS)
def test_it_decodes_what_the_transformer_makes(model: str) -> None:
    opened = session(model, "tiny_vae")
    made: list[torch.Tensor] = []
    step = opened.pipe.scheduler.step

    def keep(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        made.append(result[0])
        return result

    opened.pipe.scheduler.step = keep
    picture = draw(opened, num_inference_steps=2)
    with torch.no_grad():
        expected = opened.pipe.vae.decoder(LATENTS[model](made[-1]))[0]
    assert np.allclose(picture[0], (expected / 2 + 0.5).clamp(0, 1).permute(1, 2, 0), atol=1e-5)
    assert picture.std() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flux_2_s_statistics_change_nothing_in_any_precision(dtype: torch.dtype) -> None:
    vae = session("flux2-klein-4b", "tiny_vae").pipe.vae
    norm = torch.nn.Module.to(vae, dtype).bn
    for eps in (vae.config.batch_norm_eps, 1e-5):  # ERNIE-Image's pipeline adds the second
        assert torch.equal(torch.sqrt(norm.running_var + eps), torch.ones(128, dtype=dtype))
    assert not norm.running_mean.any()


def test_flux_2_s_sources_are_encoded_by_it() -> None:
    pipe = session("flux2-klein-4b", "tiny_vae").pipe
    image = torch.rand(1, 3, SIDE, SIDE) * 2 - 1
    latents = pipe._encode_vae_image(image, torch.Generator())
    tokens = latents.flatten(2).transpose(1, 2)
    assert torch.allclose(_patches(tokens, 32), pipe.vae.encoder(image), atol=1e-5)
    source = Image.new("RGB", (SIDE, SIDE), "red")
    call = {"height": SIDE, "width": SIDE, "num_inference_steps": 1, "max_sequence_length": 96}
    drawn = pipe(source, PROMPT, generator=torch.Generator().manual_seed(0), output_type="np", **call)
    assert np.isfinite(drawn.images).all()


def test_qwen_image_s_sources_are_encoded_by_it() -> None:
    pipe = session("qwen-image-edit-2511", "tiny_vae").pipe
    image = torch.rand(1, 3, 1, SIDE, SIDE) * 2 - 1
    latents = pipe._encode_vae_image(image, torch.Generator())
    assert torch.equal(latents[:, :, 0], pipe.vae.encoder(image[:, :, 0]))
    assert latents.shape == (1, 16, 1, SIDE // 8, SIDE // 8)


def _frames(state: dict[str, torch.Tensor], part: str, x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Run TAEW2.1 on a video, (frames, channels, height, width), layer by layer, all of its frames."""
    count = max(int(name.split(".")[2]) for name in state if name.startswith(part)) + 1
    for place in range(count):
        own = {n.split(".", 3)[3]: v for n, v in state.items() if n.startswith(f"{part}.layers.{place}.")}
        if "conv.4.weight" in own:
            y = torch.cat([x, torch.cat([torch.zeros_like(x[:1]), x[:-1]])], 1)
            for index in (0, 2, 4):
                y = functional.conv2d(y, own[f"conv.{index}.weight"], own[f"conv.{index}.bias"], padding=1)
                y = y.relu() if index < 4 else (y + x).relu()
            x = y
        elif "conv.weight" in own:
            outputs, inputs = own["conv.weight"].shape[:2]
            x = functional.conv2d(x.reshape(-1, inputs, *x.shape[2:]), own["conv.weight"])
            x = x.reshape(-1, min(inputs, outputs), *x.shape[2:])
        elif "weight" in own:
            stride = 2 if part == "encoder" and "bias" not in own else 1
            x = functional.conv2d(x, own["weight"], own.get("bias"), padding=1, stride=stride)
        elif part == "decoder" and place in (6, 12, 18):
            x = functional.interpolate(x, scale_factor=2)
        elif (part, place) != ("decoder", 0):
            x = x.relu()
    yield from x


def test_one_image_is_the_last_of_the_frames_that_the_video_decoder_makes(tmp_path: Path) -> None:
    vae = read_tiny_vae(write(tmp_path, TAEW21_FILES), "AutoencoderTinyQwenImage")
    latents = torch.randn(1, 16, 6, 4)
    *_, last = frames = list(_frames(vae.state_dict(), "decoder", torch.tanh(latents / 3) * 3))
    assert len(frames) == 4
    assert torch.allclose(vae.decode(latents[:, :, None]).sample[0, :, 0], last * 2 - 1, atol=1e-4)
    image = torch.rand(1, 3, 48, 32)
    (expected,) = _frames(vae.state_dict(), "encoder", image.repeat(4, 1, 1, 1))
    encoded = vae.encode(image[:, :, None] * 2 - 1).latents
    assert torch.allclose(encoded[0, :, 0], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "recipe", "prompts"),
    [
        ("flux2-klein-4b", "tiny_vae+fused@denoiser", [PROMPT]),
        ("flux2-klein-4b", "tiny_vae+vae_tiling(64)", [PROMPT]),
        ("qwen-image-2512", "tiny_vae+vae_slicing", [PROMPT, "a star"]),
        ("qwen-image-2512", "tiny_vae+compile(backend=eager)@vae", [PROMPT]),
    ],
)
def test_it_composes(model: str, recipe: str, prompts: list[str]) -> None:
    opened = session(model, recipe)
    picture = draw(opened, prompts, num_inference_steps=2)
    assert picture.shape == (len(prompts), SIDE, SIDE, 3)
    assert np.isfinite(picture).all()
    assert opened.refuted({}) is None


def test_it_cannot_be_saved(tmp_path: Path) -> None:
    pipe = session("qwen-image-2.1", "tiny_vae").pipe
    with pytest.raises(Unsupported, match="AutoencoderTinyQwenImage21 is not a public class of diffusers"):
        write_pipeline(pipe, SimpleNamespace(files={}), tmp_path)


def test_it_is_applied_once() -> None:
    pipe = session("krea-2-turbo", "tiny_vae").pipe
    facts = SimpleNamespace(load_tiny_vae=lambda: None)
    target: Any = SimpleNamespace(module=lambda name: getattr(pipe, name), model=facts)
    with pytest.raises(NoEffect, match="already has a tiny VAE"):
        TinyVae().apply(target)


@pytest.mark.parametrize(
    ("model", "kind", "least_gb"),
    [
        ("flux2-klein-4b", "Flux2", 1.8),
        ("qwen-image-2512", "QwenImage", 2.7),
        ("qwen-image-2.1", "QwenImage21", 7),
    ],
)
@pytest.mark.quick("flux2*")
def test_plan_counts_it(model: str, kind: str, least_gb: float) -> None:
    found = find_weightless(model)
    before, after = (predict(found, resolve(recipe)) for recipe in ("baseline", "tiny_vae"))
    (vae,) = (part for part in after.components if part.name == "vae")
    assert vae.class_name == f"AutoencoderTiny{kind}"
    assert (before.peak_bytes - after.peak_bytes) / 1e9 > least_gb


def test_a_script_reads_it_from_the_hub(tmp_path: Path) -> None:
    path = write(tmp_path, TAEF2_FILES)
    arguments = tiny_vae_arguments(SimpleNamespace(tiny_vae=TAEF2_FILES))
    facts = SimpleNamespace(tiny_vae_arguments=arguments, tiny_vae_class=TAEF2_FILES.class_name)
    old = SimpleNamespace(dtype=torch.bfloat16)
    script = TinyVae().script(SimpleNamespace(model=facts, module=lambda _: old))
    imports = [
        f"from {m} import {n}" if n else f"import {m}"
        for m, _, n in (x.partition(":") for x in script.imports)
    ]
    names: dict[str, Any] = {"pipe": SimpleNamespace()}
    with mock.patch("huggingface_hub.hf_hub_download", return_value=str(path)) as download:
        exec("\n".join([*imports, *script.lines]), names)  # noqa: S102
    download.assert_called_once_with("madebyollin/taef2", "taef2.safetensors", revision=TAEF2_FILES.revision)
    vae = names["pipe"].vae
    assert type(vae).__name__ == "AutoencoderTinyFlux2"
    assert vae.dtype == torch.bfloat16


def test_models_with_these_latents_have_it() -> None:
    named = {
        name: entry.origin.tiny_vae for name, entry in CATALOGUE.items() if isinstance(entry.origin, Origin)
    }
    for name, part in named.items():
        if name.startswith(("flux2", "ernie")):
            assert part == TAEF2_FILES
        elif name.startswith(("qwen", "krea")):
            assert part == (TAEQI21_FILES if name == "qwen-image-2.1" else TAEW21_FILES)
