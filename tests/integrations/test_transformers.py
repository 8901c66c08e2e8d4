"""The loop of `transformers.Trainer`: equal bits on any number of devices, and its own values."""

from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold.errors import CheckpointError

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the loop of transformers needs accelerate")

from tqdm import tqdm

from onefold.integrations.transformers import Trainer
from tests.integrations import looped
from tests.integrations.looped import Result, arguments, model_of, run, run_launched
from tests.tables import some

pytestmark = pytest.mark.filterwarnings("default")

KINDS = ["words", "own loss", "classes", "tags"]
SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
PART = {**SAVING, "max_steps": 4, "lr_scheduler_type": "constant"}


def on(devices: int, **more: Any) -> dict[str, Any]:
    return {"devices": ["cpu"] * devices, **more}


@pytest.fixture(autouse=True)
def _bars_have_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def same_bits(mine: Result, other: Result) -> None:
    assert mine.losses == other.losses
    assert mine.parameters.keys() == other.parameters.keys()
    for name, value in mine.parameters.items():
        assert torch.equal(value, other.parameters[name]), name


def close(mine: Result, theirs: Result, tolerance: float = 1e-12) -> None:
    # Losses are added up in float32 by the loop.
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-6)
    for name, value in theirs.parameters.items():
        torch.testing.assert_close(mine.parameters[name], value, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_the_bits_on_any_devices_that_go_on_with_others(kind: str, tmp_path: Path) -> None:
    whole = run(kind, tmp_path / "whole", choices={**PART, "max_steps": 6})
    run(kind, tmp_path / "part", choices=PART, **on(2, shares=(3, 1)))
    rest = {**PART, "max_steps": 6}
    same_bits(run(kind, tmp_path / "part", choices=rest, go_on=True, **on(3)), whole)


@pytest.mark.full
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_it_has_the_mathematics_of_the_loop(kind: str, shards: int, tmp_path: Path) -> None:
    sgd = {"optim": "sgd"}
    theirs = run(kind, tmp_path, exact=True, plain=True, choices=sgd)
    close(run(kind, tmp_path, exact=True, choices=sgd, shards=shards), theirs, 1e-10)


def test_other_shards_are_another_run(tmp_path: Path) -> None:
    run("tags", tmp_path, choices={**SAVING, "max_steps": 2}, shards=2)
    with pytest.raises(CheckpointError, match="shards"):
        run("tags", tmp_path, choices=SAVING, go_on=True, shards=3)


@pytest.mark.full
@pytest.mark.processes
def test_launched_processes(tmp_path: Path) -> None:
    part = {**PART, "dataloader_num_workers": 1}
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    rest = {**part, **best, "max_steps": 6}
    whole = run("words", tmp_path / "whole", choices=rest)
    folder = str(tmp_path / "part")
    onefold.launch(run_launched, devices="cpu:2", args=("words", folder, {**part, **best}, False))
    names = {path.name for path in Path(folder, "checkpoint-4").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "onefold"} <= names
    goes_on = onefold.launch(run_launched, devices="cpu:3", args=("words", folder, rest, True))
    same_bits(goes_on, whole)


def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(dropout: float = 0.0) -> torch.nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(model_of("words", dropout), config)

    alone = run("words", tmp_path, model=adapted(0.1))
    same_bits(run("words", tmp_path, model=adapted(0.1), **on(2)), alone)
    theirs = run("words", tmp_path, model=adapted(), exact=True, plain=True)
    close(run("words", tmp_path, model=adapted(), exact=True, shards=1), theirs)
    assert any("lora_B" in name and bool(p.any()) for name, p in theirs.parameters.items())


def test_what_would_do_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "")  # transformers sets them: afterwards they are gone again
        monkeypatch.delenv(name)
    for choices, words in (
        ({"gradient_accumulation_steps": 2}, "shards replace accumulation"),
        ({"bf16": True}, "precision='bf16'"),
        ({"auto_find_batch_size": True}, "more shards"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile": True}, "torch_compile"),
    ):
        with pytest.raises(ValueError, match=words):
            Trainer(model_of("words", 0.0), arguments(tmp_path, **choices), shards=2)
    with pytest.raises(ValueError, match="model_init is not supported"):
        Trainer(args=arguments(tmp_path), model_init=lambda: model_of("words", 0.0), shards=2)
    plain = looped.own_loss
    monkeypatch.setattr(looped, "own_loss", lambda *a, **k: plain(*a, **k) + 1)
    with pytest.raises(ValueError, match="the rest would be added once per shard"):
        run("own loss", tmp_path)
