"""Exported scripts draw what vivace draws, byte for byte, and read as if somebody had written them."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import shrunken
from tests.composition.recipes import MODELS, plain
from tests.exported import CALL, PROMPT, check, run, with_vivace, write
from vivace import runtime, techniques
from vivace.errors import NoEffect, Unsupported, UsageError
from vivace.machinery.technique import Machine
from vivace.models import find_model, load_pipeline
from vivace.models.export_embedded import export
from vivace.recipes.resolve import resolve
from vivace.runtime.export import write_script
from vivace.runtime.opening import open_session
from vivace.techniques import TECHNIQUES

ROOT = Path(__file__).parents[3]
COMPOSED = {
    "tiny-sd": [
        "tiny_vae+bf16+channels_last+scheduler(dpmpp_2m, karras=True)+steps(5)+guidance(3)",
        "bf16@denoiser+int8+attention(math)+inference_mode",
        "fuse_qkv+int4@denoiser,text_encoder+channels_last",
        "bf16+scheduler(ddim, spacing=trailing)+vae_tiling(64, overlap=0.5)",
        "tiny_vae+cfg_cutoff(0.5)+bf16+scheduler(pndm)+prompt_cache+inference_mode+guidance(5)",
        "bf16+quantize(nf4, skip='to_q, time_embedding', min_weights=9000)",
        "quantize(fp8_weight, granularity=tensor)@denoiser,text_encoder",
        "quantize(int8, backend=bitsandbytes, skip='to_out')",
    ],
    "tiny-flux": [
        "tiny_vae+bf16+int8@denoiser,text_encoder_2+attention(math)",
        "fuse_qkv+first_block_cache(hits=0.4)+attention(math)+prompt_cache+scheduler(flow_euler, karras=True)",
        "layerwise_casting@denoiser,text_encoder_2+vae_tiling(64)+inference_mode",
        "bf16+scheduler(dpmpp_2m)+guidance(3.5, true_cfg=2.5)+steps(8)",
        "scheduler(flow_lcm)+steps(8)",
        "bf16+quantize(fp8, granularity=tensor)+int8_dynamic@text_encoder_2",
        "bf16+quantize(nf4, backend=bitsandbytes, double_quantization=False)@text_encoder_2",
    ],
    "tiny-flux-schnell": ["baseline", "tiny_vae+bf16+steps(3)+prompt_cache"],
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose scripts are all checked in the end, at once: starting ruff takes longer than the check."""
    folder = tmp_path_factory.mktemp("scripts")
    yield folder
    check(folder)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", sorted(TECHNIQUES))
@pytest.mark.diagonal
@pytest.mark.exhaustive(
    "prune-tiny-flux", "parallel-*", "compile-tiny-flux", "tf32*", "steps*", "inference_mode*"
)
@pytest.mark.slow(
    "parallel*",
    "prune*",
    "compile-tiny-flux",
    "channels_last*",
    "layerwise*",
    "tiny_vae*",
    "prompt_cache*",
    "pyramid*",
    "vae_tiling*",
    "dual_block*",
    "faster*",
    "magcache*",
    "seacache*",
)
def test_each_technique_alone(name: str, model: str, scripts: Path) -> None:
    # prune chooses by whole images, three times here.
    recipe = "prune(pictures=1)" if name == "prune" else plain(name, model)
    try:
        drawn = with_vivace(model, recipe)
    except (NoEffect, Unsupported) as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            write(model, recipe)
        return
    written = write(model, recipe)
    if "pipe.load_lora_weights" in written.text:
        pytest.importorskip("peft")
    assert np.array_equal(run(written.text, scripts), drawn)
    assert f"Recipe: {resolve(recipe).text}\n" in written.text
    assert ("import vivace" in written.text) is bool(written.own)


@pytest.mark.parametrize(("model", "recipe"), [(model, r) for model in COMPOSED for r in COMPOSED[model]])
@pytest.mark.exhaustive("tiny-flux-bf16+quantize*", "*flow_lcm*")
@pytest.mark.quick("tiny-sd-tiny_vae+cfg_cutoff*", "tiny-flux-fuse_qkv*")
def test_compositions(model: str, recipe: str, scripts: Path) -> None:
    if "bitsandbytes" in recipe:
        pytest.importorskip("bitsandbytes")
    written = write(model, recipe)
    if "quantize" in resolve(recipe).text:
        assert not any(step.startswith("quantize") for step in written.own)
    assert np.array_equal(run(written.text, scripts), with_vivace(model, recipe))


