"""Compare `fused` with the best compiled recipes of a model, side by side on one GPU; of models without a fused form
their fastest recipes.

    python -m benchmarks.fused_models flux-dev --limit-s 400
    python -m benchmarks.fused_models flux2-klein-4b --rounds 2
    python -m benchmarks.fused_models chroma1-hd ernie-image --first 2 --steps 12     fewer recipes and steps
    python -m benchmarks.fused_models sana-1600m sana-sprint-1600m
    python -m benchmarks.fused_models later                       all of LATER, one after the other

Random weights, native size, the model's own number of steps; FLUX.1's prompts are encoded before, others' in the call.
Recipes are interleaved: each round of each recipe is a process of its own, and every second round runs in reverse.
Records are written after each round, to results/fused-model-MODEL.json (FLUX.1's to results/flux-fused-MODEL.json);
docs/performance/ tells what they mean. The same command resumes.
"""

from __future__ import annotations

import sys
import time

import click

import vivace
from benchmarks.command import Measuring, measures, run
from benchmarks.every_model import line
from benchmarks.record_files import write_records
from benchmarks.technique_cases import RESULTS, full_length
from vivace.benchmark import studies
from vivace.cli.display.progress_display import for_this_terminal
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Record
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of

_VAE = "channels_last@vae+compile@vae+gpu_postprocess"
_GRAPHS = "cuda_graph@denoiser,text_encoder,vae+gpu_postprocess"
_OF_FLUX = (
    "quantize(fp8_static)+channels_last@vae+compile@denoiser,vae+gpu_postprocess",
    f"fused(fp8, attention=fp8)+cuda_graph+{_VAE}",
    f"fused(fp8)+cuda_graph+{_VAE}",
    f"fused(bf16)+cuda_graph+{_VAE}",
    f"{_VAE}+compile(blocks=repeated)@denoiser",
)
"""The first is the fastest row of `every_technique`, its VAE compiled too. The last is what diffusers recommends in
bf16."""
_FP8 = "fused(fp8, attention=fp8, convolutions=fp8)@denoiser,vae"
_OF_OTHERS = (
    "baseline",
    f"{_FP8}+{_GRAPHS}",
    "quantize(fp8)+compile(blocks=repeated)",
    f"fused(bf16)@denoiser,vae+{_GRAPHS}",
    f"trim_text+{_FP8}+{_GRAPHS}",
    f"trim_text+{_FP8}+compile@text_encoder+{_GRAPHS}",
    f"trim_text+quantize(fp8)@text_encoder+{_FP8}+compile@text_encoder+{_GRAPHS}",
)
"""The third was the fastest before these models had a fused form. Of the text encoder's 17 ms in [klein] 4B, matmuls
take 6; compiled, the rest is fewer kernels."""
_OF_Z_IMAGE = (
    "baseline",
    f"{_FP8}+cuda_graph@text_encoder,vae+gpu_postprocess",
    "quantize(fp8)+compile(blocks=repeated)",
    "fused(bf16)@denoiser,vae+cuda_graph@text_encoder,vae+gpu_postprocess",
    f"trim_text+{_FP8}+{_GRAPHS}",
)
"""The last has padding left out, and a graph of the denoiser, which serves captions of up to 32, 64, ... tokens."""
_OF_QWEN = (
    "baseline",
    "fused(fp8, attention=fp8)+gpu_postprocess",
    "quantize(fp8)+compile(blocks=repeated)",
    "fused(bf16)+gpu_postprocess",
    "trim_text+fused(fp8, attention=fp8)+cuda_graph@denoiser,text_encoder+gpu_postprocess",
    "trim_text+fused(fp8, attention=fp8)+quantize(fp8)@text_encoder+cuda_graph@denoiser,text_encoder"
    "+gpu_postprocess",
)
"""Their denoisers take prompts at their own length, and a graph of each is captured anew; their text encoders'
graphs serve prompts of up to 32, 64, 128, ... tokens. Their VAEs have no fused form."""
_OF_KREA = (
    "baseline",
    "fused(fp8, attention=fp8)+cuda_graph@denoiser,text_encoder+gpu_postprocess",
    "quantize(fp8)+compile(blocks=repeated)",
    "fused(bf16)+gpu_postprocess",
)
"""As Qwen-Image's; which layers of its text encoder it reads is not known to `trim_text`."""
_OF_QWEN_EDIT = _OF_QWEN[:4]
"""With images to be edited, calls of its text encoder are not captured."""
_GRAPHS_OF_SD35 = "cuda_graph@denoiser,text_encoder,text_encoder_2,text_encoder_3,vae+gpu_postprocess"
_OF_SD35 = (
    "baseline",
    f"fused(fp8, convolutions=fp8)@denoiser,vae+{_GRAPHS_OF_SD35}",
    "quantize(fp8)+compile(blocks=repeated)",
    f"fused(bf16)@denoiser,vae+{_GRAPHS_OF_SD35}",
)
"""Its heads have 64 channels, and attention in fp8 is for 128."""
_GRAPHS_OF_TWO = "cuda_graph@denoiser,vae+gpu_postprocess"
_OF_LATER = (
    "baseline",
    f"{_FP8}+{_GRAPHS_OF_TWO}",
    f"fused(bf16)@denoiser,vae+{_GRAPHS_OF_TWO}",
    "quantize(fp8)+compile(blocks=repeated)",
)
_OF_CHROMA = tuple(text.replace(" attention=fp8,", "") for text in _OF_LATER)
"""Its attention has a mask, and Ideogram 4's heads 256 channels; cuDNN's in fp8 takes neither here."""
_OF_BASE = (*_OF_OTHERS[:2], _OF_OTHERS[3], _OF_OTHERS[2])
_OF_OTHER_BLOCKS = ("baseline", "quantize(fp8)+compile(blocks=repeated)", "compile(blocks=repeated)")
"""Of models without a fused form."""
_OF_SANA = (
    "baseline",
    f"compile@denoiser,vae+{_GRAPHS}",
    _GRAPHS,
    f"channels_last@vae+compile@denoiser,text_encoder,vae+{_GRAPHS}",
    f"quantize(fp8)+compile@denoiser,vae+{_GRAPHS}",
)
"""They have no fused form. Sana's denoiser was the fastest compiled, 1.70 times the baseline, and captured in a graph
1.28 times (results/every-model.json); both together, and the other components, were not measured before."""
_OF_SDXL = (
    "baseline",
    "fused(fp8, convolutions=fp8)@denoiser,vae+cuda_graph@denoiser,text_encoder,text_encoder_2,vae+gpu_postprocess",
    "compile+cuda_graph+gpu_postprocess",
    "fused(bf16)@denoiser,vae+cuda_graph@denoiser,text_encoder,text_encoder_2,vae+gpu_postprocess",
)
RECIPES = {
    "flux-dev": _OF_FLUX,
    "flux-schnell": _OF_FLUX,
    "flux2-klein-4b": _OF_OTHERS,
    "flux2-klein-9b": _OF_OTHERS,
    "flux2-dev": _OF_OTHERS,
    "z-image-turbo": _OF_Z_IMAGE,
    "qwen-image-2.1": _OF_QWEN,
    "qwen-image-2512": _OF_QWEN,
    "qwen-image-edit-2511": _OF_QWEN_EDIT,
    "krea-2-turbo": _OF_KREA,
    "krea-2-raw": _OF_KREA,
    "sdxl-turbo": _OF_SDXL,
    "sdxl-lightning-4step": _OF_SDXL,
    "hyper-sdxl-4step": _OF_SDXL,
    "sd35-large": _OF_SD35,
    "sd35-medium": _OF_SD35,
    "sana-1600m": _OF_SANA,
    "sana-sprint-1600m": _OF_SANA,
    "chroma1-hd": _OF_CHROMA,
    "longcat-image": _OF_LATER,
    "ernie-image": _OF_LATER,
    "ernie-image-turbo": _OF_LATER,
    "ideogram-4": _OF_CHROMA,
    "ovis-image-7b": _OF_OTHER_BLOCKS,
    "flux2-klein-base-4b": _OF_BASE,
    "flux2-klein-base-9b": _OF_BASE,
}
"""Of each model; the first is what the others are compared with."""
LATER = tuple(RECIPES)[-8:]


