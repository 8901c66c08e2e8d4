from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import onefold
from onefold.errors import CheckpointError
from onefold.weights.load import Loaded, load_weights
from tests.small import bits, line, make_trainer, points
from tests.tables import for_each

NOTHING = Loaded((), ())


class Mixed(nn.Module):
    """Tied parameters, and tensors of several kinds, shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("short", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.embedding(tokens)) * self.scale)


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
    """All that loading must not change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (id(t), t.data_ptr(), t.stride(), t.dtype, t.device, t.requires_grad)
        for name, t in tensors.items()
    }


def save_pth(state: Mapping[str, Any], file: Path) -> None:
    torch.save(dict(state), file)


def save_legacy(state: Mapping[str, Any], file: Path) -> None:
    torch.save(dict(state), file, _use_new_zipfile_serialization=False)


def save_plain(state: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file({name: value.clone() for name, value in state.items()}, file)


@for_each("save", [save_pth, save_legacy, save_plain])
@for_each("front", ["", "module.", "_orig_mod.", "module._orig_mod."])
@for_each("strict", [True, False])
def test_values_come_to_the_bit_and_tensors_stay(
    tmp_path: Path, save: Callable[..., None], front: str, strict: bool
) -> None:
    model = Mixed()
    state = other_values(model)
    save({front + name: value for name, value in state.items()}, tmp_path / "weights")
    before = places(model)
    assert load_weights(model, tmp_path / "weights", strict=strict) == NOTHING
    expected = Mixed()
    expected.load_state_dict(state)
    assert bits(model) == bits(expected)
    assert places(model) == before
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.decoder.weight is model.embedding.weight


@for_each("as_text", [True, False])
def test_a_path_may_be_a_word(tmp_path: Path, as_text: bool) -> None:
    file = tmp_path / "weights.pth"
    torch.save(line(3).state_dict(), file)
    model = nn.Linear(3, 1)
    load_weights(model, str(file) if as_text else file)
    assert bits(model) == bits(line(3))


def test_a_checkpoint_of_a_trainer_loads(tmp_path: Path) -> None:
    trainer = make_trainer(devices=2)
    trainer.step(points(8))
    model = nn.Linear(3, 1)
    assert load_weights(model, trainer.save(tmp_path)) == NOTHING
    assert bits(model) == bits(trainer.model)


def test_a_compiled_model_takes_plain_names(tmp_path: Path) -> None:
    torch.save(line(3).state_dict(), tmp_path / "weights.pth")
    model = torch.compile(nn.Linear(3, 1), backend="eager")
    assert load_weights(model, tmp_path / "weights.pth") == NOTHING
    assert list(bits(model).values()) == list(bits(line(3)).values())


@for_each("inner", [False, True])
def test_dataparallel_on_either_side(tmp_path: Path, inner: bool) -> None:
    wrapped, plain = nn.DataParallel(nn.Sequential(line(3))), nn.Sequential(nn.Linear(3, 1))
    source, target = (nn.Sequential(line(3)), nn.DataParallel(plain)) if inner else (wrapped, plain)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    assert load_weights(target, tmp_path / "weights.pth") == NOTHING
    assert bits(plain[0]) == bits(line(3))


def norm_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@for_each("devices", [1, 2])
@for_each("steps", [0, 1])
def test_a_run_goes_on_as_if_the_model_had_had_the_weights(
    tmp_path: Path, devices: int, steps: int
) -> None:
    """Whether they come before the run or between its steps; without momentum only they count."""
    state = {name: value.abs() for name, value in other_values(norm_model()).items()}
    torch.save(state, tmp_path / "weights.pth")

    def trainer_of(model: nn.Module) -> onefold.Trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return make_trainer(model, optimizer=optimizer, devices=devices)

    model = norm_model()
    trainer = trainer_of(model)
    for _ in range(steps):
        trainer.step(points(8))
    before = places(model)
    load_weights(model, tmp_path / "weights.pth")
    assert places(model) == before
    start = norm_model()
    start.load_state_dict(state)
    assert bits(model) == bits(start)
    expected = trainer_of(start)
    for batch in (points(8), points(9)):
        trainer.step(batch)
        expected.step(batch)
        assert trainer.fingerprint() == expected.fingerprint()


@for_each(
    ("dtype", "own"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.complex64),
        (torch.int32, torch.int64),
        (torch.uint8, torch.bool),
        (torch.int64, torch.float32),
    ],
)
def test_numbers_are_converted(tmp_path: Path, dtype: torch.dtype, own: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("values", torch.zeros(3, dtype=own))
    values = torch.tensor([0, 1, 3]).to(dtype)
    torch.save({"values": values}, tmp_path / "weights.pth")
    load_weights(model, tmp_path / "weights.pth")
    assert model.values.dtype == own
    assert torch.equal(model.values, values.to(own))


@for_each("strict", [True, False])
@for_each(
    ("dtype", "own"),
    [
        (torch.float32, torch.int64),
        (torch.float16, torch.bool),
        (torch.complex64, torch.float32),
        (torch.complex64, torch.uint8),
    ],
)
def test_numbers_without_room_are_refused(
    tmp_path: Path, dtype: torch.dtype, own: torch.dtype, strict: bool
) -> None:
    model = line(3)
    model.register_buffer("count", torch.ones(2, dtype=own))
    state = {**other_values(model), "count": torch.zeros(2, dtype=dtype)}
    torch.save(state, tmp_path / "weights.pth")
    before = bits(model)
    with pytest.raises(CheckpointError, match=f"count is {own} in the model and {dtype} in the f"):
        load_weights(model, tmp_path / "weights.pth", strict=strict)
    assert bits(model) == before


@for_each("left_out", ["embedding.weight", "decoder.weight"])
def test_one_name_of_tied_parameters_is_enough(tmp_path: Path, left_out: str) -> None:
    model = Mixed()
    state = other_values(model)
    tied = state.pop(left_out)
    torch.save(state, tmp_path / "weights.pth")
    assert load_weights(model, tmp_path / "weights.pth") == NOTHING
    assert torch.equal(model.embedding.weight, tied)


@for_each("strict", [True, False])
def test_tied_parameters_that_differ_in_the_file_are_refused(tmp_path: Path, strict: bool) -> None:
    model = Mixed()
    before = bits(model)
    state = other_values(model)
    state["decoder.weight"] = state["decoder.weight"] + 1
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"embedding\.weight and decoder\.weight differ in"):
        load_weights(model, tmp_path / "weights.pth", strict=strict)
    assert bits(model) == before


