"""The demo: trains a residual network on real digits, on one device and then on all of them.

The data are the 1,797 images of scikit-learn's ``load_digits``, which require no download.

`results_table`, `verdict` and `draw_curves` create the demo's output from its runs: a table, a
verdict, and the learning curves. They train nothing; `train` returns a `Run`.

Note: what must be the same on all devices
------------------------------------------
Each device is a process that calls `train`. The initial weights and the split of the data are drawn
with fixed seeds, so they are the same on all devices. The shifts are drawn from PyTorch's global
generator, which the trainer's loader seeds for every sample, so that a sample is shifted in the
same way on whichever device reads it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import nn
from torch.utils.data import Dataset

import onefold
from onefold.cli import Screen
from onefold.errors import LaunchError
from onefold.system.whole_files import aside_of
from onefold.system.words import counted

__all__ = ["demo"]


_SOFTWARE = "onefold demo"
"""Value of the Software field of each PNG, which identifies files of the demo."""
_HEAD_BYTES = 1024

CURVE_STYLES = (
    {"linewidth": 6, "alpha": 0.3, "marker": "o", "markersize": 9},
    {"linewidth": 1.5, "linestyle": "--", "marker": ".", "color": "black"},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One pass over the training set."""

    loss: float
    """Mean training loss of the samples, each computed in its own step."""

    accuracy: float
    """Fraction of test images that are classified correctly after the epoch."""

    duration_s: float
    """Duration of training, without the evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run, from beginning to end."""

    devices: tuple[str, ...]
    """Devices of the run, such as ``("cuda:0", "cuda:1")``."""

    samples: int
    """Size of the training set."""

    epochs: tuple[Epoch, ...]
    """Results of each epoch."""

    fingerprint: str
    """Fingerprint of the trained model; equal for equal bits."""

    @property
    def epoch_s(self) -> float:
        """Median duration of an epoch, so that start-up does not count."""
        return median(epoch.duration_s for epoch in self.epochs)

    @property
    def samples_per_s(self) -> float:
        """Training speed of a typical epoch."""
        return self.samples / self.epoch_s

    @property
    def name(self) -> str:
        """Number and type of the devices, such as ``2 x cpu``."""
        return f"{len(self.devices)} x {self.devices[0].partition(':')[0]}"


def results_table(runs: Sequence[Run]) -> Table:
    """Build a table with one row per run; the speed-up is relative to the first."""
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
    """Return whether two runs trained the same model, and a sentence with the result."""
    if first.fingerprint != second.fingerprint:
        return False, (
            f"The models differ: {first.fingerprint} on {first.name}, "
            f"{second.fingerprint} on {second.name}. This must not happen on devices of one type."
        )
    both = f"{first.name} and {second.name}"
    if len(first.devices) == len(second.devices):
        both = f"both runs on {first.name}"
    words = f"The same model, to the last bit: {both} have the fingerprint {first.fingerprint}."
    return True, words


def draw_curves(runs: Sequence[Run], path: Path) -> None:
    """Draw test accuracy and training loss by epoch, as a PNG file.

    Args:
        runs: one or two runs; if two curves agree, the second is drawn inside the first.
        path: path of the file; its folder is created if necessary.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    # pyplot would choose a backend that may need a display, and keep every figure.
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    accuracy_axes, loss_axes = figure.subplots(1, 2)
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes, name, quantity in (
        (accuracy_axes, "accuracy", "test accuracy"),
        (loss_axes, "loss", "training loss"),
    ):
        for run, style in zip(runs, CURVE_STYLES, strict=False):
            values = [getattr(epoch, name) for epoch in run.epochs]
            axes.plot(range(1, len(values) + 1), values, label=run.name, **style)
        axes.set(xlabel="epoch", ylabel=quantity, title=f"{quantity.capitalize()} by epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Check again, because the file may have appeared during the two runs.
    require_new(path)
    with aside_of(path) as file:
        figure.savefig(file, format="png", dpi=150, metadata={"Software": _SOFTWARE})


def require_new(path: Path) -> None:
    """Refuse to overwrite a file that the demo did not write.

    Raises:
        ValueError: the path holds something that the demo did not write.
    """
    if not path.exists() and not path.is_symlink():
        return
    regular = path.is_file() and not path.is_symlink()
    head = b""
    if regular:
        with path.open("rb") as file:
            # A PNG file stores its text fields before the pixels.
            head = file.read(_HEAD_BYTES)
    if not regular or (head and _SOFTWARE.encode() not in head):
        raise ValueError(
            f"--output {path} exists and is not a figure of an earlier demo. Remove it, or choose "
            f"another path"
        )


SHARDS = 8
BATCH_SIZE = 64
EPOCHS = 6
LEARNING_RATE = 2e-3
SEED = 0
TEST_SHARE = 0.2
EVALUATION_BATCH_SIZE = 512


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the block's input.

    Args:
        before: channels of the input.
        after: channels of the output; a block with more of them halves the image.
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if before != after:
            convolution = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map (n, before, h, w) to (n, after, h / stride, w / stride), float32."""
        residual = self.bn1(self.conv1(features)).relu()
        summed: torch.Tensor = self.bn2(self.conv2(residual)) + self.shortcut(features)
        return summed.relu()


