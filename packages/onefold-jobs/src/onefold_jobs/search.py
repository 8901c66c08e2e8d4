"""Searches for good options of a job. Optuna suggests the options of each run.

Note: the same search again
---------------------------
The options of a trial depend on the seed, its number, and the results before it, and on nothing
else: each is suggested by a new sampler, in a copy of the study. So a search that was killed
continues with the trial that it was in, and as the scores of a run do not depend on the number of
devices, neither does the search. Optuna's journal has the finished trials.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

from onefold.cli import counted, in_shell, tell
from onefold.errors import OnefoldError, RunFailed
from onefold_jobs import require
from onefold_jobs.job import Job
from onefold_jobs.options import TrainOptions, from_mapping
from onefold_jobs.run import MAY_CHANGE
from onefold_jobs.scores import spell
from onefold_jobs.series import Outcome, Series, Table, opened, warned

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

__all__ = ["read_space", "search"]

_JOURNAL = "trials.journal"
_FIXED = MAY_CHANGE | {
    *("best_by", "folds", "holdout", "seed", "task", "text_column", "image_column", "label_column"),
    *("skip_bad", "classes", "foreground", "void", "evaluation_batch_size", "threshold", "compile"),
}
"""Options that decide on which samples and by which score a trial is judged, or nothing of it."""
_LOGARITHMIC = 10
"""Ratio of the ends of a range from which it is searched on a logarithmic scale."""
_COMPARED = 10
"""Number of best runs on the page of a search."""


def read_space(job: Job, options: TrainOptions, given: Sequence[str]) -> dict[str, Any]:
    """Read what to search: ``lr=1e-4:1e-1`` for a range, ``optimizer=sgd,adamw`` for a choice.

    Args:
        job: the job.
        options: options that all trials have in common.
        given: texts of the command line.

    Returns:
        Optuna's distribution of each option.

    Raises:
        ValueError: a text is not of this form, or an option cannot be searched or has no such
            value.
    """
    if not given:
        raise ValueError("--search is missing: say what to search, such as --search lr=1e-4:1e-1")
    space: dict[str, Any] = {}
    for text in given:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values or name in space:
            raise ValueError(
                f"--search {text}: expected NAME=LOWEST:HIGHEST or NAME=VALUE,VALUE, and each name "
                f"once"
            )
        if name in _FIXED:
            raise ValueError(f"--search {text}: {name} must be the same in all trials")
        space[name] = _distribution(job, options, name, values)
    return space


def _distribution(job: Job, options: TrainOptions, name: str, values: str) -> BaseDistribution:
    from optuna import distributions

    source = f"--search {name}={values}"
    hint = typing.get_type_hints(job.options).get(name)
    numbers = [each for each in (int, float) if each in (hint, *typing.get_args(hint))]
    ends = values.split(":")
    several = ends if numbers and len(ends) == 2 else values.split(",")
    read = [_value(each.strip(), hint, numbers) for each in several]
    for each in read:
        # Checks the name, the type, the limits, and what does not go together.
        typed = getattr(from_mapping(job.options, {name: each}, source), name)
        replace(options, **{name: typed})
    if several is not ends:
        return distributions.CategoricalDistribution([*dict.fromkeys(read)])
    low, high = read
    if not low < high:
        raise ValueError(f"{source}: expected the lowest value first, got {low} and {high}")
    log = low > 0 and high / low >= _LOGARITHMIC
    if numbers == [int]:
        return distributions.IntDistribution(low, high, log=log)
    return distributions.FloatDistribution(float(low), float(high), log=log)


def _value(text: str, hint: Any, numbers: Sequence[type]) -> Any:
    if hint is bool:
        return {"true": True, "yes": True, "false": False, "no": False}.get(text.lower(), text)
    for number in numbers:
        try:
            return number(text)
        except ValueError:
            continue
    return text


def search(
    job: Job, options: TrainOptions, given: Sequence[str], *, trials: int, resumed_by: str
) -> Outcome:
    """Train trials until there are as many as asked for, and compare them.

    Args:
        job: the job.
        options: options that all trials have in common.
        given: what to search; empty for that of the search that is resumed.
        trials: total number of trials.
        resumed_by: command that resumes the search.

    Returns:
        The best trial, with the table of all.

    Raises:
        LaunchError: Optuna is not installed, or another launcher started this process.
        RunFailed: the search was stopped, or no trial succeeded.
        OnefoldError, OSError, ValueError: an option or the data cannot be used.
    """
    require("onefold tune", "tune", "optuna")
    if trials < 1:
        raise ValueError(f"--trials {trials}: expected 1 or more")
    asked = {"search": [*given], "epochs": options.epochs}
    if given or not options.resume:
        read_space(job, options, given)
    with opened(job, options, command="tune", resumed_by=resumed_by) as series:
        study = _study(series)
        begun = {**asked, **study.user_attrs}
        for name in (each for each in asked if asked[each] and asked[each] != begun[each]):
            words = asked[name] if name == "epochs" else " ".join(given)
            raise ValueError(
                f"--{name} {words}: the search {options.name} was started with {begun[name]}; "
                f"start another one with a new --name"
            )
        space = read_space(job, options, begun["search"])
        for name, value in begun.items():
            study.set_user_attr(name, value)
        for number in range(len(study.trials), trials):
            params = _suggest(study, space, options.seed)
            tell(f"trial {number + 1} of {trials}: {_listed(params)}")
            study.add_trial(_trained(series, f"trial-{number + 1}", params, space))
        return _compared(series, study, begun["search"])


def _study(series: Series) -> Study:
    """Open the study of a search; its journal has the trials that have finished."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    # It would report each trial once more.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(series.options.folder / _JOURNAL))),
        study_name="search",
        direction="maximize" if series.rule.startswith("highest") else "minimize",
        load_if_exists=True,
    )


