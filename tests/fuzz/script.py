"""The script of a case: what a user would write, on the devices that it is given."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import onefold
from tests.fuzz import data
from tests.fuzz.case import Case
from tests.fuzz.faults import FAULTS
from tests.fuzz.hooks import HOOKS
from tests.fuzz.losses import LOSSES, score
from tests.fuzz.optimizers import SCHEDULES, make_optimizer
from tests.fuzz.parts import Net

__all__ = ["Ending", "Script", "bits_of", "build", "change", "run"]

KEPT_BY_THE_SCRIPT = ("plan", "momentum", "dropout", "eval", "train", "freeze", "thaw", "hook")
"""What no checkpoint holds: a script that goes on does it again."""
_CHECKPOINT_TELLS = ("step", "epoch", "position", "optimizer", "schedule")


@dataclass
class Ending:
    """What came of a run: every number of it, to the last bit."""

    lines: list[str] = field(default_factory=list)
    error: str = ""
    """Name of the type, if it ended in an exception."""
    words: str = ""
    where: str = ""


class Observer:
    """Looks on while one device trains; see `tests.fuzz.plain`."""

    def made(self, script: Script) -> None:
        """Trainer is made."""

    def before_step(self, script: Script) -> None: ...

    def after_step(self, script: Script, loss: float) -> None: ...

    def changed(self, event: str) -> None:
        """The model or optimizer was changed between steps."""


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and schedule, alike each time."""
    fault = FAULTS.get(case.fault or "")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        model = Net(case.stem, case.blocks)
    torch.set_default_dtype(default)
    model.to(case.torch_dtype)
    if fault is not None and fault.model is not None:
        fault.model(model)
    if case.hook is not None:
        HOOKS[case.hook][0](model)
    if fault is not None and fault.optimizer is not None:
        optimizer = fault.optimizer(model)
    else:
        optimizer = make_optimizer(case.optimizer, model, case.groups, case.seed)
    if case.warm:
        _warm_up(model, optimizer)
    schedule = None if case.schedule is None else SCHEDULES[case.schedule](optimizer)
    return model, optimizer, schedule


def set_default_dtype(case: Case) -> None:
    """Let new tensors be of the dtype that a case asks for: what is built may hold some."""
    if case.double:
        torch.set_default_dtype(torch.float64)


def _warm_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step before onefold comes in, so that the optimizer has a state."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad and number % 3:
            parameter.grad = torch.full_like(parameter, 0.01 * number)
    optimizer.step()
    optimizer.zero_grad()


def change(model: nn.Module, optimizer: torch.optim.Optimizer, event: str) -> None:
    """Do to a model what an event does, wherever it is one line of PyTorch."""
    if event == "rate":
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
    elif event == "momentum":
        for part in model.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.momentum = 0.3
    elif event == "dropout":
        for part in model.modules():
            if isinstance(part, nn.Dropout | nn.AlphaDropout):
                part.p = 0.35
    elif event == "attribute":
        model.factor = 0.9
    elif event in ("eval", "train"):
        model.blocks.train(event == "train")
    elif event in ("freeze", "thaw"):
        model.head.bias.requires_grad_(event == "thaw")
    elif event == "hook":
        HOOKS["after"][0](model)
    elif event in ("changing", "in place", "data"):
        scale(model, 0.9, through_data=event == "data")
    elif event == "buffer":
        for buffer in _averages(model):
            buffer[2].mul_(0.5)
    elif event == "buffer replaced":
        for owner, name, buffer in _averages(model):
            setattr(owner, name, buffer * 0.5)


def scale(model: nn.Module, factor: float, *, through_data: bool = False) -> None:
    """All parameters, by a factor."""
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.data if through_data else parameter).mul_(factor)


def _averages(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (owner, name, buffer)
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.element_size() > 1
    ]


