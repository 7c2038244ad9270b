"""Images from images on the embedded models: pipelines, steps that are run, techniques, sizes, mistakes."""

import functools
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import vivace
from tests import typed
from tests.exported import check, run
from tests.families import load
from vivace.answers.page import page_of
from vivace.architectures import FAMILIES
from vivace.benchmark import Timing
from vivace.benchmark.run import answer_of_stores
from vivace.benchmark.store.images import image_path, read_sources
from vivace.errors import Unsupported, UsageError, VivaceError, WorkloadError
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.spec.workload import Source, Task, Workload, steps_for, steps_run
from vivace.foundation.stats import Gate, Interval
from vivace.models.export_embedded import export
from vivace.models.find import find_model
from vivace.models.load import load_pipeline
from vivace.models.sources import FOLDER, example_images, sha_of
from vivace.models.tasks import for_task, names_of, rounds_up
from vivace.recipes.resolve import resolve
from vivace.report.fidelity import Fidelity, KeptShare, Worst
from vivace.report.quality_gate import judge_figures
from vivace.runtime.export import source_files, write_script
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.opening import session_of
from vivace.runtime.session import Session
from vivace.runtime.workloads import checked_request

PROMPT = "a red circle above a blue square"
IMAGE, MASK = str(FOLDER / "00.png"), str(FOLDER / "00-mask.png")
STEPS, STRENGTH = 6, 0.7
RUN = {"tiny-sd": 4, "tiny-flux": 5}
"""0.7 of 6 steps are 4.2: Stable Diffusion's pipelines cut off, FLUX's round up."""
CASES = [(model, task) for model in RUN for task in ("image", "inpaint")]


def open_session(model: str, task: Task, recipe: str = "baseline", **defaults: Any) -> Session:
    located = find_model(model)
    call = {"height": 128, "width": 128, "num_inference_steps": STEPS, "strength": STRENGTH} | defaults
    return session_of(load(model, task), located, resolve(recipe), "cpu", call)


def draw(session: Session, batch: int = 1, **call: Any) -> np.ndarray:
    torch.set_num_threads(1)
    inputs = example_images(type(session.pipe).__name__, {"height": 128, "width": 128})
    if batch > 1:
        inputs = {name: [picture] * batch for name, picture in inputs.items()}
    generators = [torch.Generator().manual_seed(k) for k in range(batch)]
    prompts = [PROMPT] * batch if batch > 1 else PROMPT
    images = session(
        prompt=prompts,
        generator=generators if batch > 1 else generators[0],
        output_type="np",
        **inputs | call,
    )
    return np.asarray(images.images)


@functools.cache
def reference(model: str, task: Task) -> np.ndarray:
    return draw(open_session(model, task))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.mean((a - b) ** 2))
    return 200.0 if error == 0 else -10 * np.log10(error)


def test_the_table_names_pipelines_of_diffusers() -> None:
    for published in (each for family in FAMILIES for each in family.pipelines):
        for task, kind in published.tasks.items():
            accepted = inspect.signature(getattr(diffusers, kind).__call__).parameters
            names = names_of(published.name, task)
            assert {name for name in (names.image, names.mask, names.control) if name} <= set(accepted), kind
            assert ("strength" in accepted) is (task in ("image", "inpaint")), kind


@pytest.mark.parametrize("model", RUN)
def test_as_many_steps_as_diffusers_runs(model: str) -> None:
    pipe = load_pipeline(find_model(model), "cpu", task="image")
    published = find_model(model).pipeline
    for steps in (1, 4, 7, 20, 25, 28, 100):
        shifted = {"mu": 1.0} if model == "tiny-flux" else {}
        pipe.scheduler.set_timesteps(steps, **shifted)
        for strength in (0.05, 0.29, 0.5, 0.55, 0.6, 0.8, 1.0):
            _, expected = pipe.get_timesteps(steps, strength, "cpu")
            assert steps_run(steps, strength, rounds_up=rounds_up(published)) == expected, (steps, strength)
            assert steps_run(steps_for(3, strength), strength, rounds_up=False) == 3


