"""Trains one model on 1, 2 and 3 devices, with onefold and with DDP, and draws how far they differ.

    python -m docs.draw_promise [--output docs/promise.svg]

Run from the root of a checkout. All six runs start from the same weights, read the same digits of
scikit-learn in batches of `BATCH_SIZE` over all devices, and use the same optimizer, on CPU
processes with one thread each. The picture shows the fingerprint of each trained model, computed
by `onefold.Trainer.fingerprint` for both libraries: equal fingerprints mean equal bits. The curves
show the largest difference of a weight from the run of the same library on one device.

The command fails if the three runs of onefold differ in a single bit. The curves and fingerprints
themselves depend on the processor and on the version of PyTorch.

Note: why DDP differs
---------------------
Not because of its data: the batch divides by 1, 2 and 3, and the data set by the batch, so
`DistributedSampler` gives any number of processes the samples that one process would get, step by
step. Its model has no batch norm and no dropout. DDP averages one gradient per
process, so the order of additions changes with the number of processes, and training amplifies the
rounding. onefold adds one gradient per shard, and the shards do not depend on the devices.

Note: imports of each process
-----------------------------
Twelve processes train. Only the first one needs scikit-learn, so it is imported where it is used.

Note: the file
--------------
SVG with texts as text. Its colors follow `prefers-color-scheme`: inside an `img` element, browsers
derive it from the element's `color-scheme`, which `static/site.css` sets for the site's switch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import onefold

__all__ = ["main"]

OUTPUT = Path(__file__).with_name("promise.svg")
DEVICE_COUNTS = (1, 2, 3)
SHARDS = 3
BATCH_SIZE = 36
BATCHES = 49
EPOCHS = 8
LEARNING_RATE = 0.1
SEED = 0

EVERY = 8
"""Steps from one point of a curve to the next."""
LOWEST, HIGHEST = -8, 0
"""Powers of ten at the ends of the axis."""
WIDTH, HEIGHT = 600, 392
LEFT, RIGHT, TOP, BOTTOM = 62, 586, 44, 244
"""The plot's frame, in the picture's units."""
ZERO = 268
"""Height of the line of onefold, which no logarithmic axis has."""
STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
text { font-size: 15px; fill: #1f2328; }
.title { font-weight: 600; font-size: 17px; }
.name { font-weight: 600; }
.code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.grid { stroke: #d1d9e0; }
.curve { fill: none; stroke-width: 3; stroke-linejoin: round; }
.two, .three { stroke: #b35900; }
.two { stroke-dasharray: 7 4; }
.ours { stroke: #0969da; stroke-width: 6; }
.theirs-text { fill: #b35900; }
.ours-text { fill: #0969da; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .grid { stroke: #3d444d; }
  .two, .three { stroke: #f0a35e; }
  .ours { stroke: #58a6ff; }
  .theirs-text { fill: #f0a35e; }
  .ours-text { fill: #58a6ff; }
}
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one training."""

    weights: torch.Tensor  # (points, parameters) float32, after every EVERY steps
    fingerprint: str


def main() -> None:
    """Train six times, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="an SVG file")
    output: Path = parser.parse_args().output
    data = digits()
    ours = [onefold.launch(with_onefold, devices=f"cpu:{n}", args=(data,)) for n in DEVICE_COUNTS]
    theirs = [with_ddp(n, data) for n in DEVICE_COUNTS]
    for name, runs in (("onefold", ours), ("DDP", theirs)):
        print(name, *(run.fingerprint for run in runs))
    if len({run.fingerprint for run in ours}) > 1:
        raise SystemExit("expected one fingerprint of onefold on all device counts")
    output.write_text("".join(f"{line}\n" for line in drawn(ours, theirs)), encoding="utf-8")
    print(output)


# Training


def digits() -> TensorDataset:
    """Images (n, 64) float32 in [0, 1] and labels (n,) int64, as many as fill all batches."""
    from sklearn.datasets import load_digits

    source, count = load_digits(), BATCH_SIZE * BATCHES
    images = torch.from_numpy(source.data[:count]).to(torch.float32) / 16
    return TensorDataset(images, torch.from_numpy(source.target[:count]).to(torch.int64))


def new_model() -> nn.Module:
    """A small perceptron, with the same values every time."""
    torch.manual_seed(SEED)
    hidden = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*hidden, nn.ReLU(), nn.Linear(64, 10))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of every sample, (n,) float32."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def weights_of(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters, (parameters,) float32."""
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def with_onefold(data: TensorDataset) -> Run:
    """Train on the devices of this run."""
    model = new_model()
    trainer = onefold.Trainer(model, new_optimizer(model), loss, shards=SHARDS, seed=SEED)
    loader = trainer.loader(data, batch_size=BATCH_SIZE, shuffle=True)
    weights = []
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            if trainer.step(batch).number % EVERY == 0:
                weights.append(weights_of(model))
    return Run(torch.stack(weights), trainer.fingerprint())


