"""A step that is computed once more has the bits of its record, and says what is wrong in it."""

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import onefold
from onefold import RunOptions
from onefold.cli.records import first_difference
from onefold.record import FILE
from onefold.record.findings import Findings, Inspection
from onefold.shard.operations import OperationWatch
from onefold.testing import simulate
from tests.tables import some

SAMPLES, BATCH, SHARDS = 24, 8, 4


class Script:
    """A training of three steps an epoch.

    Args:
        loss: takes model and batch.
        make: makes the model.
        spoil: changes inputs (24, 3) and targets (24, 1).
    """

    def __init__(
        self,
        loss: Callable[..., Any] | None = None,
        make: Callable[[], torch.nn.Module] | None = None,
        spoil: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    ) -> None:
        self.loss, self.make, self.spoil = loss or squares, make or network, spoil

    def __call__(self) -> None:
        torch.manual_seed(0)
        model = self.make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = onefold.Trainer(model, optimizer, self.loss, shards=SHARDS)
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(SAMPLES, width, generator=generator) for width in (3, 1))
        if self.spoil is not None:
            self.spoil(x, y)
        data = torch.utils.data.TensorDataset(x, y)
        loader = trainer.loader(data, batch_size=BATCH, shuffle=True)
        for _ in trainer.epochs(2):
            for batch in loader:
                trainer.step(batch)

    def recorded(self, folder: Path, devices: int = 1, placement: str = "replicate") -> Path:
        """Run on so many devices; return the file of the record."""
        options = RunOptions(record=str(folder), placement=placement)
        with suppress(onefold.errors.OnefoldError):  # the record says so
            simulate(self, devices, options=options)
        return folder / FILE

    def look(
        self, record: Path, step: int, devices: int = 1, placement: str = "replicate", **asked: Any
    ) -> Findings:
        """Look into a step."""
        found = record.parent / "found"
        inspection = Inspection(record=str(record), step=step, findings=str(found), **asked)
        tools = {"inspection": msgspec.to_builtins(inspection)}
        options = RunOptions(tools=tools, placement=placement)
        with pytest.raises(SystemExit):
            simulate(self, devices, options=options)
        return msgspec.json.decode(found.read_bytes(), type=Findings)


def squares(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean(1)


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
    )


PLACEMENTS = ("replicate", "partition", "offload")


@pytest.mark.parametrize(
    ("recorded_on", "placement"), some(itertools.product(PLACEMENTS, PLACEMENTS), 2)
)
def test_every_step_has_the_bits_of_its_record(
    tmp_path: Path, recorded_on: str, placement: str
) -> None:
    script = Script()
    record = script.recorded(tmp_path, devices=3, placement=recorded_on)
    before = record.read_bytes()
    for step in range(1, 7):
        devices = 1 + step % 3
        found = script.look(record, step, devices, placement)
        assert (found.compared, found.differs) == (step * SHARDS, [])
        assert [each.shard for each in found.shards] == list(range(SHARDS))
        assert all(each.equal for each in found.shards)
        entry = onefold.Record(record).step(step)
        assert found.norm == pytest.approx(entry.norm)
        assert [sample.place for each in found.shards for sample in each.samples] == list(range(8))
    assert record.read_bytes() == before


def test_layers_add_up_to_the_norm(tmp_path: Path) -> None:
    script = Script()
    found = script.look(script.recorded(tmp_path), 2)
    assert [each.name for each in found.layers][:2] == ["0.weight", "0.bias"]
    whole = math.sqrt(sum((each.norm or 0.0) ** 2 for each in found.layers))
    assert found.norm == pytest.approx(whole)


def test_other_bits_are_named(tmp_path: Path) -> None:
    record = Script().recorded(tmp_path)
    other = Script(loss=lambda model, batch: squares(model, batch) * 1.0001)
    found = other.look(record, 3)
    assert found.differs
    assert found.differs[0].startswith("step 1, shard 0: its loss was ")


def test_samples_bear_their_numbers_and_losses(tmp_path: Path) -> None:
    script = Script(spoil=lambda x, y: y[17].fill_(1000.0))
    record = script.recorded(tmp_path)
    places = [sample_of(script.look(record, step), 17) for step in (1, 2, 3)]
    loss, words, operation = next(filter(None, places))
    assert loss > 100_000
    assert words.startswith("float32 (1, 3), from ")
    assert words.endswith(", 1000")
    assert operation is not None
    assert operation.startswith(("forward, aten.sub", "forward, aten.pow"))


def sample_of(found: Findings, number: int) -> tuple[float, str, str | None] | None:
    for shard in found.shards:
        for sample in shard.samples:
            if sample.number == number:
                return sample.loss or 0.0, sample.words, str(shard.first) if shard.first else None
    return None


def named(found: Findings) -> set[int | None]:
    return {each.number for own in found.shards for each in own.samples if not each.finite}


def failed_step(record: Path) -> int:
    return len(onefold.Record(record).by_step) + 1


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("number", [0, 11, 23])
def test_a_sample_that_is_not_finite_is_found_behind_batch_norm(
    tmp_path: Path, number: int, scalar: bool
) -> None:
    loss = (lambda model, batch: squares(model, batch).mean()) if scalar else squares
    script = Script(loss, spoil=lambda x, y: x[number, 1:2].fill_(math.nan))
    record = script.recorded(tmp_path)
    found = script.look(record, failed_step(record), devices=2)
    assert named(found) == {number}
    bad = next(each for each in found.shards if each.total is None)
    assert "1 not finite" in next(each.words for each in bad.samples if not each.finite)


