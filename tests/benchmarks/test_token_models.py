from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
from torch import nn

import token_models
from token_models import LSTMClassifier, TransformerClassifier

pytestmark = pytest.mark.full

TOKENS = torch.arange(3 * 12).view(3, 12) % 50

MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: TransformerClassifier(
        vocabulary=50, width=16, layers=2, length=12, num_classes=7
    ),
    "lstm": lambda: LSTMClassifier(vocabulary=50, width=16, num_classes=7),
}
each = pytest.mark.parametrize("name", MODELS)


@each
def test_logits_have_one_row_a_sample_and_one_column_a_class(name: str) -> None:
    logits = MODELS[name]()(TOKENS)
    assert logits.shape == (3, 7)
    assert logits.dtype == torch.float32


@each
def test_every_parameter_takes_part(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    model(TOKENS).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@each
def test_the_same_seed_builds_the_same_model(name: str) -> None:
    logits = []
    for _ in range(2):
        torch.manual_seed(0)
        logits.append(MODELS[name]().eval()(TOKENS))
    assert torch.equal(*logits)


@each
def test_dropout_acts_in_training_only(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    assert not torch.equal(model(TOKENS), model(TOKENS))
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))


def test_one_lstm_layer_has_nothing_to_drop_between_layers() -> None:
    # PyTorch warns of dropout between the layers of an LSTM of one layer; warnings are errors here.
    assert LSTMClassifier(width=8, layers=1, dropout=0.5).lstm.dropout == 0.0


def test_the_transformer_tells_orders_of_the_same_tokens_apart() -> None:
    torch.manual_seed(0)
    model = MODELS["transformer"]().eval()
    assert not torch.allclose(model(TOKENS), model(TOKENS.flip(1)), atol=1e-3)


def test_the_examples_run() -> None:
    results = doctest.testmod(token_models)
    assert results.attempted
    assert not results.failed
