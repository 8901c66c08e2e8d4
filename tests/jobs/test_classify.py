from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  # sets variables of the environment when it is loaded
import torch

import onefold
from onefold.errors import LaunchError
from onefold.jobs.classify import ClassifyOptions, PictureModel, make_task, prepare, settle
from onefold.jobs.finetune import best_checkpoint
from onefold.models import resnet18
from tests.jobs.tiny import CLASSES, run_here, write_pictures


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "data")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on the same classes."""
    return run_here("classify", data, tmp_path_factory.mktemp("runs"), epochs=1)[0]


def settled(data: Path, **choices: Any) -> tuple[ClassifyOptions, Any]:
    options = ClassifyOptions(data=str(data), **choices)
    prepared = prepare(options)
    return settle(options, prepared), prepared


def model_of(data: Path, **choices: Any) -> torch.nn.Module:
    return make_task(*settled(data, **choices)).model


def facts_of(data: Path, **choices: Any) -> Any:
    return make_task(*settled(data, **choices)).facts["picture_model"]


def test_small_pictures_are_kept_and_shifted(data: Path) -> None:
    options, _ = settled(data)
    assert (options.image_size, options.augment, options.flip) == (16, "shift", "yes")
    assert (options.epochs, options.lr) == (10, 0.05)


@pytest.mark.parametrize(
    ("sizes", "model", "size", "augment"),
    [
        ([(300, 200), (500, 400), (90, 800)], "resnet18", 200, "crop"),
        ([(900, 800)] * 3, "resnet18", 224, "crop"),
        ([(28, 28)] * 3, "lenet", 28, "shift"),
        ([(32, 32)] * 3, "mnist-cnn", 32, "shift"),
        ([(32, 32), (32, 40)], "lenet", 28, "shift"),
        ([(30, 30)] * 3, "lenet", 28, "shift"),
    ],
)
def test_the_size_is_chosen_by_pictures_and_model(
    data: Path, sizes: list[tuple[int, int]], model: str, size: int, augment: str
) -> None:
    options = ClassifyOptions(data=str(data), model=model)
    chosen = settle(options, replace(prepare(options), sizes=sizes))
    assert (chosen.image_size, chosen.augment) == (size, augment)


def test_fine_tuning_is_shorter_and_gentler_by_default(data: Path, run: Path) -> None:
    options, _ = settled(data, pretrained=str(run))
    assert options.epochs == 5
    assert options.lr == pytest.approx(0.01)


def test_pictures_are_normalised_by_the_training_set(data: Path) -> None:
    task = make_task(*settled(data, augment="none", flip="no"))
    pixels = torch.stack([task.train_set[i][0] for i in range(len(task.train_set))])
    assert pixels.mean(dim=(0, 2, 3)) == pytest.approx(torch.zeros(3), abs=1e-5)
    assert pixels.std(dim=(0, 2, 3)) == pytest.approx(torch.ones(3), abs=1e-3)


def test_a_file_of_weights_brings_its_stem_and_imagenets_numbers(
    data: Path, tmp_path: Path
) -> None:
    large = resnet18(num_classes=1000, small_images=False)
    torch.save(large.state_dict(), tmp_path / "published.pth")
    chosen = {"pretrained": str(tmp_path / "published.pth"), "image_size": 32}
    model = model_of(data, **chosen)
    assert torch.equal(model.conv1.weight, large.conv1.weight)
    assert model.fc.weight.shape == (3, 512)
    facts = facts_of(data, **chosen)
    assert facts["small_stem"] is False
    assert facts["mean"] == (0.485, 0.456, 0.406)


def test_the_last_layer_is_new_even_where_the_old_one_would_fit(data: Path, run: Path) -> None:
    old = PictureModel.of_run(run).build()
    onefold.load_weights(old, best_checkpoint(run))
    model = model_of(data, pretrained=str(run))
    assert torch.equal(model.layer4[1].conv2.weight, old.layer4[1].conv2.weight)
    assert not torch.equal(model.fc.weight, old.fc.weight)
    bound = (6 / (512 + 3)) ** 0.5
    assert 0.5 * bound < float(model.fc.weight.detach().abs().max()) <= bound
    assert not model.fc.bias.any()
    reused = model_of(data, pretrained=str(run), reuse_classes=True)
    assert torch.equal(reused.fc.weight, old.fc.weight)
    assert torch.equal(reused.fc.bias, old.fc.bias)


def test_classes_of_a_file_are_named_in_another(data: Path, run: Path, tmp_path: Path) -> None:
    weights = best_checkpoint(run) / "model.safetensors"
    with pytest.raises(LaunchError, match="a file of weights does not say its classes"):
        model_of(data, pretrained=str(weights), reuse_classes=True, stem="small")
    (tmp_path / "names").write_text("plum\nnothing\napple\n")
    model = model_of(
        data,
        pretrained=str(weights),
        reuse_classes=True,
        pretrained_classes=str(tmp_path / "names"),
    )
    old = PictureModel.of_run(run).build()
    onefold.load_weights(old, weights)
    assert torch.equal(model.fc.weight[CLASSES.index("plum")], old.fc.weight[0])
    assert torch.equal(model.fc.weight[CLASSES.index("apple")], old.fc.weight[2])


def test_the_rate_of_the_last_layer_and_what_is_frozen(data: Path, run: Path) -> None:
    chosen = settled(data, pretrained=str(run), head_lr_scale=10.0, freeze_until="layer3", lr=0.1)
    task = make_task(*chosen)
    rates = [group["lr"] for group in task.groups]
    assert rates == pytest.approx([0.1, 1.0])
    assert [p.shape for p in task.groups[1]["params"]] == [(3, 512), (3,)]
    names = {name for name, p in task.model.named_parameters() if not p.requires_grad}
    assert names == set(task.facts["frozen"])
    assert {name.split(".")[0] for name in names} == {"conv1", "bn1", "layer1", "layer2"}


def test_a_short_last_batch_that_starves_batch_norm_is_left_out(data: Path, tmp_path: Path) -> None:
    # 24 pictures in batches of 7: the last of 3 would leave shards with one picture.
    folder, _ = run_here("classify", data, tmp_path, batch_size=7)
    assert '"step": 3' in (folder / "metrics.jsonl").read_text()
    assert '"step": 4' not in (folder / "metrics.jsonl").read_text()


def test_too_many_shards_for_batch_norm_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this model needs 2 or more in each of its 5 shards"):
        run_here("classify", data, tmp_path, batch_size=8, shards=5)
