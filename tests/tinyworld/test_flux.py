"""The FLUX family on a CPU: what training gives the transformer is what FluxPipeline gives it."""

import argparse
import json
from dataclasses import replace

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from tinyworld import (
    clip,
    evaluate,
    evaluate_flux,
    flux,
    loop,
    networks,
    table,
    tokenizer,
    train_flux,
    train_schnell,
)  # fmt: skip

pytestmark = pytest.mark.long  # how the embedded models came to be, not what vivace does
PROMPTS = ["a red circle above a blue square", "a zebra 🙂 żółw"]


def small_transformer(guidance=True):
    return FluxTransformer2DModel(
        in_channels=flux.TOKEN_WIDTH,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=networks.TEXT_WIDTH,
        pooled_projection_dim=networks.TEXT_WIDTH,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 14, 14),
    )


@pytest.fixture
def small(monkeypatch):
    shallow = flux.T5Config(
        vocab_size=len(tokenizer.build()),
        d_model=128,
        d_kv=32,
        num_heads=4,
        d_ff=128,
        num_layers=1,
        dropout_rate=0.0,
    )
    monkeypatch.setattr(flux, "build_transformer", small_transformer)
    monkeypatch.setattr(flux, "build_clip_text", lambda: networks.build_text_encoder(layers=1))
    monkeypatch.setattr(flux, "build_t5", lambda: flux.T5EncoderModel(shallow))


