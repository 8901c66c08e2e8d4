"""Text models and their tokenizers: small ones from scratch, or ones saved by transformers.

`EncodedTexts` and `pad_shard` make samples and shards of token ids. The packages ``tokenizers`` and
``transformers`` (extra ``[text]``) are imported only on use, and these two do not need them.

Note: untrusted model folders
-----------------------------
A folder can make transformers run code: Python files named in ``config.json``, kernels from a hub
named in the same file, pickled weights, adapters. onefold allows none of this.
``trust_remote_code=False`` is passed everywhere, because the default asks the user, who is not
there; names of kernels are rejected; and onefold reads the weights itself and passes them as
tensors. What remains are configurations, and models of the library.

Note: the same tokenizer everywhere
-----------------------------------
Every device may train the tokenizer itself. Counting uses several threads and hash tables without a
defined order, but it only adds integers, the base alphabet is all 256 bytes in a fixed order, and
of pairs with equal counts the one with the lower ids is merged first. Only ids of pieces with their
own prefix or suffix ("##ing") would depend on the order of a hash table, and there are none here.
The order of the texts does not matter either.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from onefold.errors import CheckpointError
from onefold.weights import check_finite, read_weights, state_under
from onefold_jobs.data.files import read_json, read_whole

__all__ = [
    "PAD_ID",
    "EncodedTexts",
    "build_classifier",
    "build_from_config",
    "encode_texts",
    "head_parts",
    "load_pretrained",
    "most_tokens",
    "pad_shard",
    "token_roles",
    "train_tokenizer",
]

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""File names of weights, in order of preference."""
_CODE = ("attn_implementation", "experts_implementation")
"""Suffixes of the configuration keys that choose an implementation."""
_INDEX = ".index.json"
_MOST_CONFIG_BYTES = 1 << 24
_MOST_TOKENIZER_BYTES = 1 << 28
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")

# In the order of RoBERTa's own vocabulary, because its configuration has these ids as defaults.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""Special tokens of a trained tokenizer; their ids are their positions here."""
START_ID, PAD_ID, END_ID, _, MASK_ID = range(len(SPECIAL_TOKENS))


def build_classifier(
    vocabulary_size: int,
    num_classes: int,
    *,
    width: int,
    layers: int,
    heads: int,
    max_length: int,
    dropout: float,
) -> nn.Module:
    """Build a RoBERTa classifier with weights drawn from PyTorch's global generator.

    Args:
        vocabulary_size: largest token id plus 1.
        num_classes: number of logits per text.
        width: embedding size, a multiple of ``heads``.
        layers: number of encoder layers.
        heads: attention heads per layer.
        max_length: maximum length of a text, in tokens.
        dropout: dropout rate, also of attention.

    Returns:
        ``model(input_ids=..., attention_mask=...).logits`` is (n, num_classes) float32.

    Source: Liu et al., RoBERTa: A Robustly Optimized BERT Pretraining Approach, 2019.
    """
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=vocabulary_size,
        num_labels=num_classes,
        problem_type=_problem(num_classes),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        # RoBERTa numbers positions from PAD_ID + 1, but also has embeddings for the numbers below.
        max_position_embeddings=max_length + PAD_ID + 1,
        type_vocab_size=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        bos_token_id=START_ID,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
    )
    model: nn.Module = RobertaForSequenceClassification(config)
    return model


def _problem(outputs: int) -> str:
    """Return transformers' name for the task; the loss is always the job's own."""
    return "single_label_classification" if outputs > 1 else "regression"


