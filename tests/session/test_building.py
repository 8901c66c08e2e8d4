"""Models whose values are drawn where they are kept."""

from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import ExchangeName, LaunchContext, RunOptions
from onefold.core.settings import PrecisionName
from onefold.testing import simulate
from tests.tables import for_each

PLACEMENTS: list[str] = ["replicate", "partition", "offload"]


@pytest.fixture(params=PLACEMENTS)
def placement(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    context = LaunchContext(options=RunOptions(placement=request.param, offload_dir=str(tmp_path)))
    monkeypatch.setattr("onefold.session.build.current_context", lambda: context)
    return request.param


def lies_in_a_file(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split(maxsplit=1)[0].split("-"))
        if start <= address < stop:
            return line.endswith("(deleted)")
    raise AssertionError


class Layers(nn.Module):
    """A row of layers of which one is frozen, and values that are drawn in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        nn.init.trunc_normal_(self.layers[1].get_parameter("weight"), std=0.02)
        self.layers[2].requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: torch.Tensor = self.norm(x)
        return y


def test_the_values_are_those_of_the_plain_way_and_lie_where_they_are_kept(
    placement: str,
) -> None:
    torch.manual_seed(3)
    plain, after = Layers(), torch.rand(1)
    torch.manual_seed(3)
    built = onefold.build(Layers)
    assert torch.equal(torch.rand(1), after)
    expected, found = plain.state_dict(), built.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    weights = [layer.get_parameter("weight") for layer in built.layers]
    assert [each.requires_grad for each in weights] == [True, True, False, True, True]
    assert {lies_in_a_file(each) for each in weights} == {placement != "replicate"}

    def broken() -> nn.Module:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        onefold.build(broken)
    assert not lies_in_a_file(nn.Linear(30, 50).weight), "models made afterwards are ordinary"


def trained(precision: PrecisionName | None = None) -> tuple[str, float]:
    """The fingerprint of a run, and a number that is drawn after the model."""
    torch.manual_seed(5)
    model = onefold.build(Layers)
    after = torch.rand(1).item()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1, precision=precision)
    for number in range(2):
        trainer.step(torch.full((9, 64), 0.5 + number))
    return trainer.fingerprint(), after


@for_each(
    ("precision", "placement", "exchange"),
    [
        (None, "partition", "shared"),
        ("bf16-params", "offload", "collective"),
        ("bf16-params", "pipeline", "shared"),
        (None, "pipeline", "collective"),
    ],
)
def test_a_run_with_it_is_the_same(
    precision: str | None, placement: str, exchange: ExchangeName, tmp_path: Path
) -> None:
    options = RunOptions(
        placement=placement, exchange=exchange, offload_dir=str(tmp_path) * (placement == "offload")
    )
    alone = simulate(trained, 1, args=(precision,))
    assert simulate(trained, 2, args=(precision,), options=options) == alone * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_home_must_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    home = str(tmp_path / "absent")
    if by == "environment":
        monkeypatch.setenv("ONEFOLD_OFFLOAD_DIR", home)
        home = ""
    with pytest.raises(
        onefold.errors.LaunchError, match=r"ONEFOLD_OFFLOAD_DIR must be an existing folder.*absent"
    ):
        onefold.launch(trained, devices="cpu:1", placement="offload", offload_dir=home)