def toy(batch):
    return argparse.Namespace(device="cpu", no_compile=True), batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Untrained pipelines of the true sizes, as training would write them."""
    torch.manual_seed(0)
    weights = tmp_path_factory.mktemp("weights")
    vae, transformer = networks.build_vae(flux.CHANNELS), flux.build_transformer()
    flux.save(weights / flux.FOLDER, vae, transformer, flux.build_clip_text(), flux.build_t5())
    flux.save_schnell(weights / flux.SCHNELL_FOLDER, flux.build_transformer(guidance=False))
    return weights


@pytest.fixture(scope="module")
def pipe(folder):
    pipe = FluxPipeline.from_pretrained(folder / flux.FOLDER)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noises(number):
    shape = (1, flux.CHANNELS, networks.LATENT_SIDE, networks.LATENT_SIDE)
    return torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k in range(number)])


@torch.no_grad()
def test_training_and_the_pipeline_give_the_same_prediction(pipe):
    """Packing, places, both encoders, the scale of sigma and of guidance: every call of a whole sampling."""
    calls = []
    hook = pipe.transformer.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    try:
        ends = pipe(
            PROMPTS,
            num_inference_steps=flux.STEPS,
            guidance_scale=2.5,
            generator=[torch.Generator().manual_seed(k) for k in range(2)],
            output_type="latent",
            **flux.CALL,
        ).images
    finally:
        hook.remove()
    assert len(calls) == flux.STEPS
    ids = torch.tensor(tokenizer.encode(tokenizer.build(), PROMPTS))
    embeddings = flux.encode(pipe.text_encoder, pipe.text_encoder_2, ids)
    where, levels = flux.position_ids("cpu"), flux.sigmas(flux.STEPS)
    latents = flux.pack(noises(2))
    for step, (arguments, predicted) in enumerate(calls):
        assert torch.allclose(arguments["hidden_states"], latents, atol=1e-4)
        if step in (0, 9, 27):
            sigma = torch.full((2,), levels[step])
            made = flux.velocity(pipe.transformer, latents, sigma, embeddings, where, torch.full((2,), 2.5))
            assert torch.allclose(made, predicted, atol=1e-4), step
            other = flux.velocity(pipe.transformer, latents, sigma, embeddings, where, torch.full((2,), 5.0))
            assert not torch.allclose(other, predicted, atol=1e-4), "the guidance scale is heard"
        latents = latents + (levels[step + 1] - levels[step]) * predicted
    assert torch.allclose(ends, latents, atol=1e-4)


@torch.no_grad()
def test_the_training_loss_calls_the_transformer_as_the_pipeline_does(pipe):
    """With the picture unknown (sigma 1) the loss's input is the sampler's first, and so is its prediction."""
    args, batch = toy(2)
    ids = torch.tensor(tokenizer.encode(tokenizer.build(), PROMPTS))
    loss = train_flux.TeacherLoss(pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, ids, args, batch)
    picture, noise = torch.randn(2, flux.TOKENS, flux.TOKEN_WIDTH), flux.pack(noises(2))
    first = []
    hook = pipe.transformer.register_forward_hook(lambda m, a, output: first.append(output[0].detach()))
    try:
        value, _ = loss.compute(picture, ids, noise, torch.ones(2), torch.ones(2))
        pipe(
            PROMPTS,
            num_inference_steps=1,
            guidance_scale=1.0,
            generator=[torch.Generator().manual_seed(k) for k in range(2)],
            output_type="latent",
            **flux.CALL,
        )
    finally:
        hook.remove()
    assert torch.allclose(first[0], first[1], atol=1e-4)
    assert torch.allclose(value, (first[1] - (noise - picture)).square().mean(), rtol=1e-3)


def test_the_true_velocity_leads_the_scheduler_to_the_picture():
    scheduler, picture, noise = flux.build_scheduler(), torch.randn(1, 64, 64), torch.randn(1, 64, 64)
    scheduler.set_timesteps(sigmas=flux.sigmas(flux.STEPS)[:-1])
    latents = noise
    for time in scheduler.timesteps:
        latents = scheduler.step(noise - picture, time, latents, return_dict=False)[0]
    assert torch.allclose(latents, picture, atol=1e-5)


def test_packing_is_the_pipelines_and_comes_back():
    latents = noises(2)
    side = networks.LATENT_SIDE
    assert torch.equal(flux.pack(latents), FluxPipeline._pack_latents(latents, 2, flux.CHANNELS, side, side))
    assert torch.equal(flux.unpack(flux.pack(latents)), latents)


def test_a_plain_load_draws_anything(pipe, folder):
    for prompt in ("", "🙂 żółw 中文", "word " * 1000):
        made = pipe(prompt, num_inference_steps=1, output_type="np", **flux.CALL).images
        assert made.shape == (1, 128, 128, 3)
    fast = flux.load_schnell(folder)
    fast.set_progress_bar_config(disable=True)
    assert not fast.transformer.config.guidance_embeds
    steps = flux.SCHNELL_STEPS
    assert fast("a red circle", num_inference_steps=steps, guidance_scale=0.0, **flux.CALL).images[
        0
    ].size == (128, 128)


@torch.no_grad()
def test_guidance_can_be_built_in(small):
    torch.manual_seed(0)
    student = flux.build_transformer()
    fast = flux.without_guidance(student)
    latents, where = flux.pack(noises(2)), flux.position_ids("cpu")
    embeddings = flux.PromptEmbeddings(torch.randn(2, 32, 128), torch.randn(2, 128))
    sigma = torch.tensor([0.3, 0.9])
    guided = flux.velocity(student, latents, sigma, embeddings, where, torch.full((2,), flux.GUIDANCE))
    assert torch.allclose(flux.velocity(fast, latents, sigma, embeddings, where, None), guided, atol=1e-5)


def losses(small_batch=8):
    """The three losses over one random picture under four captions."""
    torch.manual_seed(0)
    args, batch = toy(small_batch)
    words = tokenizer.build()
    prompts = ["a red circle", "a blue square", "a green star", "a pink cross"]
    ids = torch.tensor(tokenizer.encode(words, prompts))
    clip, t5 = flux.build_clip_text(), flux.build_t5()
    teacher, student = flux.build_transformer(), flux.build_transformer()
    flux.init_adaln_zero(student)
    pairs = ids[:, None].repeat(1, 2, 1)
    pool = 3 * torch.randn(1, flux.TOKENS, flux.TOKEN_WIDTH).repeat(4, 1, 1)  # one picture: soon learned
    made = {
        "teacher": train_flux.TeacherLoss(student, clip, t5, pairs, args, batch),
        "student": train_flux.StudentLoss(student, teacher, clip, t5, pairs, args, batch),
    }
    for loss in made.values():
        loss.latents = pool
    fast = flux.without_guidance(student)
    made["schnell"] = train_schnell.SchnellLoss(fast, clip, t5, ids, args, batch)
    made["schnell"].states = train_schnell.Trajectories(teacher, clip, t5, args).pool(ids)  # type: ignore[attr-defined]
    return made, {"teacher": student, "student": student, "schnell": fast}


@pytest.mark.parametrize("stage", ["teacher", "student", "schnell"])
@pytest.mark.soak
def test_the_losses_of_flux_fall_on_a_small_problem(small, tmp_path, stage):
    made, models = losses()
    start = sum(made[stage]()[0].item() for _ in range(4)) / 4
    training = loop.Loop(
        stage,
        {"model": models[stage]},
        made[stage],
        figures=(),
        rate=3e-3,
        budget=loop.Budget(steps=25, print_every_s=1e9),
        checkpoint=tmp_path / "x.pt",
        warm_up=5,
    )
    training.run()
    end = sum(made[stage]()[0].item() for _ in range(4)) / 4
    assert end < 0.8 * start


@pytest.mark.soak
def test_the_largest_loss_is_one_graph(small):
    """A break in the graph, or a wait for the device, would end the capture on a GPU: seen here, on a CPU."""
    made, _ = losses(4)
    loss = made["student"]  # the others' calls are among its own
    torch._dynamo.reset()
    loss.compute = torch.compile(loss._compute, backend="eager", fullgraph=True, dynamic=False)
    assert torch.isfinite(loss()[0])


def test_noise_levels_reach_both_ends():
    levels = train_flux.noise_levels(1000, "cpu")
    assert levels.min() < 0.01
    assert levels.max() > 0.99
    assert 0.45 < levels.mean() < 0.55
    assert ((levels > 0.3) & (levels < 0.7)).float().mean() > 0.5


def test_times_are_not_rounded_under_autocast(small):
    transformer = flux.build_transformer()
    flux.embed_latents_in_fp32(transformer)
    embeddings = flux.PromptEmbeddings(torch.randn(1, 32, 128), torch.randn(1, 128))
    timesteps = []
    transformer.time_text_embed.register_forward_hook(lambda m, args, output: timesteps.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        flux.velocity(
            transformer,
            torch.randn(1, 64, 64),
            torch.tensor([0.7013]),
            embeddings,
            flux.position_ids("cpu"),
            torch.ones(1),
        )
    assert timesteps[0].item() == pytest.approx(701.3, abs=0.01)


def num_bytes(model):
    """As fp16 safetensors; their headers come on top."""
    return 2 * networks.num_parameters(model)


def test_sizes_and_widths_fit_the_budget():
    with torch.device("meta"):
        models = {
            "tiny-flux transformer": (flux.build_transformer(), 8.2),
            "tiny-flux-schnell transformer": (flux.build_transformer(guidance=False), 8.2),
            "16-channel VAE": (networks.build_vae(flux.CHANNELS), 2.6),
            "tiny VAE": (networks.build_tiny_vae(flux.CHANNELS), 0.95),
            "CLIP text": (flux.build_clip_text(), 1.0),
            "T5": (flux.build_t5(), 1.2),
            "tiny-clip": (clip.build(), 3.0),
        }
    for name, (model, limit_mb) in models.items():
        assert num_bytes(model) < limit_mb * 1e6, name
        if "VAE" in name:
            continue
        for path, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                assert layer.in_features % 32 == layer.out_features % 32 == 0, (name, path)
    tiny_sd = sum(
        file.stat().st_size
        for folder in (networks.SD_FOLDER, networks.TINY_VAE_FOLDER)
        for file in (evaluate.WEIGHTS / folder).rglob("*")
        if file.is_file()
    )
    new = sum(num_bytes(model) for model, _ in models.values())
    assert tiny_sd + new + 400_000 < 40e6, "headers, configs and tokenizers come on top"


def test_a_cache_reuses_more_steps_at_higher_thresholds(folder):
    setting = replace(evaluate_flux.DEFAULT, dtype="fp32", steps=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_flux, "THRESHOLDS", (0.0, 1e9))
        rows = evaluate_flux.measure_cache(folder, setting, PROMPTS, "cpu", evaluate.Scorer(1))
    assert [row["hit_rate"] for row in rows] == [0, pytest.approx(5 / 6)], "the first step is always new"
    assert rows[0]["psnr_db"] is None or rows[0]["psnr_db"] > 60
    assert rows[1]["psnr_db"] < 60


@pytest.mark.soak
def test_the_evaluation_writes_a_record_that_fills_the_page(folder, tmp_path, monkeypatch):
    networks.save_tiny_vae(folder / evaluate_flux.TINY_VAE_FOLDER, networks.build_tiny_vae(flux.CHANNELS))
    clip.save(folder / clip.FOLDER, clip.build())
    monkeypatch.setattr(evaluate_flux, "THRESHOLDS", (0.1,))
    monkeypatch.setattr(evaluate_flux, "DEFAULT", replace(evaluate_flux.DEFAULT, steps=2))
    monkeypatch.setattr(evaluate_flux, "VARIATIONS", (replace(evaluate_flux.SCHNELL, steps=1, dtype="fp32"),))
    record = tmp_path / "record.json"
    (tmp_path / "flux-student.json").write_text(
        json.dumps({"name": "flux-student", "steps": 2, "seconds": 1.0, "planned_s": 60.0})
    )
    toy = ["--captions", "2", "--cache-prompts", "1", "--device", "cpu", "--training", str(tmp_path)]
    command = [
        "x",
        "--weights",
        str(folder),
        "--record",
        str(record),
        *toy,
        "--pictures",
        str(tmp_path / "sheets"),
    ]
    monkeypatch.setattr("sys.argv", command)
    evaluate_flux.main()
    made = json.loads(record.read_text())
    expected = {(model, figure) for model, row in evaluate_flux.GATES.items() for figure in row}
    assert {(gate["model"], gate["figure"]) for gate in made["gates"]} == expected
    assert made["clip"]["accuracies"]["retrieval"]["accuracy"] < 0.5, "untrained"
    page = table.filled(table.PAGE.read_text(), made, table.FLUX_TABLES)
    assert "right caption among 64" in page
    assert (tmp_path / "sheets" / "tiny-flux.png").exists()
