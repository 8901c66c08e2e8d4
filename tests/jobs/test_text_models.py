from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from onefold.errors import CheckpointError
from onefold.jobs import text_models
from onefold.jobs.text_models import build_from_config, load_pretrained, most_tokens
from onefold.jobs.tokens import encode_texts, train_tokenizer
from tests.jobs.sentences import TEXTS, VOCABULARY_SIZE, logits, shard, small
from tests.tables import for_each

NEEDS = 'needs pip install "onefold[text]"'
tokenizers = pytest.importorskip("tokenizers", reason=NEEDS)
# Some of what it imports sets variables of the environment: here, before any test looks.
transformers = pytest.importorskip("transformers", reason=NEEDS)
roberta = pytest.importorskip("transformers.models.roberta.modeling_roberta", reason=NEEDS)

HEAD = {"classifier.out_proj.weight", "classifier.out_proj.bias"}


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return train_tokenizer(TEXTS, VOCABULARY_SIZE)


@pytest.fixture
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_step_gives_the_same_bits_again(tokenizer: str, attention: str) -> None:
    batch = shard(tokenizer)

    def gradients() -> list[torch.Tensor]:
        model = small(num_classes=2)
        model.set_attn_implementation(attention)
        torch.manual_seed(5)
        F.cross_entropy(logits(model, batch), batch["labels"]).backward()
        return [parameter.grad for parameter in model.parameters()]

    first, second = gradients(), gradients()
    assert all(map(torch.equal, first, second))
    assert sum(gradient.abs().max() > 0 for gradient in first) > len(first) / 2


def test_the_longest_text_fits_and_padding_changes_little(tokenizer: str) -> None:
    model = small(num_classes=3).eval()
    batch = shard(tokenizer)
    assert batch["input_ids"].shape == (3, 12)
    length = int(batch["attention_mask"][2].sum())
    assert length < 12
    alone = {name: batch[name][2:, :length] for name in ("input_ids", "attention_mask")}
    answer = logits(model, batch)
    assert (answer.shape, answer.dtype) == ((3, 3), torch.float32)
    torch.testing.assert_close(logits(model, alone), answer[2:])


def test_a_small_model_learns(tokenizer: str) -> None:
    model, batch = small(), shard(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(logits(model, batch), batch["labels"]).backward()
        optimizer.step()
    assert logits(model.eval(), batch).argmax(dim=1).tolist() == batch["labels"].tolist()


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="expected width to be a multiple of 3 heads, got 16"):
        small(heads=3)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: str) -> Path:
    """A model that was trained before, for four classes."""
    save(small(num_classes=4), tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    return tmp_path


def save(model: Any, folder: Path) -> None:
    """As its author would have, without a progress bar."""
    with text_models._quiet():
        model.save_pretrained(folder)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_what_was_trained_before_is_loaded(
    folder: Path, tokenizer: str, num_classes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    model, read = load_pretrained(str(folder), num_classes)
    torch.manual_seed(1)
    again, _ = load_pretrained(folder, num_classes)
    assert read == tokenizer
    assert model.training
    assert logits(model, shard(tokenizer)).shape == (3, num_classes)
    original, loaded, second = (each.state_dict() for each in (small(4), model, again))
    assert all(torch.equal(loaded[name], second[name]) for name in loaded)
    new = {name for name in loaded if not torch.equal(loaded[name], original[name])}
    assert new == (set() if num_classes == 4 else HEAD)
    assert capfd.readouterr() == ("", "")


def test_weights_of_half_precision_are_loaded_in_full(folder: Path) -> None:
    save(small(num_classes=4).half(), folder)
    model, _ = load_pretrained(folder, 2)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    spoilt = small(num_classes=4)
    with torch.no_grad():
        spoilt.base_model.get_input_embeddings().weight[3, 1] = float("nan")
    save(spoilt, folder)
    with pytest.raises(CheckpointError, match=r"embeddings\.weight has values that are NaN or inf"):
        load_pretrained(folder, 4)


def test_an_older_tokenizer_is_made_anew(folder: Path, tokenizer: str) -> None:
    trained = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(trained["vocab"]))
    merges = [" ".join(pair) for pair in trained["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    _, made = load_pretrained(folder, 2)
    ours, theirs = (encode_texts(TEXTS, each, max_length=12) for each in (tokenizer, made))
    assert all(map(torch.equal, ours, theirs))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def weights_of(**changed: Any) -> Callable[[Path], object]:
    """Put the weights of another model there."""

    def put(folder: Path) -> None:
        save(small(num_classes=4, **changed), folder / "other")
        (folder / "other" / "model.safetensors").rename(folder / "model.safetensors")

    return put


def more_tokens(folder: Path) -> None:
    """The tokenizer of another model."""
    (folder / "tokenizer.json").write_text(train_tokenizer(TEXTS, VOCABULARY_SIZE + 5))


def spoil(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("{")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (without("config.json"), r"expected config\.json, found none; name a folder"),
        (without("model.safetensors"), r"expected model\.safetensors or .*\.bin.*, found none"),
        (without("tokenizer.json"), r"expected tokenizer\.json or .*, found none"),
        (spoil("config.json"), r"that transformers can load, got ValueError: .*config\.json: expe"),
        (spoil("model.safetensors"), "that transformers can load, got "),
        (spoil("tokenizer.json"), "that transformers can load, got "),
        (weights_of(width=8), r"none that fit for \d+ of them, the first roberta\.embeddings"),
        (weights_of(layers=1), r"for 16 of them, the first roberta\.encoder\.layer\.1\."),
        (more_tokens, "a tokenizer of at most 300 tokens, as many as the model embeds, got 305"),
    ],
)
def test_a_folder_that_lacks_something_is_refused(
    folder: Path, damage: Callable[[Path], object], complaint: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=complaint):
        load_pretrained(folder, 2)


CONFIG = '{"model_type": "roberta", "vocab_size": 300'


@for_each(
    ("config", "words"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError|AttributeError"),
        ("{}", "KeyError: 'model_type'"),
        ("[" * 100_000, "RecursionError"),
        ('{"model_type": "nobody"}', "got ValueError"),
        (CONFIG + ', "hidden_size": "large"}', "that transformers can build"),
        (CONFIG + ', "attn_implementation": "owner/name"}', "'owner/name' names code that would"),
        (CONFIG + ', "_attn_implementation": {"": "owner/name:x"}}', "names code that would be"),
    ],
)
def test_a_description_that_cannot_be_built_is_one_error(config: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        text_models.build_from_config(config)


def test_code_of_a_description_is_never_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    asked: list[object] = []
    monkeypatch.setattr(
        transformers.AutoModelForSequenceClassification,
        "from_config",
        lambda config, **how: asked.append(how["trust_remote_code"]) or small(),
    )
    text_models.build_from_config(CONFIG + ', "auto_map": {"AutoModel": "x--y.Z"}}')
    assert asked == [False]


class Planted:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code of a file was run')",))


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Planted()}, folder / "pytorch_model.bin")


def as_distributed(folder: Path) -> None:
    """What transformers takes for a checkpoint of several devices, of which it reads a pickle."""
    (folder / ".metadata").write_bytes(pickle.dumps(Planted()))
    (folder / "__0_0.distcp").write_bytes(b"")


def with_parts_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_kernel(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "o/n"}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (as_pickle, "to read that can run any code"),
        (with_parts_elsewhere, "which is no file beside it"),
        (with_kernel, "'o/n' names code that would be fetched and run"),
    ],
)
def test_code_in_a_folder_is_not_run(
    folder: Path, change: Callable[[Path], object], words: str
) -> None:
    inner = folder / "inner"
    inner.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).rename(inner / name)
    change(inner)
    with pytest.raises(CheckpointError, match=words):
        load_pretrained(inner, 2)


