"""What the data of a loader keep between calls: generators, open files and other state."""

import io
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from onefold.core.shard import Shares
from onefold.data_order.kept_state import MOST, WIDEST, files_in, generators_in, reachable
from onefold.errors import SampleError
from tests.data_order.test_loader import make_loader, samples_in, with_workers

GLOBAL = np.random.default_rng(1)
HELD = SimpleNamespace(own=GLOBAL)
X = torch.arange(20.0)
processes = pytest.mark.processes


class Slots:
    __slots__ = ("own",)

    def __init__(self, own: Any) -> None:
        self.own = own


class Module(torch.nn.Module):
    def __init__(self, own: Any) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Identity())
        self.inner[0].own = own


class Attribute:
    def __init__(self, own: Any) -> None:
        self.own = own

    def draw(self) -> float:
        return float(self.own.random())


class Listed(list[Any]):
    """A list whose methods the search does not call."""

    def __iter__(self) -> Any:
        raise AssertionError

    __getitem__ = __len__ = __iter__  # type: ignore[assignment]


def decorated(own: Any) -> Callable[[], object]:
    def decorator(function: Callable[[], object]) -> Callable[[], object]:
        @wraps(function)
        def inner() -> object:
            return own.random(), function()

        return inner

    return decorator(lambda: 1)


def default(own: Any) -> Callable[..., object]:
    return lambda draw=own: draw.random()


def keyword(own: Any) -> Callable[..., object]:
    return lambda *, draw=own: draw.random()


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda own: own,
    "attribute": Attribute,
    "slot": Slots,
    "module transform": Module,
    "list and dict": lambda own: {"a": [1, ({"b": own},)]},
    "subclasses of list and dict": lambda own: OrderedDict(a=Listed([deque([own])])),
    "closure": lambda own: lambda: own.random(),
    "decorator": decorated,
    "default argument": default,
    "keyword default": keyword,
    "partial": lambda own: partial(lambda rng: rng.random(), own),
    "bound method": lambda own: Attribute(own).draw,
    "bound method of the generator": lambda own: own.random,
    "class attribute": lambda own: type("Holder", (Attribute,), {"shared": own})(None),
    "property": lambda own: type("Holder", (), {"one": property(lambda self: own.random())})(),
    "inner function": lambda own: lambda: (lambda: own.random())(),
    "attribute of a function": lambda own: _with_attribute(own),
}


def _with_attribute(own: Any) -> Callable[[], int]:
    def function() -> int:
        return 0

    function.own = own  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found_wherever_they_are_held(place: str) -> None:
    kinds = torch.Generator(), random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
    for own in kinds:
        if place != "bound method of the generator" or not isinstance(own, torch.Generator):
            assert generators_in(PLACES[place](own)) == [own]


def test_globals_of_the_functions_that_use_them_are_found() -> None:
    def function() -> float:
        return GLOBAL.random()

    def inner() -> Any:
        return [function() for _ in range(3)] and (lambda: HELD.own.random())

    class Owner:
        def __getitem__(self, index: int) -> float:
            return GLOBAL.random()

    assert generators_in(function) == generators_in(inner) == generators_in(Owner()) == [GLOBAL]
    assert generators_in(lambda: HELD) == [GLOBAL]
    assert generators_in(lambda: X) == []


def test_global_generators_and_those_without_a_state_are_left_alone() -> None:
    def function() -> object:
        return random.random(), np.random.rand(), torch.rand(()), random.SystemRandom

    held = (random.random, random._inst, np.random.rand, torch.default_generator, random)
    assert generators_in(function, *held, random.SystemRandom(), logging.getLogger("onefold")) == []


def test_the_search_has_a_limit_and_takes_the_nearest_first() -> None:
    own = np.random.default_rng(1)
    assert generators_in([[0] * 5, [own]]) == [own]
    wide: list[Any] = [*([[0]] * WIDEST), own]
    assert generators_in(wide) == []
    many = [[[object()] for _ in range(200)] for _ in range(200)]
    assert len(reachable([many])) == MOST
    # As a data set of a million samples.
    assert len(reachable([[{"x": [1, 2]} for _ in range(10_000)]])) <= 1 + 2 * WIDEST


def test_classes_come_last_as_their_methods_lead_to_a_whole_library() -> None:
    own = np.random.default_rng(1)
    many = [[[object()] for _ in range(200)] for _ in range(200)]
    holder = type("Holder", (), {"library": many})()
    holder.parts = [[[[{"transform": own}]]]]
    assert generators_in(holder) == [own]


