"""Components of different precision: inputs are cast on entry, without a look at the whole component in every step."""

import runpy
from pathlib import Path

import pytest
import torch

from tests import flow_models
from tests.narrow import small
from tests.targets import target_of
from vivace.errors import NoEffect
from vivace.models.synthetic import build as build_architecture
from vivace.techniques.dtype import Dtype

pytestmark = pytest.mark.usefixtures("short_calls")


@pytest.mark.parametrize(
    "model", ["qwen-image-2.1", "qwen-image", "flux2-klein-4b", "flux2-dev", "sana-1600m", "krea-2-turbo"]
)
@pytest.mark.quick("qwen-image", "flux2-klein-4b", "sana-1600m")
def test_a_converted_model_is_as_one_loaded_in_bf16(model: str, tmp_path: Path) -> None:
    """Frequencies stay in fp32, as do the layers that the model's authors name."""
    session = flow_models.session(model, "bf16")
    for name, part in flow_models.pipeline(model).components.items():
        if not isinstance(part, torch.nn.Module):
            continue
        part.save_pretrained(tmp_path / name)
        loaded = type(part).from_pretrained(tmp_path / name, dtype=torch.bfloat16, use_safetensors=True)
        converted = getattr(session.pipe, name)
        for kind in ("named_parameters", "named_buffers"):
            ours = dict(getattr(converted, kind)())
            for key, expected in getattr(loaded, kind)():
                if expected.ndim:  # Gemma's scale of embeddings, which is cast to bf16 in each call
                    assert ours[key].dtype == expected.dtype, (name, key)
                    assert torch.equal(ours[key], expected), (name, key)


def test_a_second_conversion_changes_nothing() -> None:
    session = flow_models.session("krea-2-turbo", "bf16")
    weights = [weight.dtype for weight in session.pipe.transformer.parameters()]
    assert {torch.float32, torch.bfloat16} == set(weights)
    with pytest.raises(NoEffect, match="bf16 already"):
        Dtype(dtype="bf16").apply(target_of(pipe=session.pipe))


def test_a_synthetic_model_in_bf16_has_exact_frequencies() -> None:
    pipe = build_architecture(small("qwen-image-2.1"), "cpu", torch.bfloat16)
    assert pipe.transformer.time_text_embed.time_proj.freqs.dtype == torch.float32
    assert pipe.text_encoder.model.language_model.rotary_emb.inv_freq.dtype == torch.float32
    assert pipe.transformer.dtype == torch.bfloat16


def test_a_script_keeps_frequencies(tmp_path: Path) -> None:
    pipe = flow_models.pipeline("qwen-image-2.1")
    script = Dtype(dtype="bf16").script(target_of(pipe=pipe))
    assert script is not None
    (tmp_path / "script.py").write_text("\n".join(["import torch", *script.lines]))
    runpy.run_path(str(tmp_path / "script.py"), init_globals={"pipe": pipe})
    assert pipe.transformer.time_text_embed.time_proj.freqs.dtype == torch.float32
    assert pipe.text_encoder.model.language_model.rotary_emb.inv_freq.dtype == torch.float32
    assert pipe.transformer.dtype == pipe.text_encoder.dtype == torch.bfloat16
