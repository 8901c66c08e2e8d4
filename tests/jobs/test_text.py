import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from onefold.errors import CheckpointError
from onefold_jobs.job import Target
from onefold_jobs.targets import target_measure
from onefold_jobs.text_job import TextModel, TextOptions, answer, make_task, prepare, settle
from tests.capabilities import needs_text
from tests.jobs.tiny import SMALL, run_here, write_texts

needs_text()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "data")


def both(data: Path, **choices: Any) -> tuple[TextOptions, Any]:
    options = TextOptions(data=str(data), **{**SMALL["text"], **choices})
    prepared = prepare(options)
    return settle(options, prepared), prepared


def test_a_model_learns_which_word_decides_and_is_built_again(data: Path, tmp_path: Path) -> None:
    folder, said = run_here("text", data, tmp_path, epochs=12, lr=5e-3, dropout=0.0)
    assert said["best"]["value"] == 1.0
    assert said["classes"] == ["bad", "good"]
    kind = TextModel.of_run(folder)
    model = kind.build(folder)
    ids = kind.encode(["the film was fine"])
    shard = kind.collate([(ids[0], 0), (ids[0][:3], 1)])
    with torch.no_grad():
        sure = target_measure(answer, Target())(model.eval(), shard)["confidence"]
    torch.testing.assert_close(sure.sum(dim=1), torch.ones(2))
    shapes = [
        [(n, p.shape) for n, p in each.named_parameters()]
        for each in (model, make_task(*both(data)).model)
    ]
    assert shapes[0] == shapes[1]


def test_texts_that_are_cut_off_are_counted(data: Path) -> None:
    (note,) = make_task(*both(data, max_length=4)).notes
    assert re.fullmatch(r"\d+ texts of 52 fill 4 tokens and may be truncated: .*", note)
    assert make_task(*both(data, max_length=128)).notes == []


def test_a_folder_with_a_pretrained_model_is_used(data: Path, tmp_path: Path) -> None:
    first, before = make_task(*both(data)), tmp_path / "before"
    before.mkdir()
    with pytest.raises(CheckpointError, match=r"expected config\.json"):
        make_task(*both(data, model=str(before)))
    save_file(first.model.state_dict(), before / "model.safetensors")
    (before / "config.json").write_text(first.files["model_config.json"])
    (before / "tokenizer.json").write_text(first.files["tokenizer.json"])
    options, prepared = both(data, model=str(before))
    assert (options.epochs, options.lr) == (3, 3e-5)
    old, new = first.model.state_dict(), make_task(options, prepared).model.state_dict()
    body = [name for name in new if name.startswith("roberta.")]
    assert body
    assert all(torch.equal(old[name], new[name]) for name in body)
    folder, said = run_here("text", data, tmp_path / "runs", model=str(before))
    assert said["model"] == str(before)
    assert TextModel.of_run(folder).build(folder).num_labels == 2