class Script:
    """A run of a case.

    Args:
        case: what to do.
        devices: for this process to drive; None in a launched process.
        lines: to which is added what comes of it.
        observer: is shown every step.
        shared_folder: where several processes may write.
    """

    def __init__(
        self,
        case: Case,
        devices: int | None,
        lines: list[str],
        observer: Observer,
        shared_folder: str | None,
    ) -> None:
        self.case = case
        self.lines = lines
        self.where = "at the start"
        self.observer = observer
        self.shared_folder = shared_folder
        self.shards_seen: list[data.Fields] = []
        self._build()
        self.loss = LOSSES[case.loss][0](self.model)
        fault = FAULTS.get(case.fault or "")
        self.fault = fault
        if fault is not None and fault.loss is not None:
            self.loss = fault.loss(self.loss)
        self.failing = False
        self.observer.made(self)
        self.trainer = onefold.Trainer(
            self.model,
            self.optimizer,
            self._seen_loss,
            **self._settings(devices),
        )

    def _build(self) -> None:
        self.model, self.optimizer, self.schedule = build(self.case)

    def _settings(self, devices: int | None) -> dict[str, Any]:
        """Arguments of Trainer."""
        return {
            "shards": self.case.shards,
            "seed": self.case.seed,
            "devices": None if devices is None else ["cpu"] * devices,
            "plan": self._plan_for(devices),
            "threads": 1,
            "schedule": self.schedule,
            "clip_norm": self.case.clip_norm,
            "buffers": self._buffer_rules(),
            "timeout_s": 30,
        }

    def go(self, until: int, *, save_to: str | None = None) -> None:
        """All steps up to one; saves, if asked to, before the loop is left."""
        batches = self._batches(until)
        for batch in batches:
            self._step(batch)
            if self.trainer.steps >= until:
                if save_to is not None:
                    self.where = "save"
                    self.trainer.save(save_to)
                break
        batches.close()

    def redo(self) -> None:
        """What the script has done to the model before the run was stopped."""
        for step, event in self.case.events:
            if step <= (self.case.stop or 0) and event in (*KEPT_BY_THE_SCRIPT, "attribute"):
                self._happen(event, step)

    def finish(self) -> None:
        """Note everything that is left at the end."""
        self.where = "the end"
        with tempfile.TemporaryDirectory(prefix="onefold-fuzz-") as private:
            folder = Path(self.shared_folder or private, f"end-{self.case.seed}")
            path = self.trainer.save(folder)
            self.lines.append(_digest_of(path))
        self.trainer.close()

    def _seen_loss(self, model: nn.Module, batch: object) -> object:
        if self.failing:
            self.shards_seen.append(data.read_fields(batch))
            self.loss(model, batch)
            if len(self.shards_seen) == 2 or self.case.shards == 1:
                raise KeyError("a loss that fails")
            return self.loss(model, batch)
        if torch.is_grad_enabled():
            self.shards_seen.append(data.read_fields(batch))
        return self.loss(model, batch)

    def _plan_for(self, devices: int | None) -> tuple[int, ...] | None:
        plan, here = self.case.plan, devices or self.case.processes
        return plan if plan is not None and len(plan) == here else None

    def _buffer_rules(self) -> dict[str, Any] | None:
        has = any(True for _ in self.model.buffers())
        return {"*": self.case.buffers} if self.case.buffers and has else None

    def _batches(self, until: int) -> Iterator[object]:
        case = self.case
        if case.source == "own":
            while self.trainer.steps < until:
                number = self.trainer.steps
                size = case.sizes[number % len(case.sizes)]
                fields = data.samples(size, case.torch_dtype, 1000 * case.seed + number)
                yield data.wrapped(fields, case.container)
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
            data.data_set(case.samples, case.torch_dtype, case.seed, noisy=case.noisy),
            batch_size=case.batch_size,
            shuffle=case.shuffle,
            drop_last=case.drop_last,
            lengths=[i % 5 for i in range(case.samples)] if case.lengths else None,
            workers=case.workers,
            collate=data.collate if case.collated else None,
        )

    def _step(self, batch: object) -> None:
        number = self.trainer.steps + 1
        self.where = f"step {number}"
        if self.fault is not None and self.fault.before_step and number == self.case.steps:
            other = self.fault.before_step(self)
            batch = batch if other is None else other
        self.shards_seen.clear()
        self.observer.before_step(self)
        generator = torch.get_rng_state()
        step = self.trainer.step(batch)
        assert torch.equal(generator, torch.get_rng_state()), "the script's generator was used"
        self.lines.append(
            f"step {step.number}: {float(step.loss).hex()} of {step.samples} in {step.epoch}, "
            f"{self.trainer.fingerprint()}"
        )
        self.observer.after_step(self, float(step.loss))
        for when, event in self.case.events:
            if when == step.number:
                self.where = f"{event} after step {number}"
                self._happen(event, number)

    def _happen(self, event: str, number: int) -> None:
        trainer, model = self.trainer, self.model
        scored = data.data_set(7, self.case.torch_dtype, 5, noisy=self.case.noisy)
        if event == "evaluate":
            self._evaluate(scored)
        elif event == "predict":
            said = trainer.predict(
                lambda m, b: {"logits": m(data.read_fields(b)), "index": data.read_fields(b).index},
                scored,
                batch_size=4,
            )
            self.lines.append(f"predicted {[_digest(t) for t in said.values()]}")
        elif event == "gather":
            said = trainer.gather({"number": float(number), "third": 1 / 3})
            assert said == [{"number": float(number), "third": 1 / 3}] * len(trainer.devices)
        elif event == "barrier":
            trainer.barrier()
        elif event.startswith("changing"):
            with trainer.changing():
                if trainer.is_lead:
                    scale(model, 0.9)
                elif event == "changing otherwise elsewhere":
                    scale(model, 0.1)
                    change(model, self.optimizer, "buffer replaced")
                elif event == "changing":
                    scale(model, 0.9)
            self.observer.changed("changing")
        elif event == "swap":
            self._swap(scored)
        elif event == "plan":
            trainer.plan = self._another_plan(number)
        elif event == "back":
            self._go_back()
        elif event == "failing":
            self._fail()
        elif event == "save":
            self._save_in_between(number)
        else:
            change(model, self.optimizer, event)
            self.observer.changed(event)
        self.lines.append(f"{event}: {trainer.fingerprint()}")

    def _evaluate(self, scored: Any) -> None:
        scores = self.trainer.evaluate(score, scored, batch_size=5)
        self.lines.append(f"scores {[(name, value.hex()) for name, value in scores.items()]}")

    def _swap(self, scored: Any) -> None:
        kept = [p.detach().clone() for p in self.model.parameters()]
        with self.trainer.changing():
            scale(self.model, 0.5)
        self._evaluate(scored)
        with self.trainer.changing(), torch.no_grad():
            for parameter, value in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(value)

    def _save_in_between(self, number: int) -> None:
        with tempfile.TemporaryDirectory(prefix="onefold-fuzz-") as private:
            folder = Path(self.shared_folder or private, f"between-{self.case.seed}-{number}")
            self.trainer.save(folder, wait=number % 2 == 0)
            self.trainer.barrier()
            if number % 2:
                self.trainer.save(folder)

    def _go_back(self) -> None:
        """Save, make a step more, and load what was saved."""
        before = self.trainer.fingerprint(), self.trainer.steps
        batch = tuple(data.samples(2 * self.case.shards, self.case.torch_dtype, 77))
        with tempfile.TemporaryDirectory(prefix="onefold-fuzz-") as private:
            folder = Path(self.shared_folder or private, f"back-{self.case.seed}-{before[1]}")
            self.trainer.save(folder)
            step = self.trainer.step(batch)
            self.lines.append(f"before going back: {float(step.loss).hex()}")
            self.trainer.load(folder)
            self.trainer.barrier()
        assert before == (self.trainer.fingerprint(), self.trainer.steps), "not as it was saved"

    def _fail(self) -> None:
        """A step whose loss raises, which the script survives."""
        before = self.trainer.fingerprint()
        batch = tuple(data.samples(3 * self.case.shards, self.case.torch_dtype, 78))
        self.failing, raised = True, False
        self.shards_seen.clear()
        try:
            self.trainer.step(batch)
        except KeyError:
            raised = True
        self.failing = False
        assert raised, "a loss that raises did not end the step"
        assert before == self.trainer.fingerprint(), "a step that failed has changed the model"

    def _another_plan(self, number: int) -> tuple[int, ...]:
        rng = random.Random(1000 * self.case.seed + number)
        shards, devices = self.trainer.shards, len(self.trainer.devices)
        cuts = sorted(rng.randint(0, shards) for _ in range(devices - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, shards], strict=True))


