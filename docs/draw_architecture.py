"""Draws the rooms of `src/onefold` and the imports between them.

    python -m docs.draw_architecture [--output docs/contribute/architecture.svg]

Run from the root of a checkout. Every arrow and number is read from the sources, by the same
function that `tests/test_rooms.py` checks the rooms with; only the positions of the boxes are set
by hand. Nearly all rooms import the three at the bottom: instead of arrows to them, each box has a
line with the numbers.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from tests.test_rooms import OUTER, ROOMS, imports

__all__ = ["main"]

OUTPUT = Path(__file__).parent / "contribute" / "architecture.svg"
WIDTH_IN, HEIGHT_IN, DPI = 9.6, 8.6, 100
INK, PALE, FAINT = "#3c4043", "#80868b", "#c4c8cc"
LINE_STEP = 0.245
LABEL_AT = 0.42
"""Position of the number, as a fraction of its arrow."""
INNER_COLOR, OUTER_COLOR, GROUND_COLOR = "#dbe7fd", "#fdecd2", "#e8eaed"
TITLE = "The rooms of onefold"
EXPLAINED = (
    "An arrow goes from a room to one that it imports from. Its number counts the imported names; "
    "a pale arrow is one name."
)


@dataclass(frozen=True, slots=True)
class Box:
    """Position and purpose of a room."""

    x: float
    """Horizontal center."""
    y: float
    purpose: str
    width: float = 2.0
    height: float = 0.78


BOXES = {
    "__main__": Box(1.2, 11.55, "python -m onefold", width=1.7),
    "cli": Box(6.2, 11.55, "commands"),
    "integrations": Box(11.0, 11.55, "others' training loops"),
    "testing": Box(1.2, 9.3, "simulated devices", width=1.9),
    "onefold": Box(4.3, 10.35, "the public names"),
    "trainer": Box(4.3, 9.35, "the face"),
    "losses": Box(7.0, 9.3, "PyTorch's losses", width=1.8),
    "weights": Box(9.6, 9.3, "weights of others"),
    "worker": Box(1.2, 10.35, "one process", width=1.6),
    "launcher": Box(1.2, 6.2, "processes, signals", width=1.9),
    "session": Box(3.6, 7.25, "a Trainer's run", width=1.8),
    "tools": Box(4.3, 8.3, "around the steps", width=1.9),
    "record": Box(9.2, 8.2, "results of a run", width=2.0),
    "checkpoint": Box(6.6, 8.0, "save, load, resume"),
    "passes": Box(9.3, 7.1, "evaluate, modify, average", width=2.3),
    "step": Box(5.8, 6.2, "agree, compute, judge", width=2.1),
    "placement": Box(9.1, 5.6, "storage of the model", width=2.1),
    "checks": Box(2.7, 4.9, "refusals", width=1.8),
    "shard": Box(6.0, 4.1, "one shard on a device", width=2.1),
    "update": Box(9.2, 3.7, "the optimizer, divided", width=2.1),
    "data_order": Box(11.1, 4.7, "loader, position", width=1.7),
    "exchange": Box(6.6, 2.35, "memory, transport"),
    "deferred": Box(3.7, 2.35, "values drawn later", width=1.9),
    "watch": Box(1.2, 2.35, "timing, timeline"),
    "options": Box(11.2, 10.5, "options, variables", width=1.8),
    "files": Box(11.35, 8.2, "files of others", width=1.55),
    "system": Box(2.1, 1.1, "files, signals", width=3.4),
    "core": Box(6.1, 1.1, "pure: shard, fold, flat", width=3.4),
    "errors": Box(10.1, 1.1, "all exceptions", width=3.4),
}
GROUND = ("core", "errors", "system")
"""Imported by nearly all rooms; drawn as numbers, not as arrows."""


def main() -> None:
    """Read the imports and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="an SVG or a PNG file")
    output: Path = parser.parse_args().output
    style = {"font.family": "DejaVu Sans", "svg.hashsalt": "onefold"}  # the same file every time
    with matplotlib.rc_context(style):
        stamp = {"Date": None} if output.suffix == ".svg" else None
        drawn(counted()).savefig(output, dpi=2 * DPI, facecolor="white", metadata=stamp)
    if output.suffix == ".svg":  # no line of a file in the repository ends with a space
        lines = output.read_text(encoding="utf-8").splitlines()
        output.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")
    print(output)


def counted() -> Counter[tuple[str, str]]:
    """Count the names that each room imports from each other one."""
    missing = sorted(set(ROOMS) ^ BOXES.keys())
    if missing:
        raise SystemExit(f"expected a box in BOXES for every room and no other: {missing}")
    pairs = ((found.room, found.target_room) for found in imports())
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def drawn(counts: Counter[tuple[str, str]]) -> Figure:
    """Return the whole picture."""
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0.0, 12.2)
    axes.set_ylim(0.6, 13.3)
    axes.set_axis_off()
    axes.text(0.2, 12.9, TITLE, size=15, color=INK, va="center")
    axes.text(0.2, 12.45, EXPLAINED, size=8.5, color=INK, va="center")
    shapes = {room: draw_box(axes, room, box, counts) for room, box in BOXES.items()}
    for (source, target), count in sorted(counts.items()):
        if target not in GROUND:
            draw_arrow(axes, shapes[source], shapes[target], count)
    return figure


def draw_box(axes: Axes, room: str, box: Box, counts: Counter[tuple[str, str]]) -> FancyBboxPatch:
    """Draw a room: its name, purpose, and imports from the rooms at the bottom."""
    color = OUTER_COLOR if room in OUTER else GROUND_COLOR if room in GROUND else INNER_COLOR
    corner = (box.x - box.width / 2, box.y - box.height / 2)
    shape = FancyBboxPatch(
        corner, box.width, box.height, boxstyle="round,pad=0,rounding_size=0.12",
        facecolor=color, edgecolor=PALE, linewidth=0.8, zorder=2,
    )  # fmt: skip
    axes.add_patch(shape)
    used = ", ".join(f"{name} {counts[room, name]}" for name in GROUND if counts[room, name])
    lines = [(room, 10, "bold", INK), (box.purpose, 7.5, "normal", INK)]
    lines += [(used, 6.5, "normal", PALE)] if used else []
    top = box.y + LINE_STEP * (len(lines) - 1) / 2
    for number, (text, size, weight, ink) in enumerate(lines):
        axes.text(
            box.x, top - LINE_STEP * number, text,
            size=size, weight=weight, color=ink, ha="center", va="center", zorder=3,
        )  # fmt: skip
    return shape


def draw_arrow(axes: Axes, source: FancyBboxPatch, target: FancyBboxPatch, count: int) -> None:
    """Draw the arrow between two rooms, with the number of imported names above one."""
    start, end = middle(source), middle(target)
    arrow = FancyArrowPatch(
        start, end, patchA=source, patchB=target, shrinkA=0, shrinkB=1, arrowstyle="-|>",
        mutation_scale=9, linewidth=0.5 + 0.32 * count**0.5, zorder=1,
        color=FAINT if count == 1 else PALE,
    )  # fmt: skip
    axes.add_patch(arrow)
    if count == 1:
        return
    x, y = (a + LABEL_AT * (b - a) for a, b in zip(start, end, strict=True))
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.text(x, y, str(count), size=7.5, color=INK, ha="center", va="center", bbox=behind)


def middle(shape: FancyBboxPatch) -> tuple[float, float]:
    """Return the center of a room."""
    return shape.get_x() + shape.get_width() / 2, shape.get_y() + shape.get_height() / 2


if __name__ == "__main__":
    main()
