import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.checkpoint.folder import prune
from onefold.errors import CheckpointError, DataError
from onefold_jobs.finetune import best_checkpoint, freeze, load_body, parameter_groups, run_of
from onefold_jobs.models.resnet import ResNet
from onefold_jobs.options import TrainOptions
from tests.small import Batch, bits, make_trainer
from tests.tables import for_each


def small(classes: int = 3, blocks: tuple[int, ...] = (1, 1), seed: int = 0, **more: Any) -> ResNet:
    """A ResNet for gray pictures, and batch norms that are not at their beginning."""
    torch.manual_seed(seed)
    model = ResNet(blocks=blocks, num_classes=classes, in_channels=1, **{"width": 4, **more})
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_()
    return model


def pictures(samples: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(samples, 1, 8, 8, generator=generator), torch.arange(samples) % 3


def train(model: nn.Module, *, steps: int = 3, devices: int = 1) -> onefold.Trainer:
    groups = parameter_groups(model, TrainOptions(lr=0.1), "fc")
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)
    loss, how = lambda m, b: F.cross_entropy(m(b[0]), b[1]), {"shards": 2, "devices": devices}
    trainer = make_trainer(model, loss, optimizer=optimizer, **how)
    for _ in range(steps):
        trainer.step(pictures())
    return trainer


def changed(before: dict[str, bytes], model: nn.Module) -> set[str]:
    return {name for name, value in bits(model).items() if value != before[name]}


def names_under(model: nn.Module, *parts: str) -> set[str]:
    return {name for name in model.state_dict() if name.startswith(tuple(f"{p}." for p in parts))}


@for_each("prefix", ["", "module._orig_mod."])
@for_each("without", ["nothing", "fc.", "num_batches_tracked"])
def test_the_body_is_loaded_whatever_the_head(tmp_path: Path, prefix: str, without: str) -> None:
    source = small(5, seed=1)
    state = {prefix + n: value for n, value in source.state_dict().items() if without not in n}
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    model = small()
    load_body(model, tmp_path / "w.pth", "fc", key="state_dict")
    counts = {name for name in source.state_dict() if without in name}
    assert changed(bits(source), model) <= names_under(model, "fc") | counts
    assert model.get_submodule("fc").weight.shape == (3, 8)


