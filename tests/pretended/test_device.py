"""The pretended accelerator computes what the processor does, and catches what it is there for."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from tests.pretended import build, device

pytestmark = pytest.mark.fresh
HERE = "pretend:1"
THERE = "pretend:0"
ON = torch.accelerator


class Attention(nn.Module):
    """Attention with a mask, and without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Embedded(nn.Embedding):
    """Looks up what numbers are rounded to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.abs().long().clamp(max=4))


Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
LAYERS: dict[str, Case] = {
    "linear": (lambda: nn.Linear(7, 5), (3, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 8, 3), (2, 3, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), (2, 4, 9, 9)),
    "conv transposed": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 9, 9)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(8), (4, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 8), (4, 8, 3)),
    "attention": (Attention, (2, 3, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), (2, 5, 16)),
    "max pool": (lambda: nn.MaxPool2d(2), (2, 3, 8, 8)),
    "average pool": (lambda: nn.AvgPool2d(2), (2, 3, 8, 8)),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 4)),
    "gelu": (nn.GELU, (4, 4)),
    "softmax": (lambda: nn.Softmax(-1), (4, 5)),
    "prelu": (nn.PReLU, (3, 4)),
    "embedding": (lambda: Embedded(5, 3), (2, 3)),
}
RECURRENT: tuple[Case, ...] = (
    (lambda: nn.LSTM(6, 5, 2, bidirectional=True), (3, 4, 6)),
    (lambda: nn.GRU(6, 5), (3, 4, 6)),
    (lambda: nn.RNN(6, 5), (3, 4, 6)),
)


def passed(case: Case, place: str) -> list[torch.Tensor]:
    """The result of a layer on a device, and all gradients."""
    torch.manual_seed(0)
    layer, x = case[0](), torch.randn(*case[1])
    layer, x = layer.to(place), x.to(place)
    x.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        made = layer(x)
    made = made[0] if isinstance(made, tuple) else made
    made.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [made.detach().cpu(), *(grad.cpu() for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_bits_of_the_processor(name: str) -> None:
    pairs = zip(passed(LAYERS[name], HERE), passed(LAYERS[name], "cpu"), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_layers_have_kernels_of_their_own_as_on_a_gpu(case: Case) -> None:
    for one, other in zip(passed(case, HERE), passed(case, "cpu"), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_optimizers_have_the_bits_of_the_processor(kind: str, way: str) -> None:
    def trained(place: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(place)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **{way: True})
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(
                model(torch.ones(3, 5, device=place)), torch.tensor([0, 1, 1]).to(place)
            ).backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(map(torch.equal, trained(HERE), trained("cpu")))


def test_random_numbers_are_the_processors_of_a_devices_own_generator() -> None:
    torch.manual_seed(7)
    expected = torch.randn(3), torch.randperm(5), torch.rand(2).bernoulli()
    torch.manual_seed(7)
    assert not torch.equal(torch.rand(3, device=THERE).cpu(), expected[0])
    assert torch.equal(torch.randn(3, device=HERE).cpu(), expected[0])
    assert torch.equal(torch.randperm(5, device=HERE).cpu(), expected[1])
    assert torch.equal(torch.rand(2, device=HERE).bernoulli().cpu(), expected[2])
    module = torch.get_device_module(HERE)
    state = module.get_rng_state(HERE)
    again = F.dropout(torch.ones(9, device=HERE)).tolist()
    module.set_rng_state(state, HERE)
    assert F.dropout(torch.ones(9, device=HERE)).tolist() == again
    own = torch.Generator(HERE).manual_seed(1)
    assert (
        torch.rand(2, device=HERE, generator=own).tolist()
        == torch.rand(2, generator=torch.Generator().manual_seed(1)).tolist()
    )


def test_tensors_of_all_sorts() -> None:
    x = torch.arange(6, device=HERE)
    assert x[torch.tensor([True, False] * 3)].tolist() == [0, 2, 4]
    assert torch.add(x, 1, out=torch.empty(0, device=HERE, dtype=torch.int64)).tolist()[0] == 1
    assert x.view(2, 3).t().contiguous().resize_(2).tolist() == [0, 3]
    assert torch.empty(0, device=HERE, dtype=torch.int64).set_(x[2:]).tolist() == [2, 3, 4, 5]  # type: ignore[call-overload]
    storage = x.untyped_storage()
    assert storage.resize_(0).device == torch.device(HERE)
    assert storage.resize_(8).device == torch.device(HERE)
    layer = nn.Linear(2, 2)
    kept = layer.weight
    assert copy.deepcopy(layer.to(HERE)).weight.device == torch.device(HERE)
    assert layer.weight is kept, "a parameter stays the same object on another device"
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("pretend", dtype=dtype):
            assert layer(torch.ones(1, 2, device=HERE)).dtype is dtype
            assert torch.ones(2, device=HERE).softmax(0).dtype is torch.float32


def test_a_pinned_batch_of_a_loader() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True)
    assert all(batch.is_pinned() for (batch,) in loader)
    assert not torch.ones(2).is_pinned()


def test_memory_is_nan_and_has_a_limit_and_is_counted() -> None:
    assert torch.empty(3, device=HERE).isnan().all()
    before = ON.memory_allocated(1)
    ON.reset_peak_memory_stats(1)
    kept = torch.empty(1000, device=HERE)
    torch.empty(2000, device=HERE)
    assert ON.memory_allocated(1) - before == 4096
    assert ON.max_memory_allocated(HERE) - before == 4096 + 8192
    free, total = ON.get_memory_info(1)
    assert total - free == ON.memory_allocated(1)
    with pytest.raises(torch.OutOfMemoryError, match="pretend:1 is out of memory"):
        torch.empty(total, dtype=torch.uint8, device=HERE)
    try:
        device.start(2, 1 << 20)
        small = torch.ones(600, 300, device=HERE)
        with pytest.raises(torch.OutOfMemoryError, match=r"720000 .* of 1048576"):
            small + 1
    finally:
        device.start(2)
    del kept


def test_several_devices_are_not_mixed() -> None:
    one, other = torch.ones(2, device=HERE), torch.ones(2, device=THERE)
    for wrong in (other, torch.ones(2), torch.tensor(1.0, device=THERE)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            one + wrong
    assert (one * torch.tensor(3.0) + other.to(HERE)).tolist() == [4, 4]
    # Where nothing is named, it is the current one.
    with ON.device_index(1):
        assert torch.ones(2, device="pretend").device == torch.device(HERE)


def test_what_comes_to_the_host_is_nan_until_somebody_waits() -> None:
    for wait in ("event", "stream", "device", "value", "query"):
        x = torch.ones(3, device=HERE)
        came = torch.zeros(3, pin_memory=True).copy_(x, non_blocking=True)
        event = torch.Event(HERE)
        event.record(ON.current_stream(HERE))
        later = x.to("cpu", non_blocking=True)
        assert came.isnan().all()
        if wait == "event":
            event.synchronize()
            assert later.isnan().all(), "it was queued behind the event"
        elif wait == "stream":
            ON.current_stream(HERE).synchronize()
        elif wait == "device":
            ON.synchronize(1)
        elif wait == "value":
            x[0].item()
        else:
            assert [event.query(), event.query()] == [False, True]
        assert came.tolist() == [1, 1, 1]
        ON.synchronize(1)
        assert later.tolist() == [1, 1, 1]


def test_pinned_memory_that_is_sent_must_not_change() -> None:
    """Nor does a little of other memory, which is sent after it, wait for it."""
    for waits in (True, False):
        sent = torch.ones(3).pin_memory()
        came = sent.to(HERE, non_blocking=True)
        torch.ones(3).to(HERE, non_blocking=True)
        if waits:
            torch.ones(3).to(HERE)
        sent.zero_()
        ON.synchronize(1)
        assert came.tolist() == [1, 1, 1]
        found = device.reports()
        assert len(found) == (not waits)
        assert waits or "pinned memory was changed before its copy to a device" in found[0]


def test_one_stream_waits_for_another() -> None:
    """With an event, or it is reported; so is memory that is freed while another stream uses it."""
    usual, other = ON.current_stream(HERE), torch.Stream(HERE)
    for waits, recorded in ((True, True), (False, True), (True, False)):
        x = torch.ones(3, device=HERE)
        event = torch.Event(HERE)
        event.record(usual)
        ON.set_stream(other)
        if waits:
            other.wait_event(event)
        x.mul(2)
        if recorded:
            x.record_stream(other)
        ON.set_stream(usual)
        del x
        found = device.reports()
        assert len(found) == (not waits) + (not recorded)
        assert waits or "reads memory (mul) without waiting for stream 0 of pretend:1" in found[0]
        assert recorded or "was freed while stream" in found[0]
    usual.wait_stream(other)
    ON.set_device_index(0)


def test_a_forked_process_leaves_devices_alone() -> None:
    x = torch.ones(3, device=HERE)
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            x + 1
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        del x
        os.write(writing, repr(device.reports()).encode())
        os._exit(0)
    os.wait()
    found = os.read(reading, 9999).decode()
    os.close(reading)
    os.close(writing)
    assert "cannot be used in a forked process" in found
    assert "memory of a device was freed in a forked process" in found


REFUSED: dict[str, Callable[[], object]] = {
    "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(pixels(), 4).sum().backward(),
    "upsample": lambda: F.interpolate(pixels(), scale_factor=2, mode="bicubic").sum().backward(),
    "reflection_pad2d": lambda: F.pad(pixels(), (1, 1, 1, 1), "reflect").sum().backward(),
    "nll_loss2d": lambda: F.nll_loss(pixels(), torch.zeros(1, 6, 6, device=HERE).long()),
    "cumsum": lambda: torch.ones(3, device=HERE).cumsum(0),
    "put_": lambda: torch.ones(3, device=HERE).put_(*(torch.tensor([1], device=HERE),) * 2),
    "bincount": lambda: torch.ones(3, device=HERE).long().bincount(torch.ones(3, device=HERE)),
    "median": lambda: torch.ones(3, 2, device=HERE).median(0),
}
ALLOWED: dict[str, Callable[[], object]] = {
    "cumsum of integers": lambda: torch.ones(3, device=HERE, dtype=torch.int64).cumsum(0),
    "bincount": lambda: torch.ones(3, device=HERE).long().bincount(),
    "median": lambda: torch.ones(3, 2, device=HERE).median(),
    "index_add": lambda: torch.ones(3, device=HERE).index_add_(
        0, torch.tensor([1, 1], device=HERE), torch.ones(2, device=HERE)
    ),
}


def pixels() -> torch.Tensor:
    return torch.ones(1, 1, 6, 6, device=HERE, requires_grad=True)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_deterministic_on_a_gpu_is_refused(deterministic: None, name: str) -> None:
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        REFUSED[name]()


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_deterministic_is_not(deterministic: None, name: str) -> None:
    ALLOWED[name]()


def test_launches_and_waits_are_counted_by_line() -> None:
    x = torch.ones(4, 4, device=HERE, requires_grad=True)
    device.reset_counts()
    line = sys._getframe().f_lineno
    x.t()[1:].detach()  # views
    y = x.mul(2).sum()
    y.backward()
    y.item()
    x.cpu()
    x.detach().nonzero()
    torch.ones(2).to(HERE)
    torch.ones(2).pin_memory().to(HERE, non_blocking=True)
    ON.synchronize(1)
    found = device.counts()
    device.reset_counts(counting=False)
    assert found["allocations"] > 0

    def lines(kind: str) -> list[int]:
        places = {place for place, _ in found[kind]}
        assert all(place.startswith("test_device.py:") for place in places)
        return sorted(int(place.partition(":")[2]) - line for place in places)

    assert lines("launches") == [2, 3, 4, 5, 6, 7, 8]
    assert lines("waits") == [4, 5, 6, 7, 9]
    assert found["launches"][f"test_device.py:{line + 2}", "mul"] == 1
    assert found["waits"][f"test_device.py:{line + 4}", "_local_scalar_dense"] == 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: bool(x.all()),
        lambda x: x[x > 0],
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: torch.equal(x, x),
    ],
)
def test_a_wait_can_raise(wait: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device=HERE)
    with device.nobody_waits():
        with pytest.raises(RuntimeError, match="called a synchronizing operation"):
            wait(x)
        x.add(1).to("cpu", non_blocking=True)
        ON.synchronize(1)
    wait(x)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes have found, see `tests.pretended.peers`."""
    folder = tmp_path_factory.mktemp("peers")
    command = [sys.executable, "-m", "tests.pretended.peers"]
    # Each keeps its own reports.
    environment = {**build.environment(2), device.LOG: ""}
    both = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in range(2)
    ]
    assert [process.wait(timeout=600) for process in both] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


