"""Models of texts: a small one from scratch, and those that transformers has saved."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.data.files import read_json, read_whole
from onefold.errors import CheckpointError
from onefold.jobs.tokens import END_ID, PAD_ID, START_ID, require
from onefold.weights.file import read_weights
from onefold.weights.load import refuse_spoilt

__all__ = ["build_classifier", "build_from_config", "head_parts", "load_pretrained"]

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which they are looked for."""
_CODE = ("attn_implementation", "experts_implementation")
"""How names end of what may say where code comes from."""
_INDEX = ".index.json"
_MOST_CONFIG_BYTES = 1 << 24
_MOST_TOKENIZER_BYTES = 1 << 28
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")


def build_classifier(
    vocabulary_size: int,
    num_classes: int,
    *,
    width: int,
    layers: int,
    heads: int,
    max_length: int,
    dropout: float,
    pad_id: int = PAD_ID,
) -> nn.Module:
    """A RoBERTa with a head for classes, its weights drawn from PyTorch's global generator.

    Args:
        vocabulary_size: one more than the largest token id.
        num_classes: logits of a text.
        width: size of the embeddings, a multiple of ``heads``.
        layers: number of encoder layers.
        heads: attention heads of each layer.
        max_length: tokens of the longest text.
        dropout: rate everywhere, in attention too.
        pad_id: token id of the padding.

    Returns:
        ``model(input_ids=..., attention_mask=...).logits`` is (n, num_classes) float32.

    Raises:
        LaunchError: ``transformers`` is not installed.
        ValueError: ``width`` is no multiple of ``heads``.

    Source: Liu et al., RoBERTa: A Robustly Optimized BERT Pretraining Approach, 2019.
    """
    require("transformers")
    from transformers import RobertaConfig, RobertaForSequenceClassification

    if width % heads:
        raise ValueError(f"expected width to be a multiple of {heads} heads, got {width}")
    config = RobertaConfig(
        vocab_size=vocabulary_size,
        num_labels=num_classes,
        problem_type="single_label_classification",
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        # RoBERTa counts places from pad_id + 1.
        max_position_embeddings=max_length + pad_id + 1,
        type_vocab_size=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        bos_token_id=START_ID,
        pad_token_id=pad_id,
        eos_token_id=END_ID,
    )
    model: nn.Module = RobertaForSequenceClassification(config)
    return model


def head_parts(model: nn.Module) -> tuple[str, ...]:
    """Names of what a classifier of transformers has beside its body: what gives the classes.

    Args:
        model: of `build_classifier`, `build_from_config` or `load_pretrained`.
    """
    body: Any = model.base_model_prefix
    return tuple(name for name, _ in model.named_children() if name != body)


def build_from_config(config: str) -> nn.Module:
    """A classifier of the shape of a ``config.json``, with weights from the global generator.

    Args:
        config: what ``model.config.to_json_string(use_diff=False)`` gave.

    Raises:
        LaunchError: ``transformers`` is not installed.
        CheckpointError: it describes no model, or one that needs code from elsewhere.
    """
    require("transformers")
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        values = json.loads(config)
        _refuse_kernels(values)
        with _quiet():
            described = AutoConfig.for_model(values.pop("model_type"), **values)
            model: nn.Module = AutoModelForSequenceClassification.from_config(
                described, trust_remote_code=False
            )
    except Exception as failure:  # of many kinds: the values are read by another library
        raise CheckpointError(
            f"expected the description of a model that transformers can build, got "
            f"{type(failure).__name__}: {failure}"
        ) from failure
    return model


