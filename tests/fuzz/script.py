"""The script of a case: what a user would write, on the devices that it is given."""

import hashlib
import json
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import onefold
from tests.fuzz.case import Case, draw_shares
from tests.fuzz.losses import LOSSES, collate, data_set, samples, score, wrapped
from tests.fuzz.optimizers import HOOKS, SCHEDULES, make_optimizer
from tests.fuzz.parts import Net

__all__ = ["Ending", "build", "bytes_of", "change", "run", "settings_of"]

KEPT_BY_THE_SCRIPT = (
    *("shares", "momentum", "dropout", "eval", "train", "freeze", "thaw", "hook", "attribute"),
)
"""What no checkpoint holds: a script that goes on does it again."""
_CHECKPOINT_TELLS = ("step", "epoch", "position", "optimizer", "scheduler")


@dataclass
class Ending:
    """What came of a run: every number of it, to the last bit."""

    lines: list[str] = field(default_factory=list)
    error: str = ""


def build(case: Case) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Model, optimizer and scheduler, alike each time."""
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        model = Net(case.stem, case.blocks)
    model.to(case.torch_dtype)
    optimizer = make_optimizer(case.optimizer, model, case.groups, case.seed)
    if case.hook is not None:
        HOOKS[case.hook][0](model, optimizer)
    scheduler = None if case.scheduler is None else SCHEDULES[case.scheduler](optimizer)
    return model, optimizer, scheduler


def settings_of(
    case: Case, model: nn.Module, scheduler: Any, devices: int | None
) -> dict[str, Any]:
    """Arguments of Trainer."""
    rules = case.buffers and any(True for _ in model.buffers())
    fits = case.shares is not None and len(case.shares) == (devices or case.devices)
    return {
        "shards": case.shards,
        "seed": case.seed,
        "devices": None if devices is None else ["cpu"] * devices,
        "shares": case.shares if fits else None,
        "threads": 1,
        "scheduler": scheduler,
        "clip_norm": case.clip_norm,
        "buffers": {"*": case.buffers} if rules else None,
    }


def change(model: Any, optimizer: torch.optim.Optimizer, event: str) -> None:
    """Do to a model what an event does, wherever it is one line of PyTorch."""
    if event == "rate":
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
    elif event in ("momentum", "dropout"):
        for part in model.modules():
            if event == "momentum" and isinstance(part, nn.BatchNorm1d):
                part.momentum = 0.3
            elif event == "dropout" and isinstance(part, nn.Dropout):
                part.p = 0.35
    elif event == "attribute":
        model.factor = 0.9
    elif event in ("eval", "train"):
        model.blocks.train(event == "train")
    elif event in ("freeze", "thaw"):
        model.head.bias.requires_grad_(event == "thaw")
    elif event == "hook":
        HOOKS["after"][0](model, optimizer)
    elif event == "changing":
        scale(model, 0.9)
    elif event.startswith("buffer"):
        for owner, name, buffer in _averages(model):
            if event == "buffer":
                buffer.mul_(0.5)
            else:
                setattr(owner, name, buffer * 0.5)


def scale(model: nn.Module, factor: float) -> None:
    """All parameters, by a factor."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def _averages(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (owner, name, buffer)
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if buffer.is_floating_point() and buffer.element_size() > 1
    ]


