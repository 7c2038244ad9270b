"""What a forward takes and returns arrives as it was sent, and rows are split."""

import torch

from vivace.machinery.multi_gpu.transfer import (
    deserialize,
    num_bytes,
    pack,
    select_rows,
    serialize,
    specs_in,
    split_rows,
    unpack,
)


def test_rows_are_split() -> None:
    assert split_rows(2, 2) == [slice(0, 1), slice(1, 2)]
    assert split_rows(5, 2) == [slice(0, 3), slice(3, 5)]
    assert len(split_rows(2, 4)) == 2
    arguments = {
        "sample": torch.arange(8.0).view(4, 2),
        "timestep": torch.tensor(3),
        "added": {"ids": torch.arange(4), "names": ["a"]},
        "txt_ids": torch.zeros(4, 3),
    }
    selected = select_rows(((), arguments), slice(2, 4), 4)[1]
    assert selected["sample"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert selected["added"]["ids"].tolist() == [2, 3]
    assert selected["timestep"].ndim == 0
    assert selected["txt_ids"].shape == (4, 3), "no row of the batch, though there are as many"


def test_arguments_arrive_as_they_were_sent() -> None:
    sent_arguments = (
        (torch.randn(3, 5).t(), 7),
        {
            "mask": torch.tensor([True, False]),
            "half": torch.ones(1, dtype=torch.bfloat16),
            "none": None,
            "s": torch.tensor(2),
        },
    )
    header, tensors = serialize(sent_arguments, "cpu")
    specs = specs_in(header)
    buffer = pack(tensors, "cpu")
    assert buffer.numel() == num_bytes(specs)
    args, kwargs = deserialize(header, unpack(buffer, specs))
    assert torch.equal(args[0], sent_arguments[0][0])
    assert args[1] == 7
    assert kwargs["none"] is None
    assert all(
        torch.equal(kwargs[k], sent_arguments[1][k]) and kwargs[k].dtype == sent_arguments[1][k].dtype
        for k in ("mask", "half", "s")
    )