def test_the_count_of_a_batch_norm_may_be_missing(tmp_path: Path) -> None:
    model = norm_model()
    model[1].num_batches_tracked.fill_(9)
    state = other_values(model)
    del state["1.num_batches_tracked"]
    torch.save(state, tmp_path / "weights.pth")
    loaded = load_weights(model, tmp_path / "weights.pth")
    assert loaded == Loaded(missing=("1.num_batches_tracked",), unexpected=())
    assert model[1].num_batches_tracked.item() == 9
    assert torch.equal(model[1].running_var, state["1.running_var"])


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # files of others hold them all the same
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([tensor], layout=torch.strided)


STRANGE = {
    "missing": ({"bias": None}, "1 missing in the file: bias"),
    "unexpected": ({"head.weight": torch.ones(2)}, r"1 unexpected in it: head\.weight"),
    "shape": (
        {"weight": torch.ones(3, 1)},
        r"1 of another shape: weight \(\(1, 3\) in the model, \(3, 1\) in the file\)",
    ),
    "scalar": ({"bias": torch.tensor(1.0)}, r"bias \(\(1,\) in the model, \(\) in the file\)"),
    "number": ({"bias": 3}, r"bias \(int in the file, and no tensor\)"),
    "sparse": (
        {"weight": torch.eye(3)[:1].to_sparse()},
        r"weight \(torch\.strided in the model, torch\.sparse_coo in the file\)",
    ),
    # Of the last parameter, when the others would have been copied.
    "meta": (
        {"bias": torch.ones(1, device="meta")},
        r"bias \(torch\.strided in the model, a tensor without values \(on the meta device\) in",
    ),
    "quantized": (
        {"bias": quantized(torch.ones(1))},
        r"bias \(torch\.strided in the model, quantized \(torch\.per_tensor_affine\) in the file\)",
    ),
    "nested": (
        {"bias": nested(torch.ones(1))},
        r"bias \(torch\.strided in the model, a nested tensor in the file\)",
    ),
}


