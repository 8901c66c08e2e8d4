"""A run in a program, and its model for programs without onefold."""

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from docs import execute
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import onefold_jobs
from onefold.errors import DataError, LaunchError
from onefold_jobs import export
from onefold_jobs.export import Target, export_run
from onefold_jobs.finetune import chosen_checkpoint
from onefold_jobs.predict import EvaluateOptions, PredictOptions, evaluate_run, predict_run
from tests.capabilities import needs_text
from tests.jobs.data.pictures import noise
from tests.jobs.tiny import CLASSES, WRITERS, job_of, run_here
from tests.tables import for_each

needs_text()


def predicted(
    run: Path, paths: list[Path], output: Path | None = None, top: int = 1
) -> list[dict[str, Any]]:
    return predict_run(run, paths, PredictOptions(output=output, top=top)).rows


TESTED = {"classify": "test/*/*.png", "segment": "test/images/*.png", "text": "dev.tsv"}
pytestmark = pytest.mark.usefixtures("here")


@for_each("job", ["classify", "text"])
def test_a_loaded_run_says_what_predict_says(job: str, runs: Any, data: Any) -> None:
    folder, paths = runs[job], sorted(data[job].glob(TESTED[job]))
    run = onefold_jobs.load_run(folder)
    assert (run.job, run.module.training) == (job, False)
    assert not any(parameter.requires_grad for parameter in run.module.parameters())
    inputs: list[Any] = paths
    if job == "text":
        inputs = [line.split("\t")[0] for line in paths[0].read_text().splitlines()]
    sure = run.module(**run.preprocess(inputs)).softmax(dim=1)
    for row, values in zip(predicted(folder, paths, top=9), sure, strict=True):
        found = {each["class"]: each["confidence"] for each in row["classes"]}
        expected = dict(zip(run.classes, values.tolist(), strict=True))
        assert found == pytest.approx(expected, abs=1e-5)
    assert run.description["classes"] == list(run.classes)


@for_each("job", ["classify", "segment", "text"])
def test_what_is_no_list_of_inputs_is_refused(job: str, runs: Any) -> None:
    run = onefold_jobs.load_run(runs[job])
    pixels = np.zeros((9, 7, 3), np.uint8)
    singles: tuple[Any, ...] = ("a.png", Path("a.png"), pixels, Image.fromarray(pixels), 3)
    for single in singles:
        with pytest.raises(TypeError, match="expected a list of inputs, got "):
            run.preprocess(single)
    with pytest.raises(ValueError, match="the list of inputs is empty"):
        run.preprocess([])
    if job != "text":
        (one, other) = (run.preprocess([x])["images"] for x in (pixels, Image.fromarray(pixels)))
        assert one.equal(other)
        deep = run.preprocess([np.full((9, 7), 65535, np.uint16)])["images"]
        assert deep.equal(run.preprocess([np.full((9, 7), 255, np.uint8)])["images"])
        odd = [pixels / 255, pixels > 0, pixels[..., :1], pixels.reshape(3, 9, 7), pixels[0, :, 0]]
        for array in (*odd, pixels.astype(np.uint16)):
            with pytest.raises(
                TypeError, match=r"^picture 1: expected an array \(h, w\) or .* of "
            ):
                run.preprocess([pixels, array])


def test_a_loaded_run_draws_the_masks_that_predict_draws(
    runs: Any, data: Any, tmp_path: Path
) -> None:
    folder, paths = runs["segment"], sorted(data["segment"].glob(TESTED["segment"]))
    run = onefold_jobs.load_run(folder)
    predicted(folder, paths, tmp_path)
    for path in paths:
        with Image.open(path) as picture:
            picture.load()
        (logits,) = run.module(**run.preprocess([picture]))
        mask = logits[0].sigmoid() >= run.description["threshold"]
        with Image.open(tmp_path / path.name) as drawn:
            expected = np.asarray(drawn) == 255
        height, width = expected.shape
        assert np.array_equal(mask[:height, :width].numpy(), expected)


