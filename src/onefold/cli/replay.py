"""``onefold replay`` and ``onefold why``: recompute and inspect one step of a run.

Note: how a run is recomputed
-----------------------------
In a temporary folder with the run's record and its nearest checkpoint, `StepReplay` resumes the
run's command. Nothing is written to the run itself: files that the script saves through PyTorch or
safetensors go to the temporary folder.

Note: runs of other distributions
---------------------------------
A run without a script, such as that of a job, is copied by the distribution that created it. An
entry point of the group ``onefold.replays`` names a function. It is called with the run's folder, a
new folder, and the names of the checkpoints before the step, oldest first. It copies the files that
are needed to resume the run into the new folder, and returns the arguments of ``onefold`` that
resume it there, without ``--devices``. If it does not recognize the run, it returns None.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from rich.table import Table
from rich.text import Text

import onefold
from onefold.cli import Screen, print_json
from onefold.cli.running import DEFAULT_PLACEMENT, confirm
from onefold.errors import RecordError, RunFailed
from onefold.record import FILE, Record
from onefold.record.entries import FailureEntry, FrameWriter, StartEntry, harmless_flags
from onefold.record.findings import (
    RULE,
    Departure,
    Findings,
    Inspection,
    SampleFinding,
    ShardFinding,
    first_departure,
    unpack_bundle,
)
from onefold.system.process import STOPPED_CODE, TOOLS_VARIABLE
from onefold.system.safe_files import PrivateFolder
from onefold.system.words import in_shell, listed, tell

__all__ = ["StepReplay", "explain", "replay_step"]

_NEVER = str(1 << 30)
_GATHERS = "The loss gathers over the batch, so its shards cannot be inspected separately."
_FEW, _MOST_SAMPLES = 8, 64
_OWN = ("optimizer", "the optimizer", "the number of shards per device", "the scheduler", "a hash")
"""Prefixes of words in a description that a bundle does not keep."""
_CHECKPOINT = re.compile(r"step-\d{1,18}", re.ASCII)
_MANIFEST = "run.json"
"""File that every complete checkpoint has."""


class StepReplay:
    """A run that can be recomputed up to one of its steps.

    Args:
        run: the run's folder, or its record.
        devices: devices to compute on; if empty, one of the run's type.
        placement: parameter placement.
        confirmed: whether the user agreed to run the record's command, whoever wrote the record.

    Raises:
        FileNotFoundError, RecordError: the record does not exist, or is not valid.
    """

    def __init__(
        self,
        run: Path,
        *,
        devices: str = "",
        placement: str = DEFAULT_PLACEMENT,
        confirmed: bool = False,
    ) -> None:
        self.record = record = Record(run.absolute())
        self._run, self._confirmed = record.path.parent, confirmed or not record.is_foreign
        self._devices, self._placement = devices, placement

    @property
    def steps(self) -> int:
        """Last step that can be inspected, including one that failed."""
        failed = [each.step + 1 for each in self.record.entries if isinstance(each, FailureEntry)]
        return max([*self.record.by_step, *failed], default=0)

    def begun(self, step: int) -> StartEntry:
        """Return the entry of the start or resume that led to a step."""
        begun: StartEntry | None = None
        for entry in self.record.entries:
            if isinstance(entry, StartEntry) and (begun is None or entry.step < step):
                begun = entry
        if begun is None:
            raise RecordError(f"{self.record.path} is empty. Pass the record of a run")
        return begun

    def inspect_step(self, step: int, **asked: Any) -> Findings:
        """Recompute the run up to a step, and inspect that step.

        Args:
            step: number of the step.
            asked: see `Inspection`.

        Raises:
            RecordError: the record has no such step, or does not contain the run's command.
            LaunchError: the record belongs to another user, and this user has not agreed to run it.
            RunFailed: the script failed, or ended before the step.
        """
        if not 1 <= step <= self.steps:
            has = f"steps 1 to {self.steps}" if self.steps else "no steps"
            raise RecordError(
                f"{self.record.path} has {has}, but got "
                f"{f'step {step}' if step else 'no --step N'}. Pass one of its steps"
            )
        begun = self.begun(step)
        with PrivateFolder("onefold-replay-") as private:
            folder = private.path
            found = folder / "findings.json"
            asks = Inspection(
                record=str(self.record.path),
                step=step,
                trainer=begun.trainer,
                findings=str(found),
                **asked,
            )
            command = self._command(begun, step, folder)
            flags = self._agreed(begun, command, step)
            log = folder / "output"
            with log.open("wb") as output:
                code = subprocess.run(
                    command,
                    cwd=begun.folder or None,
                    env={**os.environ, **flags, TOOLS_VARIABLE: _tools(asks)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
            if not found.exists():
                ended = "ended before" if code in (0, STOPPED_CODE) else "failed before"
                said = f"{in_shell(*command)}\n{log.read_text(errors='replace')[-4000:]}"
                raise RunFailed(f"the run {ended} step {step}: {said}", 2)
            return msgspec.json.decode(found.read_bytes(), type=Findings)

    def _command(self, begun: StartEntry, step: int, folder: Path) -> list[str]:
        """Return the command that recomputes the run, and prepare its folder."""
        python = begun.python if Path(begun.python).is_file() else sys.executable
        devices = self._devices or ("cpu:1" if begun.devices[0].startswith("cpu") else "1")
        for each in entry_points(group="onefold.replays"):
            before = self._checkpoints_before(step, of_script=False)
            if words := each.load()(self._run, folder, before):
                return [python, "-P", "-m", "onefold", *words, "--devices", devices]
        if not begun.module and not begun.script:
            raise RecordError(
                f"{self.record.path} does not contain the script of the run "
                f"({in_shell(*begun.command) or 'a notebook'}). Only runs of a script file can be "
                f"recomputed, started by onefold run, python or another launcher"
            )
        _warn_of_change(begun)
        start = ["-m", begun.module] if begun.module else [begun.script]
        options = ["--devices", devices, "--placement", self._placement]
        names = self._checkpoints_before(step, of_script=True)
        there = [self._run / name for name in names if (self._run / name / _MANIFEST).is_file()]
        if there:
            nearest, copy = there[-1], folder / "run"
            copy.mkdir()
            shutil.copyfile(self.record.path, copy / FILE)
            (copy / nearest.name).symlink_to(nearest)
            options += ["--checkpoint", str(copy), "--save-every", _NEVER]
            if begun.allow_changed and int(nearest.name.removeprefix("step-")) <= begun.step:
                options += ["--allow-changed", ",".join(begun.allow_changed)]
        return [python, "-P", "-m", "onefold", "run", *options, *start, *begun.command[1:]]

    def _agreed(self, begun: StartEntry, command: Sequence[str], step: int) -> dict[str, str]:
        """Print the command, and ask the user to agree to it if another user wrote the record.

        Returns:
            Environment variables for the recomputation.
        """
        flags = harmless_flags(begun.flags)
        tell(f"recomputing step {step}: {in_shell(*command)}")
        words = " ".join(f"{name}={in_shell(value)}" for name, value in flags.items())
        tell(f"in folder {in_shell(begun.folder or os.getcwd())} with {words or 'no variables'}")
        if left_out := sorted(begun.flags.keys() - flags.keys()):
            tell(f"without {listed(map(in_shell, left_out))}, which the run had set")
        if not self._confirmed:
            confirm(f"{self.record.path} belongs to another user, and has the command above.")
            self._confirmed = True
        return flags

    def _checkpoints_before(self, step: int, *, of_script: bool) -> list[str]:
        """Return the names of the checkpoints before a step, oldest first.

        Args:
            step: number of the step.
            of_script: leave out checkpoints that the script saved, because only its
                ``trainer.load`` resumes from them.
        """
        table = self.record.checkpoints
        columns = (table[name].tolist() for name in ("step", "folder", "line"))
        rows = sorted((at, name, line) for at, name, line in zip(*columns, strict=True))
        # Allow only names in this folder: a record may contain any path.
        rows = [each for each in rows if _CHECKPOINT.fullmatch(each[1])]
        return [name for at, name, line in rows if at < step and not (of_script and line)]


def _warn_of_change(begun: StartEntry) -> None:
    script = Path(begun.script)
    if not script.is_file():
        if begun.module:
            return
        raise RecordError(f"{script} is missing, but the run's script is needed to recompute it")
    if hashlib.sha256(script.read_bytes()).hexdigest() != begun.script_digest:
        tell(f"{script} has changed since the run, so the results may differ")


def replay_step(
    run: Path,
    step: int,
    *,
    shard: int | None,
    devices: str,
    placement: str,
    bundle: Path | None,
    function: str,
    prompt: bool,
    confirmed: bool,
    as_json: bool = False,
) -> int:
    """Recompute a step of a run, and print its details.

    Returns:
        0 if all shards have the bits of the record, 1 if not.
    """
    console = Screen(as_json=as_json)
    if bundle is not None and (bundle.exists() or not bundle.absolute().parent.is_dir()):
        raise ValueError(f"--bundle {bundle} must be a new file in an existing folder")
    if prompt and (sys.stdin is None or not sys.stdin.isatty()):
        raise ValueError("--pdb requires a terminal, but standard input is not one")
    shards = None if shard is None else [shard]
    if zipfile.is_zipfile(run):
        if step or bundle is not None or function or prompt:
            raise ValueError(f"{run} is a bundle of one step; it allows only --shard and --devices")
        if not confirmed:
            confirm(f"{run} is a bundle, which contains code.")
        found = _look_into_bundle(console, run, shards, devices or "cpu:1")
    else:
        again = StepReplay(run, devices=devices, placement=placement, confirmed=confirmed)
        found = again.inspect_step(
            step,
            shards=shards,
            bundle="" if bundle is None else str(bundle.absolute()),
            function=_absolute_function(function),
            terminal=os.ttyname(sys.stdin.fileno()) if prompt else "",
        )
    if shard is not None and shard >= len(found.totals):
        raise ValueError(f"--shard {shard}: the step has shards 0 to {len(found.totals) - 1}")
    _print_step(console, found)
    _print_shards(console, found)
    if not found.shards:
        console.print(_GATHERS)
    elif shard is not None:
        _print_samples(console, found.shards[0])
    # Print by line, because a Screen escapes line breaks.
    for line in found.printed.splitlines():
        console.out(line)
    if bundle is not None:
        console.print(f"bundle: {bundle}")
    if as_json:
        print_json(msgspec.to_builtins(found))
    return 1 if found.differs else 0


def _look_into_bundle(
    console: Screen, path: Path, shards: list[int] | None, devices: str
) -> Findings:
    """Recompute and inspect the step of a bundle.

    Raises:
        DataError: the file is not a bundle.
        RunFailed: the step cannot be computed on this machine.
    """
    with PrivateFolder("onefold-replay-") as private:
        folder, record = private.path, ""
        about, entry = unpack_bundle(path, folder)
        if entry:
            writer = FrameWriter(folder / FILE)
            writer.append(entry)
            writer.close()
            record = str(folder / FILE)
        found = folder / "findings.json"
        asks = Inspection(
            record=record, step=about.step, after=about.step - 1, shards=shards,
            scale=about.scale, findings=str(found),
        )  # fmt: skip
        os.environ[TOOLS_VARIABLE] = _tools(asks)
        try:
            onefold.launch(_compute, devices=devices, args=(str(folder / "step.pt"),))
        except RunFailed as failure:
            if failure.exit_code != STOPPED_CODE:
                raise RunFailed(str(failure), 2) from None
        finally:
            del os.environ[TOOLS_VARIABLE]
        looked = msgspec.json.decode(found.read_bytes(), type=Findings)
    for what, then in about.description.items():
        if not what.startswith(_OWN) and (now := looked.description.get(what, "")) != then:
            console.print(f"{what}: {then} where the bundle was created, here {now}")
    return looked


def _tools(asked: Inspection) -> str:
    """Return the variable's value that passes an inspection to a run."""
    return msgspec.json.encode({"inspection": asked}).decode()


