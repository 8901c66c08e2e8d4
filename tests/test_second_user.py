"""Another user of the host tries all the while to get into a run, and to hold it up.

Who stands between devices on the network: tests/exchange/test_connections.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import onefold
from tests.somebody import needs_root
from tests.warm import SCRIPTS

pytestmark = [pytest.mark.full, pytest.mark.processes, needs_root]

TRAIN = SCRIPTS.parent / "soak" / "train.py"
SOURCE = Path(onefold.__file__).parent.parent
LIMIT_S = 170


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "SOAK_BEGUN": str(folder / "begun")}
    return subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S * 3 if "code" in words else LIMIT_S,
        cwd=folder,
        env=environment,
    ).stdout


@pytest.mark.parametrize(
    ("attack", "way"),
    [
        *(("everything", "shared"), ("everything", "collective"), ("places", "shared")),
        *(("code", launcher) for launcher in ("python", "onefold", "torchrun")),
    ],
)
def test_another_user_gets_nothing_and_holds_nothing_up(
    tmp_path: Path, attack: str, way: str
) -> None:
    """Nor does compiled code lie where he can change it."""
    (home := tmp_path / "home").mkdir(mode=0o700)
    folder = home if attack == "code" else tmp_path
    said = run(tmp_path, str(SCRIPTS / "attacked.py"), attack, way, str(folder))
    rounds, got, code, output, errors = json.loads(said)
    assert (got, code) == ([], 0), errors
    assert rounds > 5
    if attack == "code":
        assert len(output.split()[-1]) == 16
        (kept,) = (home / ".cache" / "onefold" / "compiled").iterdir()
        assert list(kept.rglob("*.so"))
    else:
        assert output == run(tmp_path, str(TRAIN)), errors
