from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold_jobs.classify_job import ClassifyOptions
from onefold_jobs.job import Target
from onefold_jobs.report.folder import read_run
from onefold_jobs.run import read_options
from onefold_jobs.targets import SHOWN, choose_examples, label_task
from onefold_jobs.text_job import TextOptions
from onefold_jobs.training import Task, begin_training
from tests import simulated
from tests.jobs.tiny import job_of, write_pictures
from tests.small import make_trainer
from tests.tables import for_each

weights_of = pytest.importorskip("sklearn.utils.class_weight", reason="needs scikit-learn")


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


def task_of(**chosen: Any) -> Task:
    def answer(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(LOGITS[batch]), torch.tensor(LABELS)[batch]

    parts = dict.fromkeys(("model", "head", "train_set", "test_set", "show"))
    kind: Any = SimpleNamespace(target=Target(), classes=tuple("abc"))
    asked, labels = ClassifyOptions(data="x", **chosen), (LABELS, LABELS)
    return label_task("Image", kind, answer, asked, labels=labels, facts={}, **parts)


@for_each("smoothing", [0.0, 0.1])
@for_each("shards", [1, 4])
def test_class_weights_are_those_of_the_whole_batch(smoothing: float, shards: int) -> None:
    task = task_of(class_weights="auto", label_smoothing=smoothing)
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
    drawn = task_of(balanced=True).sample_weights
    shares = [
        sum(w for w, label in zip(drawn, LABELS, strict=True) if label == n) for n in range(3)
    ]
    assert shares == pytest.approx([14 / 3] * 3)
    assert task_of().sample_weights is None


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
        prepared = job.prepare(asked)
        settled = job.settle(asked, prepared)
        result = simulated.launch(train, devices=devices, args=(settled, prepared))
        scores = [epoch.scores for epoch in read_run(settled.folder).epochs]
        assert result["class_counts"] == ([24, 4, 4], [4, 4, 4])
        found.append((result["fingerprint"], result["best"], scores, result["confusion"]))
    assert found[0] == found[1]
    _, best, scores, _ = found[0]
    name = way.get("best_by", "balanced-accuracy")
    values = [each[name] for each in scores]
    assert (best["score"], best["value"]) == (name, (min if name == "loss" else max)(values))
