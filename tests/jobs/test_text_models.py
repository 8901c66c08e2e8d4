"""Models of texts and their tokenizers: what is loaded, what is refused, what is encoded."""

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from onefold.errors import CheckpointError
from onefold_jobs import text_models as tokens
from onefold_jobs.text_models import (
    EncodedTexts,
    build_classifier,
    build_from_config,
    encode_texts,
    load_pretrained,
    pad_shard,
    train_tokenizer,
)
from tests.capabilities import needs_text
from tests.tables import for_each

needs_text()
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


VOCABULARY_SIZE = 300
TEXTS = [
    "".join(random.Random(number).choices("fine dull film été", k=50)) for number in range(200)
]


def small(num_classes: int = 2, **changed: Any) -> nn.Module:
    """A classifier of the least size, always with the same weights."""
    options = {"width": 16, "layers": 2, "heads": 2, "max_length": 12, "dropout": 0.1} | changed
    torch.manual_seed(3)
    return build_classifier(VOCABULARY_SIZE, num_classes, **options)


def shard(tokenizer: str) -> dict[str, torch.Tensor]:
    """Three texts, each shorter than the one before it."""
    texts = [TEXTS[number][: 30 - 10 * number] for number in range(3)]
    ids = encode_texts(texts, tokenizer, max_length=12)
    return pad_shard([(each, number % 2) for number, each in enumerate(ids)])


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    answer: torch.Tensor = model(**inputs).logits
    return answer


HEAD = {"classifier.out_proj.weight", "classifier.out_proj.bias"}
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return train_tokenizer(TEXTS, VOCABULARY_SIZE)


def test_the_longest_text_fits_and_padding_changes_little(tokenizer: str) -> None:
    model, batch = small(num_classes=3).eval(), shard(tokenizer)
    assert batch["input_ids"].shape == (3, 12)
    length = int(batch["attention_mask"][2].sum())
    assert length < 12
    alone = {name: batch[name][2:, :length] for name in ("input_ids", "attention_mask")}
    answer = logits(model, batch)
    assert (answer.shape, answer.dtype) == ((3, 3), torch.float32)
    torch.testing.assert_close(logits(model, alone), answer[2:])


def save(model: Any, folder: Path) -> None:
    """As its author would have."""
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(model.config.to_json_string())


@pytest.fixture
def folder(tmp_path: Path, tokenizer: str) -> Path:
    """A model that was trained before, for four classes."""
    folder = tmp_path / "before"
    save(small(num_classes=4), folder)
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def same_as_before(model: Any, but: set[str] | None = None) -> None:
    original, loaded = small(num_classes=4).state_dict(), model.state_dict()
    assert original.keys() == loaded.keys()
    assert {n for n in loaded if not torch.equal(loaded[n], original[n])} == (but or set())


@pytest.mark.parametrize("num_classes", [2, 4])
def test_what_was_trained_before_is_loaded(
    folder: Path, tokenizer: str, num_classes: int, capfd: Any
) -> None:
    found = []
    for path in (folder, str(folder)):
        torch.manual_seed(1)
        model, read = load_pretrained(path, num_classes)
        assert read == tokenizer
        assert model.training
        assert logits(model, shard(tokenizer)).shape == (3, num_classes)
        same_as_before(model, but=set() if num_classes == 4 else HEAD)
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert capfd.readouterr() == ("", "")


def as_distributed(folder: Path) -> None:
    """What transformers takes for a checkpoint of several devices, of which it reads a pickle."""
    (folder / ".metadata").write_bytes(pickle.dumps(Planted()))
    (folder / "__0_0.distcp").write_bytes(b"")


