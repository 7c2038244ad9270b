"""`vivace.load` and `vivace.apply`: the rest of the package is imported when they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vivace.foundation.spec.task_names import Task

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from vivace.runtime.session import Session


def load(model: str, recipe: str = "baseline", *, device: str = "auto", task: Task | None = None) -> Session:
    """Load a model, apply a recipe and return the session.

    Args:
        model: e.g. "tiny-sd", "sdxl", "synthetic:sdxl" (its architecture with random weights), "org/repo@revision" on
            the Hugging Face hub, the path of a folder that holds a model_index.json, or of a .safetensors file.
        recipe: e.g. "bf16+cfg_cutoff(0.4)"; "baseline" is the model as published, "best" the best known that keeps
            the image on this card: the session's `recipe` and first warning say what that is.
        device: "auto" (a GPU if there is one), "cpu", "cuda" (AMD's GPUs too), "xpu" or "mps".
        task: "image", "inpaint", "control" or "edit" for a session that is called with images: `image`,
            `mask_image`, `strength`, ... of the diffusers pipeline; None for what the model is published for.

    Raises:
        UnknownModel, UnusableModel, RecipeError, Unsupported, NoEffect: see `vivace.errors`.
    """
    from vivace.evidence.recommendation.best import best_recipe, is_best
    from vivace.runtime.opening import load_session

    if not is_best(recipe):
        return load_session(model, recipe, device, task)
    best = best_recipe(recipe, model, device=device, task=task)
    session = load_session(model, best.recipe, device, task)
    session.warnings.insert(0, str(best))
    return session


def apply(pipe: DiffusionPipeline, recipe: str = "baseline", *, prompts: Sequence[str] = ()) -> Session:
    """Apply a recipe to an existing diffusers pipeline, in place, and return the session.

    Noise is drawn as diffusers does, in the dtype of the latents. `vivace.load` and `vivace.bench` draw it in fp32.

    Args:
        pipe: the pipeline; it is changed.
        recipe: e.g. "bf16+cfg_cutoff(0.4)".
        prompts: the prompts of later calls, for techniques that adapt to them: quantize(fp8_static).

    Raises:
        RecipeError, Unsupported, NoEffect: see `vivace.errors`. After an error the pipeline is as it was before,
            unless weights have been changed already; then the message says so, and it must be loaded again.
    """
    from vivace.runtime.opening import apply_recipe

    return apply_recipe(pipe, recipe, prompts)
