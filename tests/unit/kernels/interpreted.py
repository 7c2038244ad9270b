"""Check every kernel on the CPU: `TRITON_INTERPRET=1 python -m tests.unit.kernels.interpreted`.

The interpreter runs a launch's programs one after another. Here half of the launches, at random, run from the last one
to the first: a program that writes what is another's would otherwise go unseen, if that one writes it again later.
"""

import random
from typing import Any
from unittest import mock

import torch
from triton.runtime import interpreter

from tests import fused_kernels as kernels
from tests.unit.fused import test_krea2 as krea2
from tests.unit.fused import test_later_models as later
from tests.unit.fused import test_qwen_image as qwen_image
from tests.unit.fused import test_qwen_image21 as qwen_image21
from tests.unit.fused import test_sd3 as sd3
from tests.unit.fused.test_flux import target
from vivace.machinery.fused import operations
from vivace.techniques.fused import Fused


def accept_loop_bounds() -> None:
    """Let kernels loop up to an argument: Triton 3.6 holds it as an array of one element, which NumPy 2.4 takes for no
    index."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def reverse_launches(seed: int) -> None:
    """Let half of the launches run their programs from the last to the first."""
    chance = random.Random(seed)
    launch, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx
    is_reversed = False

    def chosen(self: Any, *args: Any, **more: Any) -> None:
        nonlocal is_reversed
        is_reversed = chance.random() < 0.5
        launch(self, *args, **more)

    def moved(*index: int) -> None:
        if is_reversed:
            index = tuple(size - 1 - at for size, at in zip(builder.grid_dim, index, strict=True))
        set_grid_idx(*index)

    interpreter.GridExecutor.__call__ = chosen
    builder.set_grid_idx = moved


def count_launches() -> list[str]:
    """Return a list to which each launch adds its kernel's name."""
    names: list[str] = []
    launch = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **more: Any) -> None:
        names.append(self.fn.__name__)
        launch(self, *args, **more)

    interpreter.GridExecutor.__call__ = counted
    return names


@torch.no_grad()
def check_models() -> None:
    """Whole transformers of one block over the kernels, in bf16, against diffusers' in fp32."""
    an_edit, two_texts = ((5,), (2, 2), (2, 2)), ((2, 3), (2, 2))
    with mock.patch.object(operations, "takes_kernels", lambda x: not x.is_meta):
        for config, shapes in (({"zero_cond_t": True}, an_edit), ({}, two_texts)):
            arguments = qwen_image.inputs(*shapes)
            made, plain = (qwen_image.transformer(num_layers=1, **config) for _ in range(2))
            Fused(precision="bf16").apply(target(made))
            assert kernels.error(made(**arguments)[0], plain(**arguments)[0]) < 0.02
        for shapes in (an_edit, two_texts):
            arguments = qwen_image21.inputs(*shapes)
            made, plain = (qwen_image21.transformer(num_layers=1) for _ in range(2))
            Fused(precision="bf16").apply(target(made))
            for output, expected in zip(
                *(qwen_image21.steps(of, arguments) for of in (made, plain)), strict=True
            ):
                assert kernels.error(output, expected) < 0.02
        arguments = krea2.inputs((3,), 4, 2, 3)
        made, plain = (krea2.transformer(num_layers=1, channels=32) for _ in range(2))
        Fused(precision="bf16").apply(target(made))
        assert kernels.error(made(**arguments)[0], plain(**arguments)[0]) < 0.02
        for form in ("ernie_image", "ideogram4"):
            arguments = later.FORMS[form][2]((3,), 2, 3)
            made, plain = (later.transformer(form) for _ in range(2))
            Fused(precision="bf16").apply(target(made))
            image = slice(-6, None)
            assert kernels.error(made(**arguments)[0][:, image], plain(**arguments)[0][:, image]) < 0.02
        two = {"channels": 32, "num_layers": 2, "dual_attention_layers": [0]}
        made, plain = (sd3.transformer(**two) for _ in range(2))
        Fused(precision="bf16").apply(target(made))
        assert kernels.error(made(**sd3.inputs(2, 3, 2, 3))[0], plain(**sd3.inputs(2, 3, 2, 3))[0]) < 0.02


if __name__ == "__main__":
    accept_loop_bounds()
    reverse_launches(seed=0)
    launched = count_launches()
    for kind, tokens in kernels.cases():
        for quantize in (False, True):
            for adds in (False, True):
                kernels.check_residual_norm(kind, tokens, 96, adds, quantize, "cpu")
            kernels.check_qk_norm_rope(kind, tokens, 5, 32, quantize, "cpu")
            if kind == "normal":
                kernels.check_qk_norm_rope(kind, tokens, 9, 128, quantize, "cpu")
        kernels.check_quantize(kind, 5, 200, "cpu")
    for kind in kernels.KINDS:
        for quantize in (False, True):
            kernels.check_rms_norm_modulated(kind, kernels.LAYOUTS[2], 96, quantize, "cpu")
            kernels.check_sigmoid_gate(kind, 5, 200, quantize, "cpu")
            kernels.check_swiglu(kind, 5, 72, 0, quantize, "cpu")
            kernels.check_swiglu(kind, 3, 128, 48, quantize, "cpu")
            kernels.check_swiglu(kind, 3, 96, 64, quantize, "cpu")
            for adds, scaled in ((False, False), (True, False), (True, True)):
                kernels.check_rms_residual(kind, 2, 4, 96, adds, scaled, quantize, "cpu")
                kernels.check_rms_residual(kind, 3, 1, 64, adds, scaled, quantize, "cpu")
    for quantize in (False, True):
        kernels.check_skinny_product(3, 130, 144, quantize, "cpu")
        kernels.check_skinny_product(33, 64, 256, quantize, "cpu")
    kernels.check_peer_barrier("cpu")
    kernels.check_of_unets("cpu")
    kernels.check_convolve("normal", (2, 5, 7), 48, 48, "cpu")
    kernels.check_convolve("zeros", (1, 9, 16), 16, 16, "cpu")
    kernels.check_convolve("normal", (2, 5, 7), 48, 48, "cpu", enlarges=True)
    check_models()
    for name in sorted(set(launched)):
        print(f"{name}: {launched.count(name)} launches")
