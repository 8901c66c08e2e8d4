"""The page of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onefold.data.files import require_ours
from onefold.jobs.report.confusion import confusion_section
from onefold.jobs.report.curves import curves_section, epochs_section
from onefold.jobs.report.examples import samples_section, worst_section
from onefold.jobs.report.folder import Run, number, read_run
from onefold.jobs.report.markup import (
    Markup,
    card,
    definitions,
    is_page,
    joined,
    page,
    section,
    table,
    tag,
)
from onefold.jobs.report.phases import phases_section
from onefold.jobs.report.words import NOTHING, counted, duration, score, speed, when
from onefold.system.plainfile import write_whole

__all__ = ["REPORT_NAME", "build_report", "devices_in_words", "option_in_words", "write_page"]

REPORT_NAME = "report.html"

_JOBS = {
    "classify": "classification of pictures",
    "segment": "segmentation of pictures",
    "text": "classification of text",
}
_FOLDED_FILES = 5
"""More files than these that were left out are folded away."""


def build_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run, with all that its folder holds at the moment.

    Args:
        run: folder of the run; the run may still be going on.
        output: path of the page; ``report.html`` in the folder if None.

    Returns:
        Path of the page: one file that needs no other.

    Raises:
        DataError: the folder is not that of a run, or a file of it cannot be read.
        LaunchError: matplotlib is not installed.
    """
    read = read_run(Path(run))
    path = output or read.folder / REPORT_NAME
    return write_page(path, page(f"{read.name}: training report", *_parts(read)))


def write_page(path: Path, text: str) -> Path:
    """Write a page aside and put it in its place, so that a browser never finds half of it.

    Raises:
        ValueError: something else is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    require_ours(path, is_page, f"{path}: expected a new file, or a page of onefold")
    write_whole(path, text.encode("utf-8", "replace"))  # a file's name may be no text at all
    return path


def _parts(run: Run) -> list[Markup]:
    return [
        _header(run),
        _summary(run),
        _facts(run),
        _notes(run),
        curves_section(run),
        epochs_section(run),
        phases_section(run),
        *_examples(run),
        _left_out(run),
        _options(run),
    ]


def _header(run: Run) -> Markup:
    job = str(run.facts.get("job") or "training")
    model = run.facts.get("model")
    words = _JOBS.get(job, job) + (f" with {model}" if model else "")
    return tag("header", tag("h1", run.name), tag("p", words, class_="sub"))


def _summary(run: Run) -> Markup:
    _, name = run.target
    best = run.best
    best_text = joined(
        [score(name, best[1]), tag("small", f"in epoch {best[0] + 1}")] if best else [NOTHING]
    )
    figures = [
        (f"Best test {name}", best_text),
        (f"Last test {name}", _last(run, name)),
        ("Samples/s in training", speed(run.samples_per_s)),
        ("Time of training and tests", duration(run.trained_s)),
    ]
    return definitions(figures, class_="figures")


def _last(run: Run, name: str) -> Markup:
    if not run.epochs:
        return joined([NOTHING])
    after = tag("small", f"after {counted(run.epochs[-1].epoch + 1, 'epoch')}")
    return joined([score(name, run.last_score), after])


def devices_in_words(run: Run) -> str:
    """How many devices of which kind, such as ``2 x cpu``."""
    kinds = [device.partition(":")[0] for device in run.devices]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or NOTHING


def _facts(run: Run) -> Markup:
    facts = run.facts
    finished = facts.get("finished")
    fingerprint = facts.get("fingerprint")
    pairs = [
        ("Job", str(facts.get("job") or NOTHING)),
        ("Model", _model(run)),
        ("Started", when(facts.get("started"))),
        ("Finished", when(finished) if finished else "not yet"),
        ("Devices", f"{devices_in_words(run)}, {facts.get('shards') or NOTHING} shards"),
        ("Samples", _samples(run)),
        ("Fingerprint of the model", tag("code", str(fingerprint)) if fingerprint else NOTHING),
        ("Versions", f"onefold {facts.get('onefold')}, PyTorch {facts.get('torch')}"),
    ]
    if run.classes:
        pairs.insert(6, ("Classes", f"{len(run.classes):,}"))
    return card(definitions(pairs, class_="facts"))


def _model(run: Run) -> str:
    parameters = run.facts.get("parameters")
    size = f", {parameters:,} parameters" if isinstance(parameters, int) else ""
    return f"{run.facts.get('model') or NOTHING}{size}"


def _samples(run: Run) -> str:
    counts = [number(run.facts.get(f"{part}_samples")) for part in ("train", "test")]
    train, test = (f"{count:,.0f}" if count >= 0 else NOTHING for count in counts)
    return f"{train} to train, {test} to test"


def _notes(run: Run) -> Markup:
    """What the page does not have, and why."""
    notes = []
    if not run.epochs:
        notes.append("No epoch has ended yet: scores and times come with the first.")
    if run.examples is None:
        notes.append("There are no sample predictions yet: they come at the end of the training.")
    notes += [str(note) for note in run.facts.get("notes") or ()]
    if run.unreadable_lines:
        lines = counted(run.unreadable_lines, "line")
        notes.append(f"{lines} of metrics.jsonl cut short and left out: the run was stopped there.")
    return joined([tag("p", note, class_="note") for note in notes])


def _examples(run: Run) -> list[Markup]:
    if run.examples is None:
        return []
    return [
        _whose_examples(run, run.examples),
        samples_section(run.folder, run.examples),
        confusion_section(run.examples),
        worst_section(run.folder, run.examples),
    ]


def _whose_examples(run: Run, examples: Mapping[str, Any]) -> Markup:
    """Of which epoch the model is that made the examples; runs of before did not say so."""
    epoch = examples.get("epoch")
    if not isinstance(epoch, int):
        return Markup("")
    best = ", the best one" if run.best and run.best[0] == epoch else ""
    text = f"What follows is by the model after epoch {epoch + 1}{best}."
    return tag("p", text, class_="note")


def _left_out(run: Run) -> Markup:
    files = [str(each) for each in run.facts.get("left_out") or ()]
    if not files:
        return Markup("")
    told = tag("ul", *(tag("li", file) for file in files), class_="left-out")
    if len(files) > _FOLDED_FILES:
        told = tag("details", tag("summary", "Which, and why"), told)
    return section(
        "Files left out", tag("p", f"{counted(len(files), 'file')} could not be used."), told
    )


def option_in_words(value: object) -> str:
    """An option's value as its file writes it; text without its quotes."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _options(run: Run) -> Markup:
    if not run.options:
        return Markup("")
    rows = [[name, option_in_words(value)] for name, value in sorted(run.options.items())]
    options = table(["option", "value"], rows, caption="From config.toml", words=2)
    return section("Options", tag("details", tag("summary", counted(len(rows), "option")), options))
