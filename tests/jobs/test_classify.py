from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sklearn  # noqa: F401  # sets variables of the environment when it is loaded
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onefold
from onefold.errors import CheckpointError, LaunchError
from onefold_jobs.classify_job import ClassifyOptions, PictureModel, make_task, prepare, settle
from onefold_jobs.finetune import best_checkpoint
from onefold_jobs.job import Target
from onefold_jobs.models import resnet18
from onefold_jobs.report.folder import read_reported
from onefold_jobs.run import read_options
from onefold_jobs.targets import SHOWN, choose_examples, label_task
from onefold_jobs.text_job import TextOptions
from onefold_jobs.training import Task, begin_training
from tests import simulated
from tests.jobs.tiny import CLASSES, job_of, run_here, write_pictures
from tests.small import make_trainer
from tests.tables import for_each

weights_of = pytest.importorskip("sklearn.utils.class_weight", reason="needs scikit-learn")


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
        told = f"lenet with {result['parameters']:,} parameters for images of {size}x{size} pixels;"
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
    with pytest.raises(CheckpointError, match=r"the file has none for conv1\.weight"):
        task_of(data, pretrained=path, stem="small")


def test_the_last_layer_is_new_or_reused_by_name(data: Path, run: Path, tmp_path: Path) -> None:
    weights, names = best_checkpoint(run) / "model.safetensors", tmp_path / "names"
    old: Any = PictureModel.of_run(run).build()
    onefold.load_weights(old, weights)
    model: Any = task_of(data, pretrained=str(run)).model
    assert torch.equal(model.layer4[1].conv2.weight, old.layer4[1].conv2.weight)
    bound = (6 / (512 + 3)) ** 0.5  # Xavier, without a bias
    assert not torch.equal(model.fc.weight, old.fc.weight)
    assert 0.5 * bound < float(model.fc.weight.detach().abs().max()) <= bound
    assert not model.fc.bias.any()
    reused: Any = task_of(data, pretrained=str(run), reuse_classes=True).model
    assert torch.equal(reused.fc.weight, old.fc.weight)
    assert torch.equal(reused.fc.bias, old.fc.bias)
    with pytest.raises(LaunchError, match="a weights file does not contain its class names"):
        task_of(data, pretrained=str(weights), reuse_classes=True, stem="small")
    names.write_text("plum\nnothing\napple\n")
    how: dict[str, Any] = {"reuse_classes": True, "pretrained_classes": str(names)}
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


@st.composite
def answers(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels, what was predicted, and how sure it was; often equally sure."""
    count = draw(st.integers(1, 90))
    labels = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    sure = st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.0]), min_size=count, max_size=count)
    return torch.tensor(draw(labels)), torch.tensor(draw(labels)), torch.tensor(draw(sure))


@settings(max_examples=40)
@given(answers())
def test_samples_are_from_all_over_and_the_worst_surest(given_: tuple[torch.Tensor, ...]) -> None:
    truth, predicted, sure = given_
    samples, worst = choose_examples(*given_)
    count = len(truth)
    assert len(samples) == min(SHOWN, count)
    assert samples == sorted(set(samples))
    assert all(0 <= number < count for number in samples)
    gaps = [second - first for first, second in zip([*samples], [*samples[1:], count], strict=True)]
    assert max(gaps) - min(gaps) <= 1
    wrong = [number for number in range(count) if truth[number] != predicted[number]]
    assert worst == sorted(wrong, key=lambda number: (-float(sure[number]), number))[:SHOWN]


LABELS = [0] * 9 + [1] * 3 + [2] * 2
LOGITS = torch.randn(14, 3, generator=torch.Generator().manual_seed(0))


def weighed(**chosen: Any) -> Task:
    def answer(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(LOGITS[batch]), torch.tensor(LABELS)[batch]

    parts: dict[str, Any] = dict.fromkeys(("model", "head", "train_set", "test_set", "show"))
    kind: Any = SimpleNamespace(target=Target(), classes=tuple("abc"))
    asked, labels = ClassifyOptions(data="x", **chosen), (LABELS, LABELS)
    return label_task("Image", kind, answer, asked, labels=labels, facts={}, **parts)


@for_each("smoothing", [0.0, 0.1])
@for_each("shards", [1, 4])
def test_class_weights_are_those_of_the_whole_batch(smoothing: float, shards: int) -> None:
    task = weighed(class_weights="auto", label_smoothing=smoothing)
    weights = weights_of.compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    assert task.class_weights == pytest.approx(weights)
    trainer = make_trainer(torch.nn.Linear(3, 3), task.loss, shards=shards)
    with torch.no_grad():
        logits = trainer.model(LOGITS)
    step = trainer.step(torch.arange(14))
    how: Any = {"weight": torch.tensor(weights).float(), "label_smoothing": smoothing}
    whole = torch.nn.functional.cross_entropy(logits, torch.tensor(LABELS), **how)
    assert float(step.loss) == pytest.approx(float(whole), rel=1e-5)


def test_balanced_samples_are_drawn_from_all_classes_alike() -> None:
    drawn = weighed(balanced=True).sample_weights
    assert drawn is not None
    shares = [
        sum(w for w, label in zip(drawn, LABELS, strict=True) if label == n) for n in range(3)
    ]
    assert shares == pytest.approx([14 / 3] * 3)
    assert weighed().sample_weights is None


@for_each("kind", [ClassifyOptions, TextOptions])
def test_frequent_classes_are_made_up_for_once(kind: Any) -> None:
    with pytest.raises(ValueError, match="--balanced: expected it without --class-weights auto"):
        kind(data="x", balanced=True, class_weights="auto")


def uneven(root: Path) -> Path:
    """Many apples, and few of the others."""
    data = write_pictures(root, train=24, test=4)
    for name in ("pear", "plum"):
        for number in range(4, 24):
            (data / "train" / name / f"{number}.png").unlink()
    return data


SMALL = {"model": "lenet", "augment": "shift", "epochs": 2, "lr": 0.02, "shards": 3}
WAYS: list[dict[str, Any]] = [{"balanced": True}, {"class_weights": "auto", "best_by": "loss"}]


def train(options: Any, data: Any) -> dict[str, Any]:
    task = job_of("classify").make_task(options, data)
    return begin_training(options, "classify", task, data).run()


@for_each("way", WAYS)
def test_frequent_classes_are_made_up_for_alike_on_several_devices(
    way: dict[str, Any], tmp_path: Path
) -> None:
    job, data, found = job_of("classify"), uneven(tmp_path / "data"), []
    for devices in ("cpu:1", "cpu:3"):
        given = {"data": str(data), "runs": str(tmp_path / "runs"), "batch_size": 8, **SMALL, **way}
        asked = read_options(job, given, None)
        prepared = job.prepare(asked, None)
        settled = job.settle(asked, prepared)
        result = simulated.launch(train, devices=devices, args=(settled, prepared))
        scores = [epoch.scores for epoch in read_reported(settled.folder).epochs]
        assert result["class_counts"] == ([24, 4, 4], [4, 4, 4])
        found.append((result["fingerprint"], result["best"], scores, result["confusion"]))
    assert found[0] == found[1]
    _, best, scores, _ = found[0]
    name = way.get("best_by", "balanced-accuracy")
    values = [each[name] for each in scores]
    assert (best["score"], best["value"]) == (name, (min if name == "loss" else max)(values))
