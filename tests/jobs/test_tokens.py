import json
from typing import Any

import pytest
import torch

from onefold_jobs import text_models as tokens
from onefold_jobs.text_models import EncodedTexts, encode_texts, train_tokenizer
from tests.capabilities import needs_text
from tests.jobs.sentences import TEXTS, VOCABULARY_SIZE

needs_text()
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return train_tokenizer(TEXTS, VOCABULARY_SIZE)


def test_the_same_texts_give_the_same_tokenizer_in_any_order(tokenizer: str) -> None:
    vocabulary = json.loads(tokenizer)["model"]["vocab"]
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    assert {name: vocabulary[name] for name in tokens.SPECIAL_TOKENS} == special
    assert (tokens.PAD_ID, tokens.MASK_ID) == (1, 4)
    assert len(vocabulary) == VOCABULARY_SIZE
    assert train_tokenizer(TEXTS[::-1], VOCABULARY_SIZE) == tokenizer
    # Ties are always broken alike.
    pairs = [first + second for first in "abcdefgh" for second in "abcdefgh"]
    assert len({train_tokenizer(pairs[turn:] + pairs[:turn], 280) for turn in range(20)}) == 1


def test_encoded_texts_decode_to_themselves_and_are_cut_before_their_end(tokenizer: str) -> None:
    texts = [*TEXTS[:3], "never seen: 漢字 🙂", " spaces  and\ttabs ", "a </s> b <mask>"]
    decoder = tokenizers.Tokenizer.from_str(tokenizer)
    for text, ids in zip(texts, encode_texts(texts, tokenizer, max_length=99), strict=True):
        assert (ids.dtype, ids[0].item(), ids[-1].item()) == (torch.int64, 0, 2)
        assert ids[1:-1].min() > tokens.MASK_ID  # special tokens in a text are text
        assert decoder.decode(ids.tolist()) == text
        for length in (3, 5):
            (cut,) = encode_texts([text], tokenizer, max_length=length)
            assert cut.tolist() == [*ids[: length - 1].tolist(), 2]


def test_token_dropout_masks_its_share_and_nothing_special() -> None:
    ids = torch.cat([torch.arange(5), torch.full((20_000,), 9), torch.arange(5)])
    texts = EncodedTexts([ids], [0], token_dropout=0.25)
    torch.manual_seed(0)
    first, second = texts[0][0], texts[0][0]
    torch.manual_seed(0)
    assert torch.equal(first, texts[0][0])
    assert not torch.equal(first, second)
    assert (first[5:-5] == tokens.MASK_ID).float().mean() == pytest.approx(0.25, abs=0.02)
    assert ((first == ids) | (first == tokens.MASK_ID)).all()
    assert first[:5].tolist() == first[-5:].tolist() == list(range(5))
    assert (ids[5:-5] == 9).all()
    ids = torch.tensor([101, *[4, 5] * 50, 102])
    others: Any = {"mask_id": 103, "special_ids": {101, 102}, "token_dropout": 0.99}
    read = EncodedTexts([ids], [0], **others)[0][0].tolist()
    assert (read[0], read[-1]) == (101, 102)
    assert read.count(103) > 80
