"""Wrong results are found, whoever has computed them and whatever they are, and nothing else is."""

import itertools
import mmap
import os
import signal
import time
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onefold
from onefold import RunOptions
from onefold.core.results import Gradients
from onefold.errors import AuditError
from onefold.record.entries import AuditEntry, SameProcessEntry
from onefold.shard import replica
from onefold.shard.gradients import take_gradients
from onefold.shard.replica import Replica
from onefold.testing import simulate
from onefold.tools.audit import Auditor, packed, unpacked
from tests.capabilities import NO_LSTM, has_lstm
from tests.inside import engine_in
from tests.small import make_trainer
from tests.tables import some

SHARDS, STEPS = 4, 6
CORES = os.sched_getaffinity(0)


def flip(words: torch.Tensor, place: int, bit: int) -> None:
    words[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)


def single(words: torch.Tensor, at: int, bit: int) -> None:
    flip(words, at % len(words), bit)


def paired(words: torch.Tensor, at: int, bit: int) -> None:
    """Two flips of one bit, which an XOR does not see."""
    flip(words, at % len(words), bit)
    flip(words, (at + 1) % len(words), bit)


def swapped(words: torch.Tensor, at: int, bit: int) -> None:
    """Two elements change places, which a sum does not see."""
    one, two = at % len(words), (at + 5) % len(words)
    words[[one, two]] = words[[two, one]].clone()


def stale(words: torch.Tensor, at: int, bit: int) -> None:
    """A tile has what another one has."""
    one, two = at % (len(words) - 4), (at + 7) % (len(words) - 4)
    words[one : one + 4] = words[two : two + 4].clone()


FAULTS = (single, paired, swapped, stale)


class Planted:
    """Spoils what a device computes of a shard, in one step, for the first few times.

    Args:
        fault: changes the words of a gradient.
        device: whose.
        step: in which step.
        shard: of which shard.
        times: how often.
        number: draws the place.
        child: whether in child processes, else in this one.
    """

    def __init__(
        self,
        fault: Callable[[torch.Tensor, int, int], None],
        *,
        device: int,
        step: int,
        shard: int,
        times: int,
        number: int = 0,
        child: bool = False,
    ) -> None:
        self.fault, self.device, self.step, self.shard = fault, device, step, shard
        self.number, self.process, self.child = number, os.getpid(), child
        # In memory that child processes share with this one.
        self._counts = np.frombuffer(mmap.mmap(-1, 8), np.int32)
        self._counts[0] = times

    @property
    def changed(self) -> bool:
        """Whether any bit was."""
        return bool(self._counts[1])

    def spoil(self, replica: Replica, gradients: Gradients, where: str) -> None:
        asked = f"step {self.step}, shard {self.shard}"
        if replica.number != self.device or where != asked or not self._counts[0]:
            return
        if (os.getpid() != self.process) != self.child:
            return
        self._counts[0] -= 1
        words = next(g for g in gradients if g is not None and g.numel() > 12).view(-1)
        before = words.clone()
        self.fault(words.view(torch.int32), self.number, self.number % 32)
        self._counts[1] |= not torch.equal(before.view(torch.int32), words.view(torch.int32))


