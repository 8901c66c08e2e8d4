from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from onefold.errors import LaunchError
from onefold.jobs import tokens
from onefold.jobs.text_models import load_pretrained
from onefold.jobs.tokens import EncodedTexts, encode_texts, pad_shard, train_tokenizer
from tests.jobs.sentences import TEXTS, VOCABULARY_SIZE, small
from tests.tables import for_each

NEEDS = 'needs pip install "onefold[text]"'
tokenizers = pytest.importorskip("tokenizers", reason=NEEDS)
# Some of what it imports sets variables of the environment: here, before any test looks.
roberta = pytest.importorskip("transformers.models.roberta.modeling_roberta", reason=NEEDS)

TRAIN_ELSEWHERE = """
import json, sys
from onefold.jobs.tokens import train_tokenizer
sys.stdout.write(train_tokenizer(json.load(sys.stdin), 300))
"""


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return train_tokenizer(TEXTS, VOCABULARY_SIZE)


def test_special_tokens_come_first(tokenizer: str) -> None:
    vocabulary = json.loads(tokenizer)["model"]["vocab"]
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    assert {name: vocabulary[name] for name in tokens.SPECIAL_TOKENS} == special
    assert (tokens.PAD_ID, tokens.MASK_ID) == (1, 4)
    assert len(vocabulary) == VOCABULARY_SIZE


def test_training_again_gives_the_same(tokenizer: str) -> None:
    assert train_tokenizer(TEXTS, VOCABULARY_SIZE) == tokenizer


def test_the_order_of_the_texts_does_not_matter(tokenizer: str) -> None:
    assert train_tokenizer(TEXTS[::-1], VOCABULARY_SIZE) == tokenizer


def test_ties_are_always_broken_alike() -> None:
    pairs = [first + second for first in "abcdefgh" for second in "abcdefgh"]
    trained = {train_tokenizer(pairs[turn:] + pairs[:turn], 280) for turn in range(20)}
    assert len(trained) == 1


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "settings",
    [{"RAYON_NUM_THREADS": "5"}, {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "7"}],
    ids=["five threads", "one thread"],
)
def test_another_process_trains_the_same(tokenizer: str, settings: dict[str, str]) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", TRAIN_ELSEWHERE],
        input=json.dumps(TEXTS),
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert answer.stdout == tokenizer
    assert answer.stderr == ""


def test_encoded_texts_decode_to_themselves(tokenizer: str) -> None:
    texts = [*TEXTS[:3], "never seen: 漢字 🙂", " spaces  and\ttabs "]
    decoder = tokenizers.Tokenizer.from_str(tokenizer)
    for text, ids in zip(texts, encode_texts(texts, tokenizer, max_length=99), strict=True):
        assert (ids.dtype, ids[0].item(), ids[-1].item()) == (torch.int64, 0, 2)
        assert ids[1:-1].min() > tokens.MASK_ID
        assert decoder.decode(ids.tolist()) == text


def test_special_tokens_in_a_text_are_text(tokenizer: str) -> None:
    (ids,) = encode_texts(["a </s> b <mask>"], tokenizer, max_length=99)
    assert ids[1:-1].min() > tokens.MASK_ID


@pytest.mark.parametrize("max_length", [3, 5])
def test_long_texts_are_cut_and_keep_their_end(tokenizer: str, max_length: int) -> None:
    (whole,), (cut,) = (
        encode_texts([TEXTS[0]], tokenizer, max_length=length) for length in (99, max_length)
    )
    assert cut.tolist() == [*whole[: max_length - 1].tolist(), 2]


@for_each(
    ("texts", "vocabulary_size", "complaint"),
    [
        (["a"], 260, "expected a vocabulary of 261 tokens or more .*, got 260"),
        ([], 300, "expected texts .* got none"),
    ],
)
def test_what_no_tokenizer_comes_of_is_refused(
    texts: list[str], vocabulary_size: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        train_tokenizer(texts, vocabulary_size)


def test_texts_without_room_for_a_token_are_refused(tokenizer: str) -> None:
    with pytest.raises(ValueError, match="expected max_length of 3 or more, got 2"):
        encode_texts(["a"], tokenizer, max_length=2)


# The data set and its shards.


def test_items_are_ids_and_label() -> None:
    ids = [torch.tensor([0, 9, 8, 2]), torch.tensor([0, 7, 2])]
    texts = EncodedTexts(ids, [1, 0])
    assert len(texts) == 2
    assert texts[0] == (ids[0], 1)
    assert (texts.lengths.tolist(), texts.lengths.dtype) == ([4, 3], torch.int64)


def test_token_dropout_masks_its_share_and_nothing_special() -> None:
    ids = torch.cat([torch.arange(5), torch.full((20_000,), 9), torch.arange(5)])
    texts = EncodedTexts([ids], [0], token_dropout=0.25)
    torch.manual_seed(0)
    first, second = texts[0][0], texts[0][0]
    torch.manual_seed(0)
    again = texts[0][0]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert (first[5:-5] == tokens.MASK_ID).float().mean() == pytest.approx(0.25, abs=0.02)
    assert ((first == ids) | (first == tokens.MASK_ID)).all()
    assert first[:5].tolist() == first[-5:].tolist() == list(range(5))
    assert (ids[5:-5] == 9).all()


def test_other_special_tokens_can_be_named() -> None:
    texts = EncodedTexts(
        [torch.tensor([101, 4, 5, 102])] * 50, [0] * 50,
        token_dropout=0.99, mask_id=103, special_ids={101, 102},
    )  # fmt: skip
    read = torch.stack([texts[number][0] for number in range(50)])
    assert read[:, [0, 3]].unique().tolist() == [101, 102]
    assert (read[:, 1:3] == 103).float().mean() > 0.8


def test_without_token_dropout_nothing_is_drawn() -> None:
    texts = EncodedTexts([torch.tensor([0, 9, 2])], [0])
    before = torch.get_rng_state()
    assert texts[0][0].tolist() == [0, 9, 2]
    assert torch.equal(torch.get_rng_state(), before)


@for_each(
    ("labels", "token_dropout", "complaint"),
    [
        ([0, 1], 0.0, "a label for each text, got 2 for 1"),
        ([0], 1.0, "token_dropout from 0 to below 1, got 1.0"),
        ([0], -0.1, "token_dropout from 0 to below 1, got -0.1"),
    ],
)
def test_texts_that_do_not_fit_are_refused(
    labels: list[int], token_dropout: float, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        EncodedTexts([torch.tensor([0, 2])], labels, token_dropout=token_dropout)


@for_each("pad_id", [1, 0])
def test_a_shard_is_as_long_as_its_longest_text(pad_id: int) -> None:
    made = pad_shard([(torch.tensor([0, 2]), 3), (torch.tensor([0, 9, 9, 2]), 1)], pad_id)
    assert made["input_ids"].tolist() == [[0, 2, pad_id, pad_id], [0, 9, 9, 2]]
    assert made["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert made["labels"].tolist() == [3, 1]
    assert {tensor.dtype for tensor in made.values()} == {torch.int64}


@for_each(
    "call",
    [
        pytest.param(lambda: train_tokenizer(["a"], 300), id="train_tokenizer"),
        pytest.param(lambda: encode_texts(["a"], "{}", max_length=9), id="encode_texts"),
        pytest.param(small, id="build_classifier"),
        pytest.param(lambda: load_pretrained("nowhere", 2), id="load_pretrained"),
    ],
)
def test_missing_packages_are_named(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r'ers\); run: pip install "onefold\[text\]"'):
        call()