def in_several_files(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"1.safetensors": names[::2], "2.safetensors": names[1::2]}
    for part, own in parts.items():
        save_file({name: whole[name] for name in own}, folder / part)
    index = {name: part for part, own in parts.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("change", [as_distributed, in_several_files])
def test_only_weights_that_are_no_code_are_read(folder: Path, change: Change) -> None:
    change(folder)
    same_as_before(load_pretrained(folder, 4)[0])


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def spoil(name: str) -> Change:
    return lambda folder: (folder / name).write_text("{")


def weights_of(**changed: Any) -> Change:
    def put(folder: Path) -> None:
        save(small(num_classes=4, **changed), folder / "other")
        (folder / "other" / "model.safetensors").rename(folder / "model.safetensors")

    return put


def not_finite(folder: Path) -> None:
    spoilt: Any = small(num_classes=4)
    with torch.no_grad():
        spoilt.base_model.get_input_embeddings().weight[3, 1] = float("nan")
    save(spoilt, folder)


def more_tokens(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(train_tokenizer(TEXTS, VOCABULARY_SIZE + 5))


class Planted:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code of a file was run')",))


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Planted()}, folder / "pytorch_model.bin")


def with_parts_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_kernel(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "o/n"}))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (without("config.json"), r"expected config\.json, found none; name a folder"),
        (without("model.safetensors"), r"expected model\.safetensors or .*\.bin.*, found none"),
        (without("tokenizer.json"), r"expected tokenizer\.json or .*, found none"),
        (
            spoil("config.json"),
            r"transformers can load, got ValueError: .*config\.json: expe",
        ),
        (spoil("model.safetensors"), "that transformers can load, got "),
        (spoil("tokenizer.json"), "that transformers can load, got "),
        (weights_of(width=8), r"but \d+ are missing or do not fit, such as roberta\.embeddings"),
        (
            weights_of(layers=1),
            r"but 16 are missing or do not fit, such as roberta\.encoder\.lay",
        ),
        (not_finite, r"embeddings\.weight has values that are NaN or inf"),
        (more_tokens, "the tokenizer has 305 tokens, but the model embeds only 300"),
        (as_pickle, "reading it can run any code"),
        (with_parts_elsewhere, "which is not a file next to it"),
        (with_kernel, "'o/n' names code that would be downloaded and run"),
    ],
)
def test_a_damaged_folder_is_refused(folder: Path, damage: Change, complaint: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=complaint):
        load_pretrained(folder, 2)


def config_of(**changes: Any) -> str:
    return json.dumps({"model_type": "roberta", "vocab_size": 300, **changes})


KERNELS: list[dict[str, Any]] = [
    {"attn_implementation": "owner/name"},
    {"_attn_implementation": {"": "owner/name:x"}},
    {"attn_implementation": ["somebody/kernel"]},
    {"layers": [{"_attn_implementation": "somebody/kernel"}]},
    {"_experts_implementation": {"": [["somebody/kernel"]]}},
]
CONFIGS = [
    ("{", "JSONDecodeError"),
    ("[]", "TypeError|AttributeError"),
    ("{}", "KeyError: 'model_"),
]
CONFIGS += [("[" * 100_000, "RecursionError"), (config_of(model_type="nobody"), "got ValueError")]
CONFIGS += [(config_of(hidden_size="large"), "that transformers can build")]
CONFIGS += [(config_of(**each), "names code that would be downloaded and run") for each in KERNELS]


@for_each(("config", "words"), CONFIGS)
def test_a_description_that_cannot_be_built_is_one_error(config: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        build_from_config(config)


def test_code_of_a_description_is_never_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def built(config: object, **how: object) -> Any:
        asked.append(how["trust_remote_code"])
        return small()

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_config", built)
    build_from_config(
        '{"model_type": "roberta", "num_labels": 3, "auto_map": {"AutoModel": "x--y.Z"}}'
    )
    assert asked == [False]


@for_each(("lengths", "padded"), [((4, 3), 8), ((8, 1), 8), ((9, 2), 13), ((13,), 13)])
def test_texts_are_padded_to_one_of_few_lengths(lengths: tuple[int, ...], padded: int) -> None:
    samples = [(torch.full((length,), 9), 0) for length in lengths]
    whole, plain = pad_shard(samples, 7, multiple=8, longest=13), pad_shard(samples, 7)
    assert whole["input_ids"].shape == (len(lengths), padded)
    for name, filler in (("input_ids", 7), ("attention_mask", 0)):
        least = max(lengths)
        assert torch.equal(whole[name][:, :least], plain[name])
        assert (whole[name][:, least:] == filler).all()


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
