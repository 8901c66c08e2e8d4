from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.checkpoint.folder import prune
from onefold.errors import CheckpointError, DataError, LaunchError
from onefold.jobs.finetune import (
    best_checkpoint,
    freeze,
    is_run,
    load_body,
    new_head,
    parameter_groups,
    reuse_rows,
)
from onefold.jobs.options import TrainOptions
from onefold.models.resnet import ResNet
from tests.small import bits, make_trainer
from tests.tables import for_each

both = for_each("devices", [1, 2])

Batch = tuple[torch.Tensor, torch.Tensor]


def small(
    classes: int = 3,
    blocks: tuple[int, ...] = (1, 1),
    *,
    width: int = 4,
    seed: int = 0,
    **more: Any,
) -> ResNet:
    """A ResNet for grey pictures, and batch norms that are not at their beginning."""
    torch.manual_seed(seed)
    model = ResNet(blocks=blocks, num_classes=classes, in_channels=1, width=width, **more)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_()
    return model


def pictures(samples: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(samples, 1, 8, 8, generator=generator), torch.arange(samples) % 3


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def saved(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


def train(model: nn.Module, *, steps: int = 3, devices: int = 1) -> onefold.Trainer:
    groups = parameter_groups(model, rate=0.1, head="fc", head_scale=1.0)
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)
    trainer = make_trainer(model, loss, optimizer=optimizer, shards=2, devices=devices)
    for _ in range(steps):
        trainer.step(pictures())
    return trainer


def changed(before: dict[str, bytes], model: nn.Module) -> set[str]:
    """Names of all parameters and buffers that have other bits."""
    return {name for name, value in bits(model).items() if value != before[name]}


def names_under(model: nn.Module, *parts: str) -> set[str]:
    return {
        name for name in model.state_dict() if any(name.startswith(f"{part}.") for part in parts)
    }


# Weights of somebody else.


@for_each("classes", [3, 5], ids=["the same size", "another size"])
@for_each("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_the_body_is_loaded_whatever_the_size_of_the_head(
    tmp_path: Path, classes: int, prefix: str
) -> None:
    source = small(classes, seed=1)
    state = {prefix + name: value for name, value in source.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    model = load_body([small], tmp_path / "w.pth", "fc", key="state_dict")
    expected, found = bits(source), bits(model)
    assert {name for name in found if found[name] != expected[name]} <= names_under(model, "fc")
    assert model.get_submodule("fc").weight.shape == (3, 8)


@for_each("without", ["fc.", "num_batches_tracked"])
def test_a_file_may_lack_the_head_and_counts_of_batches(tmp_path: Path, without: str) -> None:
    source = small(seed=1)
    state = {name: value for name, value in source.state_dict().items() if without not in name}
    torch.save(state, tmp_path / "w.pth")
    model = load_body([small], tmp_path / "w.pth", "fc", key=None)
    assert changed(bits(source), model) <= {name for name in bits(model) if without in name}


@for_each(
    ("source", "words"),
    [
        (lambda: small(width=8), r"it has none for conv1\.weight, bn1\.weight, .* and \d+ more"),
        (lambda: small(blocks=(1,)), r"it has none for layer2\.0\.conv1\.weight, .* more"),
        (lambda: small(blocks=(1, 2)), r"it has also some for layer2\.1\.conv1\.weight, .* more"),
        (lambda: small(small_images=False), r"it has none for conv1\.weight$"),
        (lambda: nn.Linear(3, 4), r"no name of it is the model's"),
    ],
    ids=["wider", "less deep", "deeper", "another stem", "something else"],
)
@for_each("prefix", ["", "module."])
def test_weights_of_another_architecture_are_refused(
    tmp_path: Path, source: Callable[[], nn.Module], words: str, prefix: str
) -> None:
    state = {prefix + name: value for name, value in source().state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=words):
        load_body([small], tmp_path / "w.pth", "fc", key=None)


def test_the_first_way_to_build_the_model_that_fits_is_taken(tmp_path: Path) -> None:
    path = saved(small(small_images=False), tmp_path / "w.pth")
    ways = [small, lambda: small(small_images=False), lambda: small(7, small_images=False)]
    model = load_body(ways, path, "fc", key=None)
    assert model.get_parameter("conv1.weight").shape[-1] == 7
    assert model.get_parameter("fc.weight").shape[0] == 3


def test_if_no_way_fits_the_first_ones_reason_is_told(tmp_path: Path) -> None:
    path = saved(small(width=8), tmp_path / "w.pth")
    ways = [lambda: small(blocks=(1,)), small]
    with pytest.raises(CheckpointError, match="for the whole model but fc") as refused:
        load_body(ways, path, "fc", key=None)
    assert "layer2" not in str(refused.value)


def test_a_trainers_checkpoint_can_be_begun_with(tmp_path: Path) -> None:
    trainer = train(small(seed=1), steps=1)
    folder = trainer.save(tmp_path)
    model = load_body([lambda: small(5)], folder, "fc", key=None)
    assert changed(bits(trainer.model), model) == {"fc.weight", "fc.bias"}


@for_each(
    ("order", "scores", "expected"),
    [
        ("highest", (0.5, 0.9, 0.7), 2),
        ("lowest", (0.5, 0.9, 0.7), 1),
        ("highest", (0.9, 0.9, 0.7), 2),
        ("lowest", (0.5, 0.5, 0.7), 2),
        ("highest", (math.nan, 0.9, math.nan), 2),
        ("highest", (0.9, math.nan, 0.5), 1),
        ("lowest", (math.nan, 0.5, math.nan), 2),
    ],
)
def test_the_best_that_is_found_is_the_one_that_stays(
    tmp_path: Path, order: str, scores: tuple[float, ...], expected: int
) -> None:
    """Where older checkpoints are deleted: a tie goes to the newer one, and NaN beats nothing."""
    trainer = train(small(), steps=0)
    for value in scores:
        trainer.step(pictures())
        rule = {"scores": {"score": value}, "best": f"{order} score"}
        trainer.save(tmp_path / "checkpoints", **rule, keep=4, wait=True)
    best = {"checkpoint": "checkpoints/step-00000099", "score": "score"}
    (tmp_path / "run.json").write_text(json.dumps({"best": best, "score": f"{order} score"}))
    found = best_checkpoint(tmp_path)
    assert found.name == f"step-{expected:08d}"
    name = json.loads((found / "run.json").read_text())["run"]
    prune(tmp_path / "checkpoints", run=name, keep=1)
    left = sorted({expected, len(scores)})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in left]


@for_each("best", ["checkpoints/step-00000003", {"checkpoint": [1]}, 3, [3]])
def test_best_weights_that_are_not_named_as_they_should_be(tmp_path: Path, best: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"best": best}))
    with pytest.raises((CheckpointError, DataError), match=r"expected the (run's best w|best ch)"):
        best_checkpoint(tmp_path)