def residual_network(width: int = 64) -> nn.Sequential:
    """Build a network of four blocks for (n, 1, 8, 8) images of ten classes.

    Source: He et al., 2015, "Deep residual learning for image recognition".
    """
    model = nn.Sequential(
        *(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(ResidualBlock(width, width), ResidualBlock(width, width)),
        *(ResidualBlock(width, 2 * width), ResidualBlock(2 * width, 2 * width)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Images (1, 8, 8) float32 and their labels.

    Args:
        pixels: (n, 8, 8) uint8.
        labels: (n,) int64.
        shifted: whether each image is shifted by up to one pixel, at random at every read.
    """

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor, *, shifted: bool) -> None:
        self._images = F.pad(pixels.unsqueeze(1), (1, 1, 1, 1)).to(torch.float32) / 255
        self._labels = labels.tolist()
        self._shifted = shifted

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        left, top = (int(torch.randint(3, ())) if self._shifted else 1 for _ in range(2))
        return self._images[index, :, top : top + 8, left : left + 8], self._labels[index]


def read_digits() -> tuple[Digits, Digits]:
    """Read the digits for training and for testing, with the same fraction of each class."""
    from sklearn.datasets import load_digits

    source = load_digits()
    # The source has gray levels from 0.0 to 16.0 in float64.
    pixels = torch.from_numpy(source.images * (255 / 16)).to(torch.uint8)
    labels = torch.from_numpy(source.target).to(torch.int64)
    generator = torch.Generator().manual_seed(SEED)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        of_class = (labels == digit).nonzero().flatten()
        drawn = torch.randperm(len(of_class), generator=generator)
        is_test[of_class[drawn[: round(TEST_SHARE * len(of_class))]]] = True
    return (
        Digits(pixels[~is_test], labels[~is_test], shifted=True),
        Digits(pixels[is_test], labels[is_test], shifted=False),
    )


def train(epochs: int) -> Run:
    """Train the network on the devices of this run.

    Args:
        epochs: number of passes over the training set.

    Returns:
        The results. Except for durations, they are equal on any number of devices of one type.
    """
    torch.manual_seed(SEED)
    model = residual_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = model(batch[0])
        return F.cross_entropy(logits, batch[1], reduction="none")

    def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"accuracy": model(batch[0]).argmax(dim=1) == batch[1]}

    trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS, seed=SEED)
    train_set, test_set = read_digits()
    batches = trainer.loader(train_set, batch_size=BATCH_SIZE, shuffle=True)
    # Stepped by hand, because its length is known only once there is a trainer and its loader.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    history: list[Epoch] = []
    console = Screen()
    for epoch in trainer.epochs(epochs):
        start_s, total, samples = time.perf_counter(), 0.0, 0
        for batch in batches:
            step = trainer.step(batch)
            scheduler.step()
            # Waits for the GPU in every step, which is acceptable for 23 steps per epoch.
            total += float(step.loss) * step.samples
            samples += step.samples
        duration_s = time.perf_counter() - start_s
        scores = trainer.evaluate(score, test_set, batch_size=EVALUATION_BATCH_SIZE)
        history.append(Epoch(loss=total / samples, duration_s=duration_s, **scores))
        if trainer.is_lead:
            accuracy = f"accuracy {history[-1].accuracy:.1%}"
            console.print(f"epoch {epoch + 1}/{epochs}: loss {total / samples:.3f}, {accuracy}")
    return Run(
        devices=tuple(str(device) for device in trainer.devices),
        samples=len(train_set),
        epochs=tuple(history),
        fingerprint=trainer.fingerprint(),
    )


def one_of(devices: str) -> str:
    """Return one device of the type of ``devices``."""
    if devices.startswith("cpu"):
        return "cpu:1"
    return devices.split(",")[0].strip() if devices.startswith("cuda") else "1"


def demo(output: Path, devices: str = "auto", epochs: int = EPOCHS) -> int:
    """Train on one device and on several, and report whether the models are the same.

    Args:
        output: path for the figure of the learning curves: a ``.png`` file, or a folder for
            ``digits.png``.
        devices: devices of the second run, as for ``onefold run --devices``.
        epochs: number of passes over the training set in each run.

    Returns:
        Exit code: 0 if the two models have the same bits, else 1.

    Raises:
        LaunchError: the packages of the extra ``[demo]`` are not installed.
        ValueError: ``epochs`` is less than 1, or the figure would replace a file that the demo did
            not write.
    """
    missing = [each for each in ("sklearn", "matplotlib") if not importlib.util.find_spec(each)]
    if missing:
        raise LaunchError(
            f"the demo needs packages that are not installed ({', '.join(missing)}). "
            f'Run: pip install "onefold[demo]"'
        )
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, but got {epochs}")
    require_new(picture_in(output))
    console = Screen()
    console.print(
        f"Training a residual network on handwritten digits for {counted(epochs, 'epoch')}: "
        f"first on one device, then on several (--devices {devices})."
    )
    first = onefold.launch(train, devices=one_of(devices), args=(epochs,))
    second = onefold.launch(train, devices=devices, args=(epochs,))
    return report(console, first, second, output)


def picture_in(output: Path) -> Path:
    """Return the path of the figure."""
    return output if output.suffix == ".png" else output / "digits.png"


def report(console: Screen, first: Run, second: Run, output: Path) -> int:
    """Print the two runs and draw their curves; return the demo's exit code."""
    console.print(results_table([first, second]))
    if len(second.devices) == 1:
        console.print("Only one device was found, so the second run repeats the first.")
    same, sentence = verdict(first, second)
    console.print(sentence, style="bold green" if same else "bold red", soft_wrap=True)
    picture = picture_in(output)
    draw_curves([first, second], picture)
    console.print(f"The learning curves are in {picture}", soft_wrap=True)
    return 0 if same else 1
