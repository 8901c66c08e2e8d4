"""Draws how fast training goes, from the record that `training.py` has written.

    python benchmarks/picture.py [--results benchmarks/results] [--output docs/speed.png]

One panel a workload, one bar a side: speed in terms of the plain loop with one thread. The whiskers
reach from the least to the greatest of the rounds.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
WIDTH_PX, HEIGHT_PX, DPI = 900, 520, 100
SHARPNESS = 2
"""Pixels of the file for each that is shown."""
COLUMNS = 4
ROWS = 2
GREY, BLUE, LINE = "#9aa0a6", "#1f6feb", "#3c4043"
LIGHT_BLUE = "#8fb8f6"


@dataclass(frozen=True, slots=True)
class Bar:
    """A side that is drawn."""

    side: str
    label: str
    color: str


BARS = [
    Bar("plain-all", "plain, all threads", GREY),
    Bar("ddp-2", "DDP, 2 processes", GREY),
    Bar("accelerate-2", "Accelerate, 2 processes", GREY),
    Bar("fabric-2", "Fabric, 2 processes", GREY),
    Bar("onefold-1-two-shards", "onefold, 1 device", LIGHT_BLUE),
    Bar("onefold-2-collective", "onefold, 2, over gloo", LIGHT_BLUE),
    Bar("onefold-2-shared", "onefold, 2 devices", BLUE),
]
"""From the top down."""

TITLES = {
    "cnn-adam": "26M-parameter CNN, Adam",
    "cnn-sgd": "26M-parameter CNN, SGD",
    "transformer": "transformer 4x256",
    "resnet18": "ResNet-18, 28x28",
    "lenet": "LeNet",
    "mlp": "tiny perceptron",
    "thousand": "1,000 small parameters",
}


def main() -> None:
    """Read the records and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "speed.png")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 8, "font.family": "DejaVu Sans"}):
        figure = drawn(training_record(args.results))
        figure.savefig(args.output, dpi=DPI * SHARPNESS, facecolor="white")
    print(args.output)


def training_record(folder: Path) -> dict[str, Any]:
    """The record of `training.py` among those in `folder`; ends the program if there is none."""
    for path in sorted(folder.glob("*.json")):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["benchmark"] == "training":
            return found
    raise SystemExit(f"{folder} holds no record of training.py: run that first, with --output")


def drawn(training: Mapping[str, Any]) -> Figure:
    """The whole picture."""
    figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI))
    panels = list(figure.subplots(ROWS, COLUMNS).flat)
    figure.subplots_adjust(left=0.17, right=0.985, top=0.83, bottom=0.05, wspace=0.1, hspace=0.28)
    figure.text(0.015, 0.955, "Training speed: times the plain loop with one thread", size=13)
    figure.text(0.015, 0.915, described(training), size=8, color=LINE)
    found = {one["workload"]: one["relative"] for one in training["results"] if one["relative"]}
    right = 1.25 * max((highest(relative) for relative in found.values()), default=1.0)
    for number, (workload, relative) in enumerate(found.items()):
        draw_panel(panels[number], TITLES[workload], relative, right)
        labels = [bar.label for bar in BARS] if number % COLUMNS == 0 else []
        panels[number].set_yticklabels(labels)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    if len(found) < len(panels):
        text = notes(training["settings"])
        panels[-1].text(0.0, 1.0, text, va="top", color=LINE, linespacing=1.6, size=8)
    return figure


def draw_panel(
    panel: Axes, title: str, relative: Mapping[str, Mapping[str, float]], right: float
) -> None:
    """The bars of one workload."""
    panel.set_title(title, size=9, loc="left", pad=5)
    for row, bar in enumerate(BARS):
        if bar.side in relative:
            draw_bar(panel, row, bar, relative[bar.side], right)
    panel.axvline(1.0, color=LINE, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0)
    panel.set_xlim(0, right)
    panel.set_ylim(len(BARS) - 0.4, -0.6)
    panel.set_yticks(range(len(BARS)))
    panel.set_xticks([0, 1])
    panel.tick_params(length=0)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.spines["left"].set_color("#d0d3d6")


def draw_bar(panel: Axes, row: int, bar: Bar, speed: Mapping[str, float], right: float) -> None:
    """One side: its median, how far the rounds lie apart, and the median in figures."""
    median, low, high = speed["median"], speed["low"], speed["high"]
    panel.barh(row, median, height=0.66, color=bar.color)
    panel.plot([low, high], [row, row], color=LINE, linewidth=1.0, solid_capstyle="butt")
    weight = "bold" if bar.color == BLUE else "normal"
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # hides the dashed line
    panel.text(high + 0.03 * right, row, f"{median:.2f}", va="center", weight=weight, bbox=behind)


def highest(relative: Mapping[str, Mapping[str, float]]) -> float:
    """As far as any whisker of a workload reaches."""
    return max(one["high"] for name, one in relative.items() if name in {b.side for b in BARS})


def described(training: Mapping[str, Any]) -> str:
    """The machine, the versions and the date."""
    hardware, versions = training["hardware"], training["versions"]
    names = {"torch": "PyTorch", "accelerate": "Accelerate", "lightning-fabric": "Lightning Fabric"}
    shown = [f"{title} {versions[name]}" for name, title in names.items() if name in versions]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    return ", ".join([machine, *shown, f"Python {versions['python']}", training["date"][:10]])


def notes(settings: Mapping[str, Any]) -> str:
    """What the reader needs to know."""
    return (
        f"Bars: medians of {settings['repeats']} rounds,\n"
        "all sides in turn.\n"
        "Lines: least to greatest of them.\n"
        "Dashed: plain loop, one thread.\n"
        "Every process has one thread,\n"
        "save where it says all.\n"
        "onefold: two shards a batch."
    )


if __name__ == "__main__":
    main()
