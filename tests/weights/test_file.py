import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors

from onefold.core.flat import same_bits
from onefold.errors import CheckpointError
from onefold.weights import read_weights, state_under
from tests.tables import for_each

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
    content = read_weights(file)
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
    weight = read_weights(tmp_path / "weights.pth")["weight"]
    assert (weight.device, weight.tolist()) == (torch.device("cpu"), [1, 1])


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        read_weights(tmp_path / "no/such/folder")
    with pytest.raises(CheckpointError, match=r"is a folder without model\.safetensors: expected"):
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
        (b"version https://git-lfs.github.com/spec/v1\n", "is no file of weights: .* b'version h"),
        (saved(STATE)[:-400], "is a broken file of torch.save: File is not a zip file"),
        (saved(STATE).replace(b"data.pkl", b"da\xcea.pkl"), "is a broken file of torch.save"),
        (legacy(STATE)[:-4], "is a broken file of torch.save: unexpected EOF"),
        (save_safetensors(STATE)[:-4], "is a broken safetensors file: .*not fully covered"),
        (zipped("weights.pth"), r"is a zip file that torch\.save did not write"),
        (PROGRAM, "holds a TorchScript program"),
        (saved([torch.ones(2)]), "holds a list: expected a state_dict"),
        (saved(torch.nn.Linear(2, 1)), "holds more than tensors and plain values"),
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
    with pytest.raises(CheckpointError, match=r"can run any code .* save the model's state_dict"):
        read_weights(tmp_path / "weights.pth")
    assert not sprung.exists()


TRAINING = {
    "model": STATE,
    "ema": {"weight": torch.ones(1)},
    "optimizer": {"state": {0: {"step": torch.ones(1)}}, "param_groups": []},
    "moments": {0: torch.ones(1)},
    "epoch": 3,
}


LACKS = "last.pt holds no dict of tensors under key='{}'; such keys are 'model', 'ema'"


@for_each(
    ("content", "key", "told"),
    [
        *((TRAINING, key, LACKS.format(key)) for key in ("state_dict", "epoch", "moments")),
        (STATE, "model", "under key='model'; it has no such key"),
        ({0: torch.ones(1)}, None, "holds a dict whose keys are not names"),
    ],
)
def test_a_key_without_tensors_is_told(content: Any, key: str | None, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        state_under(content, key, Path("last.pt"))
