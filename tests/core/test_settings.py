"""The fields of `Settings` say what devices compare, what checkpoints hold, and what may change."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.checkpoint.manifest import check_run
from onefold.checks.description import compare
from onefold.core.settings import (
    ALLOWED_AS,
    AS_GIVEN,
    COSTS,
    PROMISES,
    LossScale,
    Precision,
    Settings,
)
from onefold.errors import DisagreementError
from tests.checks.test_description import said
from tests.step.assembled import settings_of

GUIDES = Path(__file__).parents[2] / "docs" / "do"


@dataclass(frozen=True, slots=True, kw_only=True)
class More(Settings):
    """With a setting whose field says nothing."""

    smoothing: float = 0.0


def test_only_these_are_not_compared_or_not_saved() -> None:
    settings = settings_of()
    names, compared, saved = (
        {each.name for each in fields(Settings)},
        settings.compared(),
        settings.saved(),
    )
    assert saved.keys() <= compared.keys(), "a checkpoint holds what is the same on all devices"
    # Devices compare the number of threads that PyTorch has.
    assert names - compared.keys() == {"timeout_s", "threads", "graphs"}
    # When the scheduler is stepped is saved with it.
    of_devices = {"on_nonfinite", "deterministic", "buffers", "scheduler_every"}
    assert compared.keys() - saved.keys() == of_devices


def test_values_are_plain() -> None:
    settings = settings_of(precision=AS_GIVEN, buffers={"*": "max"})
    assert json.loads(json.dumps(settings.compared())) == settings.compared()


def test_a_new_setting_is_compared_and_saved() -> None:
    given: dict[str, Any] = {
        each.name: getattr(settings_of(), each.name) for each in fields(Settings)
    }
    one, other = (More(**given, smoothing=value) for value in (0.0, 0.1))
    assert one.saved() == {**settings_of().saved(), "smoothing": 0.0}
    both = [{key: str(value) for key, value in each.compared().items()} for each in (one, other)]
    with pytest.raises(DisagreementError, match=r"^smoothing is 0\.0 on device 0 and 0\.1 on"):
        compare([json.dumps(each).encode() for each in both])
    assert settings_of().compared().keys() <= said().keys(), "devices compare these"


def test_a_saved_setting_has_a_name_a_price_and_a_check() -> None:
    assert ALLOWED_AS.keys() == settings_of().saved().keys()
    assert set(ALLOWED_AS.values()) == COSTS.keys() <= PROMISES.keys()
    guides = " ".join(path.read_text() for path in GUIDES.glob("*.md"))
    assert [name for name in COSTS if name not in guides] == []
    with pytest.raises(ValueError, match="is missing"):
        check_run({})


# What each precision stands for


def test_other_names_are_refused() -> None:
    for name in ("", "float16", "fp16-", "BF16"):
        with pytest.raises(ValueError, match='precision must be one of "fp32", "bf16"'):
            Precision(name)  # type: ignore[arg-type]


def test_a_scale_doubles_after_two_thousand_good_steps_and_an_overflow_halves_it() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale = scale.after(overflow=False)
        assert scale.value == 2.0**16
    assert scale.after(overflow=False) == LossScale(2.0**17, 0)
    assert scale.after(overflow=True) == LossScale(2.0**15, 0)


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 32))
def test_a_scale_is_a_power_of_two(overflows: list[bool], first: int) -> None:
    scale = LossScale(2.0**first, 1990)
    for overflow in overflows:
        before, scale = scale, scale.after(overflow=overflow)
        assert math.frexp(scale.value)[0] == 0.5
        assert 1.0 <= scale.value <= 2.0**32
        assert before.can_shrink == (before.value > 1.0)
        assert not overflow or scale == LossScale(max(before.value / 2, 1.0))
