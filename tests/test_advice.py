"""What errors advise is what helps, and what every script of several processes meets is named."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.errors import CheckpointError, DisagreementError, PeerError
from onefold.launcher.workers import advice_on_one_file
from onefold.testing import simulate
from tests.checkpoint.folders import seal
from tests.small import line, make_trainer, points, sgd, square
from tests.tables import for_each

ROWS = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
EXCHANGES: tuple[Any, ...] = ("shared", "collective")

# Calls and files of several processes


def saved_by_the_lead(folder: str) -> None:
    trainer = make_trainer(devices=None)
    trainer.step(points(8))
    if trainer.is_lead:
        trainer.save(folder)


@for_each("exchange", EXCHANGES)
def test_a_save_of_the_lead_alone_is_named(tmp_path: Path, exchange: Any) -> None:
    """At the end of a script, where the others have ended already."""
    words = r"Device 0 is at trainer.save, which must be called on every device, and so not under"
    with pytest.raises(PeerError, match=words):
        simulate(saved_by_the_lead, 2, args=(str(tmp_path),), exchange=exchange)
    assert not list(tmp_path.iterdir())


def fingerprint_of_the_lead() -> None:
    trainer = make_trainer(devices=None)
    for _ in range(2):
        trainer.step(points(8))
        if trainer.is_lead:
            trainer.fingerprint()


def test_a_fingerprint_of_the_lead_alone_is_named() -> None:
    """Where devices keep their partitions; see `trainer.gathered`."""
    words = "device 1 reached trainer.step .*device 0 reached trainer.fingerprint"
    with pytest.raises(DisagreementError, match=words):
        simulate(fingerprint_of_the_lead, 2, placement="partition", exchange="collective")


def test_only_errors_of_files_that_somebody_else_may_have_made_are_explained() -> None:
    there = FileExistsError(17, "File exists", "run/log")
    moved = FileNotFoundError(2, "No such file", "log.part", None, "log")
    assert "write it only on the lead" in advice_on_one_file(there, 2)
    assert "writes log.part" in advice_on_one_file(moved, 2)
    for error in (FileNotFoundError(2, "No such file", "log"), OSError("x"), KeyError("x")):
        assert advice_on_one_file(error, 2) == ""
    assert advice_on_one_file(there, 1) == ""


# Freezing

STEPS, UNFROZEN_FROM = 8, 4


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def unfrozen(devices: int, folder: Path, stop: int = STEPS) -> list[torch.Tensor]:
    """As the messages advise: all in the optimizer, frozen after Trainer is made."""
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = make_trainer(model, optimizer=optimizer, devices=devices)
    trainer.load(folder, if_any=True)
    model[0].requires_grad_(False)
    while trainer.steps < stop:
        model[0].requires_grad_(trainer.steps >= UNFROZEN_FROM)
        trainer.step(tuple(t.double() for t in points(8)))
    if stop < STEPS:
        trainer.save(folder)
    return [parameter.detach() for parameter in model.parameters()]


def test_unfreezing_as_advised_is_unfreezing_in_a_plain_loop(tmp_path: Path) -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs, targets = points(8)
    batch = inputs.double(), targets.double()
    for step in range(STEPS):
        model[0].requires_grad_(step >= UNFROZEN_FROM)
        optimizer.zero_grad()
        square(model, batch).mean().backward()
        optimizer.step()
    whole = unfrozen(1, tmp_path / "none")
    for found, expected in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)
    for stop in (2, UNFROZEN_FROM, 6):
        unfrozen(3, tmp_path / str(stop), stop)
        assert all(map(torch.equal, unfrozen(2, tmp_path / str(stop)), whole))


@for_each(
    ("in_the_optimizer", "words"),
    [
        (False, "add it to the optimizer, create Trainer, then freeze"),
        (True, "require a gradient until Trainer is created, then freeze it"),
    ],
)
def test_what_is_unfrozen_otherwise_is_told_what_works(in_the_optimizer: bool, words: str) -> None:
    model = two_layers().float()
    model[0].requires_grad_(False)
    optimizer = sgd(model if in_the_optimizer else model[2])
    trainer = make_trainer(model, optimizer=optimizer)
    model[0].requires_grad_(True)
    if not in_the_optimizer:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(ValueError, match=words):
        trainer.step(points(8))


# Losses


def test_a_criterion_with_parameters_is_given_with_the_model() -> None:
    model, criterion = nn.Linear(3, 2), nn.Linear(2, 1)
    both = nn.ModuleDict({"model": model, "criterion": criterion})
    words = r"pass both to Trainer: Trainer\(\{'model': model, 'criterion': criterion\}, \.\.\.\)"
    with pytest.raises(ValueError, match=words):
        make_trainer(model, lambda m, x: criterion(m(x)).mean(1), optimizer=sgd(both))
    trainer = onefold.Trainer(
        {"model": model, "criterion": criterion},
        sgd(both),
        lambda both, x: both["criterion"](both["model"](x)).mean(1),
        shards=2,
    )
    assert trainer.step(ROWS).samples == 8


@pytest.mark.filterwarnings("ignore:std():UserWarning")
@for_each(
    ("loss", "shards"),
    [
        (lambda m, x: m(x).std(dim=0).mean(), 8),
        (lambda m, x: m(x).mean(1) / 0, 4),  # not for want of samples
    ],
)
def test_gather_is_named_where_a_shard_has_one_sample(loss: Any, shards: int) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        make_trainer(nn.Linear(3, 2), loss, shards=shards).step(ROWS)
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    advice = "Use onefold.gather(rows) to get the rows of the whole batch"
    assert (advice in said) == ("one sample" in said) == (shards == 8)


@for_each("precision", ["bf16", "fp16"])
def test_what_autocast_has_no_rule_for_is_named(precision: str) -> None:
    def step(by_hand: bool) -> None:
        def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=not by_hand):
                return m[1](*[m[0](x).float() if by_hand else m[0](x)] * 2).float().mean(1)  # type: ignore[index]

        model = nn.ModuleList([nn.Linear(3, 4), nn.Bilinear(4, 4, 2)])
        make_trainer(model, loss, precision=precision).step(ROWS)

    with pytest.raises(RuntimeError) as caught:
        step(by_hand=False)
    said = " ".join(caught.value.__notes__)
    assert "autocast does not support nn.Bilinear" in said
    assert 'precision="bf16-params"' in said
    step(by_hand=True)  # as it says


# Settings of optimizers in checkpoints


def kept(kind: str, items: Any, **more: Any) -> dict[str, Any]:
    return {"kind of value": kind, "items": items, **more}


Made = Callable[[nn.Module], Any]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def adam_and_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    weight, bias = model.parameters()
    nesterov = torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=True)
    return [torch.optim.AdamW([bias]), nesterov]


def choosy(model: nn.Module) -> torch.optim.Optimizer:
    """Of a class that takes other arguments than its settings; by a rate that it would refuse."""

    class Choosy(torch.optim.SGD):
        def __init__(self) -> None:
            super().__init__(model.parameters(), lr=0.1)

    optimizer = Choosy()
    optimizer.param_groups[0]["lr"] = -0.1
    return optimizer


def saved(folder: Path, make: Made, group: int = 0, **changed: Any) -> None:
    """A checkpoint whose settings of one group are changed."""
    trainer = make_trainer(model := line(), optimizer=make(model))
    trainer.step(points(8))
    step = trainer.save(folder)
    record = json.loads((step / "run.json").read_text())
    record["optimizer"]["settings"][group].update(changed)
    seal(step, json.dumps({**record, "sha256": "0" * 64}, indent=2) + "\n")


OF_ANOTHER_KIND = ".* in the checkpoint but .* in this script"


@for_each(
    ("make", "group", "key", "value", "words"),
    [
        *((adam, 0, "lr", value, OF_ANOTHER_KIND) for value in ("0.1", True, [0.1])),
        (adam, 0, "betas", 0.9, OF_ANOTHER_KIND),
        (adam, 0, "betas", kept("tuple", [0.9]), OF_ANOTHER_KIND),
        (adam, 0, "betas", kept("tuple", [0.9, "0.99"]), OF_ANOTHER_KIND),
        (adam, 0, "weight_decay", None, OF_ANOTHER_KIND),
        (adam, 0, "amsgrad", "no", OF_ANOTHER_KIND),
        (adam, 0, "lr", -1, "is -1 .*AdamW rejects .Invalid learning rate: -1"),
        (adam, 0, "lr", kept("float", "nan"), "is nan .*, which is not finite"),
        (adam, 0, "betas", kept("tuple", [2.0, 0.9]), r"is \(2.0, 0.9\) .*index 0: 2.0"),
        (adam, 0, "betas", kept("tuple", [0.9, kept("float", "nan")]), r"is \(0.9, nan\)"),
        (
            adam,
            0,
            "weight_decay",
            kept("float", "inf"),
            "is inf .*Settings must be valid for AdamW",
        ),
        (adam_and_sgd, 1, "momentum", 0, "is 0 .*SGD rejects .Nesterov momentum requires"),
        (adam, 0, "lr", 1, ""),
        (adam, 0, "lr", kept("tensor", 0.5, dtype="float32"), ""),
        (choosy, 0, "momentum", 0, ""),
    ],
)
def test_settings_that_do_not_fit_are_refused_when_they_are_loaded(
    make: Made, group: int, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    saved(tmp_path, make, group, **{key: value})
    again = make_trainer(model := line(), optimizer=make(model))
    before, drawn = again.fingerprint(), torch.get_rng_state()
    words = words and rf"{key} of the optimizer's group {group} {words}"
    with pytest.raises(CheckpointError, match=words) if words else nullcontext():
        again.load(tmp_path)
    assert not words or again.fingerprint() == before
    assert torch.equal(torch.get_rng_state(), drawn)
    again.step(points(8))


# Common first mistakes


CLASSES = torch.arange(8) % 3
INPUTS = ROWS, CLASSES


def outputs_and_targets(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


class Criterion(nn.Module):
    def forward(self, prediction: Any, label: Any, extra: Any) -> Any:
        return F.cross_entropy(prediction, label)


def of_the_batch_alone(batch: Any) -> Any:
    return F.cross_entropy(batch[0], batch[1])


def without_return(model: nn.Module, batch: Any) -> None:
    F.cross_entropy(model(batch[0]), batch[1])


def of_classes(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def of_numbers(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.binary_cross_entropy(model(batch[0])[:, 0].sigmoid(), batch[1], reduction="none")


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square()


AROUND = r"def loss\(model, batch\):\n.*\n +return {}\(model\(inputs\), targets\)"


@for_each(
    ("loss", "batch", "words"),
    [
        (nn.CrossEntropyLoss(), INPUTS, AROUND.format("onefold.losses.cross_entropy")),
        (nn.MSELoss(), INPUTS, AROUND.format("onefold.losses.mse_loss")),
        (nn.BCEWithLogitsLoss(), INPUTS, AROUND.format(".*_cross_entropy_with_logits")),
        (F.smooth_l1_loss, INPUTS, AROUND.format("onefold.losses.smooth_l1_loss")),
        (onefold.losses.nll_loss, INPUTS, AROUND.format("onefold.losses.nll_loss")),
        (outputs_and_targets, INPUTS, AROUND.format("outputs_and_targets")),
        (Criterion(), INPUTS, AROUND.format("Criterion")),
        # A wrapper of this name would call itself.
        (loss, INPUTS, AROUND.format("loss").replace("def loss", "def loss_of_batch")),
        (of_the_batch_alone, INPUTS, AROUND.format("of_the_batch_alone")),
        (lambda model, x, y: model(x), INPUTS, AROUND.format("criterion")),
        (without_return, INPUTS, "a function without a return statement returns None"),
        (of_classes, (ROWS.double(), CLASSES), r"batch\[0\] is torch.float64. .*astype"),
        (of_classes, (ROWS.double().numpy(), CLASSES), r"batch\[0\] is torch.float64"),
        (of_classes, (ROWS.to(torch.uint8), CLASSES), r"torch.uint8. .* tensor.float\(\) / 255"),
        (of_classes, (ROWS, CLASSES.float()), r"class numbers must be torch.int64: .*\.long\(\)"),
        (of_numbers, (ROWS, CLASSES), r"batch\[1\] is torch.int64. .*tensor.float\(\)"),
        (
            of_classes,
            (ROWS, ["cat", "dog"] * 4),
            r"\[1\]\[0\] must be a tensor.* got str.* Text labels must become numbers",
        ),
    ],
)
def test_common_mistakes_are_explained(loss: Any, batch: Any, words: str) -> None:
    trainer = make_trainer(nn.Linear(3, 3), loss)
    with pytest.raises((AttributeError, TypeError, ValueError, RuntimeError)) as found:
        trainer.step(batch)
    assert re.search(words, "\n".join([str(found.value), *getattr(found.value, "__notes__", ())]))


def test_batch_norm_over_one_sample_is_explained() -> None:
    trainer = make_trainer(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), of_classes)
    with pytest.raises(ValueError, match="more than 1 value per channel") as found:
        trainer.step((ROWS[:1], CLASSES[:1]))
    assert "drop_last=True" in found.value.__notes__[-1]


def test_texts_of_a_loader_are_named() -> None:
    trainer = make_trainer(nn.Linear(3, 3), of_classes)
    data = [(row, "cat") for row in ROWS]
    with pytest.raises(TypeError) as found:
        trainer.step(next(iter(trainer.loader(data, batch_size=8))))
    assert (
        "batch[1][0] is the text 'cat', which cannot become a tensor" in found.value.__notes__[-1]
    )


def test_errors_of_a_sound_loss_get_no_such_advice() -> None:
    def fails(model: nn.Module, batch: Any) -> Any:
        raise error

    for error in (
        TypeError("f() takes 1 positional argument but 2 were given"),
        ValueError("type"),
    ):
        with pytest.raises(type(error)) as found:
            make_trainer(nn.Linear(3, 3), fails).step(INPUTS)
        assert len(found.value.__notes__) == 1


def test_a_name_that_is_not_known_is_the_nearest() -> None:
    with pytest.raises(TypeError, match="no argument 'seeds': did you mean 'seed'"):
        make_trainer(seeds=1)
    with pytest.raises(
        TypeError, match=r"no argument 'epochs': it takes model, optimizer, .*, timeout_s$"
    ):
        make_trainer(epochs=1)


@for_each(
    "use",
    [
        float,
        sum,
        "{:.3f}".format,
        lambda step: step.item(),
        lambda step: step.backward(),
        lambda step: round(step, 3),
        lambda step: 0.5 + step,
        lambda step: step < 0.5,
    ],
)
def test_a_step_that_is_used_as_a_number_is_explained(use: Callable[[Any], object]) -> None:
    step = make_trainer().step(points(8))
    with pytest.raises((TypeError, AttributeError), match=r"f'\{step\.loss:\.3f\}'"):
        use([step] if use is sum else step)
    assert f"{step.loss:.3f}" == f"{float(step.loss):.3f}"
    assert not hasattr(step, "item")


def test_what_is_printed_of_a_run_is_short() -> None:
    trainer = make_trainer(devices=2, on_nonfinite="skip")
    step = trainer.step(points(8))
    loader = trainer.loader(ROWS, batch_size=4)
    assert repr(step) == f"Step(number=1, samples=8, epoch=0, loss={float(step.loss):.6g})"
    assert f"{step}" == str(step) == repr(step)
    assert repr(trainer) == "Trainer(Linear, devices=2, shards=4, steps=1)"
    assert repr(loader) == "Loader(Tensor, batch_size=4)"
    assert ", loss=inf, skipped='the loss of " in repr(trainer.step((ROWS, ROWS[:, :1] / 0)))


SGD_CLASS = r"got the class SGD\. Pass an object of it, SGD\(model\.parameters\(\), \.\.\.\)"


@for_each(
    ("part", "words"),
    [
        ({"optimizer": torch.optim.SGD}, SGD_CLASS),
        ({"optimizer": {"a": torch.optim.SGD}}, SGD_CLASS),
        ({"model": nn.Linear, "optimizer": sgd(line())}, r"got the class Linear\. .*Linear\("),
        ({"loss": nn.MSELoss}, r"got the class MSELoss\. Pass an object of it, MSELoss\(\.\.\.\)"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, r"Pass StepLR\(optimizer, \.\.\.\)"),
    ],
)
def test_a_class_that_was_not_called_is_named(part: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make_trainer(**part)


def test_a_trainer_that_is_there_is_told_from_one_that_is_gone() -> None:
    model = line()
    optimizer = sgd(model)
    trainer = make_trainer(model, optimizer=optimizer)
    with pytest.raises(ValueError, match="still exists: use that one for all steps"):
        make_trainer(model, optimizer=optimizer)
    del trainer
    with pytest.raises(ValueError, match=r"is deleted\. Create another optimizer"):
        make_trainer(model, optimizer=optimizer)


def test_few_samples_are_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    for _ in range(3):
        trainer.step(points(3))
    assert [text for text in caplog.messages if "the first batch has 3 samples for 4 sh" in text]
    assert len(caplog.messages) == 1
    # A last batch is often small.
    trainer = make_trainer()
    for count in (8, 3):
        trainer.step(points(count))
    assert len(caplog.messages) == 1


@for_each(("shards", "devices"), [(1, 1), (4, 2)])
def test_a_loss_that_gathers_may_differentiate_by_parameters(shards: int, devices: int) -> None:
    """As the message says: in the second of its runs."""

    def loss(model: nn.Linear, batch: torch.Tensor, advised: bool = True) -> torch.Tensor:
        found = model(batch)
        near = (found @ onefold.gather(found).T).softmax(1)[:, 0].mean()
        if advised and not any(p.requires_grad for p in model.parameters()):
            return near
        (gradient,) = torch.autograd.grad(found.tanh().sum(), [model.weight], create_graph=True)
        return near + gradient.sum() / len(batch)

    def trained(loss: Any, shards: int = shards) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3).double()
        trainer = make_trainer(model, loss, shards=shards, devices=devices if shards > 1 else 1)
        return [*model.parameters(), trainer.step(ROWS.double()).loss]

    for ours, plain in zip(trained(loss), trained(loss, 1), strict=True):
        torch.testing.assert_close(ours, plain)
    if shards > 1:
        with pytest.raises(RuntimeError) as found:
            trained(lambda model, batch: loss(model, batch, False))
        assert (
            "compute it in the second run only, under `if any(p.requires_grad for p in"
            in found.value.__notes__[-1]
        )