def head_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a classifier's modules that map the body's output to classes.

    Args:
        model: from `build_classifier`, `build_from_config` or `load_pretrained`.
    """
    body: Any = model.base_model_prefix
    return tuple(name for name, _ in model.named_children() if name != body)


def most_tokens(model: nn.Module) -> int | None:
    """Return the maximum length of a text, in tokens; None without a limit.

    Args:
        model: from `build_classifier`, `build_from_config` or `load_pretrained`.
    """
    for name, part in model.named_modules():
        # RoBERTa and related models number positions from the padding index plus 1. Only they have
        # a padding index for positions, which may differ from the id of the padding token.
        padding: Any = getattr(part, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and padding is not None:
            weight: Any = part.weight
            return len(weight) - int(padding) - 1
    most = getattr(model.config, "max_position_embeddings", None)
    # XLNet, which has no limit, returns -1.
    return most if isinstance(most, int) and most > 0 else None


def build_from_config(config: str) -> nn.Module:
    """Build a classifier from a ``config.json``, with weights from the global generator.

    Args:
        config: result of ``model.config.to_json_string(use_diff=False)``.

    Raises:
        CheckpointError: the text does not describe a model, or one that needs remote code.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        values = json.loads(config)
        _refuse_kernels(values)
        with _quiet():
            described = AutoConfig.for_model(values.pop("model_type"), **values)
            model: nn.Module = AutoModelForSequenceClassification.from_config(
                described, trust_remote_code=False
            )
    except Exception as failure:
        # transformers reads the values, and may raise anything for a wrong one.
        raise CheckpointError(
            f"expected the configuration of a model that transformers can build, got "
            f"{type(failure).__name__}: {failure}"
        ) from failure
    return model


def _refuse_kernels(value: object, name: str = "") -> None:
    """Reject a configuration that would download code: an implementation named OWNER/NAME.

    Raises:
        ValueError: the configuration names such an implementation.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            # The parent key counts as well: an implementation may be a dict by part of the model.
            _refuse_kernels(part, name if name.endswith(_CODE) else str(key))
    elif isinstance(value, list):
        for part in value:
            _refuse_kernels(part, name)
    elif isinstance(value, str) and name.endswith(_CODE) and "/" in value:
        raise ValueError(f"{name} {value!r} names code that would be downloaded and run")


def load_pretrained(directory: str | PathLike[str], num_classes: int) -> tuple[nn.Module, str]:
    """Load a pretrained model from a local folder, with a classification head.

    Args:
        directory: contains ``config.json``, the weights (``model.safetensors`` or
            ``pytorch_model.bin``) and the tokenizer (``tokenizer.json``, or the older files).
        num_classes: number of logits per text. A head that is missing, or has another number of
            classes, is drawn from PyTorch's global generator.

    Returns:
        The model in float32 and training mode, and its tokenizer in JSON for `encode_texts`. The
        model's ``config`` contains the maximum length of a text.

    Raises:
        CheckpointError: a file is missing or damaged, or model and tokenizer do not match.
    """
    directory = Path(directory)
    _check_files(directory)
    try:
        with _quiet():
            model, report = _load_model(directory, num_classes)
            tokenizer, tokens = _load_tokenizer(directory)
    except Exception as failure:
        # transformers reads the files, and may raise anything for a damaged one.
        raise CheckpointError(
            f"{directory}: expected a model and a tokenizer that transformers can load, got "
            f"{type(failure).__name__}: {failure}"
        ) from failure
    check_finite(model, directory)
    _check_weights(directory, model, report)
    _check_vocabulary(directory, model, tokens)
    # The library returns the model in evaluation mode, without dropout.
    return model.train(), tokenizer


def _check_files(directory: Path) -> None:
    for names in (("config.json",), _WEIGHTS, _TOKENIZERS):
        if not any((directory / name).is_file() for name in names):
            raise CheckpointError(
                f"{directory}: expected {' or '.join(names)}, found none; name a folder that "
                f"save_pretrained wrote for both the model and the tokenizer"
            )


def _load_model(directory: Path, num_classes: int) -> tuple[Any, dict[str, Any]]:
    """Load the model; also return the names of weights that were missing or did not fit."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    _refuse_kernels(read_json(directory / "config.json", _MOST_CONFIG_BYTES))
    config = AutoConfig.from_pretrained(
        directory,
        num_labels=num_classes,
        problem_type=_problem(num_classes),
        local_files_only=True,
        trust_remote_code=False,
    )
    # Weights are passed as tensors, because from a folder the library would also read pickles and
    # adapters. float32 is explicit, because the default depends on the release. A head for another
    # number of classes is initialized instead of rejected.
    model, report = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=_read_state(directory),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return model, report


