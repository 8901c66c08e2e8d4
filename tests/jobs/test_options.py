"""What options and their files take; each option once, in the class that declares it."""

import dataclasses
import itertools
import math
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold_jobs.catalog import JOBS
from onefold_jobs.options import (
    ScaleRate,
    TrainOptions,
    from_mapping,
    full_rate,
    make_optimizer,
    option,
    rate_factor,
    read_config,
    scaled_rate,
    write_config,
)
from onefold_jobs.run import MAY_CHANGE
from tests.jobs.tiny import job_of
from tests.tables import for_each

SEGMENT, TEXT, CLASSIFY = (job_of(name).options for name in ("segment", "text", "classify"))


def declared() -> Iterator[tuple[type[Any], dataclasses.Field[Any], Any]]:
    """Every option with its type, once for all jobs that have the same."""
    seen = set()
    kinds: list[type[Any]] = [TrainOptions, *(job.options for job in JOBS)]
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            same = (field.name, str(field.default), str(field.metadata), hints[field.name])
            if same not in seen:
                yield kind, field, hints[field.name]
            seen.add(same)


DECLARED = list(declared())
NUMBERS = [
    (kind, field)
    for kind, field, hint in DECLARED
    if {int, float} & {hint, *typing.get_args(hint)} and field.name != "seed"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd(TrainOptions):
    color: Literal["red", "blue"] | None = option(None, "Of the line.", shown="none")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@for_each(("kind", "field"), NUMBERS)
def test_every_number_has_its_bounds(kind: type[Any], field: dataclasses.Field[Any]) -> None:
    most = field.metadata["limits"].get("most")
    for value in (-1, 1e308, 10**400, 1e308 if most is None else max(most + 1, most * (1 + 1e-9))):
        with pytest.raises(ValueError, match=rf"^{flag(field.name)} .*: expected "):
            kind(**{field.name: value})
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"^{flag(field.name)} {value}: expected a finite num"):
            kind(**{field.name: value})


COUNTS = "shards batch_size base_batch_size save_every epochs decay_epochs"
POSITIVE = "more than 0"
SHARE, BELOW_1 = "more than 0 and less than 1", "0 or more and less than 1"


REFUSED: list[tuple[type[Any], str, list[Any], str]] = [
    (TrainOptions, COUNTS, [0], "1 or more"),
    (TrainOptions, "lr clip_norm head_lr_scale", [0.0], POSITIVE),
    (TrainOptions, "momentum", [1.0], BELOW_1),
    (TrainOptions, "decay", [0.0, 1.1], "more than 0 and at most 1"),
    (TrainOptions, "seed", [2**63], "a 64-bit integer"),
    (
        TrainOptions,
        "placement",
        ["spam"],
        "placement must be one of replicate, replicate:state .*, offload, but got 'spam'$",
    ),
    (TrainOptions, "runs", [""], "a folder name"),
    (TrainOptions, "name", ["a/b", "..", "a/"], "a name without slashes"),
    (CLASSIFY, "holdout", [0.0, 1.0], SHARE),
    (CLASSIFY, "least_area", [0.0], "more than 0 and at most 1"),
    (CLASSIFY, "label_smoothing", [1.0], BELOW_1),
    (CLASSIFY, "image_size", [7], "8 or more"),
    (CLASSIFY, "model", ["resnet7"], "lenet, .* or timm:NAME"),
    (SEGMENT, "holdout threshold", [0.0, 1.0], SHARE),
    (SEGMENT, "jitter", [1.0], BELOW_1),
    (SEGMENT, "width", [7], "an even number"),
    (SEGMENT, "crop", [31], "32 or more"),
    (SEGMENT, "evaluation_batch_size", [0], "1 or more"),
    (SEGMENT, "pos_weight", ["0", "nan", "inf", "many"], "auto, or a number above 0 and at"),
    (SEGMENT, "foreground", [("red",)], "pixel values of the masks"),
    (TEXT, "vocabulary", [260], "261 or more"),
    (TEXT, "max_length", [2], "3 or more"),
    (TEXT, "width", [30], "a multiple of 4"),
    (TEXT, "heads", [0], "1 or more"),
    (TEXT, "dropout token_dropout label_smoothing", [1.0], BELOW_1),
]


@for_each(("kind", "names", "values", "words"), REFUSED)
def test_an_option_out_of_range_is_refused(kind: Any, names: str, values: Any, words: str) -> None:
    for name, value in itertools.product(names.split(), values):
        told = f"{flag(name)} {value[0] if isinstance(value, tuple) else value}".rstrip()
        expected = words if " must be " in words else f"expected {words}"
        with pytest.raises(ValueError, match=f"^{re.escape(told)}: {expected}"):
            kind(**{name: value})


