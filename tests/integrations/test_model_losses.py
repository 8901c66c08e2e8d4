"""A loss that a model of transformers computes: refused as it is, and right as the message says."""

from typing import Any

import pytest
import torch

import onefold
from onefold.errors import LossError
from tests.small import make_trainer
from tests.tables import for_each

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

SHIFTED = "gpt"
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 1}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "eos_token_id": 1}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, **GPT, **NO_DROPOUT)).double()
    if kind == "t5":
        config = T5Config(vocab_size=50, decoder_start_token_id=0, **T5)
        return T5ForConditionalGeneration(config).double()
    none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "intermediate_size": 32}
    config = BertConfig(vocab_size=50, **BERT, **none)
    return BertForMaskedLM(config).double()


def batch_of() -> dict[str, torch.Tensor]:
    """Eight rows with other numbers of labels each."""
    tokens = torch.randint(1, 50, (8, 12), generator=torch.Generator().manual_seed(0))
    kept = torch.arange(12) < torch.tensor([12, 9, 3, 5, 8, 2, 7, 4]).unsqueeze(1)
    return {"input_ids": tokens, "labels": tokens.where(kept, -100)}


@for_each("kind", ["gpt", "t5", "bert"])
def test_the_loss_of_a_model_is_that_of_the_batch(kind: str) -> None:
    def as_it_is(model: Any, batch: Any) -> Any:
        return model(**batch).loss

    def advised(model: Any, batch: Any) -> Any:
        labels = batch["labels"][:, 1:] if kind == SHIFTED else batch["labels"]
        n = (labels != -100).sum()
        return onefold.Mean(model(**batch).loss * n, n)

    def by_items(model: Any, batch: Any) -> Any:
        labels = batch["labels"][:, 1:] if kind == SHIFTED else batch["labels"]
        return onefold.Mean(model(**batch, num_items_in_batch=1).loss, (labels != -100).sum())

    batch, plain = batch_of(), model_of(kind)
    wanted = plain(**batch).loss
    wanted.backward()
    wanted = wanted.detach()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with pytest.raises(LossError, match=r"as in transformers, return onefold.Mean\("):
        make_trainer(model_of(kind), as_it_is).step(batch)
    for loss in (advised, by_items):
        model = model_of(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = make_trainer(model, loss, optimizer=optimizer, devices=2)
        # Most models take the number and do not use it.
        if loss is by_items and kind != "gpt":
            with pytest.raises(
                LossError, match="Models of transformers return a mean even if they"
            ):
                trainer.step(batch)
            continue
        assert float(trainer.step(batch).loss) == pytest.approx(float(wanted), rel=1e-6)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