@pytest.mark.parametrize(("model", "task"), CASES)
@pytest.mark.quick("tiny-sd-image", "tiny-flux-inpaint")
def test_a_cache_and_a_cutoff_count_the_steps_that_are_run(model: str, task: Task) -> None:
    cache = open_session(model, task, "taylorseer(hits=0.5)")
    assert psnr(draw(cache), reference(model, task)) > 15
    assert cache.evidence()["cache_calls"] == RUN[model]
    if model == "tiny-flux":
        with pytest.raises(Unsupported, match="nothing can be cut"):
            open_session(model, task, "cfg_cutoff(0.5)")
        return
    cut = open_session(model, task, "cfg_cutoff(0.5)")
    assert psnr(draw(cut), reference(model, task)) > 20
    assert cut.evidence() == {"guided_steps": 2, "unguided_steps": 2}
    assert draw(cut, batch=2).shape[0] == 2, "masks of a batch are halved too"


def test_techniques_that_calibrate_start_from_a_picture_too() -> None:
    pruned = open_session("tiny-sd", "inpaint", "prune(0.1, pictures=1)")
    assert np.isfinite(draw(pruned)).all()


def test_samplers_that_cannot_begin_in_the_middle_are_refused() -> None:
    with pytest.raises(Unsupported, match="scale_noise"):
        open_session("tiny-flux", "image", "scheduler(unipc)")
    with pytest.raises(Unsupported, match="Runge-Kutta"):
        open_session("tiny-sd", "image", "scheduler(pndm)")


def test_a_cache_refuses_two_calls_that_it_cannot_tell_apart() -> None:
    with pytest.raises(Unsupported, match="true CFG's two calls"):
        open_session("tiny-flux", "image", "guidance(3.5, true_cfg=4)+teacache(hits=0.5)")


@pytest.mark.parametrize("model", RUN)
def test_outside_of_the_mask_the_source_stays(model: str) -> None:
    drawn = Image.fromarray(
        (draw(open_session(model, "inpaint", strength=0.9))[0] * 255).round().astype("uint8")
    )
    from vivace.measure.image_metrics import outside_metrics, pixels

    source, mask = pixels(Image.open(IMAGE)), pixels(Image.open(MASK))
    figures = outside_metrics(pixels(drawn), source, mask)
    assert figures["outside_psnr_db"] > 30
    assert figures["outside_match"] > 0.95
    inside = mask[..., 0] > 0
    assert np.abs(pixels(drawn) - source)[inside].mean() > 10, "and inside it does not"
    assert outside_metrics(pixels(drawn), source, np.full_like(mask, 255.0)) == {}


def test_the_picture_sets_the_size() -> None:
    session = open_session("tiny-flux", "inpaint", num_inference_steps=2, strength=1.0)
    wide = Image.open(IMAGE).convert("RGB").resize((96, 64))
    mask = Image.open(MASK).resize((96, 64))
    assert session(prompt=PROMPT, image=wide, mask_image=mask).images[0].size == (96, 64)


def test_no_step_left_is_refused_in_words() -> None:
    session = open_session("tiny-sd", "image", "steps(2)", strength=0.4)
    with pytest.raises(
        Unsupported, match=r"strength 0\.4 of 2 steps runs none of them; give a strength of 0\.5"
    ):
        draw(session)


@pytest.mark.parametrize("model", RUN)
@pytest.mark.quick("tiny-sd")
def test_a_controlnet_of_random_weights_disturbs_the_picture(model: str) -> None:
    session = open_session(model, "control", "taylorseer(hits=0.5)")
    drawn = draw(session)
    assert session.evidence()["cache_calls"] == STEPS
    assert 5 < psnr(drawn, reference_of_text(model)) < 60
    half = open_session(model, "control", "bf16")
    assert psnr(draw(half), draw(open_session(model, "control"))) > 20


@functools.cache
def reference_of_text(model: str) -> np.ndarray:
    return draw(open_session(model, "text"))