def _refuse_kernels(value: object, name: str = "") -> None:
    """Refuse a description that has code fetched from elsewhere: an attention named OWNER/NAME.

    Raises:
        ValueError: it does.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            _refuse_kernels(part, name if name.endswith(_CODE) else str(key))
    elif isinstance(value, str) and name.endswith(_CODE) and "/" in value:
        raise ValueError(f"{name} {value!r} names code that would be fetched and run")


def load_pretrained(directory: str | PathLike[str], num_classes: int) -> tuple[nn.Module, str]:
    """A model that was trained before, from a folder on this machine, with a head for classes.

    Args:
        directory: holds ``config.json``, the weights (``model.safetensors`` or
            ``pytorch_model.bin``) and the tokenizer (``tokenizer.json``, or the older files).
        num_classes: logits of a text. A head that is not in the folder, or is for another number
            of classes, is drawn from PyTorch's global generator.

    Returns:
        The model in float32, set to train, and its tokenizer as JSON for `encode_texts`. Its
        ``config`` says how long a text may be.

    Raises:
        LaunchError: ``transformers`` or ``tokenizers`` is not installed.
        CheckpointError: the folder lacks something, it cannot be read, or its parts do not fit.
    """
    require("transformers", "tokenizers")
    directory = Path(directory)
    _check_files(directory)
    try:
        with _quiet():
            model, told = _load_model(directory, num_classes)
            tokenizer, tokens = _load_tokenizer(directory)
    except Exception as failure:  # of many kinds: the files are read by another library
        raise CheckpointError(
            f"{directory}: expected a model and a tokenizer that transformers can load, got "
            f"{type(failure).__name__}: {failure}"
        ) from failure
    refuse_spoilt(model, directory)
    _check_weights(directory, model, told)
    _check_vocabulary(directory, model, tokens)
    return model.train(), tokenizer


def _check_files(directory: Path) -> None:
    for names in (("config.json",), _WEIGHTS, _TOKENIZERS):
        if not any((directory / name).is_file() for name in names):
            raise CheckpointError(
                f"{directory}: expected {' or '.join(names)}, found none; name a folder that "
                f"save_pretrained has written for both the model and the tokenizer"
            )


def _load_model(directory: Path, num_classes: int) -> tuple[Any, dict[str, Any]]:
    """The model, and which of its weights were not in the folder or did not fit."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    _refuse_kernels(read_json(directory / "config.json", _MOST_CONFIG_BYTES))
    config = AutoConfig.from_pretrained(
        directory,
        num_labels=num_classes,
        problem_type="single_label_classification",
        local_files_only=True,
        trust_remote_code=False,
    )
    # With the weights as tensors: of a folder, the library would also read pickles and adapters.
    model, told = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=_read_state(directory),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return model, told


def _read_state(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder, from one file or several, without running any code of them."""
    name = next(name for name in _WEIGHTS if (directory / name).is_file())
    if not name.endswith(_INDEX):
        return _tensors(directory / name)
    index = read_json(directory / name, _MOST_CONFIG_BYTES)
    parts = sorted(set(index["weight_map"].values()))
    state: dict[str, torch.Tensor] = {}
    for part in parts:
        if Path(part).name != part:
            raise ValueError(f"{name} names {part!r}, which is no file beside it")
        state.update(_tensors(directory / part))
    return state


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    content = read_weights(path)
    return {
        name: value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }


def _load_tokenizer(directory: Path) -> tuple[str, int]:
    """The tokenizer as JSON, made from older files if need be, and how many tokens it has."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    whole = directory / "tokenizer.json"
    if whole.is_file():
        tokenizer = Tokenizer.from_str(read_whole(whole, _MOST_TOKENIZER_BYTES).decode())
    else:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    return tokenizer.to_str(), tokenizer.get_vocab_size()


def _check_weights(directory: Path, model: Any, told: dict[str, Any]) -> None:
    """Refuse a folder without the weights of the encoder: only a head may be new."""
    body = f"{model.base_model_prefix}."
    missing = [str(name) for name in told["missing_keys"]]
    missing += [str(name) for name, *_ in told["mismatched_keys"]]
    lacking = sorted(n for n in missing if n.startswith(body) and ".pooler." not in n)
    if lacking:
        raise CheckpointError(
            f"{directory}: expected weights for all of the encoder that config.json describes, got "
            f"none that fit for {len(lacking)} of them, the first {lacking[0]}; see whether both "
            f"files are of the same model"
        )


def _check_vocabulary(directory: Path, model: Any, tokens: int) -> None:
    if tokens > model.config.vocab_size:
        raise CheckpointError(
            f"{directory}: expected a tokenizer of at most {model.config.vocab_size} tokens, as "
            f"many as the model embeds, got {tokens}; see whether both are of the same model"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, its table of new weights and its own deprecated calls.

    Or each device would show them.
    """
    from transformers.utils import logging

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
