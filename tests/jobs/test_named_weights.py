"""Pretrained weights by name, from servers and caches of this machine."""

import hashlib
import importlib.machinery
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onefold.errors import CheckpointError
from onefold_jobs import named_weights
from onefold_jobs.models import resnet18
from onefold_jobs.named_weights import find_weights
from onefold_jobs.run import read_options, run_job
from onefold_jobs.text_models import build_classifier, train_tokenizer
from tests.capabilities import needs_text
from tests.jobs.server import COMMIT, Server, send, serving
from tests.jobs.tiny import job_of, run_here, write_pictures, write_texts

needs_text()
pytest.importorskip("pooch", reason='needs pip install "onefold-jobs[images]"')


@pytest.fixture
def server() -> Iterator[Server]:
    with serving({}) as made:
        yield made


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A file of a ResNet-18, under torchvision's name, and a cache that does not have it."""
    torch.manual_seed(3)
    torch.save(resnet18(1000, 3, small_images=False).state_dict(), tmp_path / "w.pth")
    content = (tmp_path / "w.pth").read_bytes()
    name = f"resnet18-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    monkeypatch.setattr(named_weights, "TORCHVISION", {"resnet18": name})
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return content


def test_torchvisions_weights_are_fetched_once_and_begin_a_run(
    server: Server, weights: bytes, tmp_path: Path
) -> None:
    name = named_weights.TORCHVISION["resnet18"]
    server.answers[f"/{name}"] = send(weights)
    for _ in range(2):
        found = find_weights("torchvision:resnet18", server=server.address)
        assert found == tmp_path / "hub" / "checkpoints" / name
        assert found.read_bytes() == weights
    assert server.asked == [f"/{name}"]
    data = write_pictures(tmp_path / "data")
    how = {"model": None, "lr": 1e-9, "pretrained": "torchvision:resnet18", "freeze_until": "fc"}
    folder, said = run_here("classify", data, tmp_path / "runs", **how)
    assert said["model"] == "resnet18"
    kept = load_file(folder / said["best"]["checkpoint"] / "model.safetensors")
    assert torch.equal(kept["conv1.weight"], torch.load(tmp_path / "w.pth")["conv1.weight"])
    assert said["picture_model"]["mean"] == (0.485, 0.456, 0.406)


def test_weights_that_cannot_be_had_say_from_where_and_to_where(
    server: Server, weights: bytes, tmp_path: Path
) -> None:
    name = named_weights.TORCHVISION["resnet18"]
    path = tmp_path / "hub" / "checkpoints" / name
    for content in (None, weights[:-1], weights[:-1] + b"x"):
        server.answers = {} if content is None else {f"/{name}": send(content)}
        with pytest.raises(
            CheckpointError, match=f"{server.address}{name}: .*\n.*put the file at {path}"
        ):
            find_weights("torchvision:resnet18", server=server.address)
        assert [*path.parent.iterdir()] == []
    path.write_bytes(b"other")
    with pytest.raises(CheckpointError, match=f"{name}: expected a file whose SHA-256 begins"):
        find_weights("torchvision:resnet18")
    with pytest.raises(CheckpointError, match="resnet7: expected one of resnet18"):
        find_weights("torchvision:resnet7")
    with pytest.raises(CheckpointError, match="hf:model: expected hf:ORG/NAME"):
        find_weights("hf:model")
    assert find_weights("some/file.pth") == Path("some/file.pth")


HUB = """
import sys
from onefold.errors import CheckpointError
from onefold_jobs.named_weights import find_weights
try:
    print(find_weights(sys.argv[1], whole=len(sys.argv) > 2))
except CheckpointError as error:
    print(f"refused: {error}")
"""


def ask_hub(home: Path, *words: str, **variables: str) -> str:
    """The answer of a process of its own, as the library reads its variables when it is loaded."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", HUB, *words],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return done.stdout.strip()


@pytest.mark.full
@pytest.mark.processes
def test_a_model_of_the_hub_comes_from_its_server_and_then_from_the_cache(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # which would leave a thread
    torch.manual_seed(0)
    size = {"width": 16, "layers": 1, "heads": 2, "max_length": 16, "dropout": 0.1}
    model: Any = build_classifier(300, 2, **size)  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(train_tokenizer(["a text"] * 9, 300))
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    contents = {name: (tmp_path / "model" / name).read_bytes() for name in names}
    listed = [
        {"type": "file", "path": name, "rfilename": name, "size": len(content), "oid": "0" * 40}
        for name, content in contents.items()
    ]
    facts = {"id": "org/name", "sha": COMMIT, "siblings": listed}
    base = "/api/models/org/name"
    files = {f"{base}/revision/main": json.dumps(facts).encode()}
    tree = f"{base}/tree/{COMMIT}?recursive=true&expand=false"
    files[tree] = json.dumps(listed).encode()
    places = [f"/org/name/resolve/{place}" for place in (COMMIT, "main")]
    files |= {f"{place}/{name}": each for place in places for name, each in contents.items()}
    server.answers = {path: send(content) for path, content in files.items()}
    home = tmp_path / "home"
    offline = ask_hub(home, "hf:org/name", HF_HUB_OFFLINE="1")
    assert offline.startswith("refused: --pretrained hf:org/name: https://huggingface.co/org/name ")
    assert "hf download org/name --local-dir FOLDER" in offline
    folder = ask_hub(home, "hf:org/name", "whole", HF_ENDPOINT=server.address.rstrip("/"))
    assert folder.endswith(f"snapshots/{COMMIT}"), (folder, server.asked)
    count = len(server.asked)
    file = Path(ask_hub(home, "hf:org/name", HF_ENDPOINT=server.address.rstrip("/")))
    assert file == Path(folder) / "model.safetensors"
    assert len(server.asked) == count
    options: dict[str, Any] = {
        "data": str(write_texts(tmp_path / "data")),
        "runs": str(tmp_path / "runs"),
    }
    options |= {"pretrained": folder, "epochs": 1, "devices": "cpu:1"}
    said = run_job(job_of("text"), read_options(job_of("text"), options, None))
    assert (said["model"], said["parameters"]) == (
        folder,
        sum(p.numel() for p in model.parameters()),
    )
    file.resolve().write_bytes(b"damaged")
    assert "expected a file whose SHA-256 begins with" in ask_hub(home, "hf:org/name")


def test_timms_weights_lie_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = SimpleNamespace(hf_hub_id="timm/net.a1", mean=(0.5,) * 3, std=(0.2,) * 3)
    timm: Any = ModuleType("timm")
    timm.__spec__ = importlib.machinery.ModuleSpec("timm", None)
    timm.models = SimpleNamespace(get_pretrained_cfg={"net.a1": facts}.get)
    monkeypatch.setitem(sys.modules, "timm", timm)
    asked = []

    def snapshot(repository: str, **how: Any) -> str:
        asked.append((repository, how["local_files_only"]))
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        return str(tmp_path)

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert find_weights("timm:net.a1") == tmp_path / "model.safetensors"
    assert asked == [("timm/net.a1", True)]
    assert named_weights.model_named("timm:net.a1") == "timm:net.a1"
    with pytest.raises(CheckpointError, match="expected a model that timm has weights for"):
        find_weights("timm:other")
