"""Sparse attention by content: the reference, and the kernels in Triton's interpreter and compiled for Hopper."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.sparse_attention import CALLS, DENSITIES, break_even
from benchmarks.sparse_attention_reference import (
    Layout,
    attend,
    blocks_of,
    choose,
    exact,
    lists_of,
    random_blocks,
    structured,
    tile_order,
)

LAYOUT = Layout(text=32, queries=16, keys=8)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def inputs() -> list[torch.Tensor]:
    return structured(32, 16, 3, 16, torch.Generator().manual_seed(0))


def test_more_is_visited_and_less_is_off_with_a_larger_share() -> None:
    q, k, v = inputs()
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)))
    densities, errors = [], []
    for share in (0.5, 0.9, 0.99, 2.0):
        blocks = choose(q, k, LAYOUT, share)
        densities.append(float(blocks.float().mean()))
        errors.append(float((attend(q, k, v, blocks, LAYOUT).transpose(0, 1) - dense).norm() / dense.norm()))
    assert densities == sorted(densities)
    assert densities[-1] == 1
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < errors[0]


def test_the_text_and_the_block_itself_are_always_visited() -> None:
    q, k, _ = inputs()
    blocks = choose(q, k, LAYOUT, 0.0)
    assert blocks[:, :2].all()
    assert blocks[:, :, :4].all()
    assert all(blocks[:, block, 2 * block : 2 * block + 2].all() for block in range(blocks.shape[1]))


def test_exact_portions_are_those_of_attention() -> None:
    q, k, _ = inputs()
    torch.testing.assert_close(exact(q, k, LAYOUT).sum(-1), torch.ones(3, 18))
    scores = (q[16:32, 1] @ k[:, 1].T * 16**-0.5).softmax(-1)
    torch.testing.assert_close(exact(q, k, LAYOUT)[1, 1, 3], scores[:, 24:32].sum(-1).mean())


def test_lists_hold_the_blocks() -> None:
    blocks = random_blocks(3, 288, LAYOUT, 0.4, torch.Generator().manual_seed(1))
    counts, lists = lists_of(blocks)
    assert counts.eq(round(0.4 * 36)).all()
    assert blocks_of(counts, lists).equal(blocks)
    for head, query in ((0, 0), (2, 17)):
        assert (
            lists[head, query, : counts[head, query]].tolist()
            == blocks[head, query].nonzero().flatten().tolist()
        )


def test_tiles_hold_neighbours() -> None:
    order = tile_order(6, 10, (2, 4))
    assert order[:8].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert order[16:20].tolist() == [8, 9, 18, 19]  # the last of a row is narrower
    assert order.sort().values.tolist() == list(range(60))


def test_what_a_call_gains_counts_the_choice() -> None:
    ms = {f"sparse {density}": 1 + 4 * density for density in DENSITIES}
    ms |= {"cudnn fp8": 4.0, "choice": 0.1, "values transposed": 0.1}
    figures = break_even("flux-dev", ms)
    assert figures["break_even_density"] == pytest.approx(0.7)
    gains = figures["times_as_fast"]
    assert gains["1.0"] < 1 < gains["0.5"] < gains["0.25"]
    number, seconds = CALLS["flux-dev"]
    assert gains["0.25"] == pytest.approx(seconds / (seconds - number * 1.8e-3), abs=1e-3)


_INPUTS = """
import torch
from benchmarks import sparse_attention_kernels as kernels
from benchmarks.sparse_attention_reference import *
from tests.unit.kernels.interpreted import accept_loop_bounds
wide = structured(32, 8, 2, 32, torch.Generator().manual_seed(0))
scales = torch.stack([x.abs().amax() / 448 for x in wide])
eight = [(x / scale).to(torch.float8_e4m3fn).contiguous() for x, scale in zip(wide, scales)]
q, k, v = (x.float() * scale for x, scale in zip(eight, scales))
"""


@pytest.mark.long
@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    program = """
accept_loop_bounds()
generator = torch.Generator().manual_seed(2)
for layout, division in (
    (Layout(32, 32, 16), kernels.Division(32, 16, 4, 2)),
    (Layout(32, 32, 32), kernels.Division(16, 16, 4, 2)),
    (Layout(32, 32, 16), kernels.Division(32, 16, 4, 2, overlaps=True)),
    (Layout(32, 32, 32), kernels.Division(16, 16, 4, 2, overlaps=True)),
):
    values = torch.empty(2, 32, 96, dtype=torch.float8_e4m3fn)
    kernels.arrange(eight[2], torch.arange(96, dtype=torch.int32), values, transpose=True, rows=32)
    for density in (1.0, 0.5):
        blocks = random_blocks(2, 96, layout, density, generator)
        assert density == 1 or 0 < blocks.float().mean() < 0.8
        out = torch.empty(eight[0].shape)  # not e4m3, to which the interpreter does not round
        kernels.attend(eight[0], eight[1], values, scales[:2], *lists_of(blocks), out, layout, division)
        expected = attend(q, k, v, blocks, layout)
        off = (out * scales[2] - expected).norm() / expected.norm()
        assert off < 0.04, (layout, density, off)
        other = attend(q, k, v, ~blocks | blocks[:, :1], layout)
        assert density == 1 or (other - expected).norm() / expected.norm() > 0.1
