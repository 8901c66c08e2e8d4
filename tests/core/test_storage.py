"""How parameters are cut into segments, partitions and chunks, alike on all devices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.flat import Chunk, Layout, lay_out
from onefold.core.stages import Stages
from onefold.core.storage import cut_chunks, cut_partitions, cut_segments

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def layout_of(*tensors: torch.Tensor) -> Layout:
    return lay_out({str(number): tensor for number, tensor in enumerate(tensors)})


@given(
    sizes=st.lists(st.integers(0, 90_000), min_size=1, max_size=12),
    by_element=st.booleans(),
    devices=st.integers(1, 9),
    data=st.data(),
)
def test_spans_cover_every_element_once_aligned_and_balanced(
    sizes: list[int], by_element: bool, devices: int, data: st.DataObject
) -> None:
    layout = layout_of(*(torch.empty(n, dtype=data.draw(DTYPES), device="meta") for n in sizes))
    segments = cut_segments(layout, by_element=by_element)
    partitions = cut_partitions(segments, devices)
    assert [i for partition in partitions for i in partition] == list(range(len(segments)))
    ends = [0] * len(sizes)
    for segment in segments:
        assert segment.start == ends[segment.entry]
        ends[segment.entry] = segment.stop
        assert segment.start % 1024 == 0
        assert segment.stop % 1024 == 0 or segment.stop == sizes[segment.entry]
        assert segment.whole or by_element
    assert ends == sizes
    for entry in layout.entries:
        assert entry.offset * layout.dtypes[entry.section].itemsize % 256 == 0
    largest = max((segment.numel for segment in segments), default=0)
    for partition in partitions:
        assert sum(segments[i].numel for i in partition) <= sum(sizes) / devices + largest


def test_segments_do_not_depend_on_the_number_of_devices_but_on_the_model() -> None:
    segments = cut_segments(layout_of(torch.empty(26_000_000, device="meta")), by_element=True)
    assert 200 <= len(segments) <= 256
    assert not any(segment.whole for segment in segments)
    (segment,) = cut_segments(layout_of(torch.empty(3)), by_element=True)
    assert sorted(map(len, cut_partitions([segment], 5))) == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("devices", [2, 4, 6, 8, 16, 32])
def test_devices_have_as_much_where_each_stage_has_few_segments(
    devices: int, pipeline: int
) -> None:
    """32 blocks of a language model have about ten segments each."""
    widths = (4096 * 4096,) * 4 + (4096 * 11_008,) * 3 + (4096,) * 2
    blocks, names = 32, tuple(map(str, range(33)))
    layout = layout_of(*(torch.empty(n, device="meta") for n in widths * blocks))
    stage_of = tuple(1 + number // len(widths) for number in range(len(widths) * blocks))
    places = tuple(number * pipeline // 33 for number in range(33)) if pipeline > 1 else ()
    segments = cut_segments(layout, by_element=True)
    stages = Stages(names, stage_of, places)
    partitions = cut_partitions(segments, devices, stages)
    assert sorted(n for partition in partitions for n in partition) == list(range(len(segments)))
    numels = [sum(segments[n].numel for n in partition) for partition in partitions]
    assert max(numels) <= 1.1 * sum(numels) / devices
    for place, partition in enumerate(partitions):
        for stage in range(1, 33):
            own = [n for n in partition if stages.stage_of[segments[n].entry] == stage]
            assert own == list(range(own[0], own[-1] + 1)) if own else True
            assert not own or not places or places[stage] == place % pipeline


def test_small_neighbors_are_one_chunk_also_where_they_are_added_up_in_a_wider_dtype() -> None:
    layout = layout_of(*(torch.empty(n, dtype=torch.bfloat16) for n in (10, 0, 3, 700)))
    wide = layout.converted(lambda _: torch.float32)
    segments = cut_segments(layout, by_element=True)
    assert cut_chunks(layout, segments) == cut_chunks(wide, segments) == [Chunk(0, 0, 956, None)]
    # A segment of another device lies between.
    assert len(cut_chunks(wide, [segments[0], segments[3]])) == 2
