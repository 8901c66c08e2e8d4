from __future__ import annotations

import pytest
import torch

from onefold.core.flat import FlatTensors, lay_out


def test_views_keep_the_strides_of_channels_last() -> None:
    weight = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    flat = FlatTensors(lay_out({"w": weight}))
    flat.write([weight])
    assert flat.views[0].stride() == weight.stride()
    assert torch.equal(flat.views[0], weight)


def test_a_tensor_with_gaps_is_laid_out_densely() -> None:
    expanded = torch.arange(3.0).expand(4, 3)
    flat = FlatTensors(lay_out({"w": expanded}))
    flat.write([expanded])
    assert flat.views[0].is_contiguous()
    assert torch.equal(flat.views[0], expanded)


def test_one_section_a_dtype() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.ones(2)}
    layout = lay_out(tensors)
    assert layout.dtypes == (torch.float32, torch.bfloat16)
    assert layout.numels == (128, 128)


def test_absent_tensors_are_written_as_zeros() -> None:
    flat = FlatTensors(lay_out({"a": torch.zeros(3), "b": torch.zeros(3)}))
    flat.write([torch.ones(3), torch.ones(3)])
    flat.write([None, torch.full((3,), 2.0)])
    assert flat.views[0].tolist() == [0, 0, 0]
    assert flat.views[1].tolist() == [2, 2, 2]


def test_saving_one_tensor_does_not_save_the_others() -> None:
    tensors = {"a": torch.ones(3, 5), "b": torch.zeros(100_000), "c": torch.ones(2).bfloat16()}
    flat = FlatTensors(lay_out(tensors))
    flat.write(list(tensors.values()))
    for view, tensor in zip(flat.views, tensors.values(), strict=True):
        assert view.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        assert torch.equal(view, tensor)


def test_views_do_not_depend_on_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is asked for its capsule refuses where it is not on the current GPU."""

    def refuse(*_: object, **__: object) -> None:
        raise BufferError("a different CUDA device index")

    monkeypatch.setattr(torch.Tensor, "__dlpack__", refuse)
    flat = FlatTensors(lay_out({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.int64)}))
    assert [view.untyped_storage().nbytes() for view in flat.views] == [24, 40]