def test_a_script_is_what_somebody_would_have_written() -> None:
    written = write("tiny-sd", "tiny_vae+scheduler(dpmpp_2m)+steps(20)", about=["For a test."])
    assert written.own == []
    assert written.text == (
        '''"""Generate an image with tiny-sd.

Recipe: tiny_vae+scheduler(dpmpp_2m)+steps(20)
For a test.
"""

import torch
from diffusers import AutoencoderTiny, DiffusionPipeline, DPMSolverMultistepScheduler
from vivace.models.find import WEIGHTS

torch.set_num_threads(1)  # the image's last bits depend on it

# These weights ship with vivace. To run without vivace, export them to a folder:
# vivace models --export tiny-sd DIR
pipe = DiffusionPipeline.from_pretrained(
    WEIGHTS / "tiny-sd",
    dtype=torch.float32,
    use_safetensors=True,
)

# tiny_vae: a small distilled VAE decoder
pipe.vae = AutoencoderTiny.from_pretrained(
    WEIGHTS / "tiny-sd-tiny-vae",
    dtype=torch.float32,
)

# scheduler(dpmpp_2m): another sampler
pipe.scheduler = DPMSolverMultistepScheduler.from_config(
    pipe.scheduler.config,
    algorithm_type="dpmsolver++",
)

image = pipe(
    "a red circle above a blue square",
    num_inference_steps=20,
    guidance_scale=4.0,
    height=64,
    width=64,
    generator=torch.Generator("cpu").manual_seed(3),
).images[0]
image.save("picture.png")
'''
    )


def test_what_is_vivace_s_own_goes_through_one_session_with_what_stands_between() -> None:
    """Order matters: attention is chosen around what the cache has changed."""
    written = write("tiny-flux", "fuse_qkv+first_block_cache(hits=0.4)+attention(math)+prompt_cache+steps(5)")
    assert written.own == ["first_block_cache(hits=0.4)", "prompt_cache"]
    assert '"first_block_cache(hits=0.4)+attention(math)+prompt_cache"' in written.text
    assert "import vivace\n" in written.text
    assert "pipe.transformer.fuse_qkv_projections()" in written.text
    assert "image = draw(" in written.text
    assert (
        "\nNeeds vivace: there are no public calls for first_block_cache(hits=0.4), prompt_cache.\n"
        in written.text
    )
    assert "import vivace\n" not in write("tiny-flux", "fuse_qkv+attention(math)+steps(5)").text


def test_what_holds_already_is_left_out_and_said() -> None:
    written = write("tiny-sd", "dtype(fp32)+steps(4)+channels_last")
    assert "# dtype(fp32): every targeted component is fp32 already\n" in written.text
    assert "# steps(4): 4 is already the workload's number of steps\n" in written.text
    assert written.warnings == [
        "dtype: every targeted component is fp32 already",
        "steps: 4 is already the workload's number of steps",
    ]


def test_fp32_needs_no_care_for_its_noise() -> None:
    assert "prepare_latents" not in write("tiny-sd", "channels_last").text
    for recipe in ("bf16", "bf16@vae"):
        text = write("tiny-sd", recipe).text
        assert "\npipe.prepare_latents = prepare_in_fp32\n" in text
        assert "\npipe.scheduler.step = step_in_fp32\n" in text


