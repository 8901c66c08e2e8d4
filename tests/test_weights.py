"""Weights of others: what fits is loaded, what does not is named, and no code of a file runs."""

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors
from safetensors.torch import save_file
from torch import nn

import onefold
from onefold.core.flat import same_bits
from onefold.errors import CheckpointError
from onefold.weights import Loaded, load_weights, match_names, read_weights, state_under
from tests.checkpoint.folders import Tied
from tests.small import bits, line, make_trainer, points
from tests.tables import for_each

NOTHING = Loaded((), ())


def other_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state of the same names and kinds, with numbers of its own."""
    generator = torch.Generator().manual_seed(5)
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        same = [other for other, tied in model.state_dict(keep_vars=True).items() if tied is value]
        drawn = torch.randn(value.shape, generator=generator) * 4
        state[name] = state.get(same[0], drawn.to(value.dtype))
    return state


def places(model: nn.Module) -> dict[str, tuple[object, ...]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (id(t), t.data_ptr(), t.stride(), t.dtype, t.device, t.requires_grad)
        for name, t in tensors.items()
    }


def save_plain(state: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file({name: value.clone() for name, value in state.items()}, file)


@for_each("save", [torch.save, save_plain])
@for_each(("front", "strict"), [("", True), ("module.", False), ("module._orig_mod.", True)])
def test_values_come_to_the_bit_and_tensors_stay(
    tmp_path: Path, save: Callable[..., None], front: str, strict: bool
) -> None:
    model = Tied()
    state = other_values(model)
    save({front + name: value for name, value in state.items()}, tmp_path / "weights")
    before = places(model)
    assert load_weights(model, str(tmp_path / "weights"), strict=strict) == NOTHING
    expected = Tied()
    expected.load_state_dict(state)
    assert bits(model) == bits(expected)
    assert places(model) == before
    assert model.decoder.weight is model.embedding.weight


@for_each(
    ("source", "target"),
    [
        (lambda m: nn.DataParallel(nn.Sequential(m)), nn.Sequential),
        (nn.Sequential, lambda m: nn.DataParallel(nn.Sequential(m))),
        (lambda m: m, lambda m: torch.compile(m, backend="eager")),
    ],
)
def test_either_side_may_be_wrapped(tmp_path: Path, source: Any, target: Any) -> None:
    torch.save(source(line(3)).state_dict(), tmp_path / "weights.pth")
    plain = nn.Linear(3, 1)
    assert load_weights(target(plain), tmp_path / "weights.pth") == NOTHING
    assert bits(plain) == bits(line(3))


def norm_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@for_each(("devices", "steps"), [(1, 1), (2, 0), (2, 1)])
def test_a_run_goes_on_with_the_loaded_weights(tmp_path: Path, devices: int, steps: int) -> None:
    """Those of a checkpoint, before the run or between its steps; nothing else counts here."""

    def trainer_of(model: nn.Module) -> onefold.Trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return make_trainer(model, optimizer=optimizer, devices=devices)

    model, start = norm_model(), norm_model()
    start.load_state_dict({name: value.abs() for name, value in other_values(start).items()})
    expected, trainer = trainer_of(start), trainer_of(model)
    folder = expected.save(tmp_path)
    for _ in range(steps):
        trainer.step(points(8))
    before = places(model)
    assert load_weights(model, folder) == NOTHING
    assert places(model) == before
    for batch in (points(8), points(9)):
        assert bits(model) == bits(start)
        trainer.step(batch)
        expected.step(batch)
    assert trainer.fingerprint() == expected.fingerprint()


@for_each(
    ("dtype", "own", "fits"),
    [
        *((torch.bfloat16, torch.float32, True), (torch.float64, torch.bfloat16, True)),
        *((torch.float32, torch.complex64, True), (torch.int32, torch.int64, True)),
        *((torch.uint8, torch.bool, True), (torch.int64, torch.float32, True)),
        *((torch.float32, torch.int64, False), (torch.float16, torch.bool, False)),
        *((torch.complex64, torch.float32, False), (torch.complex64, torch.uint8, False)),
    ],
)
def test_numbers_are_converted_where_there_is_room(
    tmp_path: Path, dtype: torch.dtype, own: torch.dtype, fits: bool
) -> None:
    model = line(3)
    model.register_buffer("values", torch.zeros(3, dtype=own))
    values = torch.tensor([0, 1, 3]).to(dtype)
    torch.save({**other_values(model), "values": values}, tmp_path / "weights.pth")
    before = bits(model)
    if fits:
        load_weights(model, tmp_path / "weights.pth")
        assert model.values.dtype == own
        assert torch.equal(model.get_buffer("values"), values.to(own))
        return
    words = f"values is {own} in the model, but {dtype} in the f"
    with pytest.raises(CheckpointError, match=words):
        load_weights(model, tmp_path / "weights.pth", strict=False)
    assert bits(model) == before


def test_one_name_of_tied_parameters_is_enough(tmp_path: Path) -> None:
    for left_out in ("embedding.weight", "decoder.weight"):
        model = Tied()
        state = other_values(model)
        tied = state.pop(left_out)
        del state["norm.num_batches_tracked"]  # as before PyTorch kept it
        torch.save(state, tmp_path / "weights.pth")
        lacking = Loaded(missing=("norm.num_batches_tracked",), unexpected=())
        assert load_weights(model, tmp_path / "weights.pth") == lacking
        assert torch.equal(model.embedding.weight, tied)
    state["decoder.weight"] = tied + 1
    state["embedding.weight"] = tied
    torch.save(state, tmp_path / "weights.pth")
    before = bits(model)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"embedding\.weight and decoder\.weight differ"):
            load_weights(model, tmp_path / "weights.pth", strict=strict)
    assert bits(model) == before


def odd(make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # files of others hold them all the same
        return make(torch.ones(1))


QUANTIZED = odd(lambda one: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8))
NESTED = odd(lambda one: torch.nested.nested_tensor([one], layout=torch.strided))
STRIDED = r"bias \(torch\.strided in the model, "


@pytest.mark.filterwarnings("ignore::UserWarning")
@for_each(
    ("name", "value", "told", "lacks", "adds"),
    [
        ("bias", None, "1 missing in the file: bias", True, False),
        ("head.w", torch.ones(2), r"1 unexpected in it: head\.w", False, True),
        ("weight", torch.ones(3, 1), r"weight \(\(1, 3\) in the model, \(3, 1\) in", True, True),
        ("bias", torch.tensor(1.0), r"bias \(\(1,\) in the model, \(\) in", True, True),
        ("bias", 3, r"bias \(int in the file, not a tensor\)", True, True),
        ("weight", torch.eye(3)[:1].to_sparse(), r"weight \(.* torch\.sparse_coo in", True, True),
        # Of the last parameter, when the others would have been copied.
        ("bias", torch.ones(1, device="meta"), STRIDED + "a tensor without values", True, True),
        ("bias", QUANTIZED, STRIDED + r"quantized \(torch\.per_tensor_affine\) in", True, True),
        ("bias", NESTED, STRIDED + r"a nested tensor in the file\)", True, True),
    ],
)
def test_what_does_not_fit_is_told_and_what_fits_can_be_loaded_alone(
    tmp_path: Path, name: str, value: Any, told: str, lacks: bool, adds: bool
) -> None:
    state = {**other_values(line(3)), name: value}
    kept = {each: tensor for each, tensor in state.items() if tensor is not None}
    torch.save(kept, tmp_path / "weights.pth")
    for devices in (0, 1, 2):
        model = line(3)
        if devices:
            make_trainer(model, devices=devices)
        with pytest.raises(CheckpointError, match=f"unchanged: .*{told}.*; strict=False loads w"):
            load_weights(model, tmp_path / "weights.pth")
        assert bits(model) == bits(line(3))
    model = line(3)
    loaded = load_weights(model, tmp_path / "weights.pth", strict=False)
    assert loaded == Loaded((name,) * lacks, (name,) * adds)
    own, other = line(3).state_dict(), other_values(line(3))
    for each, tensor in model.state_dict().items():
        assert torch.equal(tensor, own[each] if each == name and lacks else other[each])


@for_each("strict", [True, False])
@for_each(
    ("state", "told"),
    [
        ({"head": torch.ones(2)}, "none of its names .* file has head; the model weight, bias"),
        ({}, "none of its names is in the model. The file has none; the model weight, bias"),
        ({"weight": torch.ones(2)}, r"1 of another shape: weight"),
        ({"weight": torch.ones(1, 3), "module.weight": torch.ones(1, 3)}, "both fit weight"),
    ],
)
def test_where_nothing_fits_it_is_an_error(
    tmp_path: Path, state: dict[str, torch.Tensor], told: str, strict: bool
) -> None:
    torch.save(state, tmp_path / "weights.pth")
    model = line(3)
    with pytest.raises(CheckpointError, match=told):
        load_weights(model, tmp_path / "weights.pth", strict=strict)
    assert bits(model) == bits(line(3))


def test_a_part_of_a_file_is_named_by_its_key(tmp_path: Path) -> None:
    state = {f"module.{name}": value for name, value in line(3).state_dict().items()}
    training = {"epoch": 3, "model": state, "ema": other_values(line(3)), "optimizer": {}}
    torch.save(training, tmp_path / "last.pt")
    model = nn.Linear(3, 1)
    with pytest.raises(CheckpointError, match=r"Pass key='model' or key='ema'$"):
        load_weights(model, tmp_path / "last.pt", strict=False)
    assert load_weights(model, tmp_path / "last.pt", key="model") == NOTHING
    assert bits(model) == bits(line(3))


class Versioned(nn.Module):
    """Its version 2 keeps twice of what version 1 kept; and something that is no tensor."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.extra: object = {"seen": 0}

        def double(_: object, state: dict[str, Any], prefix: str, data: Any, *rest: object) -> None:
            if data.get("version") == 1:
                state[f"{prefix}gain"] = state[f"{prefix}gain"] * 2

        self.register_load_state_dict_pre_hook(double)

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@for_each("front", ["", "module."])
@for_each(("version", "gain"), [(1, 6), (2, 3)])
def test_hooks_of_the_model_apply(tmp_path: Path, front: str, version: int, gain: int) -> None:
    model = nn.Sequential(Versioned())
    values = {f"{front}0.gain": torch.tensor([3.0]), f"{front}0._extra_state": {"seen": 7}}
    renamed: Any = type(model.state_dict())(values)
    renamed._metadata = {f"{front}0": {"version": version}}
    torch.save(renamed, tmp_path / "weights.pth")
    assert load_weights(model, tmp_path / "weights.pth") == NOTHING
    assert model[0].get_parameter("gain").item() == gain
    assert model[0].extra == {"seen": 7}


