"""Made-up runs of each kind, as a training leaves them in their folders."""

import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onefold.core import encoding
from onefold.record import FILE
from onefold.record.entries import FrameWriter, Result, StartEntry, StepEntry, encode

EVIL_CLASS = '<b>&"'
EVIL_SENTENCE = "good <script>alert('x')</script> & more"


def colored(seed: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def steps_line(step: int, *, loss: float | None, **others: Any) -> dict[str, Any]:
    line = {"kind": "steps", "epoch": (step - 1) // 100, "step": step, "loss": loss}
    return {**line, "lr": 0.1 * (1 - step / 2000), "samples_per_s": 60.0 + step % 7, **others}


def epoch_line(epoch: int, *, scores: dict[str, float | None], **others: Any) -> dict[str, Any]:
    device = {"device": "cpu", "data": 0.5, "forward": 25.0, "backward": 48.0, "update": 1.5}
    line = {
        "kind": "epoch",
        "epoch": epoch + 1,
        "step": 100 * (epoch + 1),
        "loss": 2.0 / (epoch + 1),
    }
    line |= {"lr": 0.1, "train_s": 80.0, "evaluate_s": 20.0, "samples_per_s": 62.5}
    devices = [{**device, "exchange": 4.0}, {**device, "exchange": 4.5}]
    return {**line, "scores": scores, "devices": devices, **others}


def metrics_of(epochs: int, *, score: str = "accuracy") -> list[dict[str, Any]]:
    """Steps and epochs of a run that learns, and gets a little worse in the end."""
    lines: list[dict[str, Any]] = []
    for epoch in range(epochs):
        for step in range(100 * epoch + 10, 100 * epoch + 101, 10):
            lines.append(steps_line(step, loss=round(2.2 / (1 + step / 150) + step % 3 * 0.04, 4)))
        value = 0.9 - 0.5 / (epoch + 1) - (0.05 if epoch == epochs - 1 else 0)
        lines.append(epoch_line(epoch, scores={"loss": 1.9 / (epoch + 1.5) + 0.2, score: value}))
    return lines


def facts_of(job: str, **others: Any) -> dict[str, Any]:
    usual = {"job": job, "name": f"my {job}", "model": "resnet18", "score": "highest accuracy"}
    usual["purpose"] = "Image segmentation" if job == "segment" else "Image classification"
    usual |= {"onefold": "0.1.0", "torch": "2.13.0", "started": "2026-11-21T14:02:03+00:00"}
    counts = {"shards": 8, "train_samples": 5000, "test_samples": 1000, "parameters": 11173962}
    later = dict.fromkeys(("best", "finished", "fingerprint"))
    return {**usual, **counts, "devices": ["cpu", "cpu"], "left_out": [], **later, **others}


OPTIONS = 'job = "classify"\nlr = 0.1\ndevices = "cpu:2"\n'
Facts = dict[str, Any] | None


def write_run(
    folder: Path,
    facts: Facts = None,
    *,
    metrics: Any = None,
    examples: Facts = None,
    options: str = OPTIONS,
) -> Path:
    """A run's folder with these contents, of text by default; what is None is not there yet."""
    (folder / "pictures").mkdir(parents=True)
    (folder / "config.toml").write_text(options)
    (folder / "run.json").write_text(json.dumps(facts_of("text") if facts is None else facts))
    if metrics is not None:
        write_record(folder, metrics)
    if examples is not None:
        (folder / "examples.json").write_text(json.dumps(examples))
    return folder


def _told(numbers: Any) -> Any:
    """With NaN for None, where there are names."""
    filled = lambda value: math.nan if value is None else value  # noqa: E731
    return {n: filled(v) for n, v in numbers.items()} if isinstance(numbers, dict) else numbers


def write_record(
    folder: Path, lines: Iterable[dict[str, Any]], resumed: tuple[int, int] = (0, 0)
) -> None:
    """The record of a run with these numbers: as if it had only made the steps that have a line.

    It is gone on with, an hour later, if it was resumed: after which step, and which entry.
    """
    step, kept = resumed
    writer, clock = FrameWriter(folder / FILE), 1e9 + 3600 * bool(step)
    names = [each["device"] for line in lines for each in line.get("devices", ())][-2:]
    names = names or ["cpu"]
    empty: Any = {"command": ["onefold"], "script": "", "script_digest": "", "description": {}}
    writer.append(
        encode(StartEntry(run="it", step=step, kept=kept, time="", devices=names, **empty))
    )
    for line in lines:
        step = line["step"]
        if line["kind"] == "steps":
            clock += 64 / line["samples_per_s"]
            loss = math.nan if line["loss"] is None else line["loss"]
            entry = StepEntry(
                step=step, epoch=line["epoch"], samples=64, loss=loss, weight=64, norm=1.0,
                rates=[line["lr"]], totals=b"", weights=b"", time=clock,
            )  # fmt: skip
            writer.append(encode(entry))
            continue
        whole = {name: line[name] for name in line.keys() - {"devices", "scores", "kind", "step"}}
        devices = [_told({**whole, **device}) for device in line["devices"]]
        for call, value in (("evaluate", _told(line["scores"])), ("gather", devices)):
            value_bytes = encoding.encode(value, "")
            name = f"trainer.{call}"
            writer.append(
                encode(Result(step=step, call=name, line="", value=value_bytes, digest=""))
            )
    writer.close()


def examples_of(
    kind: str, classes: Sequence[str], amount: int, **content: Sequence[str]
) -> dict[str, Any]:
    """Every third sample is taken for the class after its own; in the matrix, class 1 for 0."""
    samples = []
    for index in range(amount):
        label = index % len(classes)
        predicted = (label + (index % 3 == 2)) % len(classes)
        sample = {"name": f"test/{index}.png", "label": classes[label]}
        sample |= {key: values[index % len(values)] for key, values in content.items()}
        sure = 0.99 - 0.02 * index
        samples.append({**sample, "predicted": classes[predicted], "confidence": sure})
    wrong = [sample for sample in samples if sample["label"] != sample["predicted"]]
    one = np.eye(len(classes), dtype=int)
    confusion = one * 90 + np.roll(one, 1, axis=1)
    confusion[1, 0] = 7
    return {
        "kind": kind,
        "classes": list(classes),
        "confusion": confusion.tolist(),
        "confused": [{"label": 1, "predicted": 0, "samples": wrong[:2]}],
        "samples": samples,
        "worst": wrong,
    }


def classified_run(folder: Path) -> Path:
    classes = ("cat", EVIL_CLASS, "ship")
    pictures = [f"pictures/{index:03}.png" for index in range(12)]
    best = {"epoch": 7, "score": "accuracy", "value": 0.8286, "checkpoint": "checkpoints/step-1"}
    ended = {"finished": "2026-11-21T14:20:03+00:00", "fingerprint": "663f3e2011a53901"}
    left_out = ["train/cat/<7>.jpg: cannot be read"]
    facts = facts_of("classify", classes=classes, best=best, left_out=left_out, **ended)
    examples = examples_of("classify", classes, 12, picture=pictures)
    write_run(folder, facts, metrics=metrics_of(8), examples=examples)
    for index, name in enumerate(pictures):
        (folder / name).write_bytes(colored(index))
    return folder


def text_run(folder: Path) -> Path:
    classes = ("negative", "positive")
    sentences = ("A fine film.", EVIL_SENTENCE, "Too long, " * 90 + "and then it ends.")
    facts = facts_of("text", classes=list(classes), model="transformer")
    examples = examples_of("text", classes, 6, text=sentences)
    return write_run(folder, facts, metrics=metrics_of(3), examples=examples)


def segmented_run(folder: Path) -> Path:
    samples = []
    for index in range(6):
        names = {part: f"pictures/{index}-{part}.png" for part in ("image", "mask", "prediction")}
        samples.append({"name": f"{index:03}.jpg", **names, "iou": 0.41, "dice": 0.58156})
    best = {"epoch": 4, "score": "iou", "value": 0.775}
    examples = {"kind": "segment", "threshold": 0.5, "samples": samples, "worst": samples[:2]}
    facts = facts_of("segment", model="unet", score="highest iou", best=best)
    write_run(folder, facts, metrics=metrics_of(5, score="iou"), examples=examples)
    for index, sample in enumerate(samples):
        for part in ("image", "mask", "prediction"):
            (folder / str(sample[part])).write_bytes(colored(index))
    return folder