def test_parts_that_overflow_in_fp16_stay_in_fp32() -> None:
    """Of T5 its output projections. Drawing in fp16 takes a CPU half a minute, so the weights are compared."""
    names: dict[str, Any] = {}
    exec(write("tiny-flux", "tiny_vae+fp16").text.partition("\nimage = ")[0], names)  # noqa: S102
    expected = open_session(find_model("tiny-flux"), resolve("tiny_vae+fp16"), "cpu").pipe
    for part in ("transformer", "text_encoder", "text_encoder_2", "vae"):
        ours, theirs = getattr(names["pipe"], part).state_dict(), getattr(expected, part).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(ours[key].dtype == theirs[key].dtype for key in ours), part
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), part
    kinds = {parameter.dtype for parameter in names["pipe"].text_encoder_2.parameters()}
    assert kinds == {torch.float16, torch.float32}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are applied as on an H200, but for what only CUDA can do; scripts are written, and cannot run."""

    def load(located: Any, recipe: Any, device: str, *_: Any) -> Any:
        assert device == "cuda"
        pipe = load_pipeline(located, "cpu")
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                torch.nn.Module.to(part, torch.float16)
        return pipe

    monkeypatch.setattr("vivace.runtime.export.pipeline_for", load)
    for place in (runtime.session, techniques.quantize):
        monkeypatch.setattr(place, "move_to", lambda module, device: None)
    monkeypatch.setattr(
        runtime.opening, "this_machine", lambda device: Machine(device, "H200", (9, 0), "c++")
    )
    monkeypatch.setattr(techniques.offload, "_enable", lambda *args: None)


@pytest.mark.parametrize(
    ("recipe", "lines"),
    [
        ("baseline", ['pipe.to("cuda")', "    dtype=torch.float16,"]),
        (
            "tiny_vae+fp32+tf32",
            ["torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cudnn.allow_tf32 = True"],
        ),
        (
            "compile(reduce-overhead)+attention(math)",
            [
                'compiled = torch.compile(pipe.unet.forward, mode="reduce-overhead")',
                "    torch.compiler.cudagraph_mark_step_begin()",
                "pipe.unet.forward = forward_with_own_outputs",
            ],
        ),
        ("compile(max-autotune)@denoiser,vae", ["import vivace"]),
        ("bf16+offload(sequential)", ["pipe.enable_sequential_cpu_offload()"]),
        ("offload(group, stream=True)", ["pipe.enable_group_offload("]),
        (
            "cfg_cutoff(0.5)+offload(model)",
            [
                'pipe.to("cuda")',
                'pipe.to("cpu", silence_dtype_warnings=True)',
                "# that: vivace.load(model, recipe).",
                "pipe.enable_model_cpu_offload()",
            ],
        ),
    ],
)
@pytest.mark.quick("cfg_cutoff*", "baseline*")
def test_for_a_gpu(recipe: str, lines: list[str], gpu: None, tmp_path: Path) -> None:
    text = write_script(find_model("tiny-sd"), resolve(recipe), "cuda", prompt=PROMPT).text
    (tmp_path / "draw.py").write_text(text)
    check(tmp_path)
    compile(text, "draw.py", "exec")
    written = text.splitlines()
    assert [line for line in lines if line not in written] == []
    assert "set_num_threads" not in text
    moved = 'pipe.to("cuda")' in written
    assert moved is ("offload" not in recipe or "cfg_cutoff" in recipe), (
        "weights that wait need not fit at once"
    )
    if moved:
        place = written.index('pipe.to("cuda")')
        assert not [line for line in written[:place] if line.startswith("# dtype")]
        assert [line for line in written[place:] if "AutoencoderTiny.from" in line] == [], (
            "exchanged on the CPU"
        )


@pytest.mark.parametrize(
    ("recipe", "visit"),
    [
        ("int8", 'quantize_(pipe.unet, Int8WeightOnlyConfig(set_inductor_config=False), device="cuda")'),
        ("bf16+int8_dynamic", '            layer.to("cuda")'),
        ("tiny_vae+bf16+fp8+channels_last", '            layer.to("cuda")'),
        ("nf4@denoiser,text_encoder", '            layer.to("cuda")'),
        ("int8+prompt_cache", 'draw = vivace.apply(pipe, "prompt_cache")'),
    ],
)
def test_what_is_quantised_comes_to_the_gpu_smaller(
    recipe: str, visit: str, gpu: None, tmp_path: Path
) -> None:
    """Layer by layer, and the rest after it, so that the GPU never holds what it was."""
    text = write_script(find_model("tiny-sd"), resolve(recipe), "cuda", prompt=PROMPT).text
    (tmp_path / "draw.py").write_text(text)
    check(tmp_path)
    compile(text, "draw.py", "exec")
    written = text.splitlines()
    assert 'pipe.to("cuda")' not in written
    rest = written.index('                tensor.data = tensor.data.to("cuda")')
    first = next(k for k, line in enumerate(written) if line.startswith("# quantize"))
    assert visit in written
    assert (first < written.index(visit) < rest) is ("prompt_cache" not in recipe)
    later = [k for k, line in enumerate(written) if line.startswith(("# channels_last", "draw = vivace"))]
    assert all(k > rest for k in later), "what looks at weights finds them where they work"


def test_a_vae_that_is_cast_in_the_call_has_no_stream(gpu: None, tmp_path: Path) -> None:
    folder = shrunken.save(shrunken.sdxl(), tmp_path / "sdxl", (None, "fp16"))
    text = write_script(
        find_model(str(folder)), resolve("offload(group, stream=True)"), "cuda", prompt=PROMPT
    ).text
    compile(text, "draw.py", "exec")
    whole, vae = text.index("pipe.enable_group_offload("), text.index("pipe.vae.enable_group_offload(")
    assert whole < vae
    assert 'exclude_modules="vae"' in text[whole:vae]
    assert "use_stream=True" in text[whole:vae]
    assert "use_stream=False" in text[vae:]
    text = write_script(find_model(str(folder)), resolve("offload(group)"), "cuda", prompt=PROMPT).text
    assert "pipe.vae.enable_group_offload(" not in text


def test_offloaded_weights_are_quantised_where_they_wait(gpu: None) -> None:
    text = write_script(find_model("tiny-sd"), resolve("int8+offload(model)"), "cuda", prompt=PROMPT).text
    assert "quantize_(pipe.unet, Int8WeightOnlyConfig(set_inductor_config=False))" in text
    assert '"cuda"' not in text


def test_what_a_capture_cannot_contain_is_left_to_vivace(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: None)
    located = find_model("tiny-sd")
    assert write_script(located, resolve("int8+cuda_graph"), "cuda", prompt=PROMPT).own == ["cuda_graph"]
    own = write_script(located, resolve("int8_dynamic+cuda_graph"), "cuda", prompt=PROMPT).own
    assert own == ["quantize(int8_dynamic)", "cuda_graph"]


@pytest.mark.parametrize(
    ("recipe", "own"),
    [("bf16+int8", []), ("int8+compile", []), ("bf16+int8+compile", ["quantize(int8)"])],
)
def test_int8_that_inductor_has_a_slow_kernel_for_is_left_to_vivace(
    gpu: None, recipe: str, own: list[str]
) -> None:
    """Which it has in bf16, compiled."""
    written = write_script(find_model("tiny-sd"), resolve(recipe), "cuda", prompt=PROMPT)
    assert written.own == own


def test_a_folder_is_loaded_from_where_it_is(tmp_path: Path) -> None:
    folder = export("tiny-flux-schnell", tmp_path / 'my "model"').folder
    written = write(str(folder), "steps(2)")
    assert "vivace" not in written.text
    picture = run(written.text, tmp_path)
    assert np.array_equal(
        picture, with_vivace("tiny-flux-schnell", "steps(2)", CALL | {"guidance_scale": 3.5})
    )


@pytest.mark.parametrize("prompt", ['say "hello"', "it's", "back\\slash\n", '"""', "größer 🎨"])
def test_any_prompt_is_written_as_it_is(prompt: str, tmp_path: Path) -> None:
    text = write_script(find_model("tiny-sd"), resolve("baseline"), "cpu", prompt=prompt, call=CALL).text
    (tmp_path / "draw.py").write_text(text, encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "pipe"] == [prompt]
    check(tmp_path)