ERRORS = {
    "in_different_order": "operations are issued in different orders: number 0",
    "of_unequal_sizes": "sends 1 tensors of 8 bytes and receives 0",
    "of_the_host": "No backend type associated with device type cpu",
    "too_many": "a group of 129 operations: expected at most 128",
    "on_one_device": "Duplicate GPU",
    "after_an_abort": "the communicator was aborted",
}
REPORTS = {
    "changed_on_the_way": (0, ["writes to memory (add_)", "memory was changed while it was sent"]),
    "read_too_early": (1, ["reads memory (mul) without waiting for stream"]),
}


def test_processes_exchange(peers: list[dict[str, Any]]) -> None:
    sent = [[1.0, 2.0], [2.0, 3.0]]
    for rank, found in enumerate(peers):
        result, error, _ = found["both_ways"]
        assert [result, error] == [["[nan, nan]", sent[1 - rank], 1], None]
        result, error, reports = found["everything"]
        assert (result, error, reports) == ([*sent, [3.0, 5.0], sent[0]], None, [])
        assert found["sizes"] == [2, 129]


@pytest.mark.parametrize("name", ERRORS)
def test_what_an_exchange_does_not_allow_is_refused(peers: list[dict[str, Any]], name: str) -> None:
    errors = [found[name][1] for found in peers]
    assert any(ERRORS[name] in (error or "") for error in errors), errors
    assert all(errors)


@pytest.mark.parametrize("name", REPORTS)
def test_memory_on_its_way_is_left_alone(peers: list[dict[str, Any]], name: str) -> None:
    rank, words = REPORTS[name]
    _, error, reports = peers[rank][name]
    assert error is None
    assert len(reports) == len(words)
    assert all(word in report for word, report in zip(words, reports, strict=True)), reports
