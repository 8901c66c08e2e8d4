"""Draws training speeds, and writes the tables of docs/studies/speed.md.

They use the records of `training.py` and `limit.py`, so that they always agree.

    python benchmarks/picture.py [--results benchmarks/results] [--output docs/studies/speed.png]
                                 [--page docs/studies/speed.md]

One panel per workload, one bar per side: speed as a multiple of the plain loop with one thread.
The whiskers are the minimum and maximum over the rounds.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
WIDTH_PX, HEIGHT_PX, DPI = 960, 600, 100
SHARPNESS = 2
"""Pixels of the file per displayed pixel."""
COLUMNS = 4
ROWS = 2
GRAY, BLUE, LIGHT_BLUE, LINE = "#9aa0a6", "#1f6feb", "#8fb8f6", "#3c4043"
TITLE = "Training speed, as a multiple of PyTorch's plain loop on one thread"
MARKS = {
    "training": ("<!-- tables: written by benchmarks/picture.py -->", "<!-- end of the tables -->"),
    "limit": ("<!-- limit: written by benchmarks/picture.py -->", "<!-- end of the limit -->"),
}
"""Lines around the tables of a benchmark."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A side to draw."""

    side: str
    label: str
    color: str


BARS = [
    Bar("plain-all", "plain loop, all cores", GRAY),
    Bar("ddp-2", "DDP, 2 processes", GRAY),
    Bar("accelerate-2", "Accelerate, 2 processes", GRAY),
    Bar("fabric-2", "Fabric, 2 processes", GRAY),
    Bar("onefold-1", "onefold, 1 device, 1 shard", LIGHT_BLUE),
    Bar("onefold-1-two-shards", "onefold, 1 device, 2 shards", LIGHT_BLUE),
    Bar("onefold-2-collective", "onefold, 2 devices, by network", LIGHT_BLUE),
    Bar("onefold-2-shared", "onefold, 2 devices", BLUE),
]
"""Bars from top to bottom."""

TITLES = {
    "cnn-adam": "CNN, 26M parameters, Adam",
    "cnn-sgd": "CNN, 26M parameters, SGD",
    "transformer": "transformer, 4 layers of 256",
    "resnet18": "ResNet-18, 28x28 pixels",
    "lenet": "LeNet",
    "mlp": "tiny perceptron",
    "thousand": "1,000 small parameters",
}

RATIOS = {
    "onefold, 2 devices / 1 device": "2 devices / 1 device",
    "onefold, 2 devices / best of the others": "2 devices / best of DDP, Accelerate, Fabric",
    "onefold, 2 devices / plain, all threads": "2 devices / plain loop, all cores",
}
"""Columns of the second table: the ratio's name in the record, and on the page."""

LIMIT_SPEEDS = {
    "limit-2": "limit",
    "onefold-2-shared": "onefold, 2",
    "ddp-2": "DDP, 2",
    "accelerate-2": "Accelerate, 2",
    "fabric-2": "Fabric, 2",
}
LIMIT_RATIOS = {
    "onefold, 2 devices / limit": "onefold / limit",
    "best of the others / limit": "best of the others / limit",
    "onefold, 2 devices / best of the others": "onefold / best of the others",
    "onefold, 1 device, 2 shards / plain": "1 device, V = 2 / plain",
    "limit / twice one process alone": "limit / twice one process alone",
}
"""Columns of the limit's table: names in the record, and on the page."""