def test_random_weights_are_refused_with_advice() -> None:
    with pytest.raises(UsageError, match=r"synthetic:sdxl has random weights.*export sdxl"):
        write("synthetic:sdxl", "baseline")


@pytest.mark.long
@pytest.mark.own_convolutions
def test_a_script_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(write("tiny-sd", "tiny_vae+bf16@vae+steps(3)").text)
    subprocess.run([sys.executable, "draw.py"], cwd=tmp_path, check=True, capture_output=True)
    with Image.open(tmp_path / "picture.png") as picture:
        assert np.array_equal(np.asarray(picture), with_vivace("tiny-sd", "tiny_vae+bf16@vae+steps(3)"))


def test_the_docs_show_what_is_really_written() -> None:
    page = (ROOT / "docs" / "export.md").read_text()
    recipe = "tiny_vae+channels_last+scheduler(dpmpp_2m)+steps(20)"
    assert f'vivace export --recipe "{recipe}" --device cpu -o draw.py' in page
    example = page.partition("```python\n")[2].partition("```")[0]
    text = write_script(
        find_model("tiny-sd"), resolve(recipe), "cpu", prompt=PROMPT, threads=1, about=["Written by"]
    ).text
    assert re.sub(r"Written by .*?\n\"", 'Written by\n"', example, flags=re.DOTALL) == text


@pytest.mark.long
def test_what_adapts_to_prompts_is_given_the_scripts_own(scripts: Path) -> None:
    written = write("tiny-sd", "quantize(fp8_static, pictures=1)+steps(2)")
    assert f'prompts=["{PROMPT}"]' in written.text
    assert run(written.text, scripts).std() > 10