def _read_state(directory: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a folder, from one or several files, without running code in them."""
    name = next(name for name in _WEIGHTS if (directory / name).is_file())
    parts = [name]
    if name.endswith(_INDEX):
        # Sort them: which file wins if two contain a name must not depend on a hash table.
        parts = sorted(set(read_json(directory / name, _MOST_CONFIG_BYTES)["weight_map"].values()))
    state: dict[str, torch.Tensor] = {}
    for part in parts:
        # The index may come from another user: it must not lead out of the folder.
        if Path(part).name != part:
            raise ValueError(f"{name} names {part!r}, which is not a file next to it")
        content = state_under(read_weights(directory / part), None, directory / part)
        state |= {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}
    return state


def _load_tokenizer(directory: Path) -> tuple[str, int]:
    """Load the tokenizer, also from older files; return it as JSON, and its number of tokens."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    whole = directory / "tokenizer.json"
    # Read tokenizer.json directly, because AutoTokenizer reads further files of the folder.
    if whole.is_file():
        tokenizer = Tokenizer.from_str(read_whole(whole, _MOST_TOKENIZER_BYTES).decode())
    else:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    return tokenizer.to_str(), tokenizer.get_vocab_size()


def _check_weights(directory: Path, model: Any, loading: dict[str, Any]) -> None:
    """Reject a folder that lacks weights of the encoder: only the head may be new."""
    # The pooler may be new, too: masked language models lack it.
    body = f"{model.base_model_prefix}."
    missing = [str(name) for name in loading["missing_keys"]]
    missing += [str(name) for name, *_ in loading["mismatched_keys"]]
    lacking = sorted(n for n in missing if n.startswith(body) and ".pooler." not in n)
    if lacking:
        raise CheckpointError(
            f"{directory}: expected weights for the whole encoder that config.json describes, but "
            f"{len(lacking)} are missing or do not fit, such as {lacking[0]}; check that both "
            f"files belong to the same model"
        )


def _check_vocabulary(directory: Path, model: Any, tokens: int) -> None:
    if tokens > model.config.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokens} tokens, but the model embeds only "
            f"{model.config.vocab_size}; check that both belong to the same model"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars, its table of new weights, and its deprecation warnings.

    Otherwise, every device would show them.
    """
    from transformers.utils import logging

    # Settings of the whole process: restore them, because the user may have set them.
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def train_tokenizer(texts: Sequence[str], vocabulary_size: int) -> str:
    """Train a byte-level BPE tokenizer, which has a token for every byte and so covers every text.

    The same texts give the same tokenizer for any number of threads and in any process.

    Args:
        texts: training texts.
        vocabulary_size: maximum number of tokens, including the 5 of `SPECIAL_TOKENS` and the 256
            bytes, so at least 261; the texts may yield fewer.

    Returns:
        The tokenizer in JSON, for `encode_texts`.

    Source: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, 2016;
    over bytes: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", START_ID), ("</s>", END_ID)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        # Sort it, because the library returns it in no defined order, and the ids follow the order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    trained: str = tokenizer.to_str()
    return trained


def encode_texts(
    texts: Sequence[str], tokenizer: str, *, max_length: int
) -> list[torch.Tensor]:  # (t,) int64, t at most max_length
    """Convert texts to token ids between the tokenizer's special tokens, such as <s> and </s>.

    Args:
        texts: plain texts: "</s>" in a text is four characters, not a special token.
        tokenizer: JSON, from `train_tokenizer` or `load_pretrained`.
        max_length: maximum number of tokens, including special ones; longer texts are truncated.

    Raises:
        ValueError: ``max_length`` leaves no room for the text, or the tokenizer is damaged.
    """
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_str(tokenizer)
    # The library has no exception class of its own.
    except Exception as error:
        raise ValueError(f"expected a tokenizer as JSON: {error}") from error
    least = encoder.num_special_tokens_to_add(is_pair=False) + 1
    if max_length < least:
        raise ValueError(f"max_length must be at least {least}, got {max_length}")
    encoder.encode_special_tokens = True
    # Saved tokenizers may pad and truncate as in their last use; both are configured elsewhere.
    encoder.no_padding()
    encoder.enable_truncation(max_length)
    # Encode one at a time: encode_batch starts threads, and some releases then warn about forks,
    # such as those of a loader's workers.
    return [torch.tensor(encoder.encode(text).ids, dtype=torch.int64) for text in texts]