def expanded() -> nn.Module:
    model = nn.Linear(3, 1)
    model.register_buffer("ones", torch.ones(1).expand(4))
    return model


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@for_each(
    ("make", "told"),
    [
        (lambda: nn.LazyLinear(1), "weight has no shape yet"),
        (lambda: nn.Linear(3, 1, device="meta"), "weight is on the meta device"),
        (expanded, "ones is expanded"),
    ],
)
def test_a_model_without_memory(tmp_path: Path, make: Callable[[], nn.Module], told: str) -> None:
    torch.save(line(3).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=told):
        load_weights(make(), tmp_path / "weights.pth")


@for_each(
    ("found", "own"),
    [
        *(("module.module.w", "w"), ("module._orig_mod.w", "w"), ("_orig_mod.module.w", "w")),
        *(("a._orig_mod.b.w", "a.b.w"), ("a.module.0.w", "a.0.w"), ("module.module", "module")),
        *(("w", "_orig_mod.w"), ("module.w", "_orig_mod.w"), ("_orig_mod.w", "module.w")),
        *(("a.b.w", "a._orig_mod.b.w"), ("w", None), ("modules.a.w", None), ("a.module", None)),
    ],
)
def test_words_of_wrappers_are_left_out_on_either_side(found: str, own: str | None) -> None:
    names = ["a.w", "a", "bias"] if own is None else [own, "other"]
    assert match_names([found], names) == ({} if own is None else {found: own})


