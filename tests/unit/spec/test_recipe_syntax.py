"""The notation: what parses, what it means, and what a wrong recipe is told."""

import pytest

from vivace.errors import RecipeError
from vivace.foundation.spec.recipe_syntax import (
    MAX_LENGTH,
    RecipeSpec,
    TechniqueCall,
    print_value,
    short_form,
    unpinned,
)
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.techniques.lora import Lora
from vivace.techniques.steps import Steps


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("baseline", "baseline"),
        (" Baseline ", "baseline"),
        ("bf16", "dtype(bf16)"),
        ("bf16+fa2", "dtype(bf16)+attention(flash)"),
        ("FA2 + BF16", "dtype(bf16)+attention(flash)"),
        ("attention:flash", "attention(flash)"),
        ("attention(backend=flash)@unet", "attention(flash)"),
        ("attention('flash')@transformer", "attention(flash)"),
        ("bf16@vae,denoiser", "dtype(bf16)@denoiser,vae"),
        ("bf16@denoiser+fp16@vae", "dtype(bf16)@denoiser+dtype(fp16)@vae"),
        ("fp16@vae+bf16@denoiser", "dtype(bf16)@denoiser+dtype(fp16)@vae"),
        ("bf16@denoiser,text_encoder,text_encoder_2,vae", "dtype(bf16)"),
        ("compile", "compile"),
        ("compile()", "compile"),
        ("compile(mode=default)", "compile"),
        ("compile(mode=max-autotune)@denoiser,vae", "compile(max-autotune)@denoiser,vae"),
        ("compile(backend=eager)", "compile(backend=eager)"),
        ("guidance(5)", "guidance(5)"),
        ("guidance:5.0", "guidance(5)"),
        ("guidance(2.5e0)", "guidance(2.5)"),
        ("scheduler(dpmpp_2m, karras=true)", "scheduler(dpmpp_2m, karras=True)"),
        ("steps(0x10)", "steps(16)"),
        ("fbcache:0.3", "first_block_cache(0.3)"),
        ("fbcache", "first_block_cache"),
        ("fbcache(hits=0.5)", "first_block_cache(hits=0.5)"),
        ("first_block_cache(0.05, hits=none)", "first_block_cache"),
        ("lora(Style.safetensors)", "lora('Style.safetensors')"),
        ("lora:style.safetensors", "lora(style.safetensors)"),
        (
            r"lora('a b/it\'s (1), \"x\" + @.safetensors', 0.5)",
            r"""lora('a b/it\'s (1), "x" + @.safetensors', scale=0.5)""",
        ),
        ("lora(path='a/b', scale=1, hot=true)", "lora('a/b', hot=True)"),
        ("lora('x/b')+bf16+lora('a/b')@unet", "lora('a/b')@denoiser+lora('x/b')+dtype(bf16)"),
        (
            "lora(b, 2)+compile+lora(a, hot=True)+lora(c)",
            "lora(b, scale=2)+lora(c)+lora(a, hot=True)+compile",
        ),
        (
            "cfg_cutoff(0.4)+steps(20)+compile+int8+tiny_vae+channels_last+bf16",
            "tiny_vae+dtype(bf16)+quantize(int8)+channels_last+compile+cfg_cutoff(0.4)+steps(20)",
        ),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    recipe = resolve(text)
    assert recipe.text == canonical
    assert resolve(canonical) == recipe, "the canonical form means the same"


def test_every_knob_is_stored_as_resolved() -> None:
    (call,) = resolve("scheduler(unipc)").spec.techniques
    assert call.knobs == {"sampler": "unipc", "karras": False, "spacing": "as_published"}
    (call,) = resolve("compile").spec.techniques
    assert call.targets == ("denoiser",)


def test_json_round_trip() -> None:
    recipe = resolve("bf16+cfg_cutoff(0.4)")
    stored = RecipeSpec.model_validate_json(recipe.spec.model_dump_json())
    assert Recipe.from_spec(stored) == recipe