def test_the_best_weights_of_a_run_are_where_it_says(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    with pytest.raises(DataError, match="expected the folder of a run"):
        best_checkpoint(tmp_path)
    (tmp_path / "run.json").write_text('{"best": null}')
    assert is_run(tmp_path)
    with pytest.raises(CheckpointError, match="has not come to the end of an epoch yet"):
        best_checkpoint(tmp_path)
    where = "checkpoints/step-00000003"
    (tmp_path / "run.json").write_text(json.dumps({"best": {"checkpoint": where}}))
    with pytest.raises(CheckpointError, match="step-00000003: expected the run's best weights"):
        best_checkpoint(tmp_path)
    (tmp_path / where).mkdir(parents=True)
    assert best_checkpoint(tmp_path) == tmp_path / where


# The last layer.


def test_a_new_head_is_drawn_after_xavier_without_a_bias() -> None:
    head = nn.Linear(200, 100)
    before = head.weight.detach().clone()
    torch.manual_seed(0)
    new_head(head)
    bound = math.sqrt(6 / (200 + 100))
    assert 0.99 * bound < float(head.weight.detach().abs().max()) <= bound
    assert float(head.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not (head.weight == before).any()
    assert not head.bias.any()


def test_a_head_of_several_layers_is_drawn_as_a_whole() -> None:
    head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Conv2d(5, 2, 1, bias=False))
    before = bits(head)
    new_head(head)
    assert changed(before, head) == set(before)


def test_a_new_head_follows_the_generator() -> None:
    heads = [nn.Linear(4, 3) for _ in range(2)]
    for head in heads:
        torch.manual_seed(7)
        new_head(head)
    assert bits(heads[0]) == bits(heads[1])


def test_rows_are_reused_by_name() -> None:
    old, new = nn.Linear(5, 4), nn.Linear(5, 3)
    before = copy.deepcopy(new)
    shared = reuse_rows(new, ["cat", "newt", "dog"], old, ["ant", "dog", "bee", "cat"])
    assert shared == ["cat", "dog"]
    for parameter in ("weight", "bias"):
        mine, theirs, was = (getattr(head, parameter) for head in (new, old, before))
        assert torch.equal(mine, torch.stack([theirs[3], was[1], theirs[1]]))
    assert new.weight.requires_grad


def test_a_head_without_a_bias_is_reused_as_well() -> None:
    old, new = nn.Linear(5, 2, bias=False), nn.Linear(5, 2, bias=False)
    reuse_rows(new, ["b", "a"], old, ["a", "b"])
    assert torch.equal(new.weight, old.weight.flip(0))


def test_label_sets_without_a_common_class_are_refused() -> None:
    words = r"--reuse-classes: no class of the data \(a, b, c, d, e and 1 more\) .* \(A, B\)"
    with pytest.raises(LaunchError, match=words):
        reuse_rows(nn.Linear(5, 6), list("abcdef"), nn.Linear(5, 2), ["A", "B"])


# What is frozen.


class Chain(nn.Module):
    """Its parts begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(2, 2)
        self.layer10 = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(2))
        self.fc = nn.Linear(2, 2)


@for_each(
    ("chosen", "frozen"),
    [
        ({}, []),
        ({"freeze": ("layer1",)}, ["layer1.weight", "layer1.bias"]),
        ({"freeze": ("layer10.1",)}, ["layer10.1.weight", "layer10.1.bias"]),
        ({"freeze": ("layer1.bias", "scale")}, ["scale", "layer1.bias"]),
        ({"freeze_until": "layer1"}, ["scale"]),
        ({"freeze_until": "layer10"}, ["scale", "layer1.weight", "layer1.bias"]),
        ({"freeze_until": "layer1.bias"}, ["scale", "layer1.weight"]),
        (
            {"freeze_until": "layer10", "freeze": ("layer1", "layer10.0")},
            ["scale", "layer1.weight", "layer1.bias", "layer10.0.weight", "layer10.0.bias"],
        ),
    ],
)
def test_whole_parts_are_frozen_by_their_names(chosen: dict[str, Any], frozen: list[str]) -> None:
    model = Chain()
    assert freeze(model, TrainOptions(**chosen), "fc") == frozen
    still = [name for name, value in model.named_parameters() if not value.requires_grad]
    assert still == frozen


def test_all_but_the_head_may_be_frozen() -> None:
    model = Chain()
    freeze(model, TrainOptions(freeze_until="fc"), "fc")
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert trained == ["fc.weight", "fc.bias"]


@for_each(
    ("chosen", "option"),
    [
        (
            {
                "freeze": (
                    "layer1",
                    "layer",
                )
            },
            "--freeze layer",
        ),
        ({"freeze": ("layer10.2",)}, r"--freeze layer10\.2"),
        ({"freeze": ("",)}, "--freeze "),
        ({"freeze_until": "head"}, "--freeze-until head"),
    ],
)
def test_a_name_that_is_no_part_is_refused_and_the_parts_told(
    chosen: dict[str, Any], option: str
) -> None:
    model = Chain()
    words = rf"^{option}: the model has no such part; its parts are scale, layer1, layer10, fc, "
    with pytest.raises(ValueError, match=words):
        freeze(model, TrainOptions(**chosen), "fc")
    assert all(parameter.requires_grad for parameter in model.parameters())


@for_each("name", ["fc", "fc.bias"])
def test_the_head_must_not_be_frozen(name: str) -> None:
    model = Chain()
    with pytest.raises(ValueError, match="would freeze the model's last layer, fc: expected"):
        freeze(model, TrainOptions(freeze=(name, "layer1")), "fc")
    assert all(parameter.requires_grad for parameter in model.parameters())


@both
def test_frozen_parts_keep_their_values_and_statistics_in_training(devices: int) -> None:
    model = small()
    freeze(model, TrainOptions(freeze=("conv1", "bn1", "layer1")), "fc")
    before = bits(model)
    trainer = train(model, devices=devices)
    frozen = names_under(model, "conv1", "bn1", "layer1")
    assert changed(before, trainer.model) == set(before) - frozen
    assert any("running_var" in name for name in frozen)


def test_without_freezing_everything_changes() -> None:
    model = small()
    before = bits(model)
    assert changed(before, train(model).model) == set(before)


def test_a_frozen_model_is_the_same_on_several_devices() -> None:
    prints = set()
    for devices in (1, 2):
        model = small()
        freeze(model, TrainOptions(freeze_until="layer2"), "fc")
        prints.add(train(model, devices=devices).fingerprint())
    assert len(prints) == 1


def test_a_batch_norm_whose_bias_is_trained_goes_on_to_follow_its_data() -> None:
    model = small()
    freeze(model, TrainOptions(freeze=("bn1.weight",)), "fc")
    before = bits(model)
    train(model)
    assert names_under(model, "bn1") - changed(before, model) == {"bn1.weight"}


@for_each("training", [True, False, None])
def test_a_frozen_batch_norm_normalises_with_its_kept_statistics(training: bool | None) -> None:
    model = small()
    images, _ = pictures()
    kept = copy.deepcopy(model.bn1).eval()
    freeze(model, TrainOptions(freeze=("bn1",)), "fc")
    if training is not None:
        model.train(training)
    features = model.conv1(images)
    assert torch.equal(model.bn1(features), kept(features))
    assert model.layer2.training is (training is not False)


class Activated(nn.BatchNorm2d):
    """Does more than normalise, as some of timm do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_frozen_batch_norm_stays_of_its_kind() -> None:
    model = nn.Sequential(Activated(2, eps=0.5, momentum=0.25), nn.Flatten(), nn.LazyLinear(2))
    images = torch.randn(3, 2, 4, 4)
    model(images)
    expected = copy.deepcopy(model).eval()(images)
    freeze(model, TrainOptions(freeze=("0",)), "2")
    assert torch.equal(model.train()(images), expected)
    assert isinstance(model[0], Activated)
    assert (model[0].eps, model[0].momentum) == (0.5, 0.25)


def test_names_and_order_are_those_of_the_model_before() -> None:
    model = small()
    names = [list(model.state_dict()), [name for name, _ in model.named_parameters()]]
    before = bits(model)
    freeze(model, TrainOptions(freeze_until="fc"), "fc")
    assert [list(model.state_dict()), [name for name, _ in model.named_parameters()]] == names
    assert bits(model) == before
    small(seed=3).load_state_dict(model.state_dict())


def test_a_frozen_model_can_be_copied() -> None:
    model = small()
    freeze(model, TrainOptions(freeze=("bn1",)), "fc")
    twin = copy.deepcopy(model).train()
    twin(pictures()[0])
    assert not twin.bn1.training
    assert not changed(bits(model), twin) & names_under(model, "bn1")


# Rates.


@for_each("head_scale", [1.0, 10.0])
@for_each("until", [None, "layer2", "fc"])
def test_every_parameter_that_is_trained_is_in_one_group(
    head_scale: float, until: str | None
) -> None:
    model = small()
    freeze(model, TrainOptions(freeze_until=until), "fc")
    groups = parameter_groups(model, rate=0.5, head="fc", head_scale=head_scale)
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rates)
    assert rates == {
        id(parameter): 0.5 * head_scale if name.startswith("fc.") else 0.5
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def moved(head_scale: float) -> dict[str, torch.Tensor]:
    """How far one step takes every parameter."""
    model = small()
    before = copy.deepcopy(model.state_dict())
    groups = parameter_groups(model, rate=0.125, head="fc", head_scale=head_scale)
    trainer = make_trainer(model, loss, optimizer=torch.optim.SGD(groups), shards=2)
    trainer.step(pictures())
    return {name: value.detach() - before[name] for name, value in model.named_parameters()}


def test_the_head_goes_as_many_times_as_far_as_was_asked() -> None:
    plain, scaled = moved(1.0), moved(8.0)
    for name, way in scaled.items():
        factor = 8.0 if name.startswith("fc.") else 1.0
        torch.testing.assert_close(way, plain[name] * factor, rtol=1e-4, atol=1e-6)
    assert float(plain["fc.weight"].abs().max()) > 1e-3
