"""Tokenizers, texts as token ids, and shards of them.

The package ``tokenizers`` (extra ``[text]``) is imported only where it is used: neither reading
encoded texts nor making shards of them needs it.

Note: the same tokenizer everywhere
-----------------------------------
Every device may train the tokenizer by itself. Counting runs on several threads and goes through
hash tables in no particular order, but only whole numbers are added up, the base alphabet is all
256 bytes in a fixed order, and of pairs with equal counts the one with the lower ids is merged
first. What would depend on the order of a hash table are the ids of pieces with a prefix or suffix
of their own ("##ing"): none are used here. The order of the texts does not matter either.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from onefold.errors import LaunchError

__all__ = [
    "PAD_ID",
    "EncodedTexts",
    "encode_texts",
    "pad_shard",
    "require",
    "token_roles",
    "train_tokenizer",
]

# In the order of RoBERTa's own vocabulary: its configuration has these numbers as defaults.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""The special tokens of a trained tokenizer; their ids are their places here."""
START_ID, PAD_ID, END_ID, _, MASK_ID = range(len(SPECIAL_TOKENS))

_SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256


def train_tokenizer(texts: Sequence[str], vocabulary_size: int) -> str:
    """Train a byte-level BPE tokenizer, which has a token for every byte and so for every text.

    The same texts give the same tokenizer, on any number of threads and in any process.

    Args:
        texts: of the training set.
        vocabulary_size: tokens at most, with the 5 of `SPECIAL_TOKENS` and the 256 bytes; fewer if
            the texts give fewer.

    Returns:
        The tokenizer as JSON, for `encode_texts`.

    Raises:
        LaunchError: ``tokenizers`` is not installed.
        ValueError: the vocabulary is too small, or there are no texts.

    Source: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, 2016;
    over bytes: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """
    require("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocabulary_size < _SMALLEST_VOCABULARY:
        raise ValueError(
            f"expected a vocabulary of {_SMALLEST_VOCABULARY} tokens or more (the bytes and the "
            f"special tokens), got {vocabulary_size}"
        )
    if not texts:
        raise ValueError("expected texts to train a tokenizer on, got none")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", START_ID), ("</s>", END_ID)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        # Sorted, as the library gives it in no particular order, and ids follow this one.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    trained: str = tokenizer.to_str()
    return trained


def encode_texts(
    texts: Sequence[str], tokenizer: str, *, max_length: int
) -> list[torch.Tensor]:  # (t,) int64, t at most max_length
    """Turn texts into token ids, each between the tokenizer's special tokens, as <s> and </s>.

    Args:
        texts: plain texts: "</s>" in one of them is four characters, and no special token.
        tokenizer: JSON, from `train_tokenizer` or `load_pretrained`.
        max_length: tokens at most, with the special ones; what is beyond is cut off.

    Raises:
        LaunchError: ``tokenizers`` is not installed.
        ValueError: there is no room for a token of the text, or the tokenizer is damaged.
    """
    require("tokenizers")
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_str(tokenizer)
    # The library raises no class of its own.
    except Exception as error:
        raise ValueError(f"expected a tokenizer as JSON: {error}") from error
    least = encoder.num_special_tokens_to_add(is_pair=False) + 1
    if max_length < least:
        raise ValueError(f"expected max_length of {least} or more, got {max_length}")
    encoder.encode_special_tokens = True
    # Saved tokenizers may pad and cut as they were used last, and both are settled elsewhere.
    encoder.no_padding()
    encoder.enable_truncation(max_length)
    # One by one: encode_batch starts threads, and some releases warn of forks after that, such as
    # those of a loader's workers.
    return [torch.tensor(encoder.encode(text).ids, dtype=torch.int64) for text in texts]


def token_roles(tokenizer: str) -> tuple[int, set[int]]:
    """Find the token that stands for a hidden one, and the special tokens, never hidden.

    Args:
        tokenizer: JSON, from `train_tokenizer` or `load_pretrained`.

    Returns:
        The id of the mask (of the unknown token where there is no mask), and all special ids.
    """
    content = json.loads(tokenizer)
    special = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
    names = ("<mask>", "[MASK]", "<unk>", "[UNK]")
    # A tokenizer without a mask hides tokens behind the unknown one, whose meaning is as open.
    mask = next((special[name] for name in names if name in special), MASK_ID)
    return mask, set(special.values())


class EncodedTexts(Dataset[tuple[torch.Tensor, int]]):
    """Texts as token ids, with labels; an item is ``(ids, label)``, ids (t,) int64.

    Args:
        ids: of each text, (t,) int64, from `encode_texts`.
        labels: of each text, counted from 0.
        token_dropout: share of the tokens that become ``mask_id``, drawn anew at every reading
            from PyTorch's global generator; for training.
        mask_id: stands for a token that was dropped.
        special_ids: tokens that are never dropped.

    Raises:
        ValueError: texts and labels differ in number, or the share is not in [0, 1).

    Example:
        >>> texts = EncodedTexts([torch.tensor([0, 65, 66, 2]), torch.tensor([0, 67, 2])], [1, 0])
        >>> texts[1], texts.lengths
        ((tensor([ 0, 67,  2]), 0), tensor([4, 3]))
    """

    def __init__(
        self,
        ids: Sequence[torch.Tensor],
        labels: Sequence[int],
        *,
        token_dropout: float = 0.0,
        mask_id: int = MASK_ID,
        special_ids: Collection[int] = range(len(SPECIAL_TOKENS)),
    ) -> None:
        if len(ids) != len(labels):
            raise ValueError(f"expected a label for each text, got {len(labels)} for {len(ids)}")
        if not 0 <= token_dropout < 1:
            raise ValueError(f"expected token_dropout from 0 to below 1, got {token_dropout}")
        self._ids = list(ids)
        self._labels = list(labels)
        self._token_dropout = token_dropout
        self._mask_id = mask_id
        self._special_ids = torch.tensor(sorted(special_ids), dtype=torch.int64)

    @property
    def lengths(self) -> torch.Tensor:  # (n,) int64
        """Number of tokens of each text."""
        return torch.tensor([len(ids) for ids in self._ids], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ids = self._ids[index]
        if self._token_dropout:
            # For special tokens as well, so that the draws depend on the length alone.
            drawn = torch.rand(len(ids)) < self._token_dropout
            ids = ids.masked_fill(drawn & ~torch.isin(ids, self._special_ids), self._mask_id)
        return ids, self._labels[index]


def pad_shard(
    samples: Sequence[tuple[torch.Tensor, int]], pad_id: int = PAD_ID
) -> dict[str, torch.Tensor]:
    """Make a shard of texts, padded to the length of its longest.

    Args:
        samples: one or more items of `EncodedTexts`.
        pad_id: token id of the padding.

    Returns:
        ``input_ids`` (n, t) int64, ``attention_mask`` (n, t) int64, 1 where there is text, and
        ``labels`` (n,) int64.

    Example:
        >>> shard = pad_shard([(torch.tensor([0, 65, 66, 2]), 1), (torch.tensor([0, 67, 2]), 0)])
        >>> shard["input_ids"]
        tensor([[ 0, 65, 66,  2],
                [ 0, 67,  2,  1]])
        >>> shard["attention_mask"].sum(dim=1), shard["labels"]
        (tensor([4, 3]), tensor([1, 0]))
    """
    texts = [ids for ids, _ in samples]
    lengths = torch.tensor([len(ids) for ids in texts])
    # The mask is made of lengths, not of ids: some models pad with a token that texts have, too.
    padded = pad_sequence(texts, batch_first=True, padding_value=pad_id)
    return {
        "input_ids": padded,
        "attention_mask": (torch.arange(padded.shape[1]) < lengths.unsqueeze(1)).to(torch.int64),
        "labels": torch.tensor([label for _, label in samples], dtype=torch.int64),
    }


def require(*packages: str) -> None:
    """Refuse to continue without packages of the extra ``[text]``.

    Raises:
        LaunchError: a package is not installed; the message has the command that installs it.
    """
    # Looked for and not imported: to import transformers takes seconds, and comes where it is used.
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise LaunchError(
            f"the text job needs packages that are not installed here ({', '.join(missing)}); "
            f'run: pip install "onefold[text]"'
        )
