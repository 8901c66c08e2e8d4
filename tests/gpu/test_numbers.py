"""The intended numbers, in every precision; what is not finite is noticed, one step late or at once
where it decides."""

from typing import Any

import torch
import torch.nn.functional as F

import onefold
from onefold.errors import GradientError, LossError
from tests.gpu.device import DEVICE, ON_GPU, each, needs, raises
from tests.gpu.net import SPOILT, Batch, Net, Spoilt, adamw, batches, keeping, trainer_of


@each("precision", [None, "bf16", "fp16"])
def test_one_shard_is_a_plain_loop_but_for_rounding(precision: str | None) -> None:
    """Without dropout, whose seeds are onefold's own."""
    steps = batches(5, device=DEVICE)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    torch.manual_seed(0)
    plain = Net(dropout=0.0).to(DEVICE)
    optimizer = adamw(plain)
    expected = []
    for images, labels in steps:
        optimizer.zero_grad()
        with torch.autocast(torch.device(DEVICE).type, dtype=low, enabled=low is not None):
            loss = F.cross_entropy(plain(images), labels)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    torch.manual_seed(0)
    trainer = trainer_of(shards=1, model=Net(dropout=0.0), precision=precision)
    found = [float(trainer.step(batch).loss) for batch in steps]
    tolerance = 2e-3 if low is None else 3e-2
    pairs = zip(found, expected, strict=True)
    assert all(abs(one - other) < tolerance for one, other in pairs), (found, expected)


IGNORED = 3


def some(model: torch.nn.Module, batch: Batch) -> onefold.Mean:
    """Over labels that count; only the card knows how many these are."""
    images, labels = batch
    counts = (labels != IGNORED).float()
    losses = F.cross_entropy(model(images), labels, reduction="none")
    return onefold.Mean((losses * counts).sum(), counts.sum())


def some_by_losses(model: torch.nn.Module, batch: Batch) -> onefold.Mean:
    images, labels = batch
    return onefold.losses.cross_entropy(model(images), labels, ignore_index=IGNORED)