"""
    assert_runs(_INPUTS + program, TRITON_INTERPRET="1")


@pytest.mark.long
@needs_triton
def test_the_choice_in_tritons_interpreter() -> None:
    program = """
order = tile_order(8, 8, (4, 4)).int() + 32
order = torch.cat([torch.arange(32, dtype=torch.int32), order])
moved = [torch.empty_like(x) for x in eight]
for x, y in zip(eight, moved):
    kernels.arrange(x, order, y, rows=32)
    assert y.view(torch.uint8).equal(x.view(torch.uint8)[order.long()])
for layout in (Layout(32, 32, 16), Layout(32, 16, 16)):
    for share in (0.3, 0.9):
        counts, lists = kernels.choose(*moved[:2], scales[:2], layout, share)
        expected = choose(q[order.long()], k[order.long()], layout, share)
        assert blocks_of(counts, lists).equal(expected), (layout, share)
        assert 0.2 < expected.float().mean() < 1
"""
    assert_runs(_INPUTS + program, TRITON_INTERPRET="1")


@pytest.mark.long
@needs_triton
def test_the_kernels_compile_for_hopper_without_spills(tmp_path: os.PathLike[str]) -> None:
    program = """
import pathlib, subprocess, torch, triton
from tests.unit.kernels import compiled as module
from benchmarks import sparse_attention_kernels as kernels
from benchmarks.sparse_attention_reference import Layout
from tests.unit.kernels.compiled import NoDevice, compiled
device = NoDevice()
triton.runtime.driver.set_active(device)
x = torch.zeros(1024, 2, 128, dtype=torch.float8_e4m3fn)
values, scales = x.permute(1, 2, 0).contiguous(), torch.ones(2)
counts = torch.ones(2, 8, dtype=torch.int32)

def launch():
    layout, lists = Layout(256, 128, 128), torch.zeros(2, 8, 9, dtype=torch.int32)
    for division in kernels.DIVISIONS:
        kernels.attend(x, x, values, scales, counts, lists, x, layout, division)
    kernels.choose(x, x, scales, layout, 0.9)
    kernels.arrange(x, counts, values, transpose=True)

serialised, resources = [], module._resources

def ask_ptxas(program):
    file = pathlib.Path("program.ptx")
    file.write_text(program.asm["ptx"])
    words = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file, "-o", "program.cubin"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    serialised.extend(line for line in said.splitlines() if "serialized" in line)
    return resources(program)

module._resources = ask_ptxas
made = compiled((9, 0), False, launch)
assert not made.failures, made.failures
assert not serialised, serialised
assert not made.spills, made.spills
assert all("e4m3" in kind for kind in made.instructions["_attend"]), made.instructions
"""
    assert_runs(program, tmp_path, TRITON_CACHE_DIR=str(tmp_path))


def assert_runs(program: str, folder: os.PathLike[str] | None = None, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