@for_each(
    ("name", "meant"),
    [
        ("xyz", ""),
        ("batchsize", "; did you mean batch_size?"),
        ("early_stopping", "; did you mean patience?"),
        ("learning_rate", "; did you mean lr?"),
    ],
)
def test_a_name_that_is_no_option_is_refused_and_similar_ones_told(name: str, meant: str) -> None:
    words = re.escape(f"c.toml: there is no option {name}{meant}")
    with pytest.raises(ValueError, match=f"^{words}$"):
        from_mapping(TEXT, {name: 1, "lr": 0.1}, "c.toml")
    names = {field.name for kind in (TEXT, CLASSIFY) for field in dataclasses.fields(kind)}
    assert names >= MAY_CHANGE


@for_each(
    ("value", "read"),
    [
        *[("auto", ("auto",)), ("a=1, b", ("a=1", "b")), (["a,b", "c"], ("a,b", "c")), ("", ())],
        *[(255, ("255",)), ([1, "2"], ("1", "2")), ((0.5,), ("0.5",))],
    ],
)
def test_a_list_is_given_as_on_the_command_line_too(value: object, read: Any) -> None:
    assert from_mapping(Odd, {"freeze": value}, "options").freeze == read
    assert from_mapping(Odd, {"microbatch": 4}, "options").microbatch == "4"


WHOLE, NUMBER, FEW, LIST = "a whole number", "a number", "sgd, adam, adamw", "a list of texts"
TYPES = [("epochs", 1.0, WHOLE), ("epochs", "3", WHOLE), ("epochs", True, WHOLE)]
TYPES += [
    ("shards", None, WHOLE),
    ("lr", "0.1", f"{NUMBER} or auto"),
    ("lr", False, f"{NUMBER} or auto"),
]
TYPES += [("weight_decay", {}, NUMBER), ("data", [3], "text"), ("freeze_until", True, "text")]
TYPES += [("resume", 1, "true or false"), ("optimizer", ["sgd"], FEW), ("optimizer", "\udce9", FEW)]
TYPES += [("freeze", True, LIST), ("freeze", ["a", None], LIST), ("color", "green", "red, blue")]


@for_each(("name", "value", "expected"), TYPES)
def test_a_value_of_another_type_is_refused(name: str, value: object, expected: str) -> None:
    words = rf"^c\.toml: {name}: expected {expected}, got {re.escape(repr(value))}$"
    with pytest.raises(ValueError, match=words):
        from_mapping(Odd, {name: value}, "c.toml")


FILES = [(b"lr: 0.1\n", "a TOML file: "), (b"lr = 0.1\nlr = 0.2\n", "a TOML file: ")]
FILES += [(b'data = "\xff"\n', "a TOML file: "), (b"seed = " + b"7" * 5000, "a TOML file: ")]
FILES += [(b"a = " + b"[" * 50_000, "a TOML file: it is nested too deeply")]
FILES += [(b"data" + b".a" * 500_000 + b" = 1", "a TOML file: it is nested too deeply")]
FILES += [(b"data" + b".a" * 5000 + b" = 1", "a TOML file: it is nested too deeply")]
FILES += [(b"#" * (2 << 20), "a file of at most 1,048,576 bytes")]