def test_a_gradient_that_is_not_finite_is_found_where_no_loss_shows_it(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch[0]) * batch[1]
        return (out * out).sqrt()[:, 0]

    script = Script(loss, lambda: torch.nn.Linear(3, 1), spoil=lambda x, y: y[13].fill_(0.0))
    record = script.recorded(tmp_path)
    found = script.look(record, failed_step(record))
    assert named(found) == {13}
    bad = next(each for each in found.shards if each.bad_gradients)
    assert bad.bad_gradients == ["weight", "bias"]
    assert bad.first is not None
    assert (bad.first.phase, bad.first.name) == ("backward", "aten.div")
    assert "test_inspection.py" in bad.first.line


def test_a_mask_of_infinities_is_no_fault(tmp_path: Path) -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.layer(x).masked_fill(torch.tensor([False, False, True]), -math.inf)
            return scores.softmax(1)[:, :1]

    script = Script(make=Masked)
    found = script.look(script.recorded(tmp_path), 2)
    assert [each.first for each in found.shards] == [None] * SHARDS
    assert all(each.equal for each in found.shards)


def test_a_function_is_handed_the_step(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"""
def look(model, shards, step):
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    with open({str(seen)!r}, "w") as file:
        file.write(repr((step, sorted(shards), round(float(norm), 3))))
"""
    (tmp_path / "look.py").write_text(code)
    script = Script()
    found = script.look(script.recorded(tmp_path), 4, function=f"{tmp_path / 'look.py'}:look")
    assert found.norm is not None
    assert seen.read_text() == repr((4, [0, 1, 2, 3], round(found.norm, 3)))


def test_digests_differ_from_the_first_other_parameter_on(tmp_path: Path) -> None:
    def scaled() -> torch.nn.Sequential:
        model = network()
        model[3].get_parameter("weight").data *= 1.5
        return model

    one, two = (
        script.look(record, 2, digests=True)
        for script, record in ((each, each.recorded(tmp_path)) for each in [Script()])
        for script in (script, Script(make=scaled))
    )
    differ = {name for name, it in one.parameters[1].items() if two.parameters[1][name] != it}
    assert differ == {"3.weight"}
    assert {each.digest for each in one.shards[0].samples} == {
        each.digest for each in two.shards[0].samples
    }
    first = next(
        here.name
        for here, there in zip(one.shards[0].operations, two.shards[0].operations, strict=True)
        if here.digest != there.digest
    )
    assert first in ("aten.t", "aten.addmm")


def test_memory_without_values_is_no_operation() -> None:
    module = torch.nn.Linear(2, 1)
    with (watch := OperationWatch(module)).watching():
        value = torch.zeros(3, 2)
        torch.empty_permuted((3, 2), (1, 0))
        torch.empty_strided((3, 2), (2, 1))
        value.new_empty(3)
        torch.ops.aten.new_empty_strided(value, (3, 2), (2, 1))
        torch.ops.prims.empty_strided(
            (3, 2), (2, 1), dtype=torch.float32, device="cpu", requires_grad=False
        )
        torch.empty_like(value).fill_(1.0)
    assert [each.name for each in watch.operations] == ["aten.zeros", "aten.fill_"]


def test_what_every_shard_does_is_no_fault(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nothing = torch.zeros(1).log().exp()  # minus infinity on the way, in every shard
        return squares(model, batch) + nothing

    script = Script(loss, spoil=lambda x, y: y[17].fill_(math.nan))
    record = script.recorded(tmp_path)
    found = script.look(record, failed_step(record))
    assert named(found) == {17}
    bad = next(each for each in found.shards if each.total is None)
    assert bad.first is None  # the sample itself is not finite
    assert "1 not finite" in next(each.words for each in bad.samples if not each.finite) or any(
        each.words.endswith("nan") for each in bad.samples if not each.finite
    )


def test_a_backward_operation_has_the_line_of_its_forward_one(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch[0]) * batch[1]
        root = (out * out).pow(0.5)
        with torch.no_grad():
            root.mean()
        return root[:, 0]

    script = Script(loss, lambda: torch.nn.Linear(3, 1), spoil=lambda x, y: y[13].fill_(0.0))
    record = script.recorded(tmp_path)
    found = script.look(record, failed_step(record))
    bad = next(each for each in found.shards if each.bad_gradients)
    assert bad.first is not None
    lines = Path(__file__).read_text().splitlines()
    assert "pow(0.5)" in lines[int(bad.first.line.rpartition(":")[2]) - 1]


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ({}, {}, None),
        (
            {},
            {"steps": 5},
            "the 5 steps of both runs are equal; the runs have steps 1 to 6, and steps 1 to 5",
        ),
        ({}, {"value": 2.0}, "values that the loss returned"),
        ({"results": 0}, {"scale": 1.001, "results": 0}, "a block of trainer.modifying"),
        ({}, {"results": 2}, "1 and 2 results"),
    ],
)
def test_whatever_differs_between_two_records_is_found(
    tmp_path: Path, one: dict[str, Any], two: dict[str, Any], said: str | None
) -> None:
    def script(steps: int = 6, value: float = 1.0, scale: float = 1.0, results: int = 1) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model: torch.nn.Module, x: torch.Tensor) -> Any:
            return model(x).square().mean(1), {"value": value * torch.ones(len(x))}

        trainer = onefold.Trainer(model, optimizer, loss, shards=2)
        for _ in range(steps):
            trainer.step(torch.ones(4, 3))
        with trainer.modifying():
            model.weight.data *= scale
        for _ in range(results):
            trainer.fingerprint()

    records = []
    for number, chosen in enumerate((one, two)):
        (folder := tmp_path / str(number)).mkdir()
        simulate(lambda chosen=chosen: script(**chosen), 1, options=RunOptions(record=str(folder)))
        records.append(onefold.Record(folder))
    found = first_difference(*records)
    assert (found is None) if said is None else (found is not None and said in found.text)
