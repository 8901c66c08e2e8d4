"""What a machine can do: tests ask here, and skip by name what is missing."""

import functools

import pytest
import torch

__all__ = ["NO_LSTM", "has_lstm", "needs_text"]

NO_LSTM = "PyTorch has no LSTM in low precision for this processor, as without AVX-512"


@functools.cache
def has_lstm(dtype: torch.dtype) -> bool:
    """Whether autocast can compute an LSTM in a dtype, on this processor."""
    try:
        # In one thread, and from a generator that is put back: this may run inside of any test.
        with torch.random.fork_rng([]), torch.autocast("cpu", dtype):
            torch.nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        return False
    return True


def needs_text() -> None:
    """Skip the test module that calls this where the packages of texts are not installed.

    Some of what they import sets variables of the environment: here, before any test looks.
    """
    for name in ("tokenizers", "transformers.models.roberta.modeling_roberta"):
        pytest.importorskip(name, reason='needs pip install "onefold-jobs[text]"')
