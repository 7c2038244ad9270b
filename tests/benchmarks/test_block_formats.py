"""The record of NVFP4 and MXFP8: what smoothing would add is computed as SVDQuant does it."""

from benchmarks.block_formats import RECORD
from docgen.block_formats import section


def test_the_page_has_every_recipe_of_the_record() -> None:
    text = "\n".join(section(RECORD))
    for model in ("tiny-sd", "tiny-flux"):
        for recipe in ("quantize(nvfp4)", "quantize(nvfp4, rank=32)", "quantize(mxfp8)"):
            assert f"| {model} | `{recipe}` |" in text
    assert "not measured" in text
