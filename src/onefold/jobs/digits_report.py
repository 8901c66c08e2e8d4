"""What the demo shows: the table of its runs, the verdict on them and their learning curves.

Nothing here trains; a `Run` comes from `onefold.jobs.digits.train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from onefold.data.files import require_ours
from onefold.system.ownfiles import aside_of

__all__ = ["Epoch", "Run", "draw_curves", "require_new", "results_table", "verdict"]

_SOFTWARE = "onefold demo"
"""Stands in each PNG as the software that made it, and so marks the files of the demo."""

CURVE_STYLES = (
    {"linewidth": 6, "alpha": 0.3, "marker": "o", "markersize": 9},
    {"linewidth": 1.5, "linestyle": "--", "marker": ".", "color": "black"},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One pass over the training set."""

    loss: float
    """Mean training loss of the samples, each as of its own step."""

    accuracy: float
    """Share of the test images that are classified correctly afterwards."""

    duration_s: float
    """Time of the training, without the evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training from beginning to end."""

    devices: tuple[str, ...]
    """Every device of the run, such as ``("cuda:0", "cuda:1")``."""

    samples: int
    """Size of the training set."""

    epochs: tuple[Epoch, ...]
    """What happened in each epoch."""

    fingerprint: str
    """Fingerprint of the trained model; the same for the same bits."""

    @property
    def epoch_s(self) -> float:
        """Duration of a typical epoch: the median, so that the start-up does not count."""
        return median(epoch.duration_s for epoch in self.epochs)

    @property
    def samples_per_s(self) -> float:
        """Training speed of a typical epoch."""
        return self.samples / self.epoch_s

    @property
    def name(self) -> str:
        """Number and kind of the devices, such as ``2 x cpu``."""
        return f"{len(self.devices)} x {self.devices[0].partition(':')[0]}"


def results_table(runs: Sequence[Run]) -> Table:
    """Build a table with one row for each run; the speed-up is over the first."""
    table = Table(title="The same training, on different numbers of devices")
    table.add_column("devices")
    for heading in ("s/epoch", "samples/s", "speed-up", "test accuracy", "fingerprint"):
        table.add_column(heading, justify="right", no_wrap=heading == "fingerprint")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.epoch_s:.2f}",
            f"{run.samples_per_s:,.0f}",
            f"{run.samples_per_s / runs[0].samples_per_s:.2f}",
            f"{run.epochs[-1].accuracy:.2%}",
            run.fingerprint,
        )
    return table


def verdict(first: Run, second: Run) -> tuple[bool, str]:
    """Whether two runs trained the same model, and the sentence that says so."""
    if first.fingerprint != second.fingerprint:
        return False, (
            f"The models differ: {first.fingerprint} on {first.name}, "
            f"{second.fingerprint} on {second.name}. This must not happen on devices of one kind."
        )
    if len(first.devices) == len(second.devices):
        return True, (
            f"The same model, to the last bit: both runs on {first.name} have the fingerprint "
            f"{first.fingerprint}."
        )
    return True, (
        f"The same model, to the last bit: {first.name} and {second.name} have the fingerprint "
        f"{first.fingerprint}."
    )


def draw_curves(runs: Sequence[Run], path: Path) -> None:
    """Draw test accuracy and training loss by epoch, as a PNG file.

    Args:
        runs: one or two runs; where two agree, the second is drawn inside the first.
        path: the file to write; its folder is made if need be.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    # Not pyplot: that would choose a backend, which may want a display, and keep every figure.
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy_axes, loss_axes = figure.subplots(1, 2)
    for run, style in zip(runs, CURVE_STYLES, strict=False):
        numbers = range(1, len(run.epochs) + 1)
        accuracies = [epoch.accuracy for epoch in run.epochs]
        losses = [epoch.loss for epoch in run.epochs]
        accuracy_axes.plot(numbers, accuracies, label=run.name, **style)
        loss_axes.plot(numbers, losses, label=run.name, **style)
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes, quantity in ((accuracy_axes, "test accuracy"), (loss_axes, "training loss")):
        axes.set(xlabel="epoch", ylabel=quantity, title=f"{quantity.capitalize()} by epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Once more: two trainings have passed since the first look.
    require_new(path)
    with aside_of(path) as file:
        figure.savefig(file, format="png", dpi=150, metadata={"Software": _SOFTWARE})


def require_new(path: Path) -> None:
    """Refuse to write over a picture that the demo has not written.

    Raises:
        ValueError: the path holds something that the demo has not written.
    """
    # The note is in the first few hundred bytes, as PNG has texts before the pixels.
    require_ours(
        path,
        lambda head: _SOFTWARE.encode() in head,
        f"--output {path}: expected a new file, or the curves of before",
    )