@each("loss", [some, some_by_losses])
def test_one_shard_with_a_weight_of_the_cards_own_has_the_bits_of_a_plain_loop(loss: Any) -> None:
    steps = batches(4, device=DEVICE)
    torch.manual_seed(0)
    plain = Net(dropout=0.0).to(DEVICE)
    optimizer = adamw(plain)
    torch.use_deterministic_algorithms(True)
    try:
        for images, labels in steps:
            optimizer.zero_grad()
            if loss is some:
                mean = some(plain, (images, labels))
                torch.as_tensor(mean.total / mean.weight).backward()
            else:
                F.cross_entropy(plain(images), labels, ignore_index=IGNORED).backward()
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    trainer = trainer_of(shards=1, model=Net(dropout=0.0), loss=loss)
    for batch in steps:
        trainer.step(batch)
    # Nothing to count: nothing is updated, though the card has gone backward.
    empty = steps[0][0], torch.full_like(steps[0][1], IGNORED)
    trainer.step(empty)
    pairs = zip(trainer.model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    trainer.step(steps[0])
    trainer.close()


@each("options", [{"microbatch": 2}, {"shards": 1, "microbatch": 9}])
def test_weights_of_microbatches_are_added_up(options: dict[str, Any]) -> None:
    losses = []
    for place in ("cpu", DEVICE):
        torch.manual_seed(0)
        trainer = trainer_of(on=place, model=Net(dropout=0.0), loss=some, **options)
        losses.append([float(trainer.step(batch).loss) for batch in batches(3)])
        trainer.close()
    assert all(abs(one - other) < 2e-3 for one, other in zip(*losses, strict=True)), losses


@each("way", [("replicate", 1), ("replicate", 2), ("offload", 1)])
def test_the_error_comes_one_step_late_and_names_step_and_shard(way: tuple[str, int]) -> None:
    placement, devices = way
    with keeping(placement):
        loss = Spoilt()
        trainer = trainer_of(devices, loss=loss)
        steps = batches(4)
        trainer.step(steps[0])
        loss.on = True
        if ON_GPU:
            trainer.step(steps[1])
            loss.on = False
            after = trainer.fingerprint()
        with raises(LossError, "loss of step 2, shard 1 is nan"):
            trainer.step(steps[2])
        assert not ON_GPU or trainer.fingerprint() == after
        trainer.close()


def test_a_gradient_that_is_not_finite_is_noticed_as_well() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("inf")

    plain = Spoilt()
    trainer = trainer_of(loss=lambda model, batch: Steep.apply(plain(model, batch)))
    with raises(GradientError, "gradient of step 1 is not finite" if ON_GPU else "not finite"):
        trainer.step(batches(1)[0])
        trainer.step(batches(1)[0])


@each("devices", [1, 2])
@each("weight", [-1.0, float("nan")])
def test_a_weight_that_is_none_is_named_with_step_and_shard(devices: int, weight: float) -> None:
    """Though it is read after the passes, where only the card knows it."""

    def loss(model: torch.nn.Module, batch: Batch) -> onefold.Mean:
        images, labels = batch
        spoilt = (labels == SPOILT).any()
        losses = F.cross_entropy(model(images), labels, reduction="none")
        return onefold.Mean(losses.sum(), torch.where(spoilt, weight, 4.0))

    trainer = trainer_of(devices, loss=loss)
    with raises(LossError, "step 1, shard 1.* weight of onefold.Mean must be finite"):
        trainer.step(batches(1, device=DEVICE)[0])
    trainer.close()


@each("known", ["late", "early"])
def test_a_term_without_weight_gives_no_gradient_though_only_the_card_knows(known: str) -> None:
    """Where one pass sees the whole batch, too."""

    def loss(model: torch.nn.Module, batch: Batch) -> onefold.LossTerms:
        images, labels = batch
        net = getattr(model, "net")  # noqa: B009 (a plain module's attribute has no type)
        found = net(images)
        losses = F.cross_entropy(found, labels, reduction="none")
        there = 2.0 * (labels == SPOILT).any()
        head = getattr(model, "head")  # noqa: B009
        second = onefold.Mean(head(found).square().sum() * there, weight(there))
        return onefold.Mean(losses.sum(), weight(there + 2.0)) + second

    def weight(value: torch.Tensor) -> torch.Tensor | float:
        return value if known == "late" else float(value)

    torch.manual_seed(0)
    model = torch.nn.Module()
    model.net, model.head = Net(), torch.nn.Linear(10, 1)
    trainer = trainer_of(model=model, loss=loss, shards=1)
    spoilt = batches(1, device=DEVICE)[0]
    usual = spoilt[0], torch.where(spoilt[1] == SPOILT, 0, spoilt[1])
    for step, batch in enumerate((spoilt, usual, spoilt, usual)):
        before = {name: each.clone() for name, each in model.head.named_parameters()}
        trainer.step(batch)
        same = all(torch.equal(each, before[name]) for name, each in model.head.named_parameters())
        assert same == bool(step % 2)
    found = trainer.fingerprint()
    assert FOUND.setdefault("a term without weight", found) == found


FOUND: dict[str, str] = {}
"""Fingerprints that several tests must find alike."""
SKIPPED = [
    *((precision, float("nan"), "shard 1 is nan") for precision in ("fp32", "bf16", "fp16")),
    *((precision, 1e36, "overflow") for precision in ("fp16", "fp16-params")),
]


@each("devices", [1, 2])
@each("case", SKIPPED)
def test_a_step_that_is_left_out_is_left_out_on_time(
    devices: int, case: tuple[str, float, str]
) -> None:
    precision, factor, words = case
    loss = Spoilt(factor)
    skip: dict[str, Any] = {"on_nonfinite": "skip"} if factor != 1e36 else {}
    trainer = trainer_of(devices, loss=loss, precision=precision, **skip)
    steps = batches(3)
    trainer.step(steps[0])
    before, loss.on = trainer.fingerprint(), True
    assert words in trainer.step(steps[1]).skipped
    assert trainer.fingerprint() == before
    loss.on = False
    assert not trainer.step(steps[2]).skipped
    assert trainer.fingerprint() != before


def test_a_kernel_that_does_not_repeat_its_bits_is_refused() -> None:
    needs(ON_GPU, "a GPU")

    def reflected(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return F.pad(losses[None], (1, 1), "reflect")[0, 1:-1]

    with raises(RuntimeError, "(?s)does not have a deterministic implementation.*step 1, shard 0"):
        trainer_of(loss=reflected).step(batches(1)[0])
    trainer_of(loss=reflected, deterministic=False).step(batches(1)[0])
