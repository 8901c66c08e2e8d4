import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.jobs.classifier import SHOWN, choose_examples


@st.composite
def answers(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels, what was predicted, and how sure it was; often equally sure."""
    count = draw(st.integers(1, 90))
    labels = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    sure = st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.0]), min_size=count, max_size=count)
    return torch.tensor(draw(labels)), torch.tensor(draw(labels)), torch.tensor(draw(sure))


@settings(max_examples=40)
@given(answers())
def test_samples_are_from_all_over_and_the_worst_surest(given_: tuple[torch.Tensor, ...]) -> None:
    truth, predicted, sure = given_
    samples, worst = choose_examples(*given_)
    count = len(truth)
    assert len(samples) == min(SHOWN, count)
    assert samples == sorted(set(samples))
    assert all(0 <= number < count for number in samples)
    gaps = [second - first for first, second in zip([*samples], [*samples[1:], count], strict=True)]
    assert max(gaps) - min(gaps) <= 1
    wrong = [number for number in range(count) if truth[number] != predicted[number]]
    assert worst == sorted(wrong, key=lambda number: (-float(sure[number]), number))[:SHOWN]
