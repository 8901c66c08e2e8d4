"""What is made of the times of the exchanges."""

from __future__ import annotations

import pytest

from exchange import AMOUNTS, GLOO, Amount, Found, roster_of, show, storage_of, summary
from measure import spread

pytestmark = pytest.mark.full


def found(**times_us: list[float]) -> Found:
    """Measurements of the given exchanges, and of gloo's, on a quiet machine."""
    rounds = len(next(iter(times_us.values())))
    return Found(times_us={**times_us, GLOO: [20.0] * rounds}, others_cores=0.0)


def test_summary_compares_with_gloo_round_by_round() -> None:
    shown = summary(AMOUNTS[0], found(shared=[2.0, 4.0, 1.0]))
    assert shown["microseconds"]["shared"] == spread([1.0, 2.0, 4.0])
    assert shown["times_as_fast_as_gloo"] == {"shared": spread([5.0, 10.0, 20.0])}


@pytest.mark.parametrize("amount", AMOUNTS, ids=lambda amount: amount.title)
def test_storage_holds_the_amount_and_both_processes_add_up_some(amount: Amount) -> None:
    storage = storage_of(amount)
    # Without what lies between tensors.
    assert 4 * sum(entry.numel for entry in storage.gradients.entries) == amount.size_bytes
    assert all(len(span) for span in roster_of(storage).spans)


def test_every_exchange_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show([summary(AMOUNTS[1], found(shared=[2.5]))])
    shown = capsys.readouterr().out
    for text in (AMOUNTS[1].title, "shared", "2.5 (2.5-2.5)", "8.00 (8.00-8.00)", GLOO):
        assert text in shown