def _suggest(study: Study, space: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Suggest the options of the next trial: see the note."""
    import optuna

    seed_of_trial = crc32(f"{seed}/{len(study.trials)}".encode())
    sampler = optuna.samplers.TPESampler(seed=seed_of_trial)
    copy = optuna.create_study(direction=study.direction, sampler=sampler)
    copy.add_trials(study.trials)
    params: dict[str, Any] = copy.ask(dict(space)).params
    return params


def _trained(
    series: Series, name: str, params: Mapping[str, Any], space: Mapping[str, Any]
) -> FrozenTrial:
    """Train a trial, and return it as Optuna keeps it; a failure is kept, too.

    Raises:
        RunFailed: the run was stopped, or the disk is full.
    """
    from optuna.trial import TrialState, create_trial

    how: dict[str, Any] = {"params": dict(params), "distributions": dict(space)}
    try:
        outcome = series.train(name, **params)
        if not math.isfinite(outcome.value):
            raise RunFailed(f"the {series.rule.partition(' ')[2]} is not a finite number", 1)
    except (OnefoldError, ValueError) as error:
        if isinstance(error, RunFailed) and error.exit_code != 1:
            raise
        reason = str(error).partition("\n")[0]
        tell(f"{name} failed: {reason}")
        return create_trial(state=TrialState.FAIL, user_attrs={"error": reason}, **how)
    kept = {"epoch": outcome.epoch, "scores": dict(outcome.scores)}
    return create_trial(value=outcome.value, user_attrs=kept, **how)


def _compared(series: Series, study: Study, given: Sequence[str]) -> Outcome:
    """Compare the trials of a search.

    Raises:
        RunFailed: no trial succeeded.
    """
    sign = -1 if series.rule.startswith("highest") else 1
    done = [each for each in study.trials if each.value is not None]
    # Ties are broken by the loss, as for epochs, and then keep the order of trials.
    done.sort(key=lambda each: (sign * (each.value or 0), each.user_attrs["scores"].get("loss", 0)))
    failed = [each for each in study.trials if each.value is None]
    if not done:
        reason = failed[0].user_attrs["error"] if failed else "there is none"
        raise RunFailed(f"{series.options.folder}: no trial succeeded: {reason}", 1)
    best, target = done[0], series.rule.partition(" ")[2]
    outcome = series.train(f"trial-{best.number + 1}", **best.params)
    names = [*best.params]
    rows = [
        [str(each.number + 1), *(_short(each.params[name]) for name in names), shown]
        for each in (*done, *failed)
        for shown in ["failed" if each.value is None else spell(target, each.value)]
    ]
    again, warning = _command(series, best.params), outcome.warning
    table = Table(
        title=f"Search: {counted(len(rows), 'trial')}",
        words=["trial", *names],
        numbers=[target],
        rows=rows,
        notes=[
            *(f"Trial {each.number + 1} failed: {each.user_attrs['error']}." for each in failed),
            *warned(warning and warning.replace("This run", f"Trial {best.number + 1}", 1)),
            f"Best: trial {best.number + 1}, in {outcome.folder}.",
            f"The same run again: {again}",
        ],
    )
    kept = [
        {"trial": each.number + 1, "options": each.params, "value": each.value, **each.user_attrs}
        for each in study.trials
    ]
    results = {"search": [*given], "best": best.number + 1, "command": again, "trials": kept}
    folders = [series.options.folder / f"trial-{each.number + 1}" for each in done[:_COMPARED]]
    # A trial of several folds is no single run: the page compares the folds of the best one.
    runs = folders if outcome.runs == [outcome.folder] else outcome.runs
    return replace(outcome, table=table, report=series.finish(table, results, runs))


def _command(series: Series, params: Mapping[str, Any]) -> str:
    """Return the command that trains a run with these options."""
    words = [f"onefold train {series.job.name}"]
    made = replace(series.options, **params, name=f"{series.options.name}-best", resume=False)
    for each in fields(made):
        value = getattr(made, each.name)
        if value is True:
            words.append(f"--{each.name.replace('_', '-')}")
        elif value != each.default:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            words.append(f"--{each.name.replace('_', '-')} {in_shell(text)}")
    return " ".join(words)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _listed(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in params.items())
