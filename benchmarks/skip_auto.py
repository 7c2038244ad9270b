"""What quantize(skip=auto) saves of the image, against leaving no layer and against leaving as much at random.

    python -m benchmarks.skip_auto --limit-s 500
    python -m benchmarks.skip_auto --model tiny-flux --scheme fp8 --images 64

For each model and scheme the ways are: `none`, every layer that the scheme takes is quantised; `auto`, skip=auto; and
`random 1` to `random 3`, where layers are drawn and left while they fit into what `auto` left, in work and in weights.
Sensitivity is measured on the first prompts with seeds 0, 1, ...; what is compared comes from other seeds, all prompts
in turn.

The record has for each way and image the relative error of one prediction of the denoiser, at inputs of the unquantised
denoiser, from other parts of the denoising for each image; the fidelity of the image that is generated, with the
gate's figures; the gate's verdict on all of them; and the bytes of the denoiser's weights.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import click

from benchmarks.command import run
from benchmarks.record_files import read_lines
from vivace.benchmark.rounds.worker import import_all
from vivace.errors import VivaceError
from vivace.foundation.spec.limits import DEFAULT_LIMITS
from vivace.foundation.stats.equivalence import mean_interval
from vivace.machinery.quantization.layers import layers_of, replace_layer
from vivace.machinery.technique import component_of
from vivace.measure.folders import compare
from vivace.measure.machine import choose_device
from vivace.measure.scorer import ClipScorer
from vivace.measure.this_environment import environment
from vivace.models.find import find_model
from vivace.models.prompts import NUM_DEFAULT, PROMPT_SETS
from vivace.models.scorers import find_scorer
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import open_session
from vivace.runtime.session import Session

RECORD = Path(__file__).parents[1] / "results" / "skip-auto.jsonl"
MODELS = ("tiny-flux", "tiny-sd")
SCHEMES = ("fp8", "int4")
NUM_RANDOM = 3
FAILED_IN_PART = 4
_FIRST_SEED = 1000

Key = tuple[str, str]  # model, scheme
Case = dict[str, Any]


@click.command("skip_auto")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no case after this many seconds.")
@click.option("--model", "models", multiple=True, help="Default: tiny-flux and tiny-sd.")
@click.option("--scheme", "schemes", multiple=True, help="Default: fp8 and int4.")
@click.option("--images", type=click.IntRange(2, 1000), default=12, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def skip_auto(
    record: Path,
    limit_s: float | None,
    models: Sequence[str],
    schemes: Sequence[str],
    images: int,
    device: str,
) -> int:
    """Compare skip=auto with no skip and with random layers, one line per case; resumable."""
    stored = read_cases(record)
    import_all()
    chosen = choose_device(device)
    if chosen == "cpu":
        import torch

        torch.set_num_threads(1)
    here = environment(chosen)
    started = time.monotonic()
    failed, left = 0, []
    for model in models or MODELS:
        for scheme in schemes or SCHEMES:
            if (model, scheme) in stored:
                click.echo(f"{line(stored[model, scheme])} (in the record already)")
            elif limit_s is not None and time.monotonic() - started >= limit_s:
                left.append(f"{model} {scheme}")
            else:
                click.echo(f"{model} {scheme}: measuring", err=True)
                try:
                    case = measure(model, scheme, chosen, images)
                except (VivaceError, RuntimeError) as error:  # the others go on
                    click.echo(f"{model} {scheme}: failed: {(str(error).splitlines() or [repr(error)])[0]}")
                    failed += 1
                else:
                    _append(record, case | {"environment": here.model_dump(mode="json")})
                    click.echo(line(case))
    if left:
        click.echo(f"{limit_s:g} s are over; the same command goes on with {', '.join(left)}", err=True)
    return FAILED_IN_PART if failed else 0


def measure(model: str, scheme: str, device: str, num_images: int) -> Case:
    """Measure one case: every way on the same images."""
    located = find_model(model)
    prompts = (
        list(PROMPT_SETS[located.prompt_set][:NUM_DEFAULT])
        if located.entry is not None
        else ["a red circle above a blue square"]
    )
    pairs = [(prompts[k % len(prompts)], _FIRST_SEED + k) for k in range(num_images)]
    with (
        TemporaryDirectory(prefix="vivace-") as scratch,
        mock.patch.dict("os.environ", {"VIVACE_CACHE": scratch}),
    ):

        def opened(recipe: str) -> Session:
            return open_session(located, resolve(recipe), device)

        plain = opened("inference_mode")
        calls = [_one_call(plain, *pair, k, num_images) for k, pair in enumerate(pairs)]
        references = [_predict(plain, call) for call in calls]
        _draw(plain, pairs, Path(scratch) / "plain")
        started = time.perf_counter()
        auto = opened(f"quantize({scheme}, skip=auto)")
        measuring_s = time.perf_counter() - started
        effect = auto.effects["quantize@denoiser"]
        layers = _costs(plain, calls[:1], opened(f"quantize({scheme})"))
        budget = tuple(float(effect[f"denoiser.sensitive_share_of_{of}"]) for of in ("work", "weights"))
        named = {f"random {k + 1}": _at_random(layers, budget, k) for k in range(NUM_RANDOM)}
        ways = {}
        for way in ("none", "auto", *named):
            session = auto if way == "auto" else opened(f"quantize({scheme})")
            for name in named.get(way, []):  # not by skip=, whose patterns match parts of other names too
                kept = component_of(plain.pipe, "denoiser").get_submodule(name)
                replace_layer(component_of(session.pipe, "denoiser"), name, kept)
            folder = Path(scratch) / way.replace(" ", "-")
            _draw(session, pairs, folder)
            ways[way] = {
                "layers": _listed(auto) if way == "auto" else named.get(way, []),
                "weight_bytes": _weight_bytes(session),
                "prediction_errors": [
                    _relative(_predict(session, call), to) for call, to in zip(calls, references, strict=True)
                ],
                **_compared(Path(scratch) / "plain", folder, [prompt for prompt, _ in pairs]),
            }
        plain_bytes = _weight_bytes(plain)
    return {
        "model": model,
        "scheme": scheme,
        "images": num_images,
        "measuring_s": measuring_s,
        "plain_weight_bytes": plain_bytes,
        "share_of_work": budget[0],
        "share_of_weights": budget[1],
        "predicted_error": effect["denoiser.predicted_error"],
        "predicted_error_with_all": effect["denoiser.predicted_error_with_all"],
        "ways": ways,
    }


def _one_call(session: Session, prompt: str, seed: int, k: int, number: int) -> Any:
    """Generate an image; return the arguments of one of the denoiser's calls, of another part for each image."""
    import torch
    from torch.utils._pytree import tree_map_only

    calls: list[Any] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        calls.append(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs)))

    handle = component_of(session.pipe, "denoiser").register_forward_pre_hook(note, with_kwargs=True)
    try:
        session(prompt, generator=torch.Generator("cpu").manual_seed(seed), output_type="latent")
    finally:
        handle.remove()
    return calls[int(len(calls) * (k + 0.5) / number)]