def test_a_pickle_beside_the_weights_is_not_read(folder: Path) -> None:
    as_distributed(folder)
    model, _ = load_pretrained(folder, 4)
    original = small(num_classes=4).state_dict()
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())


def test_weights_in_several_files_are_read(folder: Path, tokenizer: str) -> None:
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"1.safetensors": names[::2], "2.safetensors": names[1::2]}
    for part, own in parts.items():
        save_file({name: whole[name] for name in own}, folder / part)
    index = {name: part for part, own in parts.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model, _ = load_pretrained(folder, 4)
    original = small(num_classes=4).state_dict()
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())


def test_the_parts_beside_the_body_are_the_head() -> None:
    assert text_models.head_parts(small()) == ("classifier",)
    distil = pytest.importorskip("transformers.models.distilbert.modeling_distilbert")
    config = distil.DistilBertConfig(vocab_size=300, dim=8, n_heads=2, n_layers=1, hidden_dim=8)
    model = distil.DistilBertForSequenceClassification(config)
    assert {"pre_classifier", "classifier"} <= set(text_models.head_parts(model))
    assert "distilbert" not in text_models.head_parts(model)


def tiny(kind: str, **others: Any) -> Any:
    """A classifier of another family, with 20 positions."""
    config = transformers.AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 64,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "max_position_embeddings": 20,
            "num_labels": 2,
            **others,
        },
    )
    return transformers.AutoModelForSequenceClassification.from_config(config).eval()


@for_each(
    ("kind", "others", "expected"),
    [
        ("bert", {"pad_token_id": 0}, 20),
        ("gpt2", {"pad_token_id": 63}, 20),
        ("distilbert", {"pad_token_id": 0, "dim": 8, "n_heads": 2, "hidden_dim": 8}, 20),
        ("roberta", {"pad_token_id": 1}, 18),
        ("roberta", {"pad_token_id": 0}, 19),
        ("camembert", {"pad_token_id": 3}, 16),
        # Its positions begin behind 1 whatever stands for the padding.
        ("mpnet", {"pad_token_id": 5}, 18),
    ],
)
def test_a_text_may_have_as_many_tokens_as_the_model_has_positions(
    kind: str, others: dict[str, Any], expected: int
) -> None:
    model = tiny(kind, **others)
    assert most_tokens(model) == expected
    longest = torch.full((1, expected), 7)
    assert model(input_ids=longest).logits.shape == (1, 2)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, expected + 1), 7))


@for_each("kind", ["t5", "xlnet"])
def test_a_model_without_positions_takes_texts_of_any_length(kind: str) -> None:
    model = torch.nn.Linear(1, 1)
    model.config = transformers.AutoConfig.for_model(kind)
    assert most_tokens(model) is None


@for_each(
    "named",
    [
        {"attn_implementation": ["somebody/kernel"]},
        {"layers": [{"_attn_implementation": "somebody/kernel"}]},
        {"_experts_implementation": {"": [["somebody/kernel"]]}},
    ],
)
def test_kernels_in_lists_are_refused_as_well(named: dict[str, Any]) -> None:
    config = {**json.loads(small().config.to_json_string(use_diff=False)), **named}
    with pytest.raises(CheckpointError, match="'somebody/kernel' names code that would be fetched"):
        build_from_config(json.dumps(config))