def _compute(path: str) -> None:
    """Compute the step of a bundle, on every device."""
    content = torch.load(path, weights_only=False)
    model, losses = content["model"], content["losses"]
    trained = [each for each in model.parameters() if each.requires_grad]
    trainer = onefold.Trainer(
        model,
        torch.optim.SGD(trained, lr=0.0),
        losses.get("", losses),
        **content["settings"],
    )
    batch = content["batch"]
    here = replace(batch, shares=replace(batch.shares, counts=trainer.shares))
    trainer.step(here, content["name"] or None)


def _absolute_function(text: str) -> str:
    if not text:
        return ""
    file, _, name = text.rpartition(":")
    if not Path(file).is_file() or not name:
        raise ValueError(f"--call must be FILE:FUNCTION, with an existing file, but got {text}")
    if not re.search(rf"\b{re.escape(name)}\b", Path(file).read_text(errors="replace")):
        raise ValueError(f"--call {text} is not valid: {file} has no function {name}")
    return f"{Path(file).absolute()}:{name}"


def _print_step(console: Screen, found: Findings) -> None:
    of = f" of loss {found.name}" if found.name else ""
    console.print(
        f"step {found.step}{of}, recomputed from step {found.begun}: {found.samples} "
        f"samples, loss {_word(found.loss)}, norm {_word(found.norm)}"
    )
    if found.differs:
        console.print("The bits differ from the record:", style="bold red")
        for line in found.differs[:_FEW]:
            console.print(f"  {line}")
    elif found.compared:
        words = f"{found.compared} shards have the bits of the record."
        console.print(words, style="bold green")
    if not found.made and not found.differs:
        console.print("The run did not complete this step, so there is nothing to compare with.")
    table = Table("parameter", "norm of gradient", "of parameter", "share")
    whole = found.norm or math.nan
    given = [each for each in found.layers if each.given]
    ordered = sorted(given, key=lambda each: -math.inf if each.norm is None else -each.norm)
    for layer in ordered[:_FEW]:
        known = layer.norm is not None and math.isfinite(whole)
        share = f"{(layer.norm / whole) ** 2:.1%}" if known and layer.norm is not None else ""
        table.add_row(layer.name, _word(layer.norm), _word(layer.of_parameter), share)
    console.print(table)
    if len(given) > _FEW:
        console.print(f"the {_FEW} largest of {len(given)} parameters with a gradient")