@for_each(
    ("source", "words"),
    [
        (
            lambda: small(width=8),
            r"the file has none for conv1\.weight, bn1\.weight, .* and \d+ more",
        ),
        (
            lambda: small(blocks=(1,)),
            r"the file has none for layer2\.0\.conv1\.weight, .* more",
        ),
        (
            lambda: small(blocks=(1, 2)),
            r"the file has also some for layer2\.1\.conv1\.weight, ",
        ),
        (lambda: small(small_images=False), r"the file has none for conv1\.weight$"),
        (lambda: nn.Linear(3, 4), r"none of its names is in the model"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, source: Any, words: str) -> None:
    state = {f"module.{name}": value for name, value in source().state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=words):
        load_body(small(), tmp_path / "w.pth", "fc", key=None)


TIES = [("highest", (0.5, 0.9, 0.7), 2), ("lowest", (0.5, 0.9, 0.7), 1)]
TIES += [("highest", (0.9, 0.9, 0.7), 2), ("lowest", (0.5, 0.5, 0.7), 2)]
TIES += [("highest", (math.nan, 0.9, math.nan), 2), ("highest", (0.9, math.nan, 0.5), 1)]


@for_each(("order", "scores", "best"), TIES)
def test_the_best_found_is_what_stays(tmp_path: Path, order: str, scores: Any, best: int) -> None:
    """Where older checkpoints are deleted: a tie goes to the newer one, and NaN beats nothing."""
    trainer, folder = train(small(), steps=0), tmp_path / "checkpoints"
    for value in scores:
        trainer.step(pictures())
        rule: dict[str, Any] = {"scores": {"score": value}, "best": f"{order} score"}
        trainer.save(folder, **rule, keep=4, wait=True)
    gone = {"checkpoint": "checkpoints/step-00000099", "score": "score"}
    (tmp_path / "run.json").write_text(json.dumps({"best": gone, "score": f"{order} score"}))
    found = best_checkpoint(tmp_path)
    assert found.name == f"step-{best:08d}"
    prune(folder, run=json.loads((found / "run.json").read_text())["run"], keep=1)
    left = sorted({best, len(scores)})
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{s:08d}" for s in left]


def test_the_best_weights_of_a_run_are_where_it_says(tmp_path: Path) -> None:
    def refused(error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            best_checkpoint(tmp_path)

    assert run_of(str(tmp_path)) is None
    refused(DataError, "expected the folder of a run")
    (tmp_path / "run.json").write_text('{"best": null}')
    assert run_of(str(tmp_path)) == tmp_path
    refused(CheckpointError, "has not finished an epoch yet")
    where = "checkpoints/step-00000003"
    outside = ["../other", "checkpoints/../../other", "/etc", "checkpoints/step-1", 7, ["a"]]
    for best in (*({"checkpoint": each} for each in outside), 3, [3], "checkpoints/x"):
        (tmp_path / "run.json").write_text(json.dumps({"best": best}))
        refused(DataError, "expected the best checkpoint to be one of the run")
    (tmp_path / "run.json").write_text(json.dumps({"best": {"checkpoint": where}}))
    refused(CheckpointError, "step-00000003: expected the run's best weights")
    (tmp_path / where).mkdir(parents=True)
    assert best_checkpoint(tmp_path) == tmp_path / where


class Chain(nn.Module):
    """Its parts begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(2, 2)
        self.layer10 = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(2))
        self.fc = nn.Linear(2, 2)


BODY = "scale layer1.weight layer1.bias layer10.0.weight layer10.0.bias"
FROZEN: list[tuple[tuple[str, ...], str | None, str]] = [
    ((), None, ""),
    (("layer1",), None, "layer1.weight layer1.bias"),
    (("layer10.1",), None, "layer10.1.weight layer10.1.bias"),
    (("layer1.bias", "scale"), None, "scale layer1.bias"),
    ((), "layer1", "scale"),
    ((), "layer10", "scale layer1.weight layer1.bias"),
    ((), "layer1.bias", "scale layer1.weight"),
    (("layer1", "layer10.0"), "layer10", BODY),
    ((), "fc", f"{BODY} layer10.1.weight layer10.1.bias"),
]
NO_PART = "the model has no such part. Its parts are scale, layer1, layer10, fc, "
THE_HEAD = "would freeze the model's last layer, fc: name only"
REFUSED: list[tuple[tuple[str, ...], str | None, str]] = [
    (("layer1", "layer"), None, f"^--freeze layer: {NO_PART}"),
    (("layer10.2",), None, rf"^--freeze layer10\.2: {NO_PART}"),
    (("",), None, f"^--freeze : {NO_PART}"),
    ((), "head", f"^--freeze-until head: {NO_PART}"),
    (("fc", "layer1"), None, THE_HEAD),
    (("fc.bias", "layer1"), None, THE_HEAD),
]


@for_each(("parts", "until", "frozen"), FROZEN)
def test_whole_parts_are_frozen_by_their_names(parts: Any, until: Any, frozen: str) -> None:
    model = Chain()
    assert freeze(model, TrainOptions(freeze=parts, freeze_until=until), "fc") == frozen.split()
    still = [name for name, value in model.named_parameters() if not value.requires_grad]
    assert still == frozen.split()


@for_each(("parts", "until", "words"), REFUSED)
def test_what_cannot_be_frozen_is_refused(parts: Any, until: Any, words: str) -> None:
    model = Chain()
    with pytest.raises(ValueError, match=words):
        freeze(model, TrainOptions(freeze=parts, freeze_until=until), "fc")
    assert all(parameter.requires_grad for parameter in model.parameters())


@for_each(
    ("frozen", "kept"),
    [((), ()), (("conv1", "bn1", "layer1"),) * 2, (("bn1.weight",), ("bn1.weight",))],
)
def test_only_frozen_parts_stay(frozen: tuple[str, ...], kept: tuple[str, ...]) -> None:
    prints = set()
    for devices in (1, 2):
        model = small()
        freeze(model, TrainOptions(freeze=frozen), "fc")
        before = bits(model)
        trainer = train(model, devices=devices)
        still = names_under(model, *kept) | (set(kept) & set(before))
        assert changed(before, trainer.model) == set(before) - still
        prints.add(trainer.fingerprint())
    assert len(prints) == 1


class Activated(nn.BatchNorm2d):
    """Does more than normalize, as some of timm do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


@for_each("training", [True, False, None])
def test_a_frozen_batch_norm_normalizes_with_its_kept_statistics(training: bool | None) -> None:
    model = small()
    model.bn1 = Activated(4)
    images, _ = pictures()
    kept = copy.deepcopy(model.bn1).eval()
    before = bits(model)
    freeze(model, TrainOptions(freeze=("bn1",)), "fc")
    assert list(bits(model).items()) == list(before.items())
    for each in (model, copy.deepcopy(model)):
        if training is not None:
            each.train(training)
        features = each.conv1(images)
        assert torch.equal(each.bn1(features), kept(features))
        assert each.get_submodule("layer2").training is (training is not False)
        assert isinstance(each.bn1, Activated)