def test_a_kontext_pipeline_edits_in_the_size_of_its_picture(tmp_path: Path) -> None:
    export("tiny-flux", tmp_path / "kontext")
    (tmp_path / "kontext" / "vivace.json").unlink()  # it is tiny-flux's, and not of what the folder becomes
    index = tmp_path / "kontext" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "FluxKontextPipeline"}))
    model = str(tmp_path / "kontext")
    prepared = checked_request(model, "baseline", images=(IMAGE,), prompts=[PROMPT])
    assert (prepared.workload.task, prepared.workload.strength) == ("edit", None)
    session = vivace.load(model, "seacache(hits=0.5)")
    drawn = session(prompt=PROMPT, image=Image.open(IMAGE).convert("RGB"), num_inference_steps=4).images[0]
    assert drawn.size == (128, 128)
    assert session.evidence()["cache_calls"] == 4
    plain = vivace.load(model)
    drawn = plain(
        prompt=PROMPT,
        image=Image.open(IMAGE).convert("RGB"),
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    flags = ["--model", model, "--prompt", PROMPT, "--image", IMAGE, "--steps", "4", "--device", "cpu"]
    script = typed.run_vivace(tmp_path, "export", *flags).stdout
    assert "max_area=16384" in script, "the size of the image, not a megapixel"
    (tmp_path / "runs").mkdir()
    drawn_by_script = run(script, tmp_path / "runs").astype(int)
    assert np.abs(drawn_by_script - np.asarray(drawn)).max() <= 1, "threads decide the last bit"
    with pytest.raises(Unsupported, match="no pipeline for the task 'inpaint'"):
        checked_request(model, "baseline", images=(IMAGE,), masks=(MASK,), task="inpaint")


def test_keys_of_text_workloads_are_those_of_earlier_versions() -> None:
    text: dict[str, Any] = {
        "prompts": (PROMPT,),
        "seeds": (0,),
        "height": 128,
        "width": 128,
        "num_inference_steps": 20,
        "guidance_scale": 4.0,
    }
    before = {**text, "prompts": [PROMPT], "seeds": [0], "batch": 1, "text": "prompts"}
    assert json.loads(Workload(**text).model_dump_json()) == before
    assert Workload.model_validate(before) == Workload(**text)
    made = Workload(**text, task="image", strength=0.5, sources=(Source(image="a" * 64),))
    assert Workload.model_validate_json(made.model_dump_json()) == made
    assert made.digest() != Workload(**text).digest()


def test_source_images_are_fitted_and_identified_by_their_pixels(tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    Image.open(IMAGE).convert("RGB").resize((400, 300)).save(photo)
    prepared = checked_request("tiny-flux", "baseline", images=(str(photo),), prompts=[PROMPT])
    workload, sources = prepared.workload, prepared.sources
    assert sources is not None
    assert (workload.width, workload.height) == (144, 112), (
        "as many pixels as the model's own size, multiples of 16"
    )
    (source,) = workload.sources
    assert source.image is not None
    fitted = sources.by_sha[source.image]
    assert fitted.size == (144, 112)
    assert "cutting 4% off at left and right" in sources.notes[0]
    copy = tmp_path / "copy.png"
    fitted.save(copy)
    again = checked_request("tiny-flux", "baseline", images=(str(copy),), prompts=[PROMPT]).sources
    assert again is not None
    assert again.sources == sources.sources
    assert sha_of(fitted) == source.image


def test_without_files_each_prompt_has_its_own_picture() -> None:
    workload = checked_request("tiny-sd", "baseline", task="inpaint").workload
    assert len(workload.sources) == len(workload.prompts) == 6
    assert workload.source_of(7) == workload.sources[1]
    assert workload.strength == 0.9
    assert checked_request("tiny-sd", "baseline", task="control").workload.controlnet == "random"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": (MASK,)}, "--mask: a mask needs the image"),
        ({"strength": 0.5}, "--strength 0.5: only image-to-image and inpainting have one"),
        (
            {"images": (IMAGE,), "strength": 0.03},
            "runs none of them, so the image would not change; give at least",
        ),
        ({"images": (IMAGE,), "strength": 1.5}, "must be at most 1"),
        ({"images": (IMAGE,), "task": "text"}, "--image: the task 'text' takes none"),
        ({"images": (IMAGE,), "task": "inpaint"}, "the mask is missing"),
        ({"images": (IMAGE,) * 3}, "3 files for 6 prompts"),
        ({"images": (IMAGE,), "controlnet": "x"}, "--controlnet: the task 'image' takes none"),
        ({"controls": (IMAGE,), "controlnet": "/nowhere"}, "--controlnet /nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_said_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        checked_request("tiny-sd", "baseline", **options)
    assert message in str(error.value)


def test_masks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    small, black = tmp_path / "small.png", tmp_path / "black.png"
    Image.new("L", (64, 64), 255).save(small)
    Image.new("L", (128, 128), 0).save(black)
    for file, reason in ((small, "it has 64x64 pixels, and its image 128x128"), (black, "it is black")):
        with pytest.raises(WorkloadError, match=reason):
            checked_request("tiny-sd", "baseline", images=(IMAGE,), masks=(str(file),))


@pytest.mark.parametrize("model", ["flux2-klein-4b", "flux2-dev", "flux2-klein-9b-kv", "qwen-image-2.1"])
def test_models_that_draw_and_edit_do_what_is_given(model: str) -> None:
    """One class does both; several images are sources of one image, so they take one prompt a call."""
    name = f"synthetic:{model}"
    assert checked_request(name, "baseline").workload.task == "text"
    assert checked_request(name, "baseline", batches=(2,)).workload.batch == 2
    edit = checked_request(name, "baseline", prompts=[PROMPT], images=(IMAGE,))
    assert (edit.workload.task, edit.workload.strength, len(edit.workload.sources)) == ("edit", None, 1)
    assert "image" in edit.arguments(edit.workload.calls()[0])
    with pytest.raises(WorkloadError, match="one prompt a call with source images"):
        checked_request(name, "baseline", images=(IMAGE,), batches=(2,))
    with pytest.raises(Unsupported, match="no pipeline for the task 'inpaint'"):
        checked_request(name, "baseline", images=(IMAGE,), masks=(MASK,))


def test_a_model_without_such_a_pipeline_says_which_tasks_it_has() -> None:
    with pytest.raises(Unsupported, match=r"not trained to edit.*: text, image, inpaint, control"):
        checked_request("tiny-sd", "baseline", task="edit")


@pytest.mark.parametrize("task", ["image", "inpaint", "control"])
@pytest.mark.quick("control")
def test_plan_counts_the_encoder_of_pictures(task: Task) -> None:
    def peaks(task_of_call: Task) -> dict[str, int]:
        return predict(find_weightless("tiny-flux"), resolve("baseline"), task=task_of_call).stages

    assert "vae encoder" in peaks(task)
    assert "vae encoder" not in peaks("text")


def test_sdxl_casts_its_vae_back_after_encoding() -> None:
    from tests import families

    pipe: Any = for_task(families.upcasting(), "StableDiffusionXLImg2ImgPipeline")
    from vivace.runtime.noise import draw_noise_in_fp32

    pipe.unet.to(torch.float16)
    draw_noise_in_fp32(pipe)
    picture = pipe.image_processor.preprocess(Image.open(IMAGE).convert("RGB"))
    pipe.scheduler.set_timesteps(4)
    times = pipe.scheduler.timesteps[:1]
    latents = pipe.prepare_latents(
        picture, times, 1, 1, torch.float16, "cpu", torch.Generator().manual_seed(0)
    )
    assert latents.dtype == pipe.vae.dtype == torch.float16


@pytest.mark.parametrize(("recipe", "own"), [("baseline", []), ("bf16+cfg_cutoff(0.5)", ["cfg_cutoff(0.5)"])])
@pytest.mark.quick("baseline*")
def test_a_script_draws_the_same_from_a_source_image(recipe: str, own: list[str], tmp_path: Path) -> None:
    request = WorkloadRequest(images=(IMAGE,), masks=(MASK,), prompts=(PROMPT,), num_inference_steps=STEPS)
    prepared = checked_request("tiny-sd", recipe, **request.model_dump(exclude_unset=True))
    located, workload = prepared.located, prepared.workload
    written = write_script(
        located,
        prepared.recipe,
        "cpu",
        prompt=PROMPT,
        call=workload.call,
        threads=1,
        workload=workload,
        sources=source_files(located, workload, request),
    )
    assert written.own == own
    drawn = run(written.text, tmp_path).astype(float)
    session = open_session("tiny-sd", "inpaint", recipe, strength=0.9)
    assert np.abs(drawn - (draw(session)[0] * 255).round()).max() <= 1
    check(tmp_path)


def test_a_script_needs_a_file() -> None:
    prepared = checked_request("tiny-sd", "baseline", task="image")
    with pytest.raises(UsageError, match="a script needs a file to open; give --image FILE"):
        source_files(prepared.located, prepared.workload, WorkloadRequest(task="image"))


@pytest.mark.long
def test_bench_keeps_sources_and_judges_against_them(tmp_path: Path) -> None:
    run = vivace.bench(
        "tiny-flux",
        ["baseline", "taylorseer(hits=0.5)"],
        task="inpaint",
        num_inference_steps=6,
        prompts=[PROMPT],
        masks=(MASK,),
        images=(IMAGE,),
        text="embeddings",
        rivals=False,
        timing=Timing(rounds=1, repeats=1, max_warmup=1),
        store=tmp_path / "store",
    )
    baseline, cached = run.rows()
    assert baseline.num_denoiser_calls == cached.num_denoiser_calls == 6, "0.9 of 6, rounded up"
    for row in (baseline, cached):
        assert row.fidelity is not None
        assert row.fidelity.outside_psnr_db is not None
        assert row.fidelity.outside_psnr_db.point > 30
        assert row.fidelity.source_similarity is not None
    (source,) = baseline.record.trial.workload.sources
    kept = read_sources(tmp_path / "store" / "sources", baseline.record.trial.workload)
    assert set(kept) == {source.image, source.mask}
    assert "outside_psnr_db" in run.to_dicts()[0]
    assert baseline.stages_s["encode"] > 0
    page = page_of(answer_of_stores([tmp_path / "store"]))
    assert page.count('alt="source"') == page.count('alt="mask"') == 1
    damaged = image_path(tmp_path / "store" / "sources", str(source.image))
    Image.new("RGB", (128, 128)).save(damaged)
    with pytest.raises(VivaceError, match="was changed"):
        read_sources(tmp_path / "store" / "sources", baseline.record.trial.workload)


def outside(share: float) -> Fidelity:
    interval = Interval(share, share - 0.01, share + 0.01)
    kept = KeptShare(interval, interval, Worst(PROMPT, share, 1), share)
    return Fidelity(
        num_pictures=6,
        num_identical=0,
        num_prompts=6,
        psnr_db=None,
        worst_psnr_db=None,
        ssim=None,
        outside=kept,
        outside_of_baseline=Interval(0.97, 0.96, 0.98),
    )


def test_the_gate_holds_the_picture_outside_of_the_mask() -> None:
    limits = Limits(clip=None, witness=None)
    assert judge_figures(outside(0.95), None, limits, same_picture=False).gate is Gate.PASSED
    failed = judge_figures(outside(0.7), None, limits, same_picture=False)
    assert (failed.gate, failed.figure) == (Gate.FAILED, "outside")
    assert "match outside the mask 70.0 %" in failed.reason
    poor = replace(outside(0.83), outside_of_baseline=Interval(0.81, 0.8, 0.82))
    assert judge_figures(poor, None, limits, same_picture=False).gate is Gate.PASSED, (
        "no worse than the baseline"
    )


@pytest.mark.parametrize("kind", ["Img2Img", "Inpaint", "ControlNet"])
def test_sdxl_with_random_weights(kind: str) -> None:
    """Its batches hold sizes too, and are halved with the rest when guidance ends."""
    from tests import families

    pipe = for_task(families.build("sdxl"), f"StableDiffusionXL{kind}Pipeline")
    session = vivace.apply(pipe, "cfg_cutoff(0.5)+taylorseer(hits=0.5)")
    inputs = example_images(type(pipe).__name__, {"height": 64, "width": 64})
    strength = {} if kind == "ControlNet" else {"strength": 0.7}
    size = {} if kind == "Img2Img" else {"height": 64, "width": 64}
    image = session(
        prompt=[PROMPT] * 2,
        generator=[torch.Generator().manual_seed(k) for k in range(2)],
        num_inference_steps=6,
        guidance_scale=5.0,
        output_type="np",
        **{name: [picture] * 2 for name, picture in inputs.items()},
        **strength,
        **size,
    )
    steps = 6 if kind == "ControlNet" else 4
    assert np.asarray(image.images).shape == (2, 64, 64, 3)
    evidence = session.evidence()
    assert evidence["cache_calls"] == steps
    assert (evidence["guided_steps"], evidence["unguided_steps"]) == (steps // 2, steps // 2)