def _print_shards(console: Screen, found: Findings) -> None:
    table = Table("shard", "loss", "weight", "digest", "samples")
    by_shard = {each.shard: each for each in found.shards}
    rows = zip(found.totals, found.weights, found.digests, strict=True)
    for shard, (total, weight, digest) in enumerate(rows):
        mean = None if total is None else total / (weight if weight > 0 else 1.0)
        own = by_shard.get(shard)
        samples = [] if own is None else [
            str(each.place if each.number is None else each.number) for each in own.samples
        ]  # fmt: skip
        weighs = f"{weight:g}" if weight >= 0 else ""
        table.add_row(
            str(shard), _word(mean), weighs, f"{digest % (1 << 64):016x}",
            listed(samples, _FEW),
        )  # fmt: skip
    console.print(table)


def _print_samples(console: Screen, own: ShardFinding) -> None:
    table = Table("sample", "in the data", "loss", "what it holds")
    for each in own.samples[:_MOST_SAMPLES]:
        number = "" if each.number is None else str(each.number)
        loss = Text(_word(each.loss), style="" if each.finite else "bold red")
        table.add_row(str(each.place), number, loss, each.words)
    console.print(table)


def _word(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def explain(
    run: Path,
    step: int | None,
    *,
    devices: str,
    placement: str,
    confirmed: bool,
    as_json: bool = False,
) -> int:
    """Print the first step whose numbers stand out, and the shards and operations that cause it.

    Returns:
        0 if something stands out, 1 if nothing does.
    """
    console = Screen(as_json=as_json)
    again = StepReplay(run, devices=devices, placement=placement, confirmed=confirmed)
    found = first_departure(again.record) if step is None else None
    if step is None:
        console.print(f"A number stands out if it is {RULE}.")
        if found is None:
            console.print(f"Nothing stands out in {len(again.record.by_step)} steps.")
            if as_json:
                print_json({"departure": None, "findings": None, "shards": []})
            return 1
        console.print(_words_of(found))
        step = found.step
        sizes = {number: each.samples for number, each in again.record.by_step.items()}
        usual = median(sizes.values()) if sizes else 0
        if 2 * sizes.get(step, usual) < usual:
            console.print(
                f"It has {sizes[step]} samples instead of the usual {usual:g}, and fewer samples "
                f"give larger gradients by chance."
            )
    looked = again.inspect_step(step)
    _print_step(console, looked)
    if not looked.shards:
        console.print(_GATHERS)
    culprits = _shards_that_stand_out(looked, found)[:_FEW]
    for own in culprits:
        _print_culprit(console, own, _mean_of(looked, own))
    if as_json:
        departure, shards = found and found._asdict(), [own.shard for own in culprits]
        findings = msgspec.to_builtins(looked)
        print_json({"departure": departure, "findings": findings, "shards": shards})
    return 0


def _words_of(found: Departure) -> str:
    if found.text:
        return f"Step {found.step} failed. {found.text}"
    usual = f", where {found.usual:.6g} was usual (spread {found.spread:.3g})"
    known = "" if math.isnan(found.usual) else usual
    return f"Step {found.step}: the {found.what} is {found.value:.6g}{known}."


def _shards_that_stand_out(looked: Findings, found: Departure | None) -> list[ShardFinding]:
    bad = [each for each in looked.shards if each.total is None or each.bad_gradients]
    if bad:
        return bad
    by_norm = found is not None and found.what == "norm"
    sizes = {each.shard: each.norm if by_norm else _mean_of(looked, each) for each in looked.shards}
    known = [size for size in sizes.values() if size is not None]
    if not known:
        return []
    usual = median(known)
    ordered = sorted(looked.shards, key=lambda each: -(sizes[each.shard] or 0.0))
    far = [each for each in ordered if (sizes[each.shard] or 0.0) > usual + abs(usual)]
    return far or ordered[:1]


def _mean_of(looked: Findings, own: ShardFinding) -> float | None:
    weight = looked.weights[own.shard]
    return None if own.total is None else own.total / (weight if weight > 0 else 1.0)


def _print_culprit(console: Screen, own: ShardFinding, mean: float | None) -> None:
    words = f"Shard {own.shard}: loss {_word(mean)}, norm of its gradient {_word(own.norm)}"
    if own.bad_gradients:
        words += f", not finite in {listed(own.bad_gradients)}"
    console.print(words, style="bold")
    losses = [each.loss for each in own.samples if each.loss is not None]
    usual = median(losses) if losses else math.nan
    bad = [each for each in own.samples if not each.finite]
    for each in (bad or _largest(own.samples, usual))[:_FEW]:
        number = "" if each.number is None else f", number {each.number} of the data set"
        text = f"  sample {each.place} of the batch{number}: loss {_word(each.loss)}"
        if not bad:
            text += f" (the median of the shard is {usual:.6g})"
        elif each.loss is not None:
            text += ", its gradient is not finite"
        console.print(f"{text}; {each.words}")
    if not own.samples:
        console.print("  its samples could not be separated")
    if own.first is not None:
        far = "is not finite" if own.times is None else f"is {own.times:.3g} times the usual one"
        console.print(f"  first operation whose result {far}: {own.first}")


def _largest(samples: Sequence[SampleFinding], usual: float) -> list[SampleFinding]:
    """Return the sample with the largest loss, and others far above the usual one."""
    ordered = sorted(samples, key=lambda each: -(each.loss or 0.0))
    far = [each for each in ordered if (each.loss or 0.0) > usual + 4 * abs(usual)]
    return far or ordered[:1]