def test_a_stored_recipe_of_another_version_is_readable_and_refused_by_name() -> None:
    call = TechniqueCall(name="gone", knobs={"level": 3}, targets=())
    stored = RecipeSpec.model_validate_json(RecipeSpec(text="gone(3)", techniques=(call,)).model_dump_json())
    assert stored.text == "gone(3)"
    with pytest.raises(RecipeError, match="no technique 'gone'"):
        Recipe.from_spec(stored)
    other = RecipeSpec(
        text="steps(3)", techniques=(TechniqueCall(name="steps", knobs={"count": 3}, targets=()),)
    )
    with pytest.raises(RecipeError, match="another steps: "):
        Recipe.from_spec(other)


@pytest.mark.parametrize("name", ["token_merging", "progressive_resolution"])
def test_a_removed_technique_is_refused_with_what_to_use_instead(name: str) -> None:
    stored = RecipeSpec(text=name, techniques=(TechniqueCall(name=name, knobs={}, targets=()),))
    for read in (lambda: resolve(f"bf16+{name.upper()}(0.5)"), lambda: Recipe.from_spec(stored)):
        with pytest.raises(RecipeError, match=rf"{name} was removed on .*steps\(N\) in its place"):
            read()


def test_recipes_are_edited_as_values() -> None:
    recipe = resolve("bf16+tiny_vae+steps(20)")
    assert recipe.without("steps").text == "tiny_vae+dtype(bf16)"
    assert recipe.without(Steps(steps=20)) == recipe.without("steps")
    assert recipe.without(Steps(steps=8)) == recipe
    assert resolve("bf16").with_(Steps(steps=8)) == resolve("steps(8)+bf16")
    with pytest.raises(RecipeError, match="both set the number of steps of the call"):
        recipe.with_(Steps(steps=8))
    assert recipe.replacing(Steps(steps=8), *resolve("fp16")).text == "tiny_vae+dtype(fp16)+steps(8)"
    assert recipe.text == "tiny_vae+dtype(bf16)+steps(20)", "the edited one is another"


def test_same_picture_holds_only_if_it_holds_for_all() -> None:
    assert resolve("bf16+compile+channels_last").same_picture
    assert not resolve("bf16+tiny_vae").same_picture


