from __future__ import annotations

import dataclasses
import math
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.jobs.catalog import JOBS, job_of
from onefold.jobs.options import (
    RUN_OPTIONS,
    TrainOptions,
    expect,
    from_mapping,
    given_options,
    option,
    read_config,
    write_config,
)
from onefold.jobs.run import Job
from tests.tables import for_each

each_job = for_each("job", [pytest.param(job, id=job.name) for job in JOBS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd(TrainOptions):
    colour: Literal["red", "blue"] | None = option(None, "Of the line.", shown="none")


def fields_of(*kinds: type) -> list[Any]:
    """Every option of every job whose type has one of these in it, as a case."""
    return [
        pytest.param(job, field.name, id=f"{job.name}-{field.name}")
        for job in JOBS
        for field in dataclasses.fields(job.options)
        if not kinds or set(kinds) & _types(typing.get_type_hints(job.options)[field.name])
    ]


def _types(hint: Any) -> set[Any]:
    return {hint, *typing.get_args(hint)}


def choices_of() -> list[Any]:
    """Every option of every job that is one of a few words, as a case."""
    return [
        pytest.param(job, name, typing.get_args(hint), id=f"{job.name}-{name}")
        for job in JOBS
        for name, hint in typing.get_type_hints(job.options).items()
        if typing.get_origin(hint) is Literal
    ]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@for_each(("job", "name"), fields_of())
def test_every_option_has_a_help_of_one_line_and_tells_its_default(job: Job, name: str) -> None:
    (field,) = [field for field in dataclasses.fields(job.options) if field.name == name]
    assert field.default is not dataclasses.MISSING
    told = field.metadata["help"]
    assert told == told.strip()
    assert told.endswith(".")
    assert "\n" not in told
    shown = field.metadata["shown"]
    assert str(field.default) if shown is None else shown
    assert field.default is not None or shown


@each_job
def test_the_defaults_are_in_range(job: Job) -> None:
    assert job.options() == from_mapping(job.options, {}, "here")


@for_each(("job", "name"), fields_of(int, float))
def test_every_number_but_the_seed_has_a_least_value(job: Job, name: str) -> None:
    if name == "seed":
        assert job.options(seed=-1).seed == -1
        return
    with pytest.raises(ValueError, match=f"^{flag(name)} -1: expected "):
        job.options(**{name: -1})


@for_each("value", [math.nan, math.inf, -math.inf])
@for_each(("job", "name"), fields_of(float))
def test_a_number_that_is_not_finite_is_refused(job: Job, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{flag(name)} {value}: expected a finite number"):
        job.options(**{name: value})


@for_each(("job", "name", "choices"), choices_of())
def test_a_word_that_is_no_choice_is_refused(job: Job, name: str, choices: tuple[str]) -> None:
    assert getattr(job.options(), name) in choices
    with pytest.raises(ValueError, match=f"here: {name}: expected {', '.join(choices)}, got 'odd'"):
        from_mapping(job.options, {name: "odd"}, "here")


@for_each(
    ("name", "value", "expected"),
    [
        ("shards", 0, "1 or more"),
        ("batch_size", 0, "1 or more"),
        ("base_batch_size", 0, "1 or more"),
        ("save_every", 0, "1 or more"),
        ("epochs", 0, "1 or more"),
        ("decay_epochs", 0, "1 or more"),
        ("lr", 0.0, "more than 0"),
        ("clip_norm", 0.0, "more than 0"),
        ("head_lr_scale", 0.0, "more than 0"),
        ("weight_decay", -0.1, "0 or more"),
        ("warmup_epochs", -0.5, "0 or more"),
        ("workers", -1, "0 or more"),
        ("momentum", 1.0, "0 or more and less than 1"),
        ("decay", 0.0, "more than 0 and at most 1"),
        ("decay", 1.1, "more than 0 and at most 1"),
        ("seed", 2**63, "a number of 64 bits"),
        ("name", "a/b", "a name without slashes"),
        ("name", "..", "a name without slashes"),
        ("name", ".", "a name without slashes"),
        ("name", "a/", "a name without slashes"),
    ],
)
@each_job
def test_an_option_out_of_range_is_refused_with_its_name_and_value(
    job: Job, name: str, value: object, expected: str
) -> None:
    words = re.escape(f"{flag(name)} {value}: expected {expected}")
    with pytest.raises(ValueError, match=f"^{words}$"):
        job.options(**{name: value})


@for_each(
    ("job", "values", "words"),
    [
        ("classify", {"holdout": 0.0}, "--holdout 0.0: expected more than 0 and less than 1"),
        ("classify", {"holdout": 1.0}, "--holdout 1.0: expected"),
        ("classify", {"least_area": 0.0}, "--least-area 0.0: expected more than 0, at most 1"),
        ("classify", {"label_smoothing": 1.0}, "--label-smoothing 1.0: expected 0 to below 1"),
        ("classify", {"image_size": 7}, "--image-size 7: expected 8 or more"),
        ("classify", {"model": "resnet7"}, "--model resnet7: expected lenet, .* or timm:NAME"),
        ("classify", {"reuse_classes": True}, "--reuse-classes: expected with --pretrained"),
        ("classify", {"pretrained_key": "a"}, "--pretrained-key: expected with --pretrained"),
        ("text", {"vocabulary": 260}, "--vocabulary 260: expected 261 or more"),
        ("text", {"max_length": 2}, "--max-length 2: expected 3 or more"),
        ("text", {"width": 30, "heads": 4}, "--width 30: expected a multiple of 4"),
        ("text", {"heads": 0}, "--heads 0: expected 1 or more"),
        ("text", {"dropout": 1.0}, "--dropout 1.0: expected 0 or more and less than 1"),
        ("text", {"token_dropout": 1.0}, "--token-dropout 1.0: expected"),
    ],
)
def test_a_jobs_own_option_out_of_range_is_refused(
    job: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        job_of(job).options(**values)


def test_an_option_without_a_value_is_told_without_one() -> None:
    with pytest.raises(ValueError, match=r"^--runs: expected the name of a folder$"):
        TrainOptions(runs="")
    with pytest.raises(ValueError, match=r"^--resume: expected with --name, which run it is$"):
        TrainOptions(resume=True)
    expect(True, "runs", "", "never said")


def test_the_folder_of_a_run_has_its_name() -> None:
    assert TrainOptions(runs="a/b", name="c").folder == Path("a/b/c")


@each_job
def test_what_may_change_when_a_run_goes_on_are_options(job: Job) -> None:
    assert {field.name for field in dataclasses.fields(job.options)} >= RUN_OPTIONS


@each_job
def test_a_name_that_is_no_option_is_refused_and_the_known_ones_told(job: Job) -> None:
    with pytest.raises(
        ValueError, match=r"^c\.toml: there is no option speed, Lr; known are "
    ) as no:
        from_mapping(job.options, {"speed": 1, "lr": 0.1, "Lr": 0.1}, "c.toml")
    listed = str(no.value).partition("known are ")[2].split(", ")
    assert listed == [field.name for field in dataclasses.fields(job.options)]


@for_each(
    ("name", "value", "expected"),
    [
        ("epochs", 1.0, "a whole number, got 1.0"),
        ("epochs", "3", "a whole number, got '3'"),
        ("epochs", True, "a whole number, got True"),
        ("shards", None, "a whole number, got None"),
        ("lr", "0.1", "a number, got '0.1'"),
        ("lr", False, "a number, got False"),
        ("data", 3, "text, got 3"),
        ("resume", 1, "true or false, got 1"),
        ("optimizer", "lion", "sgd, adam, adamw, got 'lion'"),
        ("optimizer", "\udce9", r"sgd, adam, adamw, got '\\udce9'"),
        ("optimizer", ["sgd"], r"sgd, adam, adamw, got \['sgd'\]"),
        ("freeze", "layer1", "a list of texts, got 'layer1'"),
        ("freeze", ["a", 2], r"a list of texts, got \['a', 2\]"),
        ("freeze_until", 4, "text, got 4"),
        ("weight_decay", {}, "a number, got {}"),
    ],
)
@each_job
def test_a_value_of_another_type_is_refused(
    job: Job, name: str, value: object, expected: str
) -> None:
    with pytest.raises(ValueError, match=rf"^c\.toml: {name}: expected {expected}$"):
        from_mapping(job.options, {name: value}, "c.toml")


@for_each(
    ("name", "value", "held"),
    [
        ("lr", 1, 1.0),
        ("clip_norm", None, None),
        ("warmup_epochs", 0, 0.0),
        ("freeze", ["a", "b.c"], ("a", "b.c")),
        ("freeze", [], ()),
        ("epochs", None, None),
        ("seed", -5, -5),
    ],
)
@each_job
def test_a_value_is_held_as_its_option_has_it(
    job: Job, name: str, value: object, held: object
) -> None:
    found = getattr(from_mapping(job.options, {name: value}, "c.toml"), name)
    assert (found, type(found)) == (held, type(held))


def test_a_choice_may_be_left_open() -> None:
    assert from_mapping(Odd, {"colour": "red"}, "here").colour == "red"
    assert from_mapping(Odd, {"colour": None}, "here").colour is None
    with pytest.raises(ValueError, match="expected red, blue, got 'green'"):
        from_mapping(Odd, {"colour": "green"}, "here")


@each_job
def test_a_config_file_has_the_names_of_the_options(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'job = "{job.name}"\nlr = 1\nepochs = 3\nfreeze = ["a", "b"]\nskip_bad = true\n'
        f'data = "träge/日本"\n',
        encoding="utf-8",
    )
    options = from_mapping(job.options, read_config(path, job.name), str(path))
    assert (options.lr, options.epochs, options.freeze) == (1.0, 3, ("a", "b"))
    assert (options.skip_bad, options.data) == (True, "träge/日本")


def test_a_config_file_need_not_say_its_job(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("lr = 0.5\n", encoding="utf-8")
    assert read_config(path, "text") == read_config(path, "classify") == {"lr": 0.5}


def test_a_config_file_of_another_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('job = "text"\n', encoding="utf-8")
    words = "expected options of onefold train classify, got those of text"
    with pytest.raises(ValueError, match=rf"c\.toml: {words}"):
        read_config(path, "classify")


@for_each(
    "content",
    [b"lr: 0.1\n", b'lr = "0.1\n', b"lr = 0.1\nlr = 0.2\n", b'data = "\xff"\n', b"[[["],
    ids=["yaml", "open", "twice", "bytes", "brackets"],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.toml: expected a TOML file: "):
        read_config(path, "text")


@for_each(
    "values",
    [
        {},
        {"freeze": ("conv1", "layer1"), "freeze_until": "layer2", "lr": 3e-05, "clip_norm": 2.0},
        {"data": 'a "b"\\c\n', "name": "é 1", "skip_bad": True, "seed": -(2**63), "decay": 1.0},
        {"warmup_epochs": 1e8, "weight_decay": 5e-324, "epochs": 10**6, "decay_epochs": 2},
    ],
    ids=["defaults", "lists", "texts", "numbers"],
)
@each_job
def test_saved_options_read_again_are_equal(
    job: Job, values: dict[str, Any], tmp_path: Path
) -> None:
    options = job.options(**values)
    write_config(options, job.name, tmp_path / "c.toml")
    again = from_mapping(job.options, read_config(tmp_path / "c.toml", job.name), "c.toml")
    assert again == options


def test_that_a_run_goes_on_is_not_saved(tmp_path: Path) -> None:
    options = TrainOptions(name="a", resume=True)
    write_config(options, "text", tmp_path / "c.toml")
    assert "resume" not in read_config(tmp_path / "c.toml", "text")
    assert given_options(options, ("resume", "runs")).keys().isdisjoint({"resume", "runs", "lr"})


@for_each("content", [b"a = " + b"[" * 20_000, b"seed = " + b"9" * 5000])
def test_a_config_without_end_is_one_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.toml: expected a TOML file"):
        read_config(path, "text")


def test_a_large_config_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ValueError, match=r"c\.toml: expected a file of at most 1,048,576 bytes"):
        read_config(path, "text")


@for_each("value", [math.inf, math.nan, 1e308, -1e308, 10**30, 10**400])
@for_each(("job", "name"), fields_of(int, float))
def test_numbers_out_of_all_bounds_are_refused(job: Job, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name.replace("_", "[-_]")) as caught:
        from_mapping(job.options, {name: value}, "options")
    assert "expected" in str(caught.value)


@for_each(
    ("job", "name", "value"),
    [
        ("classify", "workers", 10**6),
        ("classify", "batch_size", 10**12),
        ("classify", "epochs", 10**18),
        ("classify", "image_size", 10**6),
        ("classify", "lr", 1e308),
        ("segment", "crop", 10**6),
        ("segment", "width", 10**6),
        ("text", "max_length", 10**9),
        ("text", "layers", 10**6),
    ],
)
def test_more_than_any_machine_has_is_refused(job: str, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"--{name.replace('_', '-')} .*: expected .* or less"):
        from_mapping(job_of(job).options, {name: value}, "options")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    data=TEXTS,
    freeze=st.lists(TEXTS, max_size=3).map(tuple),
    freeze_until=st.none() | TEXTS,
    lr=st.none() | st.floats(0, 1e6, exclude_min=True),
    momentum=st.floats(0, 1, exclude_max=True),
    seed=st.integers(-(2**63), 2**63 - 1),
    epochs=st.none() | st.integers(1, 10**9),
)
def test_any_options_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, **values: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    options = TrainOptions(**values)
    write_config(options, "text", path)
    assert from_mapping(TrainOptions, read_config(path, "text"), str(path)) == options


@for_each("name", [job.name for job in JOBS])
def test_a_job_is_found_by_its_name(name: str) -> None:
    assert job_of(name).name == name


def test_an_unknown_job_is_refused_and_the_known_ones_told() -> None:
    known = ", ".join(job.name for job in JOBS)
    with pytest.raises(ValueError, match=f"there is no job poems: expected one of {known}$"):
        job_of("poems")
