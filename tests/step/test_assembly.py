"""What an engine is put together from, and what becomes of the user's model on the way."""

from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.core.shard import Shares
from onefold.exchange.exchange import Exchange
from onefold.placement import partitioned
from onefold.step import assembly
from onefold.step.assembly import assemble, check_moves
from tests.inside import engine_in
from tests.small import bits, line, make_trainer, points, sgd, square
from tests.step.assembled import devices_of, settings_of
from tests.tables import for_each


def test_names_are_those_of_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    """The state of an optimizer is saved under them."""
    wrapped = nn.ModuleDict({"_orig_mod": nn.Sequential(line())})  # as torch.compile does
    trainer = make_trainer(wrapped, lambda m, b: square(m["_orig_mod"], b))
    trainer.step(points(8))
    folder = trainer.save(tmp_path)
    plain = nn.Sequential(line())
    assert make_trainer(plain).load(folder).step == 1
    assert list(bits(plain).values()) == list(bits(wrapped).values())


def test_the_exchange_is_known_before_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hear of a failure through the exchange that was handed over."""

    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("while replicas are made")

    came: list[Exchange] = []
    monkeypatch.setattr(assembly, "Replica", fail)
    with pytest.raises(ArithmeticError, match="while replicas are made"):
        assemble(
            module := line(),
            sgd(module),
            {"": square},
            settings=settings_of(shards=2),
            devices=devices_of(2),
            shares=Shares((1, 1)),
            scheduler=None,
            joined=came.append,
        )
    assert len(came) == 1


WIDTH = 64
STAGE_BYTES = 4 * WIDTH * WIDTH


@for_each(
    ("placement", "capacity", "fits"),
    [
        ("partition", 2 * STAGE_BYTES, True),
        ("partition", 2 * STAGE_BYTES - 1, False),
        ("offload", STAGE_BYTES, True),
        ("offload", STAGE_BYTES - 1, False),
        ("replicate", 1, True),
    ],
)
def test_a_stage_that_no_device_can_have_is_named(
    placement: str,
    capacity: int,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def make() -> onefold.Trainer:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        return make_trainer(model, devices=None)

    monkeypatch.setattr(partitioned, "capacity_bytes", lambda _: capacity)
    context = LaunchContext(options=RunOptions(placement=placement, offload_dir=str(tmp_path)))
    monkeypatch.setattr("onefold.trainer.current_context", lambda: context)
    if fits:
        trainer = make()
        assert engine_in(trainer).context.exchange.memory.allocator.on_disk == (
            placement == "offload"
        )
        trainer.close()
        return
    expected = (
        rf"stage 0 needs .* bytes of .*, but cpu has only {capacity:,}\. .*large-models\.html"
    )
    with pytest.raises(ValueError, match=expected):
        make()


def test_a_model_that_cannot_be_moved_in_place_is_refused() -> None:
    """Accelerators of other parties are no kind that a tensor may change to; ``meta`` is none."""
    model, meta = nn.Linear(2, 2), torch.device("meta")
    check_moves(model, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"to meta and keep them .* with model.to\('meta'\)"):
        check_moves(model, meta)
    mixed = nn.Sequential(model, nn.Linear(2, 2, device=meta))
    with pytest.raises(ValueError, match=r"to cpu and keep them .* with model.to\('cpu'\)"):
        check_moves(mixed, torch.device("cpu"))
    check_moves(model.to(meta), meta)