def main() -> None:
    """Read the record, draw, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "studies" / "speed.png")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "studies" / "speed.md")
    args = parser.parse_args()
    training = training_record(args.results)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 8, "font.family": "DejaVu Sans"}):
        drawn(training).savefig(args.output, dpi=DPI * SHARPNESS, facecolor="white")
    page = with_tables(args.page.read_text(encoding="utf-8"), "training", tables(training))
    if text := limit_table(args.results):
        page = with_tables(page, "limit", text)
    args.page.write_text(page, encoding="utf-8")
    print(args.output, args.page, sep="\n")


def training_record(folder: Path) -> dict[str, Any]:
    """Find the record of `training.py` in `folder`; exit the program if there is none.

    Records in which all sides keep their memory, or compute in low precision, are other
    measurements and are skipped.
    """
    for path in sorted(folder.glob("*.json")):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["benchmark"] != "training":
            continue
        if found["settings"].get("precisions", ["fp32"]) == ["fp32"]:
            return found
    raise SystemExit(f"{folder} contains no record of training.py: first run training.py --output")


# The picture


def drawn(training: Mapping[str, Any]) -> Figure:
    """Draw the whole figure."""
    figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI))
    panels = list(figure.subplots(ROWS, COLUMNS).flat)
    figure.subplots_adjust(left=0.19, right=0.985, top=0.84, bottom=0.05, wspace=0.09, hspace=0.25)
    figure.text(0.015, 0.955, TITLE, size=13)
    figure.text(0.015, 0.92, described(training), size=8, color=LINE)
    found = {one["workload"]: one["relative"] for one in training["results"] if one["relative"]}
    reach = max((highest(relative) for relative in found.values()), default=1.0)
    for number, (workload, relative) in enumerate(found.items()):
        draw_panel(panels[number], TITLES[workload], relative, reach)
        labels = [bar.label for bar in BARS] if number % COLUMNS == 0 else []
        panels[number].set_yticklabels(labels)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    if len(found) < len(panels):
        text = notes(training["settings"])
        panels[-1].text(0.0, 1.0, text, va="top", color=LINE, linespacing=1.5, size=8)
    return figure


def draw_panel(
    panel: Axes, title: str, relative: Mapping[str, Mapping[str, float]], reach: float
) -> None:
    """Draw the bars of one workload, and a column with the medians."""
    panel.set_title(title, size=9, loc="left", pad=5)
    for row, bar in enumerate(BARS):
        if bar.side in relative:
            draw_bar(panel, row, bar, relative[bar.side], figures_at=1.3 * reach)
    panel.axvline(1.0, color=LINE, linewidth=0.8, linestyle=(0, (3, 2)), zorder=0)
    panel.set_xlim(0, 1.32 * reach)
    panel.set_ylim(len(BARS) - 0.4, -0.6)
    panel.set_yticks(range(len(BARS)))
    panel.set_xticks([0, 1, 2])
    panel.tick_params(length=0)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.spines["left"].set_color("#d0d3d6")


def draw_bar(
    panel: Axes, row: int, bar: Bar, speed: Mapping[str, float], *, figures_at: float
) -> None:
    """Draw one side: its median as a bar and as a number, and the spread of the rounds."""
    median, low, high = speed["median"], speed["low"], speed["high"]
    panel.barh(row, median, height=0.66, color=bar.color)
    panel.plot([low, high], [row, row], color=LINE, linewidth=1.0, solid_capstyle="butt")
    weight = "bold" if bar.color == BLUE else "normal"
    panel.text(figures_at, row, f"{median:.2f}", va="center", ha="right", weight=weight)


def highest(relative: Mapping[str, Mapping[str, float]]) -> float:
    """Return the maximum of all whiskers of a workload."""
    return max(one["high"] for name, one in relative.items() if name in {b.side for b in BARS})


def described(training: Mapping[str, Any]) -> str:
    """Return the machine, the versions and the date."""
    hardware, versions = training["hardware"], training["versions"]
    names = {"torch": "PyTorch", "accelerate": "Accelerate", "lightning-fabric": "Lightning Fabric"}
    shown = [f"{title} {versions[name]}" for name, title in names.items() if name in versions]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    return ", ".join([machine, *shown, f"Python {versions['python']}", training["date"][:10]])


def notes(settings: Mapping[str, Any]) -> str:
    """Return the notes for the reader."""
    return (
        f"Bars and figures: medians of {settings['repeats']}\n"
        "rounds, all sides in turn.\n"
        "Thin lines: the slowest and the\n"
        "fastest round.\n"
        "Dashed line: the plain loop.\n"
        "A process has one thread, but for\n"
        "the plain loop on all cores.\n"
        "onefold on 2 devices has 2 shards;\n"
        "by network: through gloo, as\n"
        "between hosts; otherwise through\n"
        "shared memory."
    )


# The tables


def with_tables(page: str, benchmark: str, text: str) -> str:
    """Return the page with new tables; exit the program if it has no place for them."""
    first, last = MARKS[benchmark]
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise SystemExit(f"expected the lines {first} and {last} around the tables of the page")
    return f"{before}{first}\n{text}{last}{after}"


def limit_table(folder: Path) -> str:
    """Return the speeds and ratios of all records of `limit.py` in a folder, as Markdown.

    The text is empty if there is no record.
    """
    results = []
    for path in sorted(folder.glob("*.json")):
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        results += record["results"] if record["benchmark"] == "limit" else []
    order = list(TITLES)
    results.sort(key=lambda one: (one["memory"], order.index(one["workload"])))
    rows = []
    # Leave out the columns of libraries that were not installed.
    sides = [n for n in LIMIT_SPEEDS if any(n in one["samples_per_s"] for one in results)]
    for one in results:
        title = TITLES[one["workload"]] + (
            "; memory kept by all" if one["memory"] == "kept" else ""
        )
        speeds, ratios = one["samples_per_s"], one["ratios"]
        cells = [samples(speeds[n]["median"]) if n in speeds else "" for n in sides]
        cells += [
            f"{ratios[n]['ratio']['median']:.2f}" if n in ratios else "" for n in LIMIT_RATIOS
        ]
        rows.append([title, *cells])
    head = ["workload", *(LIMIT_SPEEDS[n] for n in sides), *LIMIT_RATIOS.values()]
    return f"\n{table(head, rows)}\n" if rows else ""


def tables(training: Mapping[str, Any]) -> str:
    """Return the numbers of the figure, and some ratios, as Markdown."""
    results = [one for one in training["results"] if one["relative"]]
    return f"\n{speed_table(results)}\n{ratio_table(results)}\n"


def speed_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return each side's speed as a multiple of the plain loop."""
    rows = []
    for one in results:
        plain, relative = one["samples_per_s"]["plain-1"]["median"], one["relative"]
        speeds = [f"{relative[b.side]['median']:.2f}" if b.side in relative else "" for b in BARS]
        rows.append([TITLES[one["workload"]], samples(plain), *speeds])
    return table(["workload", "plain loop, samples/s", *(bar.label for bar in BARS)], rows)


def ratio_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return ratios of two sides: median, minimum and maximum over the rounds."""
    rows = []
    for one in results:
        found = [one["ratios"][name]["ratio"] if name in one["ratios"] else None for name in RATIOS]
        cells = [f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f})" if r else "" for r in found]
        rows.append([TITLES[one["workload"]], *cells])
    return table(["workload", *RATIOS.values()], rows)


def samples(value: float) -> str:
    """Format a speed with three digits."""
    digits = max(0, 2 - len(str(int(value))) + 1)
    return f"{float(f'{value:.3g}'):,.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    main()
