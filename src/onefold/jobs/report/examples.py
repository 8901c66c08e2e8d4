"""What the trained model makes of single samples: pictures, sentences, or masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onefold.jobs.report.folder import number
from onefold.jobs.report.markup import Markup, joined, section, tag
from onefold.jobs.report.pictures import picture
from onefold.jobs.report.words import percent, plain

__all__ = ["samples_section", "worst_section"]

_SHOWN_CHARACTERS = 300
"""Of a sentence, before the rest is folded away."""

Sample = Mapping[str, Any]


def samples_section(folder: Path, examples: Mapping[str, Any]) -> Markup:
    """Samples as they came; nothing where there are none."""
    samples: Sequence[Sample] = examples.get("samples") or ()
    if not samples:
        return Markup("")
    return section("Sample predictions", _note(examples), _grid(folder, examples, samples))


def worst_section(folder: Path, examples: Mapping[str, Any]) -> Markup:
    """The worst mistakes first; nothing where there are none."""
    worst: Sequence[Sample] = examples.get("worst") or ()
    if not worst:
        return Markup("")
    if examples.get("kind") == "segment":
        heading, text = "Worst predictions", "Those that overlap least with their masks come first."
    else:
        heading, text = "Worst mistakes", "Those that the model was surest of come first."
    return section(heading, tag("p", text, class_="note"), _grid(folder, examples, worst))


def _note(examples: Mapping[str, Any]) -> Markup:
    if examples.get("kind") != "segment":
        return Markup("")
    threshold = plain(number(examples.get("threshold")))
    return tag(
        "p", f"A pixel is predicted where its probability is over {threshold}.", class_="note"
    )


def _grid(folder: Path, examples: Mapping[str, Any], samples: Sequence[Sample]) -> Markup:
    kind = examples.get("kind")
    if kind == "segment":
        return tag("div", *(_row(folder, sample) for sample in samples), class_="rows")
    if kind == "text":
        cards = (_classified(sample, _sentence(sample)) for sample in samples)
        return tag("div", *cards, class_="sentences")
    cards = (_classified(sample, _shown(folder, sample)) for sample in samples)
    return tag("div", *cards, class_="samples")


def _classified(sample: Sample, content: Markup) -> Markup:
    """A sample with what it is, what it was taken for, and in words whether that is right."""
    label, predicted = str(sample.get("label")), str(sample.get("predicted"))
    right = label == predicted
    confidence = percent(number(sample.get("confidence")))
    return tag(
        "div",
        content,
        tag("div", "✓ right" if right else "✗ wrong", class_="verdict"),
        tag("div", "true: ", tag("b", label)),
        tag("div", "predicted: ", tag("b", predicted), f" ({confidence})"),
        tag("small", str(sample.get("name", ""))),
        class_="sample right" if right else "sample wrong",
    )


def _shown(folder: Path, sample: Sample) -> Markup:
    alt = f"{sample.get('name', 'sample')}, a picture of class {sample.get('label')}"
    return picture(folder, sample.get("picture"), alt=alt)


def _sentence(sample: Sample) -> Markup:
    text = str(sample.get("text", ""))
    if len(text) <= _SHOWN_CHARACTERS:
        return tag("blockquote", text)
    head, rest = text[:_SHOWN_CHARACTERS], text[_SHOWN_CHARACTERS:]
    folded = tag("details", tag("summary", "the rest"), tag("blockquote", "… ", rest))
    return joined([tag("blockquote", head, " …"), folded])


def _row(folder: Path, sample: Sample) -> Markup:
    name = str(sample.get("name", "sample"))
    parts = [
        tag("div", picture(folder, sample.get(part), alt=f"{name}: {part}"), part)
        for part in ("image", "mask", "prediction")
    ]
    iou, dice = plain(number(sample.get("iou"))), plain(number(sample.get("dice")))
    caption = tag("figcaption", name, tag("br"), tag("b", f"IoU {iou}"), f", Dice {dice}")
    return tag("figure", tag("div", *parts, class_="triple"), caption, class_="row")
