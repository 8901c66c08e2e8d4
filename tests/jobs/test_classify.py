from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  # sets variables of the environment when it is loaded
import torch

import onefold
from onefold.errors import CheckpointError, LaunchError
from onefold_jobs.classify_job import ClassifyOptions, PictureModel, make_task, prepare, settle
from onefold_jobs.finetune import best_checkpoint
from onefold_jobs.models import resnet18
from onefold_jobs.training import begin_training
from tests.jobs.tiny import CLASSES, run_here, write_pictures


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "data")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here("classify", data, tmp_path_factory.mktemp("runs"), epochs=1)[0]


def settled(data: Path, **choices: Any) -> tuple[ClassifyOptions, Any]:
    options = ClassifyOptions(data=str(data), **choices)
    prepared = prepare(options)
    return settle(options, prepared), prepared


def task_of(data: Path, **choices: Any) -> Any:
    return make_task(*settled(data, **choices))


SIZES: list[tuple[list[tuple[int, int]], str, int, str]] = [
    ([(300, 200), (500, 400), (90, 800)], "resnet18", 200, "crop"),
    ([(900, 800)] * 3, "resnet18", 224, "crop"),
    ([(16, 16)] * 3, "resnet18", 16, "shift"),
    ([(28, 28)] * 3, "lenet", 28, "shift"),
    ([(32, 32)] * 3, "mnist-cnn", 32, "shift"),
    ([(32, 32), (32, 40)], "lenet", 28, "shift"),
    ([(30, 30)] * 3, "lenet", 28, "shift"),
]


def test_the_size_is_chosen_by_pictures_and_model(data: Path, run: Path) -> None:
    for sizes, model, size, augment in SIZES:
        options = ClassifyOptions(data=str(data), model=model)
        chosen = settle(options, replace(prepare(options), sizes=sizes))
        assert (chosen.image_size, chosen.augment, chosen.flip) == (size, augment, "yes")
        assert (chosen.epochs, chosen.lr) == (10, 0.001 if model == "resnet18" else 0.003)
    fine, _ = settled(data, pretrained=str(run))
    assert (fine.epochs, fine.lr) == (5, 0.0002)


def test_the_size_is_told_and_whether_pictures_were_made_smaller(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, smaller in ((12, True), (16, False)):
        _, result = run_here("classify", data, tmp_path, epochs=1, model="lenet", image_size=size)
        told = f"lenet of {result['parameters']:,} parameters for pictures of {size}x{size} pixels;"
        assert told in capsys.readouterr().out
        assert result["shrunk"] is smaller


def test_pictures_are_normalized_by_the_training_set(data: Path) -> None:
    task = task_of(data, augment="none", flip="no")
    pixels = torch.stack([task.train_set[i][0] for i in range(len(task.train_set))])
    assert pixels.mean(dim=(0, 2, 3)) == pytest.approx(torch.zeros(3), abs=1e-5)
    assert pixels.std(dim=(0, 2, 3)) == pytest.approx(torch.ones(3), abs=1e-3)


def test_a_file_of_weights_brings_its_stem_and_normalization(data: Path, tmp_path: Path) -> None:
    large, path = resnet18(num_classes=1000, small_images=False), str(tmp_path / "published.pth")
    torch.save(large.state_dict(), path)
    task = task_of(data, pretrained=path, image_size=32)
    assert torch.equal(task.model.conv1.weight, large.conv1.weight)
    assert task.model.fc.weight.shape == (3, 512)
    facts = task.facts["picture_model"]
    assert (facts["small_stem"], facts["mean"]) == (False, (0.485, 0.456, 0.406))
    with pytest.raises(CheckpointError, match=r"it has none for conv1\.weight"):
        task_of(data, pretrained=path, stem="small")


def test_the_last_layer_is_new_or_reused_by_name(data: Path, run: Path, tmp_path: Path) -> None:
    weights, names = best_checkpoint(run) / "model.safetensors", tmp_path / "names"
    old = PictureModel.of_run(run).build()
    onefold.load_weights(old, weights)
    model = task_of(data, pretrained=str(run)).model
    assert torch.equal(model.layer4[1].conv2.weight, old.layer4[1].conv2.weight)
    bound = (6 / (512 + 3)) ** 0.5  # Xavier, without a bias
    assert not torch.equal(model.fc.weight, old.fc.weight)
    assert 0.5 * bound < float(model.fc.weight.detach().abs().max()) <= bound
    assert not model.fc.bias.any()
    reused = task_of(data, pretrained=str(run), reuse_classes=True).model
    assert torch.equal(reused.fc.weight, old.fc.weight)
    assert torch.equal(reused.fc.bias, old.fc.bias)
    with pytest.raises(LaunchError, match="a file of weights does not say its classes"):
        task_of(data, pretrained=str(weights), reuse_classes=True, stem="small")
    names.write_text("plum\nnothing\napple\n")
    how = {"reuse_classes": True, "pretrained_classes": str(names)}
    model = task_of(data, pretrained=str(weights), **how).model
    assert torch.equal(model.fc.weight[CLASSES.index("plum")], old.fc.weight[0])
    assert torch.equal(model.fc.weight[CLASSES.index("apple")], old.fc.weight[2])


def test_the_rate_of_the_last_layer_and_what_is_frozen(data: Path, run: Path) -> None:
    how = {"head_lr_scale": 10.0, "freeze_until": "layer3", "lr": 0.1}
    options, prepared = settled(data, pretrained=str(run), **how)
    task = make_task(options, prepared)
    training = begin_training(options, "classify", task, prepared)
    groups = training.optimizer.param_groups
    assert [group["initial_lr"] for group in groups] == pytest.approx([0.1, 1.0])
    assert [p.shape for p in groups[1]["params"]] == [(3, 512), (3,)]
    names = {name for name, p in task.model.named_parameters() if not p.requires_grad}
    assert names == set(training.facts["frozen"])
    assert {name.split(".")[0] for name in names} == {"conv1", "bn1", "layer1", "layer2"}


def test_a_short_last_batch_that_starves_batch_norm_is_left_out(data: Path, tmp_path: Path) -> None:
    # 24 pictures in batches of 7: the last of 3 would leave shards with one picture.
    folder, _ = run_here("classify", data, tmp_path, batch_size=7)
    assert onefold.Record(folder).steps["step"].tolist() == [1, 2, 3]


def test_too_many_shards_for_batch_norm_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this model needs 2 or more in each of its 5 shards"):
        run_here("classify", data, tmp_path, batch_size=8, shards=5)
