"""Exports a run's model for use without onefold: ONNX, ``torch.export``, or safetensors.

The exported file is loaded again and its logits are compared with those of the model, on samples of
the run's report and with several batch sizes. Only a file that agrees is kept. A JSON file next to
it describes classes and preprocessing, and so does the file itself.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch.export import Dim

from onefold import load_weights
from onefold.errors import LaunchError, OnefoldError
from onefold.files import PrivateFolder, aside_of, open_plain, read_plain, write_whole
from onefold_jobs import require
from onefold_jobs.catalog import LoadedRun, job_of, load_run
from onefold_jobs.job import Batch, Job
from onefold_jobs.runfolder import FAULTS, path_inside, read_object, require_writable

__all__ = ["Exported", "Target", "export_run"]

Target = Literal["onnx", "torch-export", "safetensors"]
Call = Callable[[Batch], torch.Tensor]

_ENDINGS: dict[Target, str] = {
    "onnx": ".onnx",
    "torch-export": ".pt2",
    "safetensors": ".safetensors",
}
_CLOSE = 1e-3
"""Tolerance of logits, relative to the largest: other kernels round differently."""
_SAMPLES = 8
_NOTE = "onefold.json"


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of `export_run`."""

    file: Path
    beside: list[Path]
    """Files with the description, and the tokenizer of text models."""
    samples: int
    """Number of the run's own samples that were compared; 0 if noise was used instead."""
    difference: float
    """Largest difference of a logit, relative to the largest logit (or to 1)."""


def export_run(
    folder: Path,
    to: Target,
    output: Path | None = None,
    *,
    weights: Literal["best", "last"] = "best",
) -> Exported:
    """Export a run's model to a file, after verifying that it returns the same logits.

    Args:
        folder: folder of the run.
        to: file format.
        output: the file; None for ``model`` with the format's suffix in the run's folder.
        weights: checkpoint to export.

    Raises:
        DataError, CheckpointError: see `onefold_jobs.load_run`.
        LaunchError: a package is not installed, the file exists, or its logits differ.
    """
    if to == "onnx":
        require("--to onnx", "export", "onnx", "onnxscript", "onnxruntime")
    path = output or folder / f"model{_ENDINGS[to]}"
    beside = path.with_name(f"{path.name}.json")
    if path.suffix != _ENDINGS[to]:
        raise LaunchError(f"--output {path}: the file name must end in {_ENDINGS[to]}")
    job = job_of(folder)
    copies = {name: path.with_name(f"{path.name}.{name}") for name in job.files}
    for each in (path, beside, *copies.values()):
        if os.path.lexists(each):
            raise LaunchError(f"{each} exists already: remove it, or name another --output")
    require_writable(path.parent, "name another one with --output")
    run = load_run(folder, weights=weights)
    batches, samples = _batches(job, run, folder)
    before: Any = run.description["preprocessing"]
    # The description refers to files by their names in the run.
    before |= {key: copies[name].name for key, name in before.items() if name in job.files}
    files = {beside: json.dumps(run.description, indent=1).encode()}
    files |= {copy: read_plain(folder / name) for name, copy in copies.items()}
    # The libraries overwrite any existing path, so they write to a private folder.
    with PrivateFolder("onefold-export-") as aside:
        made = aside.path / path.name
        with _quiet():
            call = _WRITERS[to](run, made, batches[0])
            difference = max(_difference(call(each), run.module(**each)) for each in batches)
        if not difference <= _CLOSE:
            raise LaunchError(
                f"{path}: not written, because its logits differ from those of {run.weights} by "
                f"{difference:.2g} of the largest; the limit is {_CLOSE:g}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        for each in sorted(aside.path.iterdir()):
            if each.name.startswith(path.name):
                copy = path.with_name(each.name)
                with open_plain(each) as source, aside_of(copy, new=True) as file:
                    shutil.copyfileobj(source, file)
    for name, content in files.items():
        write_whole(name, content, new=True)
    return Exported(path, [*files], samples, difference)


def _batches(job: Job, run: LoadedRun, folder: Path) -> tuple[list[Batch], int]:
    """Make inputs to compare by, in a batch and a single one, and count the run's samples in
    them."""
    try:
        shown = read_object(folder / "examples.json").get("samples") or []
        shown = shown[:_SAMPLES]
        names = [each.get("text") or each.get("picture") or each.get("image") for each in shown]
        found = [each if job.sample == "text" else path_inside(folder, each) for each in names]
        samples = [*dict.fromkeys(found)]
        if samples:
            return [run.preprocess(samples), run.preprocess(samples[:1])], len(samples)
    # The run stopped before it wrote any, its images are gone, or another user wrote the file.
    except (OnefoldError, *FAULTS):
        pass
    noise = job.noise()
    return [run.preprocess(noise), run.preprocess(noise[:1])], 0


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest logit; infinite if shapes differ."""
    if got.shape != expected.shape:
        return float("inf")
    scale = max(1.0, float(expected.abs().max()))
    return float((got - expected).abs().max()) / scale


def _write_safetensors(run: LoadedRun, file: Path, _: Batch) -> Call:
    state = load_file(run.weights / "model.safetensors")
    save_file(state, file, metadata={"format": "pt", _NOTE: json.dumps(run.description)})
    again = load_run(run.weights.parents[1])
    load_weights(getattr(again.module, "model", again.module), file)
    return lambda batch: again.module(**batch)


def _write_torch_export(run: LoadedRun, file: Path, batch: Batch) -> Call:
    program = torch.export.export(run.module, (), dict(batch), dynamic_shapes=_shapes(run, batch))
    torch.export.save(program, file, extra_files={_NOTE: json.dumps(run.description)})
    again = torch.export.load(file).module()
    return lambda batch: again(**batch)


def _write_onnx(run: LoadedRun, file: Path, batch: Batch) -> Call:
    runtime: Any = importlib.import_module("onnxruntime")
    program = torch.onnx.export(
        run.module,
        kwargs=dict(batch),
        dynamo=True,
        dynamic_shapes=_shapes(run, batch),
        input_names=[*batch],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props[_NOTE] = json.dumps(run.description)
    program.save(str(file))
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def call(batch: Batch) -> torch.Tensor:
        inputs = {name: value.numpy() for name, value in batch.items()}
        return torch.from_numpy(session.run(["logits"], inputs)[0])

    return call


_WRITERS: dict[Target, Callable[[LoadedRun, Path, Batch], Call]] = {
    "onnx": _write_onnx,
    "torch-export": _write_torch_export,
    "safetensors": _write_safetensors,
}


def _shapes(run: LoadedRun, batch: Batch) -> dict[str, dict[int, Any]]:
    """Return the dynamic dimensions of the inputs: samples, tokens, and sides of images."""
    free = job_of(run.weights.parents[1]).free
    return {name: dict.fromkeys(free, Dim.AUTO) for name in batch}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of exporters about missing libraries and their own code, on any logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
