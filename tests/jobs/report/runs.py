"""Made-up runs of each kind, as a training leaves them in their folders."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

EVIL_CLASS = '<b>&"'
EVIL_SENTENCE = "good <script>alert('x')</script> & more"


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of (h, w, 3) uint8."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def blob(seed: int, *, size: int = 32) -> np.ndarray:
    """(size, size) bool: True inside a spot somewhere."""
    x, y, radius = np.random.default_rng(seed).uniform(0.25, 0.6, 3)
    across, down = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size))
    return (across - x) ** 2 + (down - y) ** 2 < (0.6 * radius) ** 2


def coloured(seed: int, *, size: int = 32) -> bytes:
    """A PNG of a spot on a ground of another colour."""
    ground, spot = np.random.default_rng(seed).integers(40, 230, (2, 3))
    pixels = np.where(blob(seed, size=size)[..., None], spot, ground)
    return png(pixels.astype(np.uint8))


def black_and_white(inside: np.ndarray) -> bytes:
    """A PNG of a mask."""
    return png(np.repeat(inside[..., None], 3, axis=2).astype(np.uint8) * 255)


def steps_line(step: int, *, loss: float | None, **others: Any) -> dict[str, Any]:
    line = {"kind": "steps", "epoch": step // 100, "step": step, "loss": loss}
    return {**line, "lr": 0.1 * (1 - step / 2000), "samples_per_s": 60.0 + step % 7, **others}


def epoch_line(epoch: int, *, scores: dict[str, float | None], **others: Any) -> dict[str, Any]:
    device = {"device": "cpu", "data": 0.5, "forward": 25.0, "backward": 48.0, "update": 1.5}
    return {
        "kind": "epoch",
        "epoch": epoch,
        "step": 100 * (epoch + 1),
        "loss": 2.0 / (epoch + 1),
        "scores": scores,
        "lr": 0.1,
        "train_s": 80.0,
        "evaluate_s": 20.0,
        "samples_per_s": 62.5,
        "devices": [{**device, "exchange": 4.0}, {**device, "exchange": 4.5}],
        **others,
    }


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
    return {
        "job": job,
        "name": f"my {job}",
        "onefold": "0.1.0",
        "torch": "2.13.0",
        "started": "2026-11-21T14:02:03+00:00",
        "devices": ["cpu", "cpu"],
        "shards": 8,
        "train_samples": 5000,
        "test_samples": 1000,
        "left_out": [],
        "parameters": 11173962,
        "model": "resnet18",
        "best": None,
        "finished": None,
        "fingerprint": None,
        "score": "highest accuracy",
        **others,
    }


def write_run(
    folder: Path,
    facts: dict[str, Any],
    *,
    metrics: Sequence[dict[str, Any]] | None = None,
    examples: dict[str, Any] | None = None,
    options: str = 'job = "classify"\nlr = 0.1\ndevices = "cpu:2"\n',
) -> Path:
    """A run's folder with these contents; what is None is not there yet."""
    (folder / "pictures").mkdir(parents=True)
    (folder / "config.toml").write_text(options)
    (folder / "run.json").write_text(json.dumps(facts))
    if metrics is not None:
        lines = (json.dumps(line) + "\n" for line in metrics)
        (folder / "metrics.jsonl").write_text("".join(lines))
    if examples is not None:
        (folder / "examples.json").write_text(json.dumps(examples))
    return folder


def confusion_of(classes: int) -> list[list[int]]:
    """Class 1 is taken for class 0 seven times; each other class once for the next."""
    counts = np.eye(classes, dtype=int) * 90 + np.roll(np.eye(classes, dtype=int), 1, axis=1)
    counts[1, 0] = 7
    return [[int(count) for count in row] for row in counts]


def predictions(classes: Sequence[str], amount: int, **content: Any) -> list[dict[str, Any]]:
    """Samples of which every third is taken for the class after its own."""
    samples = []
    for index in range(amount):
        label = index % len(classes)
        predicted = (label + (index % 3 == 2)) % len(classes)
        samples.append(
            {
                "name": f"test/{index}.png",
                "label": classes[label],
                "predicted": classes[predicted],
                "confidence": 0.99 - 0.02 * index,
                **{key: value(index) for key, value in content.items()},
            }
        )
    return samples


def classified_run(
    folder: Path, *, classes: Sequence[str] = ("cat", EVIL_CLASS, "ship"), epochs: int = 8
) -> Path:
    """A finished run that tells pictures apart."""
    samples = predictions(classes, 12, picture=lambda index: f"pictures/{index:03}.png")
    examples = {
        "kind": "classify",
        "classes": list(classes),
        "confusion": confusion_of(len(classes)),
        "samples": samples,
        "worst": [sample for sample in samples if sample["label"] != sample["predicted"]],
    }
    best = {"epoch": 6, "score": "accuracy", "value": 0.8286, "checkpoint": "checkpoints/step-1"}
    facts = facts_of(
        "classify",
        classes=list(classes),
        best=best,
        finished="2026-11-21T14:20:03+00:00",
        fingerprint="663f3e2011a53901",
        left_out=["train/cat/<7>.jpg: cannot be read"],
    )
    write_run(folder, facts, metrics=metrics_of(epochs), examples=examples)
    for index in range(len(samples)):
        (folder / f"pictures/{index:03}.png").write_bytes(coloured(index))
    return folder


def text_run(folder: Path) -> Path:
    """A finished run that tells sentences apart."""
    classes = ("negative", "positive")
    sentences = ("A fine film.", EVIL_SENTENCE, "Too long, " * 90 + "and then it ends.")
    samples = predictions(classes, 6, text=lambda index: sentences[index % 3])
    examples = {
        "kind": "text",
        "classes": list(classes),
        "confusion": confusion_of(2),
        "samples": samples,
        "worst": [sample for sample in samples if sample["label"] != sample["predicted"]],
    }
    facts = facts_of("text", classes=list(classes), model="transformer")
    return write_run(folder, facts, metrics=metrics_of(3), examples=examples)


def segmented_run(folder: Path) -> Path:
    """A finished run that marks spots in pictures."""
    samples = []
    for index in range(6):
        names = {part: f"pictures/{index}-{part}.png" for part in ("image", "mask", "prediction")}
        samples.append({"name": f"{index:03}.jpg", **names, "iou": 0.41, "dice": 0.58156})
    examples = {"kind": "segment", "threshold": 0.5, "samples": samples, "worst": samples[:2]}
    facts = facts_of("segment", model="unet", score="highest iou")
    write_run(folder, facts, metrics=metrics_of(5, score="iou"), examples=examples)
    for index, sample in enumerate(samples):
        inside, moved = (blob(index, size=128), np.roll(blob(index, size=128), 9, axis=1))
        (folder / sample["image"]).write_bytes(coloured(index, size=128))
        (folder / sample["mask"]).write_bytes(black_and_white(inside))
        (folder / sample["prediction"]).write_bytes(black_and_white(moved))
    return folder