def _predict(session: Session, call: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    args, kwargs = tree_map_only(torch.Tensor, torch.clone, call)
    with torch.no_grad():
        outputs = tree_leaves(component_of(session.pipe, "denoiser")(*args, **kwargs))
    return torch.cat([output.float().flatten() for output in outputs if isinstance(output, torch.Tensor)])


def _relative(output: Any, reference: Any) -> float:
    return float((output - reference).norm() / reference.norm())


def _draw(session: Session, draws: list[tuple[str, int]], folder: Path) -> None:
    import torch

    folder.mkdir()
    for k, (prompt, seed) in enumerate(draws):
        drawn = session(prompt, generator=torch.Generator("cpu").manual_seed(seed))
        drawn.images[0].save(folder / f"{k:04}.png")


def _compared(reference: Path, folder: Path, prompts: list[str]) -> dict[str, Any]:
    """Return the gate's figures and its verdict."""
    scorer = find_scorer("tiny-clip")
    names = [path.name for path in sorted(folder.iterdir())]
    compared = compare(reference, folder, names, prompts, ClipScorer(scorer.folder))
    limits = DEFAULT_LIMITS.for_scorer(scorer.id)
    judgement, close = compared.judge(limits, same_picture=True)
    pairs = compared.to_dict()["pairs"]
    figures = ("psnr_db", "ssim", "match", "clip_similarity")
    return {
        "against": {name: [pair["against"][name] for pair in pairs] for name in figures},
        "verdict": judgement.gate.value,
        "reason": judgement.reason,
        "fidelity": None if close is None else close.to_json(),
    }


def _costs(plain: Session, calls: list[Any], quantized: Session) -> dict[str, tuple[float, float]]:
    """Return the layers that the scheme takes, with their shares of the work and of the weights."""
    denoiser = component_of(plain.pipe, "denoiser")
    quantized_layers = {
        name: layer
        for name, layer in layers_of(denoiser).items()
        if type(component_of(quantized.pipe, "denoiser").get_submodule(name).weight) is not type(layer.weight)
    }
    work = dict.fromkeys(quantized_layers, 0.0)
    handles = []
    for name, layer in quantized_layers.items():

        def count(layer: Any, _: Any, output: Any, name: str = name) -> None:
            work[name] += layer.weight.numel() * output.numel() / layer.weight.shape[0]

        handles.append(layer.register_forward_hook(count))
    for call in calls:
        _predict(plain, call)
    for handle in handles:
        handle.remove()
    weights = {name: float(layer.weight.numel()) for name, layer in quantized_layers.items()}
    sums = math.fsum(work.values()), math.fsum(weights.values())
    return {name: (work[name] / sums[0], weights[name] / sums[1]) for name in quantized_layers}


def _at_random(layers: dict[str, tuple[float, float]], budget: tuple[float, ...], seed: int) -> list[str]:
    """Return random layers, each as long as it fits into the rest of the budget."""
    names = sorted(layers)
    random.Random(seed).shuffle(names)
    left = [budget[0], budget[1]]
    chosen = []
    for name in names:
        if all(cost <= rest for cost, rest in zip(layers[name], left, strict=True)):
            chosen.append(name)
            left = [rest - cost for cost, rest in zip(layers[name], left, strict=True)]
    return chosen


def _listed(session: Session) -> list[str]:
    listed = session.evidence()["denoiser.sensitive"]
    assert isinstance(listed, list)
    return [text.partition(":")[0] for text in listed]


def _weight_bytes(session: Session) -> int:
    """Return the bytes of the denoiser's weights, of quantised ones those that they store."""

    def stored(tensor: Any) -> int:
        if hasattr(tensor, "__tensor_flatten__"):
            return sum(stored(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return int(tensor.numel() * tensor.element_size())

    return sum(stored(weight) for weight in component_of(session.pipe, "denoiser").parameters())


def root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(math.fsum(error**2 for error in errors) / len(errors))


def line(case: Case) -> str:
    """Describe a case in one line."""
    parts = []
    for way in ("none", "auto"):
        outcome = case["ways"][way]
        parts.append(
            f"{way} {root_mean_square(outcome['prediction_errors']):.2%}, {_psnr(outcome):.1f} dB, {outcome['verdict']}"
        )
    others = [result for way, result in case["ways"].items() if way.startswith("random")]
    errors = sorted(root_mean_square(result["prediction_errors"]) for result in others)
    parts.append(
        f"random {errors[0]:.2%} to {errors[-1]:.2%}, "
        f"{min(map(_psnr, others)):.1f} to {max(map(_psnr, others)):.1f} dB"
    )
    gain = mean_interval(gains(case, "none"))
    between = "" if gain.low is None else f" [{gain.low:.2f}, {gain.high:.2f}]"
    return (
        f"{case['model']} {case['scheme']}, {case['images']} images: auto leaves {len(case['ways']['auto']['layers'])} "
        f"layers, {case['share_of_work']:.1%} of the work and {case['share_of_weights']:.1%} of the weights; "
        f"error of the prediction and PSNR: {'; '.join(parts)}; auto gains {gain.point:.2f} dB an image{between}"
    )


def gains(case: Case, over: str) -> list[float]:
    """Return for each image by how many decibels auto's is nearer to the unquantised model's than another way's."""
    pairs = zip(
        case["ways"]["auto"]["against"]["psnr_db"], case["ways"][over]["against"]["psnr_db"], strict=True
    )
    return [own - other for own, other in pairs if own is not None and other is not None]


def _psnr(way: dict[str, Any]) -> float:
    """Return the mean over the images that are not identical."""
    finite = [value for value in way["against"]["psnr_db"] if value is not None]
    return math.fsum(finite) / len(finite) if finite else math.inf


def read_cases(path: Path) -> dict[Key, Case]:
    """Read the cases of a record; empty if there is no such file.

    Raises:
        StoreError: the file holds something else.
    """
    return read_lines(path, line, lambda case: (case["model"], case["scheme"]))


def _append(record: Path, case: Case) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(case) + "\n")


if __name__ == "__main__":
    raise SystemExit(run(skip_auto))
