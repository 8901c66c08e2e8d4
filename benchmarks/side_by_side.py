"""onefold's jobs and other libraries: score on unseen data, time, and typed lines.

    python benchmarks/side_by_side.py prepare --source DATA --data FOLDER
    python benchmarks/side_by_side.py run --data FOLDER --results FILE
        [--python fastai=ENV/bin/python --python transformers=...] [--only text] [--seeds 0,1,2]
    python benchmarks/side_by_side.py show --results FILE

What a user types for each library is a file in `beside`, as short as the library's documentation
suggests. All sides get the same folders: they train on `train`, may use `val` (text: `dev`) during
training, and predict `test`. Scores are computed from their written predictions, by the same rule
for all. Images in `train` that are also in `test` are removed.

`SIDES` defines the number of epochs of each side: about as many as fit the budget of CPU time on
the machine of the published figures. CPU time is that of all processes of a side, each with one
computing thread, because on a busy machine, threads waiting for each other would count as work.
Only one side runs at a time, and one seed of all sides before the next seed.

Every line counts as typed unless it is empty, a comment, or marked `# harness`. Python is formatted
by ruff with a line length of 100.
"""

import argparse
import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import mean

import numpy as np

__all__ = ["SIDES", "main", "score_of", "typed_lines"]

TIMES = ("minutes", "cpu_minutes")
SCRIPTS = Path(__file__).with_name("beside")
VALIDATION_EVERY = 10
"""Every n-th sample is for validation, if a training set has no validation set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One library for one task."""

    task: str
    """Name of the data, and first word of the script."""
    library: str
    script: str
    """Name of the script in `beside`, without suffix."""
    epochs: int = 0
    """Number of epochs that fit the budget."""
    settings: tuple[tuple[str, str], ...] = ()
    """Environment variables of the script in addition to its data, epochs and seed."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Cost and score of one run of a side."""

    task: str
    library: str
    note: str
    seed: int
    epochs: int
    score: float
    """Accuracy, or IoU of the masks; NaN if the side failed."""
    minutes: float
    cpu_minutes: float
    lines: int


DATA = {"classify": "hotdog", "text": "sst2", "segment": "crackforest"}
"""Data folder of each task."""
SIDES = (
    Side(task="text", library="onefold", script="text_onefold", epochs=4),
    Side(task="text", library="transformers", script="text_transformers", epochs=4),
    Side(
        task="text",
        library="transformers",
        script="text_transformers",
        epochs=4,
        settings=(("RATE", "5e-4"),),
        note="rate 5e-4",
    ),
    Side(task="classify", library="onefold", script="classify_onefold", epochs=3),
    Side(task="classify", library="fastai", script="classify_fastai", epochs=3),
    Side(task="classify", library="ultralytics", script="classify_ultralytics", epochs=12),
    Side(task="segment", library="transformers", script="segment_transformers", epochs=10),
    Side(task="text", library="autogluon", script="text_autogluon", settings=(("LIMIT_S", "600"),)),
    Side(task="segment", library="onefold", script="segment_onefold", epochs=10),
    Side(task="segment", library="fastai", script="segment_fastai", epochs=3),
    Side(task="text", library="fastai", script="text_fastai", epochs=1),
)


def prepare(source: Path, data: Path) -> None:
    """Lay out the data for all sides."""
    texts, folder = data / DATA["text"], source / DATA["text"]
    shutil.copytree(folder, texts)
    pictures = data / DATA["classify"]
    tested = {_digest(path) for path in (source / DATA["classify"] / "test").glob("*/*.jpg")}
    for path in sorted((source / DATA["classify"]).glob("test/*/*.jpg")):
        _copy(path, pictures / "test" / path.parent.name / path.name)
    kept = sorted((source / DATA["classify"]).glob("train/*/*.jpg"))
    for number, path in enumerate(each for each in kept if _digest(each) not in tested):
        _copy(path, pictures / _part(number) / path.parent.name / path.name)
    masked = source / DATA["segment"]
    for part in ("train", "test"):
        for number, path in enumerate(sorted(masked.glob(f"{part}/images/*.jpg"))):
            to = data / DATA["segment"] / (_part(number) if part == "train" else part)
            mask = path.parents[1] / "masks" / f"{path.stem}.png"
            _halve(path, to / "images" / path.name)
            _halve(mask, to / "masks" / mask.name)


def _part(number: int) -> str:
    return "val" if number % VALIDATION_EVERY == 0 else "train"


def _digest(path: Path) -> bytes:
    return sha256(path.read_bytes()).digest()


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def _halve(path: Path, to: Path) -> None:
    """Halve both sides: of an image by the mean, of a mask by the brightest of four pixels."""
    from PIL import Image  # not required for showing results

    to.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(path)
    if image.mode == "RGB":
        image.reduce(2).save(to, quality=95)
    else:
        whole = np.asarray(image)
        height, width = whole.shape[0] // 2, whole.shape[1] // 2
        fours = whole[: height * 2, : width * 2].reshape(height, 2, width, 2)
        Image.fromarray(fours.max(axis=(1, 3))).save(to)


