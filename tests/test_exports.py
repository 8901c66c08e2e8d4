"""The public names, and what importing them loads."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onefold
import onefold_jobs
from tests.tables import for_each

SOURCE = Path(onefold.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__")
    for source in (Path(onefold.__file__).parent, Path(onefold_jobs.__file__).parent)
    for path in source.rglob("*.py")
    if path.stem != "__main__"
)
PUBLIC = """
    Broadcast Checkpoint DeviceInfo Loader LossTerms Mean Outcome Record RunOptions Scatter
    Selection Step Sum SyncBatchNorm Trainer __version__ build errors gather is_launched
    launch list_devices load_weights losses same_rng_for_all_shards select_devices supervise
"""


def test_the_public_names_are_these() -> None:
    assert onefold.__all__ == PUBLIC.split()
    assert set(onefold.__all__) == set(dir(onefold))
    assert all(getattr(onefold, name) is not None for name in onefold.__all__)
    with pytest.raises(AttributeError, match="module 'onefold' has no attribute 'trainer_of'"):
        onefold.trainer_of  # noqa: B018


@for_each("name", MODULES)
def test_every_module_names_what_is_public(name: str) -> None:
    assert {"onefold", "onefold.trainer", "onefold.cli"} <= set(MODULES)
    if name == "onefold.integrations.transformers":
        pytest.importorskip("transformers")
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__) <= (27 if name == "onefold" else 20)
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


def test_the_errors_are_the_tree_that_is_drawn() -> None:
    errors = onefold.errors
    classes = dict(inspect.getmembers(errors, inspect.isclass))
    bases = {
        name: base.__name__
        for name, each in classes.items()
        for base in each.__bases__
        if issubclass(base, errors.OnefoldError)
    }
    above, drawn = [errors.OnefoldError.__name__], {}
    for branch, name in re.findall(r"(?m)^    ([│ ]*[├└]── )(\w+)", errors.__doc__ or ""):
        depth = len(branch) // 4
        above[depth:] = [name]
        drawn[name] = above[depth - 1]
    assert drawn == bases
    assert set(errors.__all__) == classes.keys() == {*bases, errors.OnefoldError.__name__}


@pytest.mark.processes
def test_the_launcher_does_not_load_pytorch() -> None:
    """Or every run would begin a second later."""
    code = "import sys, onefold, onefold.cli.main, onefold.worker; "
    code += "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert answer.stdout == "[]\n"


@pytest.mark.processes
def test_the_commands_of_the_jobs_are_loaded_when_they_are_called(tmp_path: Path) -> None:
    code = "import sys; from onefold.cli.main import main; sys.argv = ['onefold', *sys.argv[1:]]\n"
    code += "try: main()\nexcept SystemExit as end: print(end.code)\n"
    code += "print([m for m in sys.modules if m.startswith('onefold_jobs')])"

    def printed(*arguments: str, **environment: str) -> list[str]:
        command = [sys.executable, "-c", code, *arguments]
        surroundings = {**os.environ, **environment}
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=600, env=surroundings
        )
        return [*done.stdout.splitlines()[-2:], done.stderr]

    assert printed("run", "--help")[:2] == ["0", "[]"]
    assert "torch" not in printed("--help")[1]
    # Without the distribution: nothing is found in a folder without it.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\nmetadata.entry_points = lambda **_: ()\n"
    )
    code_, _, said = printed("train", "classify", PYTHONPATH=str(tmp_path))
    assert code_ == "2"
    assert said == (
        "onefold: onefold train is part of onefold-jobs, which is not installed. Run: "
        "pip install 'onefold[jobs]'\n"
    )
