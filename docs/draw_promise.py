"""Trains one model on 1, 2 and 3 devices, by onefold and by DDP, and draws the six loss curves.

    python -m docs.draw_promise [--output docs/promise.svg]

Run from the root of a checkout. All six runs start from the same weights, read the same digits of
scikit-learn in batches of `BATCH_SIZE` over all devices, and use the same optimizer, on CPU
processes with one thread each. The legends show the fingerprint of each trained model, computed by
`onefold.Trainer.fingerprint` for both libraries: equal fingerprints mean equal bits.

The command fails if the three runs of onefold differ in a single bit. The curves and fingerprints
themselves depend on the processor and on the version of PyTorch.

Note: why DDP differs
---------------------
Not because of its data: the batch divides by 1, 2 and 3, and the data set by the batch, so
`DistributedSampler` gives any number of processes the samples that one process would get, step by
step. But batch norm sees only the samples of its own process, 36, 18 or 12 of them, and normalizes
by other statistics each time. onefold normalizes over a shard, and the shards do not depend on the
devices.

Note: what each process imports
-------------------------------
Twelve processes train. Only the first one needs scikit-learn and matplotlib, so they are imported
where they are used.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import onefold

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["main"]

OUTPUT = Path(__file__).with_name("promise.svg")
DEVICE_COUNTS = (1, 2, 3)
SHARDS = 3
BATCH_SIZE = 36
BATCHES = 49
EPOCHS = 4
LEARNING_RATE = 0.05
SEED = 0

WIDTH_IN, HEIGHT_IN, DPI = 9.6, 3.7, 100
INK, FAINT = "#3c4043", "#dadce0"
COLORS = ("#8ab4f8", "#f29900", "#202124")
NESTED_WIDTHS = (9.0, 4.5, 1.3)
"""Of the curves of onefold: each is drawn inside of the one before."""
PLAIN_WIDTH = 1.8
SMOOTHED_OVER = 14
"""Each point of a curve is the mean loss of so many steps, a divisor of all steps."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training from the first step to the last."""

    losses: list[float]
    """Mean loss of the batch, of every step."""
    fingerprint: str


def main() -> None:
    """Train six times, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="an SVG or a PNG file")
    output: Path = parser.parse_args().output
    data = digits()
    ours = [onefold.launch(with_onefold, devices=f"cpu:{n}", args=(data,)) for n in DEVICE_COUNTS]
    theirs = [with_ddp(n, data) for n in DEVICE_COUNTS]
    for name, runs in (("onefold", ours), ("DDP", theirs)):
        print(name, *(run.fingerprint for run in runs))
    if len({run.fingerprint for run in ours}) > 1:
        raise SystemExit("expected one fingerprint of onefold on all device counts")
    save(drawn(ours, theirs), output)
    print(output)


# Training


def digits() -> TensorDataset:
    """Images (n, 64) float32 in [0, 1] and labels (n,) int64, as many as fill all batches."""
    from sklearn.datasets import load_digits

    source, count = load_digits(), BATCH_SIZE * BATCHES
    images = torch.from_numpy(source.data[:count]).to(torch.float32) / 16
    return TensorDataset(images, torch.from_numpy(source.target[:count]).to(torch.int64))


def new_model() -> nn.Module:
    """A small perceptron with batch norm, with the same values every time."""
    torch.manual_seed(SEED)
    hidden = [[nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()] for _ in range(2)]
    return nn.Sequential(*hidden[0], *hidden[1], nn.Linear(64, 10))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of every sample, (n,) float32."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def with_onefold(data: TensorDataset) -> Run:
    """Train on the devices of this run."""
    model = new_model()
    trainer = onefold.Trainer(model, new_optimizer(model), loss, shards=SHARDS, seed=SEED)
    loader = trainer.loader(data, batch_size=BATCH_SIZE, shuffle=True)
    losses = [float(trainer.step(batch).loss) for _ in trainer.epochs(EPOCHS) for batch in loader]
    return Run(losses, trainer.fingerprint())


def with_ddp(device_count: int, data: TensorDataset) -> Run:
    """Train in so many processes, which meet by a file in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(ddp_process, (device_count, data, folder), device_count)
        saved = torch.load(Path(folder) / "result.pt")
    model = new_model()
    model.load_state_dict(saved["model"])
    fingerprint = onefold.Trainer(model, None, loss, shards=1).fingerprint()
    return Run(saved["losses"], fingerprint)


def ddp_process(rank: int, device_count: int, data: TensorDataset, folder: str) -> None:
    """Train as one process of DDP; rank 0 saves the losses and the model."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=device_count)
    model = DistributedDataParallel(new_model())
    optimizer = new_optimizer(model)
    sampler = DistributedSampler(data, shuffle=True, seed=SEED)
    loader = DataLoader(data, batch_size=BATCH_SIZE // device_count, sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            mean = loss(model, batch).mean()
            mean.backward()
            optimizer.step()
            total = mean.detach().clone()
            dist.all_reduce(total)  # shares are equal, so this is the mean of the whole batch
            losses.append(float(total) / device_count)
    if rank == 0:
        result = {"losses": losses, "model": model.module.state_dict()}
        torch.save(result, Path(folder) / "result.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads can abort or hang a process that tears down a DDP model


# Drawing


def drawn(ours: Sequence[Run], theirs: Sequence[Run]) -> Figure:
    """Both panels, on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw_panel(left, ours, "onefold: one curve, one model", NESTED_WIDTHS)
    draw_panel(right, theirs, "DistributedDataParallel: three models", (PLAIN_WIDTH,) * 3)
    left.set_ylabel(f"training loss, mean of {SMOOTHED_OVER} steps", color=INK)
    return figure


def draw_panel(axes: Axes, runs: Sequence[Run], title: str, widths: Sequence[float]) -> None:
    """The curves of one library, and the fingerprints of its models."""
    for count, run, color, width in zip(DEVICE_COUNTS, runs, COLORS, widths, strict=True):
        losses = torch.tensor(run.losses).reshape(-1, SMOOTHED_OVER).mean(dim=1).tolist()
        steps = range(SMOOTHED_OVER, len(run.losses) + 1, SMOOTHED_OVER)
        label = f"{count} device{'s' * (count > 1):1}  {run.fingerprint}"
        style = {"color": color, "linewidth": width, "solid_capstyle": "round"}
        axes.plot(steps, losses, label=label, **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(title, color=INK, size=11, loc="left")
    axes.set_xlabel("step", color=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.tick_params(colors=INK, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(prop={"family": "DejaVu Sans Mono", "size": 9}, frameon=False, labelcolor=INK)


def save(figure: Figure, output: Path) -> None:
    """Write the picture; the same curves give the same file."""
    import matplotlib

    is_svg = output.suffix == ".svg"
    style = {"font.family": "DejaVu Sans", "svg.hashsalt": "onefold"}
    with matplotlib.rc_context(style):
        stamp = {"Date": None} if is_svg else None
        figure.savefig(output, dpi=2 * DPI, facecolor="white", metadata=stamp)
    if is_svg:  # no line of a file in the repository ends with a space
        lines = output.read_text(encoding="utf-8").splitlines()
        output.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