@click.command("fused_models")
@click.argument("names", metavar="MODEL...", nargs=-1, required=True, type=click.Choice([*RECIPES, "later"]))
@click.option("--rounds", type=click.IntRange(1, 10), default=2, show_default=True, help="Rounds per recipe.")
@click.option(
    "--only", multiple=True, metavar="RECIPE", help="These recipes instead; the first is compared with."
)
@click.option("--first", type=click.IntRange(1), help="The first so many recipes alone.")
@click.option("--steps", type=click.IntRange(1, 1000), help="At most; else the model's own number.")
@measures(record="results/fused-model-MODEL.json", repeats=4, warmup=2)
def fused_models(
    names: tuple[str, ...],
    how: Measuring,
    rounds: int,
    only: tuple[str, ...],
    first: int | None,
    steps: int | None,
) -> int:
    """Compare fused with the best compiled recipes of models on one GPU; resumable."""
    with studies.start_launcher(how.device) as launcher:
        for name in LATER if names == ("later",) else names:
            recipes = [resolve(text).text for text in (only or RECIPES[name])[:first]]
            if how.is_over:
                return how.ended(name)
            if status := _compare(name, how, rounds, recipes, steps, launcher):
                return status
    return 0


def _compare(
    name: str, how: Measuring, rounds: int, recipes: list[str], steps: int | None, launcher: Launcher
) -> int:
    is_flux = name.startswith("flux-")
    record = how.record or RESULTS / f"{'flux-fused' if is_flux else 'fused-model'}-{name}.json"
    measured: dict[str, Record] = {}
    own = full_length(name)
    for number in range(1, rounds + 1):
        for recipe in recipes if number % 2 else reversed(recipes):
            if how.is_over:
                return how.ended(f"round {number} of {recipe}")
            before = time.monotonic()
            # Rounds that the store holds are not measured again, so this adds one.
            (measured[recipe],) = vivace.bench(
                SYNTHETIC + name,
                [recipe],
                text="embeddings" if is_flux else "prompts",
                timing=how.timing.model_copy(update={"rounds": number}),
                device=how.device,
                store=how.store,
                quality=False,
                rivals=False,
                progress=for_this_terminal(),
                launcher=launcher,
                num_inference_steps=own if steps is None else min(steps, own),
            )
            records = [measured[text] for text in recipes if text in measured]
            write_records(record, records)
            row = next(row for row in rows_of(records) if row.record is measured[recipe])
            click.echo(f"{line(row)} ({time.monotonic() - before:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(run(fused_models))