@pytest.mark.parametrize(
    ("text", "caret", "says"),
    [
        ("", 0, "baseline"),
        ("   ", 0, "baseline"),
        ("+", 0, "missing"),
        ("bf16+", 4, "missing"),
        ("bf16++fa2", 5, "missing"),
        ("btf16", 0, "did you mean 'bf16'"),
        ("bf16+chanels_last", 5, "did you mean 'channels_last'"),
        ("attention(flsh)", 10, "did you mean 'flash'"),
        ("attention", 0, "needs a value: backend must be one of math, efficient, flash, cudnn"),
        ("attention(flash", 9, "not closed"),
        ("attention flash)", 15, "without its opening bracket"),
        ("attention('flash)", 10, "quote"),
        ("attention(flash]", 15, "expected ')'"),
        ("attention(flash)x", 16, "expected '@' or '+'"),
        ("attention(flash)@text_encoder", 17, "cannot be aimed at text_encoder"),
        ("bf16@denoisr", 5, "did you mean 'denoiser'"),
        ("bf16@vae,vae", 9, "given twice"),
        ("bf16@", 4, "expected a target"),
        ("bf16@vae@denoiser", 8, "one '@'"),
        ("steps(20)@denoiser", 10, "concerns the call as a whole"),
        ("steps(0)", 6, "at least 1"),
        ("steps(2.5)", 6, "whole number"),
        ("steps(true)", 6, "whole number"),
        ("steps('20')", 6, "whole number"),
        ("steps(20, 30)", 10, "too many arguments"),
        ("steps(steps=20, steps=30)", 16, "given twice"),
        ("steps(count=20)", 6, "no knob 'count'"),
        ("steps(20, steps=30)", 10, "given twice"),
        ("scheduler(karras=True, unipc)", 23, "positional argument after a named one"),
        ("cfg_cutoff(1.5)", 11, "less than 1"),
        ("cfg_cutoff(1e999)", 11, "less than 1"),
        ("cfg_cutoff((0.4,))", 11, "a number"),
        ("cfg_cutoff(open('x'))", 11, "or a plain word"),
        ("fbcache(0.3, hits=0.5)", 0, "give a threshold or hits, not both"),
        ("fbcache(hits=1.5)", 8, "hits must be a number or None, more than 0 and less than 1"),
        ("bf16+fp16", 5, "both set the dtype of denoiser"),
        ("fp32@vae+tiny_vae+bf16@vae", 18, "both set the dtype of vae"),
        ("fp16(bf16)", 5, "already stands for dtype(fp16)"),
        ("baseline+bf16", 0, "stands alone"),
        ("tiny_vae(1)", 9, "takes no arguments"),
        ("attention:", 10, "one plain word"),
        ("attention:a b", 10, "one plain word"),
        ("@vae", 0, "expected a technique's name"),
        ("steps(" + "[" * 40, 13, "nest deeper"),
    ],
)
def test_a_wrong_recipe_is_told_what_and_where(text: str, caret: int, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(text)
    error = caught.value
    assert says in str(error)
    assert error.start == caret
    _, line, marks = str(error).split("\n")
    assert marks.index("^") == 2 + caret
    assert line.strip() == text.strip() or not text.strip()


def test_a_long_recipe_keeps_its_caret_on_the_screen() -> None:
    text = "+".join(["channels_last"] * 50) + "+nonsense"
    with pytest.raises(RecipeError) as caught:
        resolve(text)
    _, line, marks = str(caught.value).split("\n")
    assert len(line) < 130
    assert line[marks.index("^") :].startswith(("nonsense", "channels_last"))


def test_length_is_limited() -> None:
    with pytest.raises(RecipeError, match="at most"):
        resolve("a" * (MAX_LENGTH + 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lora('/a/b c/style (1), x.safetensors', scale=0.5, sha256=86e19e4dfa9fe84e)+compile",
         "lora(style (1), x@86e1, scale=0.5)+compile"),
        ("lora('org/repo/x.safetensors@main')@denoiser+bf16", "lora(x)@denoiser+bf16"),
        (r"lora('C:\\loras\\ink.safetensors', sha256='1234567890123456')", "lora(ink@1234)"),
        ("lora('/a/ink/pytorch_lora_weights.safetensors')+lora('/b')", "lora(ink)+lora(b)"),
        ("dtype(bf16)+quantize(int8, skip='a/b')", "dtype(bf16)+quantize(int8, skip='a/b')"),
        ("no recipe ((", "no recipe (("),
    ],
)  # fmt: skip
def test_tables_show_files_by_name(text: str, expected: str) -> None:
    assert short_form(text) == expected


def test_a_stored_recipe_is_found_by_what_was_written() -> None:
    written = "lora('/a, b/x.safetensors', scale=0.5, hot=True)+compile"
    assert unpinned(written.replace(")+", ", sha256='1234567890123456')+")) == written
    assert unpinned("lora(x, sha256=ab12)@denoiser+dtype(bf16)") == "lora(x)@denoiser+dtype(bf16)"
    assert unpinned(written) == written


def technique_path(recipe: Recipe) -> str:
    (technique,) = recipe
    assert isinstance(technique, Lora)
    return technique.path


@pytest.mark.parametrize(
    "path", [r"C:\new\test", r"D:\2024\a", r"C:\x64\a", r"C:\users\me", r"\\host\share\me"]
)
def test_a_single_backslash_is_no_escape(path: str) -> None:
    """C:\\new was a path with a new line in it."""
    with pytest.raises(RecipeError) as caught:
        resolve(f"lora('{path}.safetensors')")
    assert "write a backslash twice, or as /: '" + path.replace("\\", "/") in caught.value.problem
    doubled = resolve("lora('" + path.replace("\\", "\\\\") + ".safetensors')")
    assert resolve(doubled.text) == doubled
    assert technique_path(doubled) == f"{path}.safetensors"


@pytest.mark.parametrize("path", ["/a\nb.safetensors", "/a\tb.safetensors", "/it's\udcff.safetensors"])
def test_odd_names_of_files_are_read_as_they_are_printed(path: str) -> None:
    assert technique_path(resolve(f"lora({print_value(path)})")) == path