def token_roles(tokenizer: str) -> tuple[int, set[int]]:
    """Find the token that replaces dropped tokens, and the special tokens, which are never dropped.

    Args:
        tokenizer: JSON, from `train_tokenizer` or `load_pretrained`.

    Returns:
        The mask's id (the unknown token's if there is no mask), and all special ids.
    """
    content = json.loads(tokenizer)
    special = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
    names = ("<mask>", "[MASK]", "<unk>", "[UNK]")
    # Without a mask, use the unknown token, whose meaning is as open.
    mask = next((special[name] for name in names if name in special), MASK_ID)
    return mask, set(special.values())


@dataclass(eq=False)
class EncodedTexts(Dataset[tuple[torch.Tensor, int]]):
    """Texts as token ids, with labels; an item is ``(ids, label)`` with ids (t,) int64.

    Example:
        >>> texts = EncodedTexts([torch.tensor([0, 65, 66, 2]), torch.tensor([0, 67, 2])], [1, 0])
        >>> texts[1], texts.lengths
        ((tensor([ 0, 67,  2]), 0), tensor([4, 3]))
    """

    ids: Sequence[torch.Tensor]
    """Token ids of each text, (t,) int64, from `encode_texts`."""
    labels: Any
    """Label of each text: its class number from 0, or a tensor."""
    token_dropout: float = 0.0
    """Fraction of tokens to replace by ``mask_id``, at least 0 and below 1, drawn at every
    access from PyTorch's global generator; for training."""
    mask_id: int = MASK_ID
    """Token that replaces dropped tokens."""
    special_ids: Collection[int] = range(len(SPECIAL_TOKENS))
    """Tokens that are never dropped."""

    @property
    def lengths(self) -> torch.Tensor:  # (n,) int64
        """Length of each text, in tokens."""
        return torch.tensor([len(ids) for ids in self.ids], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ids = self.ids[index]
        if self.token_dropout:
            # Draw for special tokens too, so that the number of draws depends only on the length.
            drawn = torch.rand(len(ids)) < self.token_dropout
            special = torch.isin(ids, torch.tensor(sorted(self.special_ids), dtype=torch.int64))
            ids = ids.masked_fill(drawn & ~special, self.mask_id)
        return ids, self.labels[index]


def pad_shard(
    samples: Sequence[tuple[torch.Tensor, int]],
    pad_id: int = PAD_ID,
    *,
    multiple: int = 1,
    longest: int = 1,
) -> dict[str, torch.Tensor]:
    """Make a shard of texts, padded to its longest text or to a few fixed lengths.

    Args:
        samples: one or more items of `EncodedTexts`.
        pad_id: id of the padding token.
        multiple: pad to a multiple of this number of tokens, but not beyond ``longest``.
        longest: maximum length of a text, in tokens.

    Returns:
        ``input_ids`` (n, t) int64, ``attention_mask`` (n, t) int64, 1 for text and 0 for padding,
        and ``labels`` (n,) int64, or (n,) or (n, classes) float32 like the samples.

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
    # The mask is based on lengths, not ids: some models pad with a token that texts contain, too.
    padded = pad_sequence(texts, batch_first=True, padding_value=pad_id)
    length = padded.shape[1]
    more = max(0, min(-(-length // multiple) * multiple, longest) - length)
    padded = F.pad(padded, (0, more), value=pad_id)
    return {
        "input_ids": padded,
        "attention_mask": (torch.arange(padded.shape[1]) < lengths.unsqueeze(1)).to(torch.int64),
        "labels": default_collate([label for _, label in samples]),
    }