def test_a_name_that_is_the_models_is_taken_as_it_is() -> None:
    assert match_names(["module.a", "module.b"], ["a", "module.a"]) == {"module.a": "module.a"}
    matched = match_names(["averaged", "module.weight", "module.bias"], ["weight", "bias"])
    assert matched == {"module.weight": "weight", "module.bias": "bias"}
    names = ["weight", "module.weight", "module.module.bias"]
    matched = match_names([f"module._orig_mod.{name}" for name in names], names)
    assert list(matched.values()) == names


@for_each(
    ("found", "own", "words"),
    [
        (["c.w", "module.c.w"], ["c.w"], "c.w and module.c.w in the file both fit c"),
        (["a.module.x.w"], ["module.a.x.w", "a.x.module.w"], "may be module.a.x.w or a.x.module.w"),
    ],
)
def test_names_that_fit_two_are_refused(found: list[str], own: list[str], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        match_names(found, own)


# Files of weights


STATE = {
    "weight": torch.tensor([[1.5, -0.0], [float("nan"), 3e-41]]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
}


def saved(content: object, *, zipped: bool = True) -> bytes:
    """What torch.save writes, in today's form or in that of before PyTorch 1.6."""
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def legacy(content: object) -> bytes:
    return saved(content, zipped=False)


WRITERS = [saved, legacy, save_safetensors]


@for_each(("write", "suffix"), zip(WRITERS, [".safetensors", "", ".pth"], strict=True))
def test_content_says_the_kind(
    tmp_path: Path, write: Callable[[object], bytes], suffix: str
) -> None:
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(write(STATE))
    content: Any = read_weights(file)
    assert content.keys() == STATE.keys()
    for name, value in STATE.items():
        assert (content[name].dtype, content[name].shape) == (value.dtype, value.shape)
        assert same_bits(content[name], value)


@for_each("length", range(0, 256, 8))
def test_no_length_of_a_header_is_taken_for_a_pickle(tmp_path: Path, length: int) -> None:
    """A file of safetensors begins with it, and a pickle with the byte 0x80."""
    written = (save_safetensors(STATE, {"note": "x" * letters}) for letters in range(0, 512, 8))
    file = tmp_path / "model.safetensors"
    file.write_bytes(next(content for content in written if content[0] == length))
    assert read_weights(file).keys() == STATE.keys()


@for_each(("write", "device"), [(saved, "cuda:3"), (legacy, "mps")])
def test_tensors_of_a_device_that_is_not_here_come_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, device: str
) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: device)
    (tmp_path / "weights.pth").write_bytes(write({"weight": torch.ones(2)}))
    assert device.encode() in (tmp_path / "weights.pth").read_bytes()
    weight: Any = read_weights(tmp_path / "weights.pth")["weight"]
    assert (weight.device, weight.tolist()) == (torch.device("cpu"), [1, 1])


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        read_weights(tmp_path / "no/such/folder")
    with pytest.raises(CheckpointError, match=r"is a folder without model\.safetensors\. Pass"):
        read_weights(tmp_path)