Plant = Callable[[Planted | None], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    planted: list[Planted | None] = [None]
    real = take_gradients

    original = Replica.taken

    def taken(self: Replica, *given: Any) -> Gradients:
        def take(*arguments: Any) -> Gradients:
            gradients = real(*arguments)
            if planted[0] is not None:
                planted[0].spoil(self, gradients, given[-1].where)
            return gradients

        with monkeypatch.context() as patch:
            patch.setattr(replica, "take_gradients", take)
            return original(self, *given)

    monkeypatch.setattr(Replica, "taken", taken)
    return lambda it: planted.__setitem__(0, it)


def script(steps: int = STEPS) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = lambda m, x: m(x).square().mean(1)  # noqa: E731
    trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
    loader = trainer.loader(torch.randn(48, 3), batch_size=8, shuffle=True)
    for _ in range(-(-steps // 6)):
        for batch in loader:
            trainer.step(batch)
    return trainer.fingerprint()


def run(folder: Path, devices: int, *, placement: str = "replicate", **audit: Any) -> set[str]:
    folder.mkdir(exist_ok=True)
    options = RunOptions(record=str(folder), placement=placement, **audit)
    return set(simulate(script, devices, options=options))


def entries_in(folder: Path, kind: type[Any]) -> list[Any]:
    return [entry for entry in onefold.Record(folder).entries if isinstance(entry, kind)]


faults_in = partial(entries_in, kind=AuditEntry)


@pytest.mark.parametrize(
    ("placement", "devices"),
    some(itertools.product(["replicate", "partition", "offload"], [1, 2, 3]), 4),
)
def test_an_audit_changes_no_bit(tmp_path: Path, devices: int, placement: str) -> None:
    plain = set(simulate(script, 1))
    assert run(tmp_path, devices, placement=placement, audit=1.0) == plain
    assert not faults_in(tmp_path)


@pytest.mark.parametrize(
    ("fault", "devices", "placement"),
    some(itertools.product(FAULTS, [1, 2, 3], ["replicate", "partition"]), 5),
)
def test_a_transient_fault_is_healed_and_told(
    tmp_path: Path,
    plant: Plant,
    fault: Callable[..., None],
    devices: int,
    placement: str,
) -> None:
    sound = set(simulate(script, 1))
    owner = {1: 0, 2: 1, 3: 1}[devices]
    planted = Planted(fault, device=owner, step=3, shard=2, times=1, number=devices)
    plant(planted)
    assert run(tmp_path, devices, placement=placement, audit=1.0) == sound
    assert planted.changed
    (told,) = faults_in(tmp_path)
    assert (told.step, told.shard, told.devices) == (3, 2, [owner])
    assert (told.persistent, told.healed) == (False, True)
    plant(Planted(fault, device=owner, step=3, shard=2, times=1, number=devices))
    with pytest.raises(AuditError, match=f"step 3, shard 2: device {owner} computed wrong bits"):
        run(tmp_path / "b", devices, placement=placement, audit=1.0, on_corruption="stop")


def test_a_fault_of_the_auditor_is_its_own(tmp_path: Path, plant: Plant) -> None:
    # Of two devices, the one that does not own a shard audits it.
    plant(Planted(single, device=0, step=2, shard=3, times=1))
    assert run(tmp_path, 2, audit=1.0) == set(simulate(script, 1))
    (told,) = faults_in(tmp_path)
    assert (told.step, told.shard, told.devices) == (2, 3, [0])


@pytest.fixture(params=["beside the step", "after it"])
def idle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one device, its child begins with the step where cores are idle, and else after it."""
    found = request.param == "beside the step"
    monkeypatch.setattr("onefold.tools.audit.has_idle_cores", lambda: found)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("child", [False, True])
def test_one_device_asks_another_process(tmp_path: Path, plant: Plant, child: bool) -> None:
    sound = set(simulate(script, 1))
    planted = Planted(single, device=0, step=3, shard=2, times=1, child=child)
    plant(planted)
    assert run(tmp_path, 1, audit=1.0) == sound
    assert planted.changed
    (told,) = faults_in(tmp_path)
    assert (told.step, told.shard, told.devices) == (3, 2, [0])
    assert (told.persistent, told.healed) == (False, True)
    # A process that stays wrong, be it this one or its children, cannot be told from the other.
    plant(Planted(single, device=0, step=3, shard=2, times=1000, child=child))
    with pytest.raises(AuditError, match="step 3, shard 2: device 0 computed wrong bits again"):
        run(tmp_path / "b", 1, audit=1.0)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("fate", "why"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "it ended without an answer"),
        (lambda: time.sleep(60), "it did not answer within"),
        (lambda: torch.ones(2) @ torch.ones(3), "RuntimeError: inconsistent tensor size"),
    ],
)
def test_without_a_child_the_same_process_audits(
    tmp_path: Path,
    plant: Plant,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fate: Callable[[], object],
    why: str,
) -> None:
    sound, process = set(simulate(script, 1)), os.getpid()
    if why == "it did not answer within":  # the others end by themselves, however late
        monkeypatch.setattr(Auditor, "least_limit_s", 0.1)
    real = torch.nn.Dropout.forward

    def forward(self: torch.nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != process:
            fate()
        return real(self, x)

    monkeypatch.setattr(torch.nn.Dropout, "forward", forward)
    planted = Planted(single, device=0, step=4, shard=2, times=1)
    plant(planted)
    assert run(tmp_path, 1, audit=1.0) == sound
    (changed,) = entries_in(tmp_path, SameProcessEntry)
    assert changed.step == 1
    assert why in changed.why
    assert caplog.text.count("a child process could not compute an audit") == 1
    assert [(fault.step, fault.healed) for fault in faults_in(tmp_path)] == [(4, True)]


def test_a_step_that_fails_leaves_no_child(tmp_path: Path) -> None:
    process = os.getpid()

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != process:
            time.sleep(60)
        raise ValueError("not this batch")

    options = RunOptions(record=str(tmp_path), audit=1.0)
    with pytest.raises(ValueError, match="not this batch"):
        simulate(other_script, 1, args=(loss, 4, ""), options=options)


@pytest.mark.parametrize(("devices", "named"), [(2, "device 1 or device 0"), (3, "device 1")])
def test_a_device_that_stays_wrong_ends_the_run(
    tmp_path: Path, plant: Plant, devices: int, named: str
) -> None:
    plant(Planted(single, device=1, step=4, shard=2, times=1000))
    with pytest.raises(AuditError, match=f"step 4, shard 2: {named} computed wrong bits again"):
        run(tmp_path, devices, audit=1.0)
    assert [fault.persistent for fault in faults_in(tmp_path)] == [True]


@pytest.mark.parametrize("elsewhere", [False, True] if len(CORES) > 1 else [False])
def test_a_wrong_update_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    real, left = torch.optim.Adam.step, [1]

    def step(self: torch.optim.Adam, *given: Any) -> None:
        real(self, *given)
        states = [each["step"] for each in self.state.values()]
        there = os.sched_getaffinity(0) != CORES
        if there == elsewhere and left[0] and states and max(map(float, states)) == 4:
            left[0] -= 1
            for group in self.param_groups:
                for segment in group["params"]:
                    segment.data.view(-1)[:1].add_(1e-3)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    words = "step 4, the update of a segment: device 0 computed wrong"
    with pytest.raises(AuditError, match=words):
        run(tmp_path, 1, audit=1.0)
    (told,) = faults_in(tmp_path)
    assert (told.step, told.shard, told.healed) == (4, -1, False)


def in_place(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.div_(x.norm())
    return model(x).square().mean(1)


def gathers(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    z = onefold.gather(model(x))
    return (z @ z.T).square().mean()


def of_a_mapping(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch.x).square().mean(1)


class Attributes(UserDict[str, torch.Tensor]):
    @property
    def x(self) -> torch.Tensor:
        return self["x"]


def other_script(loss: Callable[..., Any], shards: int, kind: str) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, loss, shards=shards)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        batch: Any = torch.randn(16, 5, generator=generator)
        batch = {"T": batch.T.contiguous().T, "mapping": Attributes(x=batch)}.get(kind, batch)
        trainer.step(batch)
    return trainer.fingerprint()


def repeats(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean(1)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss", "shards", "kind"),
    [
        (in_place, 4, ""),
        (gathers, 4, ""),
        (of_a_mapping, 4, "mapping"),
        (repeats, 4, "T"),
        (in_place, 1, ""),
    ],
)
def test_what_cannot_be_audited_is_left_alone(
    tmp_path: Path, loss: Callable[..., Any], shards: int, kind: str, devices: int
) -> None:
    devices = min(devices, shards)
    plain = simulate(other_script, devices, args=(loss, shards, kind))
    options = RunOptions(record=str(tmp_path), audit=1.0)
    assert simulate(other_script, devices, args=(loss, shards, kind), options=options) == plain
    assert not faults_in(tmp_path)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_loss_that_does_not_repeat_ends_the_run(tmp_path: Path, devices: int) -> None:
    calls = itertools.count()

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x + next(calls)).square().mean(1)

    # A child has its own copy of the count: it would repeat a whole step.
    options = RunOptions(record=str(tmp_path), audit=0.5)
    with pytest.raises(AuditError, match="the loss may not be deterministic"):
        simulate(other_script, devices, args=(loss, 4, ""), options=options)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50, 16)
        self.cells = torch.nn.LSTM(16, 24, 2, batch_first=True, dropout=0.2)
        self.out = torch.nn.Linear(24, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.cells(self.words(x))[0])
        return logits


def transformer() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return torch.nn.Sequential(torch.nn.Embedding(50, 32), encoder, torch.nn.Linear(32, 50))


def convolutions() -> torch.nn.Module:
    layers = [
        torch.nn.Embedding(50, 16), torch.nn.Conv1d(12, 32, 3, padding=1),
        torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Conv1d(32, 12, 3, padding=1),
        torch.nn.Dropout(0.1), torch.nn.Linear(16, 50),
    ]  # fmt: skip
    return torch.nn.Sequential(*layers)


def next_words(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = torch.nn.functional.cross_entropy(
        model(x).float().flatten(0, 1), x.flatten(), reduction="none"
    )
    return found.view(len(x), -1).mean(1)


def long_script(
    make: Callable[[], torch.nn.Module], precision: Any, threads: int, folder: Path | None
) -> str:
    """With workers that read ahead, and threads that write checkpoints."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = onefold.Trainer(
        model, optimizer, next_words, shards=8, precision=precision, threads=threads
    )
    words = torch.randint(0, 50, (128, 12), generator=torch.Generator().manual_seed(0))
    loader = trainer.loader(words, batch_size=16, shuffle=True, workers=1)
    for _ in range(2):
        for batch in loader:
            trainer.step(batch)
            if folder is not None and trainer.steps % 4 == 0:
                trainer.save(folder / str(trainer.steps), wait=False)
    return trainer.fingerprint()


@pytest.mark.full
@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [Recurrent, transformer, convolutions])
def test_another_process_computes_the_same_bits(
    tmp_path: Path, make: Callable[[], torch.nn.Module], precision: str | None, threads: int
) -> None:
    if make is Recurrent and precision and not has_lstm(torch.bfloat16):
        pytest.skip(NO_LSTM)
    plain = simulate(long_script, 1, args=(make, precision, threads, None))
    options = RunOptions(record=str(tmp_path), audit=1.0)
    saved = tmp_path / "saved"
    args = (make, precision, threads, saved)
    assert simulate(long_script, 1, args=args, options=options) == plain
    assert not faults_in(tmp_path)
    assert not entries_in(tmp_path, SameProcessEntry)


@pytest.mark.parametrize("width", [1, 3, 64])
def test_a_payload_lies_elsewhere_as_it_lies_here(width: int) -> None:
    whole = torch.arange(40.0 * width).view(40, width)
    for part in (whole[3:7], whole[3:9].T, whole[5:6, :0], whole.int()[1:4]):
        payload = {"x": (part, 2), "y": [None, "text", part.clone()]}
        made = unpacked(packed(payload))
        there = made["x"][0]
        assert (there.stride(), there.dtype) == (part.stride(), part.dtype)
        assert torch.equal(there, part)
        assert not part.numel() or there.data_ptr() % 64 == part.data_ptr() % 64
        assert made["x"][1] == 2
        assert made["y"][:2] == [None, "text"]
    with pytest.raises(TypeError, match="sparse, or expanded"):
        packed(torch.ones(1, 3).expand(4, 3))


def test_the_share_that_is_audited_is_the_one_asked_for() -> None:
    engine = engine_in(make_trainer(shards=8))
    options = RunOptions(audit=0.05)
    auditor = Auditor(engine, options, [])
    chosen = [auditor.chosen(step, 8) for step in range(1, 4001)]
    assert sum(map(len, chosen)) == pytest.approx(0.05 * 8 * 4000, rel=0.1)
    assert {shard for each in chosen for shard in each} == set(range(8))