class Script:
    """A run of a case.

    Args:
        case: what to do.
        devices: for this process to drive; None on a simulated device.
        lines: to which is added what comes of it.
        folder: where all devices may write, and parts of a run find each other.
    """

    def __init__(self, case: Case, devices: int | None, lines: list[str], folder: Path) -> None:
        self.case, self.lines, self.folder = case, lines, folder
        self.model, self.optimizer, self.scheduler = build(case)
        self.loss = LOSSES[case.loss][0](self.model)
        settings = settings_of(case, self.model, self.scheduler, devices)
        self.trainer = onefold.Trainer(self.model, self.optimizer, self.loss, **settings)

    def go(self, until: int, *, save_to: Path | None = None) -> None:
        """All steps up to one; saves, if asked to, before the loop is left."""
        batches = self._batches(until)
        for batch in batches:
            self._step(batch)
            if self.trainer.steps >= until:
                if save_to is not None:
                    self.trainer.save(save_to)
                break
        batches.close()

    def redo(self) -> None:
        """What the script has done to the model before the run was stopped."""
        for step, event in self.case.events:
            if step <= (self.case.stop or 0) and event in KEPT_BY_THE_SCRIPT:
                self._happen(event, step)

    def finish(self) -> None:
        """Note everything that is left at the end."""
        self.lines.append(_digest_of(self.trainer.save(self.folder / "end")))
        self.trainer.close()

    def _batches(self, until: int) -> Generator[object, None, None]:
        case = self.case
        if case.source == "own":
            while self.trainer.steps < until:
                yield batch_of(case, self.trainer.steps)
        elif case.source in ("epochs", "fresh"):
            loader = self._loader() if case.source == "epochs" else None
            for _ in self.trainer.epochs(1000):
                yield from self._pass(loader or self._loader())
        elif case.source == "two":
            loaders = self._loader(), self._loader()
            while True:
                for pair in zip(*loaders, strict=True):
                    yield from pair
        else:
            loader = self._loader()
            while True:
                yield from self._pass(loader)

    def _pass(self, loader: Any) -> Iterator[object]:
        """Through the data once, or until it is broken off."""
        for batch in loader:
            yield batch
            if self.case.broken_off_after and self.trainer.steps % self.case.broken_off_after == 0:
                break

    def _loader(self) -> Any:
        case = self.case
        return self.trainer.loader(
            data_set(case.samples, case.torch_dtype, case.seed, noisy=case.noisy),
            batch_size=case.batch_size,
            shuffle=case.shuffle,
            drop_last=case.drop_last,
            lengths=[i % 5 for i in range(case.samples)] if case.lengths else None,
            workers=case.workers,
            collate=collate if case.collated else None,
        )

    def _step(self, batch: object) -> None:
        generator = torch.get_rng_state()
        step = self.trainer.step(batch)
        assert torch.equal(generator, torch.get_rng_state()), "the script's generator was used"
        self.lines.append(
            f"step {step.number}: {float(step.loss).hex()} of {step.samples} in {step.epoch}, "
            f"{self.trainer.fingerprint()}"
        )
        for when, event in self.case.events:
            if when == step.number:
                self._happen(event, step.number)

    def _happen(self, event: str, number: int) -> None:
        trainer, case = self.trainer, self.case
        scored = data_set(7, case.torch_dtype, 5, noisy=case.noisy)
        if event == "evaluate":
            scores = trainer.evaluate(score, scored, batch_size=5)
            self.lines.append(f"scores {[(name, value.hex()) for name, value in scores.items()]}")
        elif event.startswith("changing"):
            self._change(event)
        elif event == "shares":
            rng = random.Random(1000 * case.seed + number)
            trainer.shares = draw_shares(rng, trainer.shards, len(trainer.devices))
        elif event == "save":
            trainer.save(self.folder / f"between-{number}", wait=number % 2 == 0)
        else:
            change(self.model, self.optimizer, event)
        self.lines.append(f"{event}: {trainer.fingerprint()}")

    def _change(self, event: str) -> None:
        """What the lead does in the block counts, whatever the others do."""
        with self.trainer.modifying():
            if self.trainer.is_lead or event == "changing":
                scale(self.model, 0.9)
            elif event == "changing otherwise elsewhere":
                scale(self.model, 0.1)
                change(self.model, self.optimizer, "buffer replaced")


def batch_of(case: Case, number: int) -> object:
    """A batch of the script's own."""
    size = case.sizes[number % len(case.sizes)]
    return wrapped(samples(size, case.torch_dtype, 1000 * case.seed + number), case.container)


def run(case: Case, devices: int | None, folder: Path, part: str = "whole") -> Ending:
    """Run a case, or the part of it before or after its stop.

    Args:
        case: what to run.
        devices: for this process to drive; None on a simulated device.
        folder: where all devices may write, and parts find each other.
        part: whole, first or second.
    """
    ending = Ending()
    script: Script | None = None
    try:
        script = Script(case, devices, ending.lines, folder)
        if part == "second":
            script.trainer.load(folder / "stop")
            script.redo()
            ending.lines.clear()
        if part == "first":
            script.go(case.stop or case.steps, save_to=folder / "stop")
            script.trainer.close()
        else:
            script.go(case.steps)
            script.finish()
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        after = ending.lines[-1] if ending.lines else "the start"
        ending.error = f"after {after}: {type(error).__name__}: {error} {notes}".strip()
        if script is not None:
            script.trainer.close()
    return ending


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes())


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()[:12]


def _digest_of(checkpoint: Path) -> str:
    """Everything that a checkpoint says of the run, and not of who wrote it."""
    tensors = {
        f"{path.name} {name}": _digest(tensor)
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in sorted(load_file(path).items())
    }
    told = json.loads((checkpoint / "run.json").read_text())
    kept = {key: told[key] for key in _CHECKPOINT_TELLS}
    for part in filter(None, (kept["optimizer"], kept["scheduler"])):
        part.pop("settings_at_start")
    return json.dumps([tensors, kept], sort_keys=True)