@for_each("job", ["classify", "segment"])
def test_a_picture_that_would_be_black_is_refused(
    job: str, runs: Any, data: Any, tmp_path: Path
) -> None:
    """Of another range than the pictures of the run had, such as fractions instead of 12 bits."""
    run = shutil.copytree(runs[job], tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    facts["picture_model" if job == "classify" else "mask_model"]["white"] = 4095
    (run / "run.json").write_text(json.dumps(facts))
    tested = shutil.copytree(data[job] / "test", tmp_path / "test")
    path = next(path for path in tested.rglob("*.png") if path.parent.name != "masks")
    path.unlink()
    fractions = np.linspace(0, 1, 40 * 48, dtype=np.float32).reshape(40, 48)
    Image.fromarray(fractions).save(path.with_suffix(".tiff"))
    uses: list[Callable[[Path], object]] = [
        lambda _: evaluate_run(run, tested, EvaluateOptions()),
        lambda path: predicted(run, [path.parent], tmp_path / "out" if job == "segment" else None),
        lambda path: onefold_jobs.load_run(run).preprocess([path]),
        lambda path: onefold_jobs.load_run(run).preprocess([Image.open(path)]),
    ]
    for use in uses:
        with pytest.raises(DataError, match=r"1 would all become black, because white is 4095: "):
            use(path.with_suffix(".tiff"))


@for_each("job", ["classify", "segment"])
def test_pages_that_are_not_read_are_noted(
    job: str, runs: Any, data: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs[job]
    tested = shutil.copytree(data[job] / "test", tmp_path / "test")
    path = next(path for path in tested.rglob("*.png") if path.parent.name != "masks")
    page = Image.open(path)
    page.save(path.with_suffix(".tiff"), save_all=True, append_images=[page])
    path.unlink()
    evaluate_run(run, tested, EvaluateOptions())
    predicted(run, [path.parent], tmp_path / "out" if job == "segment" else None)
    words = "onefold: 1 image with several pages or frames: only the first is used\n"
    assert capsys.readouterr().err.count(words) == 2


def test_the_last_weights_may_be_loaded(runs: Any, tmp_path: Path) -> None:
    last = onefold_jobs.load_run(runs["classify"], weights="last")
    assert last.weights == max((runs["classify"] / "checkpoints").iterdir())
    assert last.classes == CLASSES
    (tmp_path / "checkpoints" / "step-123456789").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-99999999").mkdir()
    assert chosen_checkpoint(tmp_path, "last").name == "step-123456789"


@for_each("job", ["classify", "segment", "text"])
def test_safetensors_have_the_weights_and_the_description(
    job: str, runs: Any, tmp_path: Path
) -> None:
    folder = runs[job]
    made = export_run(folder, "safetensors", tmp_path / "a.safetensors")
    assert (made.samples > 2, made.difference) == (True, 0)
    told = json.loads((tmp_path / "a.safetensors.json").read_text())
    with safe_open(made.file, "pt") as file:
        assert json.loads(file.metadata()["onefold.json"]) == told
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    module = onefold_jobs.load_run(folder).module
    for name, value in getattr(module, "model", module).state_dict().items():
        assert torch.equal(stored[name], value)
    assert sorted(tmp_path.iterdir()) == sorted([made.file, *made.beside])
    for each in made.beside:
        each.unlink()
        with pytest.raises(LaunchError, match=r"a\.safetensors exists already: remove it"):
            export_run(folder, "safetensors", made.file)


@for_each("job", ["classify", "text"])
def test_an_export_leads_nowhere(job: str, runs: Any, tmp_path: Path) -> None:
    """Of a run of others, in which each name that is written is a link to a file of the user's."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    files = job_of(job).files
    for name in ("model.safetensors", *(f"model.safetensors.{each}" for each in ("json", *files))):
        for target in (mine, tmp_path / "gone"):
            run = shutil.copytree(runs[job], tmp_path / f"{name} {target.name}")
            (run / name).symlink_to(target)
            with pytest.raises(LaunchError, match=f"{name} exists already: remove it"):
                export_run(run, "safetensors")
            # Or the link comes while the model is compared.
            (run / name).unlink()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(export, "load_run", partial(meanwhile, run / name, target))
                with pytest.raises(FileExistsError, match="expected a free name, got a link"):
                    export_run(run, "safetensors")
            assert (run / name).is_symlink()
    assert mine.read_text() == "mine"
    assert not (tmp_path / "gone").exists()


def meanwhile(path: Path, target: Path, *args: Any, **named: Any) -> onefold_jobs.LoadedRun:
    """Load a run, while somebody puts a link where a file is to be written."""
    if not path.is_symlink():
        path.symlink_to(target)
    return onefold_jobs.load_run(*args, **named)


@for_each(
    "examples",
    [3, [], {"samples": 3}, {"samples": [3]}, {"samples": [None]}, {"samples": [{"picture": [1]}]}]
    + [
        {"samples": [{"picture": name}]} for name in ("/etc/passwd", "../mine.png", "\0", "a\ud800")
    ],
)
def test_examples_of_anybody_are_not_what_an_export_is_compared_by(
    examples: Any, runs: Any, tmp_path: Path
) -> None:
    run = shutil.copytree(runs["classify"], tmp_path / "run")
    shutil.copy(next((run / "pictures").iterdir()), tmp_path / "mine.png")
    (run / "examples.json").write_text(json.dumps(examples))
    assert export_run(run, "safetensors").samples == 0


def test_what_differs_is_not_written(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs["classify"]
    before = sorted(folder.rglob("*"))
    save: Any = save_file

    def save_other(state: Any, file: Path, **how: Any) -> None:
        save({name: value * 2 for name, value in state.items()}, file, **how)

    monkeypatch.setattr(export, "save_file", save_other)
    with pytest.raises(LaunchError, match=r"\.safetensors: not written, because its logits differ"):
        export_run(folder, "safetensors")
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(LaunchError, match=r"a\.pth: the file name must end in \.pt2"):
        export_run(folder, "torch-export", tmp_path / "a.pth")


def test_onnx_needs_packages(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"--to onnx requires .*onefold-jobs\[export\]"):
        export_run(runs["text"], "onnx")


def test_numbers_are_made_of_logits_as_the_description_says(tmp_path: Path) -> None:
    data = WRITERS["classify"](tmp_path / "data")
    paths = sorted(data.glob("train/*/*.png"))
    rows = "".join(f"{path.relative_to(data)},{7 * n + 0.5}\n" for n, path in enumerate(paths))
    (data / "all.csv").write_text(f"image,label\n{rows}")
    options = {"task": "regression", "model": "lenet", "epochs": 1}
    folder, _ = run_here("classify", data / "all.csv", tmp_path / "runs", **options)
    run = onefold_jobs.load_run(folder)
    description: Any = run.description
    logits, target = (
        run.module(**run.preprocess(paths)),
        SimpleNamespace(**description["target"]),
    )
    found = eval(description["value"], {"logits": logits, "target": target})
    expected = [row["value"] for row in predicted(folder, paths)]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def in_float32(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(values, np.float32)


def test_masks_are_padded_as_the_description_says(runs: Any) -> None:
    run = onefold_jobs.load_run(runs["segment"])
    how: Any = run.description["preprocessing"]
    assert how["padded"].startswith("zeros after normalization, on the right and below, ")
    picture = noise((70, 9))
    (found,) = run.preprocess([picture])["images"]
    height, width = (
        max(2, -(-side // how["side_multiple"])) * how["side_multiple"] for side in (9, 70)
    )
    expected = np.zeros((3, height, width), np.float32)
    numbers = (in_float32(picture) / 255 - in_float32(how["mean"])) / in_float32(how["std"])
    expected[:, :9, :70] = numbers.transpose(2, 0, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.full
@for_each("side", [32, 100])
def test_the_script_of_the_page_gives_the_same_predictions(
    side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without onefold: of large and small pictures, wide and tall, and turned by EXIF."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # which would leave a thread
    pytest.importorskip("onnxruntime")
    data = WRITERS["classify"](tmp_path / "data")
    options = {"model": "resnet18", "image_size": side, "epochs": 1}
    folder, _ = run_here("classify", data, tmp_path / "runs", **options)
    made = export_run(folder, "onnx", tmp_path / "model.onnx")
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    turned = Image.Exif()
    turned[0x0112] = 6
    sizes = [(700, 300), (333, 801), (20, 31), (150, 97), (640, 480)]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        noise(size, seed=number).save(path, exif=turned if number == 4 else None)
    script = tmp_path / "predict_onnx.py"
    script.write_text(execute.files(execute.ROOT / "docs/do/jobs.md")[script.name])
    command: list[str | Path] = [sys.executable, script, made.file, *paths]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for row, line in zip(predicted(folder, paths), printed.splitlines(), strict=True):
        file, name, confidence = line.split()
        best = row["classes"][0]
        assert (Path(file).name, name) == (row["file"], best["class"])
        assert float(confidence) == pytest.approx(best["confidence"], abs=1e-4)


EXPORTS: list[tuple[str, Target]] = [
    (job, to) for job in WRITERS for to in ("onnx", "torch-export")
]


@pytest.mark.full
@for_each(("job", "to"), EXPORTS)
def test_other_formats_take_any_number_and_size(
    job: str, to: Target, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More samples than were traced, and pictures of another size."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # which would leave a thread
    folder = runs[job]
    run = onefold_jobs.load_run(folder)
    if to == "onnx":
        runtime = pytest.importorskip("onnxruntime")
    made = export_run(folder, to, tmp_path / f"it.{'onnx' if to == 'onnx' else 'pt2'}")
    assert made.samples > 2
    inputs: list[Any] = [Image.effect_noise((70, 130), 90).convert("RGB") for _ in range(11)]
    if job == "text":
        inputs = [f"this is text {number} " * (number + 1) for number in range(11)]
    batch = run.preprocess(inputs)
    expected = run.module(**batch)
    if to == "onnx":
        session = runtime.InferenceSession(str(made.file))
        given = {name: value.numpy() for name, value in batch.items()}
        got = torch.from_numpy(session.run(["logits"], given)[0])
        stored = importlib.import_module("onnx").load(str(made.file)).metadata_props
        told = json.loads({each.key: each.value for each in stored}["onefold.json"])
    else:
        files = {"onefold.json": ""}
        got = torch.export.load(made.file, extra_files=files).module()(**batch)
        told = json.loads(files["onefold.json"])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert told == json.loads(made.beside[0].read_text())
