"""What captured launches wait for. Run with `python -m pytest -m gpu tests/gpu/test_stream_capture_cuda.py`."""

import ctypes

import pytest
import torch

from vivace.machinery.compilation.stream_capture import MemsetsBeside, awaited_by, capture_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def clear(tensor: torch.Tensor) -> None:
    """A memset, where PyTorch would launch a kernel."""
    driver = ctypes.CDLL("libcuda.so.1")
    place, size = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert driver.cuMemsetD8Async(place, ctypes.c_ubyte(0), size, ctypes.c_void_p(stream())) == 0


def test_memsets_run_beside_what_comes_before_and_the_kernel_waits_for_both() -> None:
    x, total, cleared = (torch.ones(1 << 20, device="cuda") for _ in range(3))
    beside = MemsetsBeside()
    pairs = []

    def launch() -> None:
        clear(cleared)
        cleared.add_(x)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            x.add_(1)
            before = capture_of(stream())
            beside.launch(stream(), launch)
            after = capture_of(stream())
            assert before is not None
            assert after is not None
            (earlier,), (kernel,) = before.awaited, after.awaited
            (memset,) = set(awaited_by(kernel)) - {earlier}
            pairs.append((kernel, awaited_by(memset)))
        total.copy_(cleared)
    (kernel, of_first), (_, of_second) = pairs
    assert of_first == []
    assert of_second == [kernel], "which has used what is cleared"
    for replays in range(1, 4):
        graph.replay()
        torch.cuda.synchronize()
        assert total[0].item() == 1 + 2 * replays


def test_a_kernel_before_the_last_one_still_waits() -> None:
    x, twice, total = (torch.ones(1 << 20, device="cuda") for _ in range(3))

    def launch() -> None:
        torch.mul(x, 2, out=twice)
        torch.add(twice, 1, out=total)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        MemsetsBeside().launch(stream(), launch)
    for replays in range(1, 4):
        graph.replay()
        torch.cuda.synchronize()
        assert total[0].item() == 2 * (1 + replays) + 1


def test_outside_of_a_capture_it_only_launches() -> None:
    x = torch.ones(4, device="cuda")
    MemsetsBeside().launch(stream(), lambda: x.zero_())
    assert x.sum().item() == 0
    assert capture_of(stream()) is None
