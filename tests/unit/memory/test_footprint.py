"""The footprint against chains that can be counted by hand, and against PyTorch's own memory events."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from vivace.runtime.memory.footprint import CUBLAS_WORKSPACE, NCHW_WORKSPACE, Footprint

MIB = 2**20


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.no_grad():
        yield


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_chain_of_products_holds_what_its_names_hold() -> None:
    """Squares of 4 MiB: x and w, then y; then z while y lives; then y is dropped before the last product."""
    footprint = Footprint()
    x, w = meta(1024, 1024), meta(1024, 1024)
    footprint.hold([x, w, w.T])
    assert footprint.held == 8 * MIB, "a view is no second tensor"
    with footprint.following():
        y = x @ w
        assert footprint.held == 12 * MIB + CUBLAS_WORKSPACE
        z = y @ w
        del y
        assert footprint.held == 12 * MIB + CUBLAS_WORKSPACE
        z.add_(1)
        z = z.reshape(512, 2048)
    assert footprint.peak == (16 * MIB + CUBLAS_WORKSPACE, "")
    del z
    assert footprint.held == 8 * MIB + CUBLAS_WORKSPACE, "cuBLAS keeps its workspace"


def test_peaks_are_kept_by_stage() -> None:
    footprint = Footprint()
    with footprint.following():
        with footprint.in_stage("small"):
            x = meta(1024, 1024)
        with footprint.in_stage("large"):
            y = x + 1
            z = y + 1
        del y, z
    assert footprint.peaks == {"small": 4 * MIB, "large": 12 * MIB}
    assert footprint.peak == (12 * MIB, "large")
    footprint.start_peak()
    assert footprint.peaks == {}


class Block(torch.nn.Module):
    """A transformer's MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(256)
        self.wide, self.narrow = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.norm(x))
        y, gate = torch.nn.functional.gelu(y), torch.sigmoid(y)
        return x + self.narrow(y * gate)


def test_it_agrees_with_the_memory_events_of_a_real_run() -> None:
    network = torch.nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(4, 64, 256)
    footprint = Footprint("cpu")
    footprint.hold([x, *network.parameters()])
    before = footprint.held
    footprint.start_peak()
    with footprint.following():
        network(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        network(x)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 3 * MIB
    assert footprint.peak[0] - before - CUBLAS_WORKSPACE == pytest.approx(peak, rel=0.01)


def attention_peak(backend: SDPBackend, dtype: torch.dtype = torch.bfloat16) -> int:
    footprint = Footprint()
    with footprint.following(), sdpa_kernel(backend):
        query = meta(2, 8, 2048, 64, dtype=dtype)
        result = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        assert result.shape == query.shape
    return footprint.peak[0]


def test_only_math_attention_holds_the_score_matrix() -> None:
    tensor = 2 * 8 * 2048 * 64 * 2
    scores = 2 * 8 * 2048 * 2048 * 4  # in fp32, whatever the inputs are
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        assert 2 * tensor <= attention_peak(backend) < 2.2 * tensor
    assert 2 * scores < attention_peak(SDPBackend.MATH) < 3 * scores + CUBLAS_WORKSPACE


def conv_peak(last: bool, weight_last: bool = False, batch: int = 1) -> int:
    """Peak bytes of a convolution; an image is 32 MiB in and 64 MiB out."""
    footprint = Footprint()
    conv = torch.nn.Conv2d(16, 32, 3, padding=1, device="meta", dtype=torch.float16)
    x = meta(batch, 16, 1024, 1024, dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last) if last else x
    conv = conv.to(memory_format=torch.channels_last) if weight_last else conv
    footprint.hold([x])
    with footprint.following():
        assert conv(x).is_contiguous(memory_format=torch.channels_last) == (last or weight_last)
    return footprint.peak[0]


def test_a_convolution_in_nchw_takes_a_workspace_and_one_in_channels_last_none() -> None:
    assert conv_peak(last=True, weight_last=True) == 96 * MIB
    assert conv_peak(last=False) == pytest.approx((1 + NCHW_WORKSPACE) * 96 * MIB, rel=0.01)
    assert conv_peak(last=False, weight_last=True) == pytest.approx((96 + 32) * MIB, rel=0.01), "a copy"


def test_beyond_32_bits_of_bytes_cudnn_takes_no_workspace() -> None:
    assert conv_peak(last=False, batch=31) == pytest.approx((1 + NCHW_WORKSPACE) * 31 * 96 * MIB, rel=0.01)
    assert conv_peak(last=False, batch=32) == 32 * 96 * MIB