def run(side: Side, seed: int, data: Path, python: str, log: Path) -> Result:
    """Run a side once, alone, with its output in a file."""
    folder = (data / DATA[side.task]).resolve()
    program = SCRIPTS / f"{side.script}.py"
    command = [python, str(program)]
    if not program.exists():
        program = program.with_suffix(".sh")
        command = ["bash", "-e", str(program)]
    environment = {
        **os.environ,
        "PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}",
        "DATA": str(folder),
        "EPOCHS": str(side.epochs),
        "SEED": str(seed),
        "OMP_NUM_THREADS": "1",
        **dict(side.settings),
    }
    with tempfile.TemporaryDirectory() as work, log.open("w", encoding="utf-8") as output:
        before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            command, cwd=work, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
        after, ended_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        failed = done.returncode != 0
        score = float("nan") if failed else score_of(side.task, folder, Path(work))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Result(
        task=side.task,
        library=side.library,
        note=side.note,
        seed=seed,
        epochs=side.epochs,
        score=score,
        minutes=(ended_s - begun_s) / 60,
        cpu_minutes=cpu_s / 60,
        lines=typed_lines(program.read_text(encoding="utf-8")),
    )


def score_of(task: str, data: Path, work: Path) -> float:
    """Compare the predictions in a folder with the labels of the test set.

    Args:
        task: classify or text, for the accuracy; segment, for the IoU over all pixels.
        data: folder with the test set.
        work: folder with ``predictions.csv``, or with masks in ``predictions``.

    Raises:
        ValueError: a sample has no prediction.
    """
    if task == "segment":
        masks = sorted((data / "test" / "masks").glob("*.png"))
        pairs = [(_mask(path), _mask(work / "predictions" / path.name)) for path in masks]
        both = sum(int((truth & found).sum()) for truth, found in pairs)
        return both / sum(int((truth | found).sum()) for truth, found in pairs)
    with (work / "predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [row["class"] for row in rows]
    if task == "text":
        lines = (data / "test.tsv").read_text(encoding="utf-8").splitlines()
        truth = [line.rsplit("\t", 1)[1] for line in lines]
    else:
        classes = {path.name: path.parent.name for path in data.glob("test/*/*.jpg")}
        truth = [classes.pop(Path(row["file"]).name) for row in rows]
        if classes:
            raise ValueError(f"{len(classes)} images have no prediction, such as {min(classes)}")
    return mean(label == each for label, each in zip(truth, found, strict=True))


def _mask(path: Path) -> np.ndarray:
    from PIL import Image  # not required for showing results

    return np.asarray(Image.open(path).convert("L")) > 127


def typed_lines(text: str) -> int:
    """Count the lines of a script that a user types."""
    lines = [line.strip() for line in text.splitlines()]
    return sum(
        bool(line) and not line.startswith("#") and not line.endswith("# harness") for line in lines
    )


def show(results: list[Result]) -> None:
    """Print the table of the page, in Markdown."""
    print("| task | library | score | minutes | CPU minutes | epochs | lines typed |")
    print("|---|---|---|---|---|---|---|")
    groups = defaultdict(list)
    for each in results:
        groups[each.task, each.library, each.note].append(each)
    for (task, library, note), runs in groups.items():
        scores = [f"{each.score:.3f}" for each in runs]
        name = f"{library}, {note}" if note else library
        row = [
            *(task, name, f"{mean(each.score for each in runs):.3f} ({', '.join(scores)})"),
            *(f"{mean(getattr(each, name) for each in runs):.1f}" for name in TIMES),
            *(str(runs[-1].epochs or "by time"), str(runs[-1].lines)),
        ]
        print(f"| {' | '.join(row)} |")


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("prepare", "run", "show"))
    parser.add_argument("--source", type=Path, help="folder with hotdog, sst2 and crackforest")
    parser.add_argument("--data", type=Path, help="folder of the prepared data")
    parser.add_argument("--results", type=Path, help="JSON lines file to append to")
    parser.add_argument("--python", action="append", default=[], help="LIBRARY=its Python")
    parser.add_argument("--only", default="", help="comma-separated tasks or libraries")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, help="epochs of all sides, for timing")
    return parser.parse_args()


def main() -> None:
    """Prepare the data, run the sides, or show the results."""
    options = parsed()
    if options.what == "prepare":
        prepare(options.source, options.data)
        return
    if options.what == "run":
        pythons = dict(each.split("=", 1) for each in options.python)
        only = set(filter(None, options.only.split(",")))
        sides = [
            replace(each, epochs=options.epochs or each.epochs)
            for each in SIDES
            if not only or {each.task, each.library, each.script} & only
        ]
        for seed in map(int, options.seeds.split(",")):
            for side in sides:
                log = options.results.with_name(f"{side.script}-{side.note or 'log'}-{seed}.txt")
                python = pythons.get(side.library, sys.executable)
                result = run(side, seed, options.data, python, log)
                with options.results.open("a", encoding="utf-8") as file:
                    print(json.dumps(asdict(result)), file=file)
                print(result, flush=True)
        return
    lines = options.results.read_text(encoding="utf-8").splitlines()
    show([Result(**json.loads(line)) for line in lines])


if __name__ == "__main__":
    main()