def run(
    case: Case,
    devices: int | None,
    *,
    part: str = "whole",
    folder: str | None = None,
    observer: Observer | None = None,
    script: type[Script] = Script,
) -> Ending:
    """Run a case, or the part of it before or after its stop.

    Args:
        case: what to run.
        devices: for this process to drive; None in a launched process.
        part: whole, first or second.
        folder: where several processes may write, and parts find each other.
        observer: is shown every step.
        script: which one.
    """
    ending = Ending()
    running: Script | None = None
    saved = f"{folder}/stop-{case.seed}"
    before = torch.get_default_dtype()
    try:
        set_default_dtype(case)
        running = script(case, devices, ending.lines, observer or Observer(), folder)
        if part == "second":
            running.where = "load"
            running.trainer.load(saved)
            running.redo()
            ending.lines.clear()
        if part == "first":
            running.go(case.stop or case.steps, save_to=saved)
            running.trainer.close()
        else:
            running.go(case.steps)
            running.finish()
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        ending.error, ending.words = type(error).__name__, f"{error} {notes}".strip()
        ending.where = "at the start" if running is None else running.where
        if running is not None:
            running.trainer.close()
    finally:
        torch.set_default_dtype(before)
    return ending


def bits_of(model: nn.Module) -> dict[str, bytes]:
    """All parameters and buffers, hidden ones too."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: _bytes(tensor) for name, tensor in tensors}


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes())


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()[:12]


def _digest_of(checkpoint: Path) -> str:
    """Everything that a checkpoint says of the run, and not of who wrote it."""
    tensors = {
        f"{path.name} {name}": _digest(tensor)
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in sorted(load_file(path).items())
    }
    told = json.loads((checkpoint / "run.json").read_text())
    kept = {key: told[key] for key in _CHECKPOINT_TELLS}
    kept["optimizer"].pop("settings_at_start")
    return json.dumps([tensors, kept], sort_keys=True)