def test_open_files_are_found(tmp_path: Path) -> None:
    path = tmp_path / "samples.bin"
    path.write_bytes(b"0123")
    with path.open("rb") as file, path.open() as text, path.open("ab") as log:
        assert files_in(Attribute({"a": [file]}), lambda: text, log, io.BytesIO()) == [str(path)]
    assert files_in(file) == []


@processes
def test_an_open_file_that_forked_workers_share_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "samples.bin"
    path.write_bytes(bytes(20))

    class Lines(Dataset[int]):
        def __init__(self) -> None:
            self.file = path.open("rb")

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            return index

    data = Lines()
    with data.file:
        for workers, method in ((0, None), (2, None), (2, None)):
            loader = make_loader(data, Shares((1,)), workers=workers)
            assert sorted(samples_in(list(loader))) == list(range(20)), method
    said = [each.getMessage() for each in caplog.records]
    assert [str(path) in each for each in said] == [True]


class Counter:
    """Counts its calls, which moves what it returns."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: Any) -> Any:
        self.calls += 1
        return value + self.calls


class Data(Dataset[torch.Tensor]):
    def __init__(self, change: Callable[[Any], Any] = lambda value: value) -> None:
        self.change = change

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        found: torch.Tensor = self.change(X[index])
        return found


class InPlace(Data):
    """Keeps its samples, and scales them where they are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = X.clone()

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.kept[index].mul_(2)


class Streamed(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(X)


def read(data: Any, own: tuple[int, ...] = (0, 1), **choices: Any) -> list[Any]:
    """The payloads of two passes on one device of two, or on both."""
    loader = make_loader(data, Shares((1, 1)), own, collate=None, **choices)
    found: list[dict[int, Any]] = [dict(batch.shards) for _ in range(2) for batch in loader]
    return [{number: each.tolist() for number, each in shards.items()} for shards in found]


def counting_collate() -> Callable[[list[Any]], Any]:
    counter = Counter()
    return lambda samples: counter(torch.stack(samples))


@with_workers
@pytest.mark.parametrize("kind", ["data set", "in place", "collate", "stream"])
def test_a_count_is_rejected_on_the_device_that_reads_the_first_shard(
    kind: str, workers: int
) -> None:
    choices: dict[str, Any] = {"workers": workers}
    if kind in ("collate", "stream"):
        choices["collate"] = counting_collate()
    if kind == "stream":
        choices |= {"shuffle": False, "workers": min(workers, 1)}
    data = {"data set": Data(Counter()), "in place": InPlace(), "stream": Streamed()}
    named = "collate" if kind in ("collate", "stream") else "the data set"
    loader = make_loader(data.get(kind, Data()), Shares((1, 1)), (0,), **choices)
    with pytest.raises(SampleError, match=f"{named} returned different bytes when called twice"):
        list(loader)


class Lazy:
    """Makes its generator when it is first called, as collators with a seed do."""

    def __init__(self) -> None:
        self.rng: Any = None

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(3)
        return torch.stack(samples) + float(self.rng.random())


@with_workers
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_generator_made_in_the_first_call_is_seeded_as_well(kind: str, workers: int) -> None:
    def found(own: tuple[int, ...], workers: int) -> list[Any]:
        data, choices = (Streamed(), {"shuffle": False}) if kind == "stream" else (Data(), {})
        loader = make_loader(data, Shares((1, 1)), own, collate=Lazy(), workers=workers, **choices)
        return [
            {n: each.tolist() for n, each in batch.shards.items()}  # type: ignore[attr-defined]
            for _ in range(2)
            for batch in loader
        ]

    both = found((0, 1), 0)
    workers = min(workers, 1) if kind == "stream" else workers
    alone = [found((number,), workers) for number in (0, 1)]
    assert [one | other for one, other in zip(*alone, strict=True)] == both


def popping(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([sample.pop("x") for sample in samples])


def test_collate_may_change_samples_that_are_kept_in_memory() -> None:
    """Each is collated once: a second time there would be nothing left."""
    data = [{"x": value} for value in X]
    loader = make_loader(data, Shares((1,)), collate=popping)
    assert len(list(loader)) == 4
    assert data == [{}] * 20


def test_a_generator_that_script_and_collate_share_stays_the_scripts() -> None:
    own = torch.Generator().manual_seed(1)
    before = own.get_state().tolist()

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + torch.rand((), generator=own)

    first, second = (list(make_loader(Data(), Shares((1,)), collate=collate)) for _ in range(2))
    assert own.get_state().tolist() == before
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.shards[0], other.shards[0])  # type: ignore[arg-type]