def zipped(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return stream.getvalue()


PROGRAM = zipped("model/data.pkl", "model/constants.pkl", "model/code/model.py")


@for_each(
    ("data", "told"),
    [
        (b"", "is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is not a file of weights .* b'version h",
        ),
        (saved(STATE)[:-400], "is a broken file of torch.save: File is not a zip file"),
        (saved(STATE).replace(b"data.pkl", b"da\xcea.pkl"), "is a broken file of torch.save"),
        (legacy(STATE)[:-4], "is a broken file of torch.save: unexpected EOF"),
        (save_safetensors(STATE)[:-4], "is a broken safetensors file: .*not fully covered"),
        (zipped("weights.pth"), r"is a zip file that torch\.save did not write"),
        (PROGRAM, "contains a TorchScript program"),
        (saved([torch.ones(2)]), "contains a list. Pass a file with a state_dict"),
        (saved(torch.nn.Linear(2, 1)), "contains more than tensors and plain values"),
    ],
)
def test_a_broken_file_is_told(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "weights.pth").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"weights\.pth {told}"):
        read_weights(tmp_path / "weights.pth")


class Trap:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self._file, "sprung")


@for_each("write", [saved, legacy, pickle.dumps])
def test_no_code_is_run(tmp_path: Path, write: Callable[[object], bytes]) -> None:
    sprung = tmp_path / "sprung"
    (tmp_path / "weights.pth").write_bytes(write({"weight": Trap(sprung)}))
    with pytest.raises(
        CheckpointError, match=r"reading it can run any code .* save the model's state_dict"
    ):
        read_weights(tmp_path / "weights.pth")
    assert not sprung.exists()


TRAINING = {
    "model": STATE,
    "ema": {"weight": torch.ones(1)},
    "optimizer": {"state": {0: {"step": torch.ones(1)}}, "param_groups": []},
    "moments": {0: torch.ones(1)},
    "epoch": 3,
}


LACKS = "last.pt has no dict of tensors under key='{}'; such keys are 'model', 'ema'"


@for_each(
    ("content", "key", "told"),
    [
        *((TRAINING, key, LACKS.format(key)) for key in ("state_dict", "epoch", "moments")),
        (STATE, "model", "under key='model'; it has no such key"),
        ({0: torch.ones(1)}, None, "contains a dict whose keys are not names"),
    ],
)
def test_a_key_without_tensors_is_told(content: Any, key: str | None, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        state_under(content, key, Path("last.pt"))