def with_ddp(device_count: int, data: TensorDataset) -> Run:
    """Train in so many processes, which meet by a file in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(ddp_process, (device_count, data, folder), device_count)
        saved = torch.load(Path(folder) / "result.pt")
    model = new_model()
    model.load_state_dict(saved["model"])
    fingerprint = onefold.Trainer(model, None, loss, shards=1).fingerprint()
    return Run(saved["weights"], fingerprint)


def ddp_process(rank: int, device_count: int, data: TensorDataset, folder: str) -> None:
    """Train as one process of DDP; rank 0 saves the weights and the model."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=device_count)
    model = DistributedDataParallel(new_model())
    optimizer = new_optimizer(model)
    sampler = DistributedSampler(data, shuffle=True, seed=SEED)
    loader = DataLoader(data, batch_size=BATCH_SIZE // device_count, sampler=sampler)
    weights, steps = [], 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).mean().backward()
            optimizer.step()
            steps += 1
            if steps % EVERY == 0:
                weights.append(weights_of(model.module))
    if rank == 0:
        result = {"weights": torch.stack(weights), "model": model.module.state_dict()}
        torch.save(result, Path(folder) / "result.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads can abort or hang a process that tears down a DDP model


# Drawing


def drawn(ours: Sequence[Run], theirs: Sequence[Run]) -> Iterator[str]:
    """The lines of the picture."""
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    yield f'     width="{WIDTH}" height="{HEIGHT}" role="img">'
    yield f"<style>{STYLE}</style>"
    yield text(8, 24, "Largest difference of a weight from the one-device run", "title")
    for power in range(LOWEST, HIGHEST + 1, 2):
        y = height_of(10.0**power)
        yield f'<path class="grid" d="M{LEFT} {y:.0f}H{RIGHT}"/>'
        yield text(LEFT - 8, y + 5, f"{10.0**power:g}", anchor="end")
    for name, run in (("two", theirs[1]), ("three", theirs[2])):
        yield f'<path class="curve {name}" d="{curve(run, theirs[0])}"/>'
    yield f'<path class="ours" d="M{LEFT} {ZERO}H{RIGHT}"/>'
    yield text(LEFT - 8, ZERO + 5, "0", anchor="end")
    label = "DDP on 2 (dashed) and 3 devices"
    yield text(RIGHT, height_of(1e-5), label, "name theirs-text", anchor="end")
    yield text(LEFT + 10, ZERO - 10, "onefold on 2 and 3 devices", "name ours-text")
    yield text(RIGHT, ZERO + 24, f"after {EPOCHS * BATCHES} steps", anchor="end")
    yield text(8, 316, "fingerprint")
    yield text(120, 316, "onefold", "name ours-text")
    yield text(330, 316, "DDP", "name theirs-text")
    for row, (count, our, their) in enumerate(zip(DEVICE_COUNTS, ours, theirs, strict=True)):
        y = 340 + 21 * row
        yield text(8, y, f"{count} device{'s' * (count > 1)}")
        yield text(120, y, our.fingerprint, "code")
        yield text(330, y, their.fingerprint, "code")
    yield "</svg>"


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    """Return a line of text; ``y`` is its base line."""
    return f'<text x="{x:g}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def curve(run: Run, alone: Run) -> str:
    """The path of a run's difference from the run on one device."""
    differences = (run.weights - alone.weights).abs().amax(dim=1).tolist()
    width = (RIGHT - LEFT) / len(differences)
    points = (
        f"{LEFT + width * (number + 1):.1f} {height_of(difference):.1f}"
        for number, difference in enumerate(differences)
    )
    return f"M{'L'.join(points)}"


def height_of(difference: float) -> float:
    """Height of a difference on the axis; smaller ones than the lowest are drawn at its end."""
    power = torch.tensor(max(difference, 10.0**LOWEST)).log10().item()
    return TOP + (BOTTOM - TOP) * (HIGHEST - power) / (HIGHEST - LOWEST)


if __name__ == "__main__":
    main()
