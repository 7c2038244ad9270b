"""cuDNN's attention in fp8, through the package nvidia-cudnn-frontend: its Python bindings, without its DSL's packages.

On Hopper queries, keys, values and the output are e4m3, each with one scale. The softmax's numerators are scaled by 256
before they are rounded. cuDNN is told how many keys there are on the GPU, so a plan and a graph serve fewer keys as
well; its kernel for this is 9 % faster than that for all keys, also where all are there (4,096 queries, 24 and 30
heads, an H200). PyTorch's own call of cuDNN takes bf16 and fp16 only.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vivace.machinery.technique import Machine

PACKAGE = "nvidia-cudnn-frontend"
_SOFTMAX_SCALE = 256.0
_PADDING_SINCE = 90700


def unsupported_on(machine: Machine, needs_package: bool = True) -> str | None:
    """Return why a machine cannot compute attention in fp8 (without the package: to predict its memory), or None."""
    if not machine.is_cuda:
        return "attention in fp8 is cuDNN's, which runs on GPUs; take attention=bf16"
    if machine.capability is not None and machine.capability != (9, 0):
        major, minor = machine.capability
        return (
            f"cuDNN's attention in fp8 is used as on Hopper, compute capability 9.0, and this GPU has {major}.{minor}; "
            "take attention=bf16"
        )
    if needs_package and not machine.has_package("cudnn"):
        return f"attention in fp8 needs {PACKAGE} (pip install --no-deps {PACKAGE}); or take attention=bf16"
    return None


def takes_padding() -> bool:
    """Return whether cuDNN leaves keys out that are padding, of which it is told on the GPU."""
    import torch

    return not torch.cuda.is_available() or torch.backends.cudnn.version() >= _PADDING_SINCE


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qk_scales: torch.Tensor,
    v_scales: torch.Tensor,
    out: torch.Tensor,
    num_keys: torch.Tensor | None = None,
) -> None:
    """Write softmax(q k^T / sqrt(channels)) v to `out`, with the values' scale.

    Args:
        q, k, v: (batch, tokens, heads, channels), e4m3. q is contiguous; k and v may have more tokens than q, which may
            be part of wider rows, and fewer heads, each for several of q's.
        qk_scales: (2,), fp32, of queries and keys.
        v_scales: (2,), fp32: the values' scale, and its inverse. The output, a mean of values, never exceeds them.
        out: like q, but tokens may be part of wider rows.
        num_keys: (batch,), int32, on the GPU: how many keys there are, the first; those behind are padding. None: all.
    """
    keys = (k.shape[1], k.shape[2], k.stride(1))
    plan = _plan(tuple(q.shape), keys, out.stride(1), q.device.index or 0)
    plan(q, k, v, qk_scales, v_scales, out, num_keys)


# Never dropped: CUDA graphs captured earlier replay with the addresses of a plan's tensors.
@functools.cache
def _plan(
    shape: tuple[int, int, int, int],
    keys: tuple[int, int, int],
    row_stride: int,
    device: int,
) -> Any:
    """Return what executes cuDNN's plan for one shape of queries and of keys (number, heads, elements between
    tokens)."""
    import torch

    torch.backends.cudnn.version()  # loads PyTorch's cuDNN, which the package finds then
    import cudnn

    batch, tokens, heads, channels = shape
    num_keys, num_key_heads, key_stride = keys
    handle = _handle(device)
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    dim = [batch, heads, tokens, channels]
    eight, single = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    q, k, v = (
        graph.tensor(
            dim=[batch, num, length, channels],
            stride=[length * stride, channels, stride, 1],
            data_type=eight,
        )
        for length, num, stride in (
            (tokens, heads, heads * channels),
            *[(num_keys, num_key_heads, key_stride)] * 2,
        )
    )
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    ones = [1, 1, 1, 1]
    scales = {name: graph.tensor(dim=ones, stride=ones, data_type=single) for name in names}
    lengths: dict[str, Any] = {}
    if takes_padding():
        counts = {"dim": [batch, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": cudnn.data_type.INT32}
        lengths = {name: graph.tensor(**counts) for name in ("seq_len_q", "seq_len_kv")}
    out, _, largest_s, largest_o = graph.sdpa_fp8(
        q=q,
        k=k,
        v=v,
        **scales,
        **lengths,
        is_inference=True,
        attn_scale=channels**-0.5,
        use_causal_mask=False,
        use_padding_mask=bool(lengths),
    )
    wide = [tokens * row_stride, channels, row_stride, 1]
    out.set_output(True).set_dim(dim).set_stride(wide).set_data_type(eight)
    for tensor in (largest_s, largest_o):
        tensor.set_output(True).set_dim(ones).set_stride(ones).set_data_type(single)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()

    where = torch.device("cuda", device)
    size = graph.get_workspace_size()
    constants = torch.tensor([1 / _SOFTMAX_SCALE, _SOFTMAX_SCALE, 0.0, 0.0], device=where)
    workspace = torch.empty(max(size, 1), device=where, dtype=torch.uint8)
    all_queries, all_keys = (
        torch.full((batch,), count, device=where, dtype=torch.int32) for count in (tokens, num_keys)
    )

    def execute(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        qk_scales: torch.Tensor,
        v_scales: torch.Tensor,
        result: torch.Tensor,
        existing_keys: torch.Tensor | None,
    ) -> None:
        tensors = {
            q: queries,
            k: keys,
            v: values,
            out: result,
            scales["descale_q"]: qk_scales[0:1],
            scales["descale_k"]: qk_scales[1:2],
            scales["descale_v"]: v_scales[0:1],
            scales["scale_o"]: v_scales[1:2],
            scales["descale_s"]: constants[0:1],
            scales["scale_s"]: constants[1:2],
            largest_s: constants[2:3],
            largest_o: constants[3:4],
        }
        if lengths:
            number = all_keys if existing_keys is None else existing_keys
            tensors |= {lengths["seq_len_q"]: all_queries, lengths["seq_len_kv"]: number}
        cudnn.set_stream(handle, torch.cuda.current_stream(where).cuda_stream)
        graph.execute(tensors, workspace, handle=handle)

    return execute


@functools.cache
def _handle(device: int) -> Any:
    import torch

    torch.backends.cudnn.version()
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()