@for_each(("content", "expected"), FILES)
def test_a_file_of_no_run_is_one_error(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(ValueError, match=rf"c\.toml: expected {expected}"):
        read_config(tmp_path / "c.toml", "text")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    data=TEXTS,
    freeze=st.lists(TEXTS, max_size=3).map(tuple),
    freeze_until=st.none() | TEXTS,
    lr=st.none() | st.floats(0, 1e6, exclude_min=True),
    momentum=st.floats(0, 1, exclude_max=True),
    seed=st.integers(-(2**63), 2**63 - 1),
    epochs=st.none() | st.integers(1, 10**9),
    skip_bad=st.booleans(),
)
def test_saved_options_come_back(tmp_path_factory: pytest.TempPathFactory, **values: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    for job in JOBS:
        options = job.options(**values, name="é 1")
        write_config(dataclasses.replace(options, resume=True), job.name, path)
        with pytest.raises(ValueError, match=f"options of onefold train x, not of {job.name}"):
            read_config(path, "x")
        saved = read_config(path, job.name)
        assert from_mapping(job.options, saved, str(path)) == options


HALF = math.sqrt(2) / 2
COSINE = [(1 + HALF) / 2, 0.75, 0.5, 0.25, (1 - HALF) / 2]


STEP, STAYS = {"schedule": "step"}, {"schedule": "constant"}
VALUES: list[tuple[dict[str, Any], int, int, list[float]]] = [
    ({"schedule": "cosine"}, 1, 4, [1.0, COSINE[0], 0.5, COSINE[4], 0.0]),
    ({"warmup_epochs": 1.0}, 2, 4, [0.2, 0.4, 0.6, 0.8, 1.0, COSINE[0], 0.5, COSINE[4], 0.0]),
    ({**STEP, "decay": 0.5, "decay_epochs": 2}, 3, 2, [1.0] * 4 + [0.5] * 3),
    # A warm-up does not put the decay off, and may take a fraction of a step.
    ({**STEP, "decay_epochs": 1, "warmup_epochs": 1.0}, 2, 2, [1 / 3, 2 / 3, 0.1, 0.1, 0.01]),
    ({**STAYS, "warmup_epochs": 1}, 3, 2, [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ({**STAYS, "warmup_epochs": 0.25}, 1, 6, [0.4, 0.8] + [1.0] * 5),
]
# By itself the rate decays after a third of the epochs.
VALUES += [
    (STEP, epochs, 1, [0.1 ** (done // every) for done in range(epochs + 1)])
    for epochs, every in ((9, 3), (10, 3), (3, 1), (2, 1), (1, 1))
]


@for_each(("chosen", "epochs", "steps", "expected"), VALUES)
def test_a_schedule_has_these_values(chosen: Any, epochs: int, steps: int, expected: Any) -> None:
    options = TrainOptions(**{"warmup_epochs": 0, **chosen})
    factor = rate_factor(options, epochs=epochs, steps=steps)
    found = [factor(done) for done in range(epochs * steps + 1)]
    assert found == pytest.approx(expected, abs=1e-12)


SCALED: list[tuple[ScaleRate, int, int, float]] = [("none", 1024, 256, 0.5)]
SCALED += [("linear", 1024, 256, 2.0), ("linear", 16, 256, 0.03125), ("linear", 96, 32, 1.5)]
SCALED += [("sqrt", 1024, 256, 1.0), ("sqrt", 16, 256, 0.125)]


@for_each(("rule", "batch_size", "base", "rate"), SCALED)
def test_the_batch_size_scales(rule: Any, batch_size: int, base: int, rate: float) -> None:
    chosen = TrainOptions(lr=0.5, scale_lr=rule, batch_size=batch_size, base_batch_size=base)
    assert scaled_rate(chosen) == rate


@for_each(("name", "decay"), [("sgd", 5e-4), ("adam", 5e-4), ("adamw", 0.01)])
def test_the_decay_suits_the_optimizer(name: Any, decay: float) -> None:
    made = make_optimizer(TrainOptions(optimizer=name), [{"params": [torch.zeros(2)], "lr": 0.5}])
    assert made.param_groups[0]["weight_decay"] == decay


RATES: list[tuple[str, bool, bool, float]] = [
    ("sgd", False, True, 0.05), ("sgd", True, False, 0.01), ("adamw", False, False, 0.001),
    ("adamw", True, False, 0.0002), ("adamw", False, True, 0.003), ("adamw", True, True, 0.0006),
]  # fmt: skip


@for_each(("name", "fine", "small", "rate"), RATES)
def test_the_rate_suits_optimizer_and_model(name: Any, fine: Any, small: Any, rate: float) -> None:
    found = full_rate(TrainOptions(optimizer=name), fine=fine, small=small)
    assert found == pytest.approx(rate)
    assert full_rate(TrainOptions(optimizer=name, lr=0.5), fine=fine, small=small) == 0.5


def test_an_optimizer_gets_what_was_chosen() -> None:
    for name, kind, rate in (("sgd", torch.optim.SGD, 0.05), ("adamw", torch.optim.AdamW, 1e-3)):
        options = TrainOptions(optimizer=name, momentum=0.75, weight_decay=0.125)  # type: ignore[arg-type]
        assert scaled_rate(options) == rate
        optimizer = make_optimizer(options, [{"params": [torch.zeros(2)], "lr": 0.5}])
        (group,) = optimizer.param_groups
        assert type(optimizer) is kind
        assert (group["lr"], group["weight_decay"], group.get("momentum", 0.75)) == (
            0.5,
            0.125,
            0.75,
        )
