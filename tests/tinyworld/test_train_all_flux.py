"""What carries a training from call to call, and the driver, with stages that cost nothing."""

import importlib
import json

import pytest
import torch

from tests.tinyworld.test_training import small_training
from tinyworld import carry, clip, flux, loop, networks, train_all_flux, train_t5


def finish(out, name, finished=True):
    (out / f"{name}.json").write_text(json.dumps({"finished": finished}))


def test_parts_travel_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(carry, "PART_BYTES", 4096)
    out, bag, back = (tmp_path / name for name in ("out", "bag", "back"))
    (out / "model").mkdir(parents=True)
    (out / "model" / "weights.safetensors").write_bytes(bytes(range(256)) * 50)
    (out / "half.part").mkdir()
    (out / "half.part" / "x").write_text("unfinished")
    finish(out, "small", False)
    carry.pack(out, bag)
    assert len(list(bag.glob("carry.0*"))) > 3
    assert max(path.stat().st_size for path in bag.iterdir()) <= 4096
    carry.unpack(bag, back)
    assert (back / "model" / "weights.safetensors").read_bytes() == bytes(range(256)) * 50
    assert not (back / "half.part").exists()
    monkeypatch.setattr(carry, "PART_BYTES", 2**20)
    carry.pack(out, bag, frozenset({"model"}))
    assert len(list(bag.glob("carry.0*"))) == 1, "no part of the old set is left"
    (bag / "carry.000").write_bytes(b"torn")
    with pytest.raises(ValueError, match="damaged"):
        carry.unpack(bag, back)


def test_a_carried_training_goes_on_where_it_was(tmp_path):
    out, bag, back = (tmp_path / name for name in ("out", "bag", "back"))
    out.mkdir()
    first = small_training(out / "small.pt", loop.Budget(steps=300))
    start = first.loss()[0].item()
    first.run()
    finish(out, "small", False)
    carry.pack(out, bag)
    carry.unpack(bag, back)
    second = small_training(back / "small.pt", loop.Budget(steps=320))
    assert second.step == 300
    for key, value in second.parameters.items():
        assert torch.allclose(value, first.parameters[key], rtol=1e-3, atol=1e-6)
        assert second.optimizer.state[value]["exp_avg"].abs().sum() == 0
        assert second.optimizer.state[value]["exp_avg_sq"].sum() > 0
    assert second.run()["loss"] < 0.7 * start
    finish(out, "small")
    carry.pack(out, bag)
    carry.unpack(bag, tmp_path / "third")
    assert not (tmp_path / "third" / "small.pt").exists(), "a finished training has its folder"


STAGE = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
{}
"""


def plan(tmp_path, monkeypatch, scripts, after, limit_s=200.0):
    """A plan whose stage NAME runs scripts[NAME]."""
    package = tmp_path / "tinyworld"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    for name, script in scripts.items():
        (package / f"{name}.py").write_text(STAGE.format(script))
    monkeypatch.setattr(train_all_flux, "POLL_S", 0.05)
    monkeypatch.chdir(tmp_path)  # python -m looks here first
    stages = tuple(train_all_flux.Stage(name, name, name, 1.0, after=after.get(name, ())) for name in scripts)
    return train_all_flux.StageRunner(tmp_path / "out", tmp_path / "bring", limit_s, stages=stages)


DONE = '(out / "{0}").mkdir(); (out / "{0}.json").write_text(\'{{"finished": true}}\'); print(*sys.argv[1:])'


def test_stages_run_in_order_and_only_once(tmp_path, monkeypatch, capsys):
    checks_the_first = 'assert (out / "one.json").exists()\n'
    made = plan(
        tmp_path,
        monkeypatch,
        {"two": checks_the_first + DONE.format("two"), "one": DONE.format("one")},
        {"two": ("one",)},
    )
    assert made.run()
    output = capsys.readouterr().out
    assert output.index("one ended") < output.index("two starts")
    carry.unpack(tmp_path / "bring", tmp_path / "back")
    assert carry.is_finished(tmp_path / "back", "two")
    again = train_all_flux.StageRunner(tmp_path / "out", tmp_path / "bring", 200.0, stages=made.stages)
    assert again.run()
    assert "starts" not in capsys.readouterr().out


def test_a_stage_that_fails_is_tried_once_more_the_plain_way(tmp_path, monkeypatch):
    script = 'sys.exit("no") if "--no-graph" not in sys.argv else None\n' + DONE.format("one")
    assert plan(tmp_path, monkeypatch, {"one": script}, {}).run()
    log = (tmp_path / "out" / "one.log").read_text()
    assert log.startswith("no\n")
    assert "--no-compile" in log
    broken = plan(tmp_path, monkeypatch, {"bad": "sys.exit(3)"}, {})
    assert not broken.run()
    assert broken.tries == {"bad": 2}


def test_the_limit_is_kept_and_what_there_is_is_brought(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_all_flux, "STOP_MARGIN_S", 1.5)
    monkeypatch.setattr(train_all_flux, "BRING_MARGIN_S", 0.5)
    script = '(out / "one.json").write_text(\'{"finished": false}\'); time.sleep(600)'
    made = plan(tmp_path, monkeypatch, {"one": script}, {}, limit_s=2.0)
    made.stages = (train_all_flux.Stage("one", "one", "one", 1.0, least_s=0.0),)
    assert not made.run()
    assert train_all_flux.time.perf_counter() - made.started < 2.0
    assert "did not stop in time" in capsys.readouterr().out
    carry.unpack(tmp_path / "bring", tmp_path / "back")
    assert (tmp_path / "back" / "one.log").exists()


def test_the_plan_fits_three_calls():
    names = [stage.name for stage in train_all_flux.STAGES]
    minutes = {stage.name: stage.minutes for stage in train_all_flux.STAGES}
    assert all(need in names for stage in train_all_flux.STAGES for need in stage.after)
    for stage in train_all_flux.STAGES:
        assert importlib.import_module(f"tinyworld.{stage.module}").main
    made = {stage.name: stage.makes for stage in train_all_flux.STAGES}
    assert made == {
        "vae-16": networks.vae_name(flux.CHANNELS),
        "clip": clip.FOLDER,
        "t5": train_t5.FOLDER,
        "flux-teacher": flux.TEACHER_FOLDER,
        "flux-student": flux.FOLDER,
        "flux-schnell": flux.SCHNELL_FOLDER,
        "tiny-vae-16": networks.TINY_VAE_FOLDERS[flux.CHANNELS],
    }
    usable = 595 - train_all_flux.STOP_MARGIN_S
    start_s = 70  # imports, captions, compiling and the latents, as measured
    assert start_s + 60 * minutes["clip"] <= usable
    assert start_s + 60 * (minutes["flux-teacher"] + minutes["flux-student"]) <= usable
    assert start_s + 60 * max(minutes["flux-schnell"], minutes["tiny-vae-16"]) <= usable


def test_an_earlier_teacher_is_trained_on(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        train_all_flux.subprocess, "Popen", lambda command, **_: commands.append(command) or FinishedProcess()
    )
    made = train_all_flux.StageRunner(
        tmp_path / "out", tmp_path / "bring", 595.0, start_from=tmp_path / "old"
    )
    made.out.mkdir()
    for stage in train_all_flux.STAGES:
        made._start(stage, 0)
    made._collect()
    started_from = {
        stage.name: "--start-from" in command
        for stage, command in zip(train_all_flux.STAGES, commands, strict=True)
    }
    assert {name for name, on in started_from.items() if on} == {"t5", "flux-teacher"}


class FinishedProcess:
    returncode = 0

    def poll(self) -> int:
        return 0
