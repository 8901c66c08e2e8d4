"""Cross-validation and searches: several runs of a job, stopped, resumed and compared."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import sklearn  # noqa: F401  # sets variables of the environment when it is loaded
from hypothesis import given
from hypothesis import strategies as st

import onefold
import onefold_jobs
from onefold.errors import DataError, LaunchError, LossError, RunFailed
from onefold_jobs import report, series
from onefold_jobs.cli import train as command_line
from onefold_jobs.data.folds import deal
from onefold_jobs.options import TrainOptions, from_mapping
from onefold_jobs.predict import EvaluateOptions, evaluate_run
from onefold_jobs.report import page
from onefold_jobs.run import read_options, run_job
from onefold_jobs.search import read_space, search
from onefold_jobs.series import cross_validate
from tests.jobs.tiny import SMALL, WRITERS, job_of, write_pictures
from tests.tables import for_each

CLASSIFY = job_of("classify")
TINY: dict[str, Any] = {
    "classify": {"model": "lenet", "augment": "none", "lr": 0.02},
    "segment": {},
    "text": {"layers": 1},
}


def asked(data: Path, runs: Path, job: str = "classify", **more: Any) -> TrainOptions:
    usual = {
        "data": str(data),
        "runs": str(runs),
        "name": "it",
        "epochs": 1,
        "devices": "cpu:1",
        "log": "none",
    }
    return read_options(job_of(job), {**usual, **SMALL[job], **TINY[job], **more}, None)


def resumed(runs: Path, **more: Any) -> TrainOptions:
    given = {"runs": str(runs), "name": "it", "resume": True, "devices": "cpu:1"}
    return read_options(CLASSIFY, {**given, **more}, None)


def of_run(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def results_of(runs: Path) -> Any:
    return json.loads((runs / "it" / "results.json").read_text())


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Stop a series at the beginning of one of its runs."""

    def stop(number: int) -> None:
        begun: list[str] = []

        def run(job: Any, options: TrainOptions, resumed_by: str) -> Any:
            begun.append(options.name)
            if len(begun) == number:
                raise RunFailed(f"stopped: {resumed_by}", 75)
            return run_job(job, options, resumed_by)

        monkeypatch.setattr(series, "run_job", run)

    return stop


