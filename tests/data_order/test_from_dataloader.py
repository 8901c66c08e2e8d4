"""A DataLoader of PyTorch's is taken over with its settings, and PyTorch's names are known."""

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import onefold
from onefold.errors import SampleError
from tests.data_order.test_loader import Augmented, noisy_collate, processes, samples_in
from tests.small import line, make_trainer, points, square
from tests.tables import for_each

DATA: Any = list(range(20))


def read(loader: onefold.Loader, passes: int = 2) -> list[Any]:
    return [[dict(batch.shards) for batch in loader] for _ in range(passes)]


@for_each(
    ("theirs", "ours"),
    [
        ({"batch_size": 6, "collate_fn": list}, {"batch_size": 6, "collate": list}),
        (
            {"batch_sampler": BatchSampler(RandomSampler(DATA), 6, True)},
            {"batch_size": 6, "shuffle": True, "drop_last": True},
        ),
        ({"batch_size": 3, "sampler": [4, 5, 4]}, {"batch_size": 3, "sampler": [4, 5, 4]}),
        ({"batch_sampler": [[1, 2], [3]]}, {"batch_sampler": [[1, 2], [3]]}),
        (
            {"batch_size": 6, "pin_memory": False, "timeout": 0, "drop_last": True}
            | {"generator": torch.Generator().manual_seed(8), "in_order": True},
            {"batch_size": 6, "drop_last": True},
        ),
    ],
)
def test_settings_are_those_of_ours(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    theirs = {"collate_fn": noisy_collate, **theirs}
    taken = make_trainer().loader(DataLoader(Augmented(), **theirs))
    made = make_trainer().loader(Augmented(), **{"collate": noisy_collate, **ours})
    assert read(taken) == read(made)
    assert taken.track.size == made.track.size
    assert len(taken) == len(made)
    assert taken.batch_size == made.batch_size
    assert isinstance(taken.dataset, Augmented)


@processes
def test_workers_are_started_as_it_says() -> None:
    def theirs(worker: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        info.dataset.number = 7 + worker  # type: ignore[attr-defined]

    class Noted(Augmented):
        number: int

        def __getitem__(self, index: int) -> Any:
            return self.number

    choices: Any = {"num_workers": 2, "worker_init_fn": theirs, "collate_fn": list}
    more: Any = {"multiprocessing_context": "fork", "prefetch_factor": 1}
    for loader in (
        make_trainer().loader(DataLoader(Noted(), 6, **choices, **more)),
        make_trainer().loader(Noted(), batch_size=6, **choices),
    ):
        assert {*samples_in(list(loader))} == {7, 8}


class Wholes(Augmented):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((5 + index, 2), float(index)), "y": torch.arange(5 + index)}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=processes)])
def test_items_that_are_whole_batches_are_cut(workers: int) -> None:
    trainer = make_trainer(shards=2, devices=2)
    loader = trainer.loader(DataLoader(Wholes(3), batch_size=None, num_workers=workers))
    batches = list(loader)
    assert [(batch.samples, batch.stop) for batch in batches] == [(5, 1), (6, 2), (7, 3)]
    lengths = [[len(p["x"]) for p in batch.shards.values()] for batch in batches]  # type: ignore[index]
    assert lengths == [[3, 2], [3, 3], [4, 3]]
    assert (len(loader), loader.batch_size) == (3, None)
    shuffled = trainer.loader(DataLoader(Wholes(9), batch_size=None, shuffle=True))
    orders = [[batch.samples - 5 for batch in shuffled] for _ in range(2)]
    assert orders[0] != orders[1] != sorted(orders[1]) == list(range(9))
    picked = trainer.loader(DataLoader(Wholes(9), batch_size=None, sampler=[2, 2, 1]))
    assert [batch.samples for batch in picked] == [7, 7, 6]


class Stream(IterableDataset[Any]):
    def __init__(self, items: Any = range(20)) -> None:
        self._items = items

    def __iter__(self) -> Any:
        return iter(self._items)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=processes)])
def test_a_stream_is_taken_over(workers: int) -> None:
    """With one worker, whatever it says."""
    loader = Harmless(Stream(), 6, drop_last=True, collate_fn=list, num_workers=workers)
    taken = make_trainer().loader(loader)
    assert samples_in(list(taken)) == list(range(18))
    assert taken.batch_size == 6


