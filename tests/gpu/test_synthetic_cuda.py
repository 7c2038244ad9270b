"""Published architectures at full size, built where they run. `python -m pytest -m gpu tests/gpu`."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.narrow import FLOW
from vivace.architectures import ARCHITECTURES
from vivace.models.synthetic import build

pytestmark = pytest.mark.gpu
GB = 1e9
NORMS = ("LayerNorm", "GroupNorm", "RMSNorm", "T5LayerNorm")
CALLS: dict[str, dict[str, Any]] = {
    "sdxl-turbo": {"num_inference_steps": 1, "guidance_scale": 0.0},
    "sdxl-lightning-2step": {"num_inference_steps": 2, "guidance_scale": 0.0},
    "sdxl-lightning-4step": {"num_inference_steps": 4, "guidance_scale": 0.0},
    "hyper-sdxl-4step": {"num_inference_steps": 4, "guidance_scale": 0.0},
    "lcm-sdxl": {"num_inference_steps": 4, "guidance_scale": 8.0},
    "flux-dev": {"num_inference_steps": 2},
    "flux-schnell": {"num_inference_steps": 2, "guidance_scale": 0.0, "max_sequence_length": 256},
}


@pytest.fixture(autouse=True)
def _memory_released() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name.startswith("flux") else torch.float16


def host_bytes(entry: str) -> int:
    match = re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def test_flux_is_built_on_the_gpu_and_never_on_the_host() -> None:
    # The CUDA context and its libraries are the host's, too, but not the weights'.
    x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.conv2d((x @ x)[None, None], x[None, None, :3, :3])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, on_device = host_bytes("VmRSS"), torch.cuda.memory_allocated()
    pipe = build("flux-dev", "cuda", torch.bfloat16)
    torch.cuda.synchronize()
    assert host_bytes("VmHWM") - before < 3 * GB
    weights = sum(
        parameter.numel() * parameter.element_size()
        for component in pipe.components.values()
        if isinstance(component, torch.nn.Module)
        for parameter in component.parameters()
    )
    assert weights == pytest.approx(2 * (11901.4e6 + 4762.3e6 + 123.1e6 + 83.8e6), rel=0.005)
    assert torch.cuda.max_memory_allocated() - on_device == pytest.approx(weights, rel=0.01), "allocated once"


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FLOW])
def test_every_model_draws_at_its_native_size(name: str) -> None:
    architecture = ARCHITECTURES[name]
    pipe = build(name, "cuda", dtype_of(name))
    variances: dict[str, list[float]] = {}

    def note(into: list[float]) -> Any:
        return lambda _, args: into.append(float(args[0].float().var()))

    for part, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            for path, module in component.named_modules():
                if type(module).__name__ in NORMS:
                    module.register_forward_pre_hook(note(variances.setdefault(f"{part}.{path}", [])))
    call = {"num_inference_steps": 6} | CALLS.get(name, {})
    size = {"height": architecture.height, "width": architecture.width}

    def draw(prompt: str, output: str) -> torch.Tensor:
        images: torch.Tensor = pipe(
            prompt, generator=torch.Generator().manual_seed(0), output_type=output, **size, **call
        ).images
        return images

    latents = draw("a red circle above a blue square", "latent")
    assert torch.isfinite(latents).all()
    assert 0.15 < latents.float().std() < 4
    assert not torch.equal(latents, draw("seven photographs of old, rusty ships", "latent"))
    picture = draw("a red circle above a blue square", "pt")
    assert picture.shape == (1, 3, architecture.height, architecture.width)
    assert torch.isfinite(picture).all()
    assert picture.float().std() > 0.05
    for path, values in variances.items():
        if not path.startswith("vae.encoder"):
            assert values, f"{path} never ran"
            assert min(values) > 0.03, path
            assert max(values) < 20, path