@pytest.fixture
def unreported(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands compute here, and draw no page of a single run."""
    monkeypatch.setattr(report, "build_report", str)


@pytest.fixture
def whole(unreported: None, data: dict[str, Path], tmp_path: Path) -> onefold_jobs.JobResult:
    """A cross-validation that nothing has stopped."""
    options = asked(data["classify"] / "train", tmp_path / "whole", folds=2)
    return onefold_jobs.classify(**values_of(options))


# Folds

LABELED = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), min_size=20)


@given(LABELED, st.integers(2, 5), st.integers(0, 3), st.randoms())
def test_folds_depend_on_contents_alone(samples: Any, folds: int, seed: int, draw: Any) -> None:
    samples = [(label, f"{label}{number}") for label, number in samples]
    classes = {label: {content for own, content in samples if own == label} for label, _ in samples}
    if min(map(len, classes.values())) < 2 or len({*samples}) < folds:
        with pytest.raises(DataError, match="different samples"):
            deal(*zip(*samples, strict=True), seed=seed, folds=folds)
        return
    found = dict(
        zip(samples, deal(*zip(*samples, strict=True), seed=seed, folds=folds), strict=True)
    )
    shuffled = draw.sample(samples, len(samples))
    again = zip(shuffled, deal(*zip(*shuffled, strict=True), seed=seed, folds=folds), strict=True)
    # Copies included.
    assert all(found[sample] == fold for sample, fold in again)
    sizes = [[*found.values()].count(fold) for fold in range(1, folds + 1)]
    assert max(sizes) - min(sizes) <= 1
    for label in classes:
        sizes = [
            [f for (own, _), f in found.items() if own == label].count(n + 1) for n in range(folds)
        ]
        assert max(sizes) - min(sizes) <= 1


@for_each("job", [*WRITERS])
def test_every_sample_is_tested_once(job: str, data: dict[str, Path], tmp_path: Path) -> None:
    kind, digests = job_of(job), set()
    tested: list[Any] = []
    for number in range(1, 4):
        prepared = kind.prepare(asked(data[job], tmp_path, job, folds=f"{number}/3"))
        tested += kind.tested(prepared)
        digests.add(prepared.digest)
        assert any("not used by --folds, which divides" in note for note in prepared.notes)
        assert not prepared.own_test
    assert len(digests) == 3
    whole = kind.prepare(asked(data[job], tmp_path, job))
    assert len(tested) == len({*tested}) == len(whole.train)
    assert not {*tested} & {*kind.tested(whole)}


def test_digits_have_folds() -> None:
    found = [CLASSIFY.prepare(asked(Path("digits"), Path("x"), folds=f"{n}/4")) for n in (1, 4)]
    assert [len(each.test) for each in found] == [450, 449]
    assert [len(each.train) for each in found] == [1347, 1348]


@for_each(
    ("given", "words"),
    [
        ({"folds": 1}, "--folds 1: expected a number of folds, 2 or more, such as 5, or one of"),
        ({"folds": "6/5"}, "--folds 6/5: expected a number of folds"),
        ({"folds": 5, "holdout": 0.2}, "--holdout 0.2: expected it without --folds"),
        ({"folds": 5, "dev": "dev.csv"}, "--dev dev.csv: expected it without --folds"),
    ],
)
def test_wrong_folds_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_mapping(CLASSIFY.options, given, "options")


@pytest.mark.usefixtures("here")
def test_data_that_cannot_be_divided_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_pictures(tmp_path / "data", train=1)
    with pytest.raises(DataError, match=r"--folds 2: .* every class, .* got one of apple, pear"):
        cross_validate(CLASSIFY, asked(data, tmp_path / "runs", folds=2))
    monkeypatch.setattr(onefold, "is_launched", lambda: True)
    with pytest.raises(LaunchError, match="use --devices, without onefold run, torchrun or srun"):
        cross_validate(CLASSIFY, asked(data, tmp_path / "runs", folds=2))
    assert not (tmp_path / "runs").exists()


def test_a_cross_validation_is_stopped_resumed_and_summed_up(
    whole: onefold_jobs.JobResult, data: dict[str, Path], tmp_path: Path, stop_at: Any, capsys: Any
) -> None:
    runs, folder = tmp_path / "runs", data["classify"] / "train"
    assert whole.report == whole.folder / "report.html"
    stop_at(2)
    with pytest.raises(RunFailed, match=r"onefold train classify --runs .* --name it --resume"):
        cross_validate(CLASSIFY, asked(folder, runs, folds=2))
    assert sorted(each.name for each in (runs / "it").glob("fold-*")) == ["fold-1"]
    with pytest.raises(LaunchError, match="exists already: continue it with --resume"):
        asked(folder, runs, folds=2)
    first = (runs / "it" / "fold-1" / "run.json").read_bytes()
    # The rest is read from what the first one has found.
    stop_at(0)
    command_line.tell_series(cross_validate(CLASSIFY, resumed(runs)))
    assert (runs / "it" / "fold-1" / "run.json").read_bytes() == first
    found = [results_of(each) for each in (tmp_path / "whole", runs)]
    assert found[0] == found[1]
    folds = [each["accuracy"] for each in found[0]["folds"]]
    assert found[0]["mean"]["accuracy"] == fmean(folds) == whole.scores["accuracy"]
    assert found[0]["spread"]["accuracy"] == stdev(folds)
    bits = [
        [of_run(at / f"it/fold-{n}")["fingerprint"] for n in (1, 2)]
        for at in (whole.folder.parent, runs)
    ]
    assert bits[0] == bits[1]
    assert len({*bits[0]}) == 2
    said = capsys.readouterr().out
    assert "Cross-validation: 2 folds" in said
    assert "After the last epoch, which no score selected: mean accuracy" in said
    shown = (runs / "it" / "report.html").read_text()
    assert shown.count("fold-") > 2
    assert "Cross-validation: 2 folds</h1>" in shown
    # Each is a run like others: what it has not seen is scored.
    scored = evaluate_run(runs / "it/fold-2", folder, EvaluateOptions(devices="cpu:1"))
    assert len(scored.prediction.rows) == of_run(runs / "it/fold-2")["test_samples"] == 12


def values_of(options: TrainOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


# Searches


@for_each(
    ("given", "words"),
    [
        ([], "--search is missing: say what to search, such as --search lr=1e-4:1e-1"),
        (["lr"], "--search lr: expected NAME=LOWEST:HIGHEST or NAME=VALUE,VALUE"),
        (["lr=0.1,0.2", "lr=1:2"], "and each name once"),
        (["lrr=0.1:0.2"], "there is no option lrr; did you mean lr?"),
        (["lr=0.2:0.1"], "expected the lowest value first, got 0.2 and 0.1"),
        (["lr=0:0.1"], "--lr 0.0: expected more than 0"),
        (["optimizer=sgd,adm"], "optimizer: expected sgd, adam, adamw, got 'adm'"),
        (["batch-size=8.5:16"], "batch_size: expected a whole number, got '8.5'"),
        (["balanced=maybe"], "balanced: expected true or false, got 'maybe'"),
        (["seed=1,2"], "seed must be the same in all trials"),
        (["holdout=0.1:0.2"], "holdout must be the same in all trials"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: Any, words: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    options = asked(tmp_path / "none", tmp_path)
    with pytest.raises(ValueError, match=words):
        search(CLASSIFY, options, given, trials=1, resumed_by="")
    assert not [*tmp_path.iterdir()]


def test_ranges_and_choices(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    given = ["lr=1e-4:1e-1", "batch-size=8:16", "momentum=0.8:0.9", "balanced=yes,no"]
    assert read_space(CLASSIFY, asked(tmp_path, tmp_path), [*given, "model=lenet,timm:a"]) == {
        "lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
        "batch_size": optuna.distributions.IntDistribution(8, 16),
        "momentum": optuna.distributions.FloatDistribution(0.8, 0.9),
        "balanced": optuna.distributions.CategoricalDistribution([True, False]),
        "model": optuna.distributions.CategoricalDistribution(["lenet", "timm:a"]),
    }


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Trials that are computed, not trained, and fail where the rate is high."""
    pytest.importorskip("optuna")
    trained: list[dict[str, Any]] = []

    def train(self: series.Series, name: str, **params: Any) -> series.Outcome:
        folder = self.options.folder / name
        if not folder.exists():
            trained.append(params)
            folder.mkdir()
        if params["lr"] > 0.1:
            raise LossError("the loss of step 1 is nan")
        value = 1 - abs(params["lr"] - 0.01) - (params["optimizer"] == "sgd") / 10
        scores = {"accuracy": value}
        return series.Outcome(folder=folder, runs=[folder], scores=scores, last=scores, epoch=0)

    monkeypatch.setattr(series.Series, "train", train)
    monkeypatch.setattr(series.Series, "finish", lambda self, table, results, runs: None)
    return trained


SPACE = ["lr=1e-4:1", "optimizer=sgd,adamw"]


@for_each("folds", [None, "2"])
def test_a_series_that_learned_nothing_says_so(
    folds: str | None, unreported: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step with a tiny rate: the result is that of always predicting one class."""
    pytest.importorskip("optuna")
    data = write_pictures(tmp_path / "data", train=4) / "train"
    options = asked(data, tmp_path, lr=1e-6, batch_size=12, folds=folds)
    found = search(CLASSIFY, options, ["momentum=0.5,0.9"], trials=1, resumed_by="")
    assert found.table is not None
    who = "2 of 2 runs" if folds else "Trial 1"
    words = f"Warning: {who} learned nothing. This model is no better than the baseline"
    assert found.table.notes[0].startswith(words)
    command_line.tell_series(found)
    assert words in capsys.readouterr().out


def test_a_search_is_the_same_again_and_when_it_is_resumed(
    scored: list[Any], data: dict[str, Path], tmp_path: Path
) -> None:
    for runs in ("a", "b"):
        options = asked(data["classify"], tmp_path / runs)
        found = search(CLASSIFY, options, SPACE, trials=14, resumed_by="")
    assert scored[:14] == scored[14:]
    assert len({each["lr"] for each in scored}) == 14
    del scored[14:]
    search(CLASSIFY, asked(data["classify"], tmp_path / "c"), SPACE, trials=5, resumed_by="")
    # Killed in a trial: its folder exists, and its result is missing.
    (tmp_path / "c" / "it" / "trial-6").mkdir()
    again = search(CLASSIFY, resumed(tmp_path / "c"), [], trials=14, resumed_by="")
    assert scored[14:19] + scored[19:] == [*scored[:5], *scored[6:14]]
    assert again.table is not None
    assert found.table is not None
    assert again.table.rows == found.table.rows
    failed = [row for row in found.table.rows if row[-1] == "failed"]
    assert failed == found.table.rows[-len(failed) :]
    assert "failed: the loss of step 1 is nan." in found.table.notes[0]
    shown = [float(row[-1].rstrip("%")) for row in found.table.rows if row not in failed]
    assert shown == sorted(shown, reverse=True)
    with pytest.raises(ValueError, match=r"--search lr=1:2: the search it was started with"):
        search(CLASSIFY, resumed(tmp_path / "c"), ["lr=1:2"], trials=15, resumed_by="")
    with pytest.raises(ValueError, match="--epochs 9: the search it was started with 1"):
        search(CLASSIFY, resumed(tmp_path / "c", epochs=9), [], trials=15, resumed_by="")


def test_a_search_ends_if_it_is_stopped_or_nothing_succeeds(
    scored: list[Any], data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = asked(data["classify"], tmp_path)
    with pytest.raises(RunFailed, match="no trial succeeded: the loss of step 1 is nan"):
        search(CLASSIFY, options, ["lr=0.5:1", "optimizer=sgd,adam"], trials=2, resumed_by="")

    def stopped(*_: Any, **__: Any) -> Any:
        raise RunFailed("stopped by SIGTERM", 75)

    monkeypatch.setattr(series.Series, "train", stopped)
    with pytest.raises(RunFailed, match="stopped by SIGTERM"):
        search(CLASSIFY, resumed(tmp_path), [], trials=3, resumed_by="")


@pytest.mark.usefixtures("unreported")
def test_a_search_trains_and_names_the_command_of_the_best(
    data: dict[str, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    compared: list[Any] = []

    def compare(*given: Any) -> Any:
        compared.append(given)
        return given[1]

    monkeypatch.setattr(page, "compare_runs", compare)
    options = asked(data["classify"], tmp_path, lr=None)
    found = search(CLASSIFY, options, ["lr=1e-3:1e-1", "momentum=0.5,0.9"], trials=2, resumed_by="")
    kept = results_of(tmp_path)
    assert [each["value"] for each in kept["trials"]] == [
        of_run(tmp_path / f"it/trial-{n}")["best"]["value"] for n in (1, 2)
    ]
    command_line.tell_series(found)
    assert f"The same run again: {kept['command']}" in capsys.readouterr().out.replace("\n", "")
    best = of_run(tmp_path / f"it/trial-{kept['best']}")
    words = kept["command"].split()
    assert words[:3] == ["onefold", "train", "classify"]
    named = dict(
        zip((w.strip("-").replace("-", "_") for w in words[3::2]), words[4::2], strict=True)
    )
    assert named.pop("name") == "it-best"
    typed = {
        name: type(getattr(options, name))(v) if getattr(options, name) else float(v)
        for name, v in named.items()
    }
    again = run_job(CLASSIFY, read_options(CLASSIFY, {**typed, "name": "again"}, None))
    assert again["fingerprint"] == best["fingerprint"]
    ((runs, output, table),) = compared
    assert {run.name for run in runs} == {"trial-1", "trial-2"}
    assert runs[0].name == f"trial-{kept['best']}"
    assert (output, table) == (tmp_path / "it" / "report.html", found.table)
