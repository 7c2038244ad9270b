"""Facts about diffusers' classes that no attribute has: read from their source, all in this file.

Each function names what it looks for. A later diffusers that words it otherwise fails the tests of this file, and not a
user's image.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from types import CodeType, FunctionType, MethodType
from typing import Any

from vivace.errors import Unsupported
from vivace.machinery.technique.anatomy import call_of, call_parameters

_PROCESSORS = re.compile(r"attn_proc|set_processor|processor = ")
_DENOISER_CALL = re.compile(r"self\.(?:unet|transformer)\(")
_ASKS_PYTORCH = ("scaled_dot_product_attention", "dispatch_attention_fn")


def call_code(pipe: Any) -> str:
    """Return the source of the pipeline's call; Unsupported where it was typed into an interpreter, or made by exec."""
    return _source(call_of(pipe).function)


@functools.cache
def _source(of: Any) -> str:
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):
        raise Unsupported(
            f"how {getattr(of, '__qualname__', of)} works is read from its source, and it has none: it was typed into "
            "an interpreter or made by exec; write the class into a file and import it"
        ) from None


def encoded_names(pipe: Any) -> tuple[str | None, ...]:
    """Return the call's arguments for the values that `encode_prompt` returns; None: it has none, and computes it
    again."""
    tree = ast.parse(textwrap.dedent(_source(type(pipe).encode_prompt)))
    *_, last = (node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    taken = call_parameters(pipe)
    values = last.elts if isinstance(last, ast.Tuple) else []
    named = [[n.id for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in taken] for value in values]
    return tuple(names[0] if names else None for names in named)


def names_its_calls(pipe: Any) -> bool:
    """Whether the pipeline names its calls of the denoiser for caches; of FLUX's pipelines only text-to-image does."""
    return "cache_context" in call_code(pipe)


def number_of_denoiser_calls(pipe: Any) -> int:
    return len(_DENOISER_CALL.findall(call_code(pipe)))


def skips_layers(pipe: Any) -> bool:
    """Whether a call of the denoiser leaves out layers, as Stable Diffusion 3's second guidance does."""
    return "skip_layers=" in call_code(pipe)


def guides_by_the_usual_scale(pipe: Any) -> bool:
    """Whether the call guides by `guidance_scale`, and not by `true_cfg_scale`."""
    return "do_classifier_free_guidance" in call_code(pipe) and "true_cfg_scale" not in call_parameters(pipe)


def doubles_latents(pipe: Any) -> bool:
    """Whether the call puts the unconditional rows before as many conditional ones."""
    return hasattr(type(pipe), "do_classifier_free_guidance") and "torch.cat([latents] * 2)" in call_code(
        pipe
    )


def replaces_processors(pipe: Any) -> bool:
    """Whether the call gives the denoiser other attention processors, as those with PAG or SAG do."""
    return _PROCESSORS.search(call_code(pipe)) is not None


def rounds_steps_up(pipe: Any) -> bool:
    """Whether the pipeline rounds the share of the steps up. Flow-matching pipelines do; see `spec.workload`."""
    timesteps = getattr(type(pipe), "get_timesteps", None)
    try:
        return timesteps is not None and "int(num_inference_steps * strength)" not in _source(timesteps)
    except Unsupported:
        return True  # then no call is refused for running no step


def passed_to_set_timesteps(pipe: Any) -> set[str]:
    code = call_code(pipe)
    # With sigmas of their own where the call has none.
    passed = {"sigmas"} if "sigmas is None" in code else set()
    return passed | ({"mu"} if "mu=mu" in code or '{"mu": mu}' in code else set())


def asks_the_scheduler_for_flow_sigmas(pipe: Any) -> bool:
    """Whether the call passes sigmas only where the scheduler does not make those of flow matching itself."""
    return "use_flow_sigmas" in call_code(pipe)


def passes_sigmas_as_an_array(pipe: Any) -> bool:
    return "np.linspace" in call_code(pipe)


def passes_a_shift_to_dynamic_schedulers(pipe: Any) -> bool:
    """Whether the call passes `mu` where the scheduler shifts dynamically, as Stable Diffusion 3's does."""
    return 'scheduler_kwargs["mu"] = mu' in call_code(pipe)


def never_asks_pytorch(layer: Any) -> bool:
    """Whether an attention layer's processor computes attention itself, by its methods and what they name."""
    return not _asks(layer.processor, set())


def _asks(value: Any, seen: set[int]) -> bool:
    """Whether code that calling a value runs names a function of PyTorch's attention, by any name."""
    if getattr(value, "__name__", None) in _ASKS_PYTORCH:
        return True
    if id(value) in seen or getattr(value, "__module__", None) in (None, "builtins", "typing"):
        return False
    seen.add(id(value))
    if isinstance(value, MethodType | functools.partial):
        return _asks(value.func if isinstance(value, functools.partial) else value.__func__, seen)
    if isinstance(value, FunctionType):
        names = _names_of(value.__code__)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        called = [value.__globals__[name] for name in names if name in value.__globals__]
        return any(name in _ASKS_PYTORCH for name in names) or any(_asks(v, seen) for v in (*called, *cells))
    kind = value if isinstance(value, type) else type(value)
    if not callable(getattr(kind, "__call__", None)) or kind.__module__.startswith("torch."):  # noqa: B004
        return False
    kept = () if isinstance(value, type) else vars(value).values() if hasattr(value, "__dict__") else ()
    own = [v for base in kind.__mro__ if base.__module__ != "builtins" for v in vars(base).values()]
    functions = [v for v in own if isinstance(v, FunctionType)]
    return any(_asks(each, seen) for each in (*functions, *kept))


def _names_of(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_of, inner))