class Own(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([1])


class Harmless(DataLoader[int]):
    """As those of libraries that only bring a collate function."""


class WebLoader(Stream):
    """As webdataset's, which has a DataLoader inside."""


@for_each("choices", [{}, {"batch_size": 4}])
def test_the_loader_of_webdataset_is_refused(choices: dict[str, Any]) -> None:
    """Also with a batch size: its batches would be taken for samples."""
    with pytest.raises(TypeError, match=r"WebLoader makes batches .* trainer.loader\(webdataset"):
        make_trainer().loader(WebLoader(), **choices)


@for_each(
    ("loader", "words"),
    [
        (Own(DATA), "Own reads its data in its own way"),
        (
            DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1)),
            "sampler contains a DistributedSampler, which splits samples across devices",
        ),
        (DataLoader(Stream(), batch_size=None), "a stream of whole batches"),
        (
            DataLoader(range(8), batch_size=None, sampler=BatchSampler(range(8), 4, False)),  # type: ignore[arg-type]
            "gets the indices of a whole batch at once. Use .*batch_sampler",
        ),
    ],
)
def test_a_loader_that_cannot_be_taken_over_is_refused(loader: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make_trainer().loader(loader)


@for_each(
    ("data", "choices", "words"),
    [
        (DATA, {"workers": 2, "num_workers": 2}, "workers and num_workers are the same argument"),
        (
            DATA,
            {"collate": list, "collate_fn": list},
            "collate and collate_fn are the same argument",
        ),
        (DATA, {"pin_memory": True}, "unexpected argument pin_memory. Use the arguments of train"),
        (DATA, {"worker_init_fn": 3}, "expected worker_init_fn to be a function, but got 3"),
        (DATA, {"batch_size": None}, "batch_size is missing: pass the global batch size"),
        *(
            (
                DataLoader(DATA, 4),
                {"batch_size": None, name: 1},
                f"passed together with {name}, but",
            )
            for name in ("workers", "collate", "sampler", "num_workers")
        ),
        (None, {}, "expected a data set, but got a Loader, which makes batch"),
    ],
)
def test_wrong_arguments_are_refused(data: Any, choices: dict[str, Any], words: str) -> None:
    trainer = make_trainer()
    data = trainer.loader(DATA, batch_size=4) if data is None else data
    choices = {"batch_size": 4, **choices}
    choices = {name: value for name, value in choices.items() if value is not None}
    with pytest.raises(TypeError, match=words):
        trainer.loader(data, **choices)
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(TypeError, match=words):
            call(lambda m, b: {}, data, **choices)


@for_each("shuffle", [False, True])
def test_evaluation_takes_loaders_in_the_order_of_their_data(shuffle: bool) -> None:
    data = TensorDataset(*points(20))
    items = [data[number] for number in range(len(data))]
    loader, streamed = DataLoader(data, 6, shuffle=shuffle), DataLoader(Stream(items), 6)
    trainer = make_trainer(line())
    score: Any = lambda m, b: {"loss": square(m, b)}  # noqa: E731
    expected = trainer.evaluate(score, data, batch_size=6)
    assert [trainer.evaluate(score, each) for each in (loader, streamed)] == [expected] * 2
    found = trainer.predict(lambda m, b: {"x": b[0]}, loader)["x"]
    assert torch.equal(found, data.tensors[0])
    part = trainer.predict(lambda m, b: {"x": b[0]}, data, batch_size=2, sampler=[3, 1, 2])["x"]
    assert torch.equal(part, data.tensors[0][[3, 1, 2]])


def test_batches_by_a_rule_are_numbered_through_the_run() -> None:
    given = []

    def rule(step: int, generator: torch.Generator) -> torch.Tensor:
        given.append(step)
        return torch.rand(6, generator=generator) + torch.rand(6)

    def drawn(devices: int) -> list[Any]:
        batches = make_trainer(devices=devices).batches(rule, per_epoch=3)
        assert (len(batches), batches.batch_size) == (3, None)
        return [p.tolist() for one in read(batches, 4) for b in one for p in b.values()]

    values = drawn(1)
    assert given == list(range(12))
    assert len({tuple(value) for value in values}) == len(values)
    assert drawn(2) == values


@for_each(
    ("rule", "per_epoch", "kind", "words"),
    [
        (3, 3, TypeError, "expected a function of step and generator"),
        (square, 0, ValueError, "per_epoch must be at least 1, but got 0"),
        (square, 1.5, TypeError, "per_epoch must be an integer"),
        (lambda step, generator: 1 / 0, 3, SampleError, "making batch 0 in epoch 0 failed: ZeroD"),
    ],
)
def test_a_rule_that_is_none_is_refused(rule: Any, per_epoch: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        list(make_trainer().batches(rule, per_epoch=per_epoch))
