"""``onefold verify --resume``: a script is stopped at random steps, and the ends are compared."""

from pathlib import Path

import pytest

from tests.started import ended

pytestmark = pytest.mark.full

SCRIPT = """
import sys
import torch, onefold

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
data = torch.randn(24, 3)
calls = [0]


def loss(m, x):
    calls[0] += 1
    return m(x).square().mean(1)


trainer = onefold.Trainer(model, optimizer, loss, shards=2)
loader = trainer.loader(data, batch_size=8, shuffle=True)
seen = torch.zeros(())
for epoch in trainer.epochs(3):
    for batch in loader:
        step = trainer.step(batch)
        if "copies" in sys.argv:
            seen += model.weight.detach().sum()
    if len(sys.argv) > 1:
        with trainer.modifying():
            model.bias.data += 0.01 * (calls[0] if "counts" in sys.argv else seen)
    score = trainer.evaluate(lambda m, x: {"out": m(x)}, data, batch_size=8)
print(trainer.fingerprint())
"""


def verified(folder: Path, *words: str) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT)
    done = ended("verify", "--resume", "2", "train.py", *words, cwd=folder, COLUMNS="200")
    return done.returncode, done.stdout + done.stderr


def test_all_ends_are_equal(tmp_path: Path) -> None:
    code, text = verified(tmp_path)
    assert code == 0, text
    assert "All ends are equal." in text
    assert text.count("equal") > 4


def test_weights_that_a_resumed_script_lacks_are_named(tmp_path: Path) -> None:
    code, text = verified(tmp_path, "copies")
    assert code == 2, text
    assert "StateError: train.py:" in text
    assert "but the checkpoint does not contain them" in text


def test_a_count_that_begins_anew_is_found(tmp_path: Path) -> None:
    code, text = verified(tmp_path, "counts")
    assert code == 1, text
    assert "differ first in a block of modifying after step" in text
    assert "The ends differ." in text