def save_strange(kind: str, file: Path) -> str:
    """A file with one thing that does not fit, and what is said about it."""
    changes, told = STRANGE[kind]
    state = {**other_values(line(3)), **changes}
    torch.save({name: value for name, value in state.items() if value is not None}, file)
    return told


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("devices", [0, 1, 2])
def test_what_does_not_fit_is_told_and_nothing_is_changed(
    tmp_path: Path, kind: str, devices: int
) -> None:
    told = save_strange(kind, tmp_path / "weights.pth")
    model = line(3)
    if devices:
        make_trainer(model, devices=devices)
    with pytest.raises(CheckpointError, match=f"unchanged: .*{told}.*; strict=False loads what"):
        load_weights(model, tmp_path / "weights.pth")
    assert bits(model) == bits(line(3))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "missing", "unexpected"),
    [
        ("missing", ("bias",), ()),
        ("unexpected", (), ("head.weight",)),
        ("shape", ("weight",), ("weight",)),
        ("scalar", ("bias",), ("bias",)),
        ("number", ("bias",), ("bias",)),
        ("sparse", ("weight",), ("weight",)),
        ("meta", ("bias",), ("bias",)),
        ("quantized", ("bias",), ("bias",)),
        ("nested", ("bias",), ("bias",)),
    ],
)
def test_what_fits_can_be_loaded_alone(
    tmp_path: Path, kind: str, missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> None:
    save_strange(kind, tmp_path / "weights.pth")
    model = line(3)
    loaded = load_weights(model, tmp_path / "weights.pth", strict=False)
    assert loaded == Loaded(missing, unexpected)
    for name, value in other_values(line(3)).items():
        kept = line(3).state_dict()[name]
        assert torch.equal(model.state_dict()[name], kept if name in missing else value)


def test_of_many_names_a_few_are_told(tmp_path: Path) -> None:
    model = nn.Sequential(*(line(2) for _ in range(6)))
    state = {"0.weight": torch.ones(1, 2), **{f"x{i}": torch.ones(1) for i in range(20)}}
    torch.save(state, tmp_path / "weights.pth")
    told = (
        r"11 missing in the file: 0\.bias, 1\.weight, 1\.bias, 2\.weight, 2\.bias and 6 more; "
        r"20 unexpected in it: x0, x1, x2, x3, x4 and 15 more; strict"
    )
    with pytest.raises(CheckpointError, match=told):
        load_weights(model, tmp_path / "weights.pth")


@for_each("strict", [True, False])
@for_each(
    ("state", "told"),
    [
        ({"head": torch.ones(2)}, "no name .* file has head; the model weight, bias"),
        ({}, "no name of it is the model's. The file has none; the model weight, bias"),
        ({"weight": torch.ones(2)}, r"1 of another shape: weight"),
        ({"weight": torch.ones(1, 3), "module.weight": torch.ones(1, 3)}, "are both weight"),
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
    """Its version 2 keeps twice of what version 1 kept, and its hook knows."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.register_load_state_dict_pre_hook(self._double)

    @staticmethod
    def _double(
        module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object
    ) -> None:
        if metadata.get("version") == 1:
            state[f"{prefix}gain"] = state[f"{prefix}gain"] * 2


@for_each("front", ["", "module."])
@for_each(("version", "gain"), [(1, 6), (2, 3)])
def test_hooks_of_the_model_apply(tmp_path: Path, front: str, version: int, gain: int) -> None:
    model = nn.Sequential(Versioned())
    state = nn.Sequential(Versioned()).state_dict()
    renamed = type(state)({f"{front}0.gain": torch.tensor([3.0])})
    renamed._metadata = {f"{front}0": {"version": version}}
    torch.save(renamed, tmp_path / "weights.pth")
    load_weights(model, tmp_path / "weights.pth")
    assert model[0].gain.item() == gain


class Extra(nn.Linear):
    """Has something to save that is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.extra: object = {"seen": 0}

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def test_extra_state_is_handed_on(tmp_path: Path) -> None:
    source, model = Extra(), Extra()
    source.extra = {"seen": 7}
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    assert load_weights(model, tmp_path / "weights.pth") == NOTHING
    assert model.extra == {"seen": 7}


def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    torch.save(other_values(line(3)), tmp_path / "weights.pth")
    data = (tmp_path / "weights.pth").read_bytes()
    (tmp_path / "weights.pth").write_bytes(data[:-30])
    model = line(3)
    with pytest.raises(CheckpointError, match=r"is a broken file of torch\.save"):
        load_weights(model, tmp_path / "weights.pth", strict=False)
    assert bits(model) == bits(line(3))


@for_each(
    ("arguments", "settings", "told"),
    [
        (({}, "a.pth"), {}, "expected model to be a torch.nn.Module, got dict"),
        ((line(), {"weight": 1}), {}, "expected path to be a str or Path, got dict"),
        ((line(), b"a.pth"), {}, "expected path to be a str or Path, got bytes"),
        ((line(), "a.pth"), {"key": 3}, "expected key to be a str or None, got int"),
        ((line(), "a.pth"), {"strict": "no"}, "expected strict to be True or False, got str"),
    ],
)
def test_a_wrong_argument_is_told(
    arguments: tuple[Any, ...], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(TypeError, match=told):
        load_weights(*arguments, **settings)


def expanded() -> nn.Module:
    model = nn.Linear(3, 1)
    model.register_buffer("ones", torch.ones(1).expand(4))
    return model


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.LazyLinear(1), "weight has no shape yet"),
        (lambda: nn.Linear(3, 1, device="meta"), "weight is on the meta device"),
        (expanded, "ones is expanded"),
    ],
)
def test_a_model_without_memory_to_copy_to_is_refused(
    tmp_path: Path, make: Callable[[], nn.Module], told: str
) -> None:
    torch.save(line(3).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=told):
        load_weights(make(), tmp_path / "weights.pth")
