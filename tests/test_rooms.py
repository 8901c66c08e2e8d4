"""The rooms of the house: who may import whom."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import onefold
import onefold_jobs

SOURCE = Path(onefold.__file__).parent

# From the ground up: a room may use itself and those before it.
ROOMS = (
    "errors",
    "system",
    "files",
    "core",
    "deferred",
    "watch",
    "exchange",
    "data_order",
    "update",
    "shard",
    "checks",
    "placement",
    "step",
    "passes",
    "record",
    "checkpoint",
    "options",
    "launcher",
    "session",
    "tools",
    "worker",
    "weights",
    "losses",
    "trainer",
    "onefold",
    "testing",
    "integrations",
    "cli",
    "__main__",
)
OUTER = {"integrations", "cli"}
"""What is built on the public interface, as a user's program is."""
OPEN_TO_OUTER = {"errors", "losses", "options", "record", "system", "weights", "onefold", *OUTER}


OF_SYSTEM_FOR_CORE = {"onefold.system.accelerator", "onefold.system.compat"}
"""The core is pure: it opens nothing, but uses PyTorch."""

WITHOUT_PLACEMENTS = (
    *("update", "shard", "checks", "step", "passes", "checkpoint", "tools", "trainer"),
)

# The last five are `watch/limits.py`, `shard/graphs.py`, `system/capture.py`,
# `core/packed_generators.py` and `integrations/ipython.py`, which must stay out of the kernel.
LIMIT_FILES = 191
LIMIT_FILES_OF_A_ROOM = 25
LIMIT_CODE_LINES = 400
LIMIT_SESSION_LINES = 320
LIMIT_IMPORTS = 25
LIMIT_BODY_LINES = 60


class Import(NamedTuple):
    """One module that uses a name of another."""

    room: str
    module: str
    target: str
    name: str

    def __str__(self) -> str:
        return f"{self.module} uses {self.name} of {self.target}"

    @property
    def target_room(self) -> str:
        return room_of(self.target)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ["onefold", *path.relative_to(SOURCE).with_suffix("").parts]
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports() -> Iterator[Import]:
    known = {name for name, _ in modules()}
    for module, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                pairs = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module} has a relative import"
                pairs = [(str(node.module), alias.name) for alias in node.names]
            else:
                continue
            for target, name in pairs:
                if room_of(target) and target.split(".")[0] == "onefold":
                    whole = f"{target}.{name}"
                    yield Import(room_of(module), module, whole if whole in known else target, name)


def test_every_module_has_a_room() -> None:
    assert {room_of(module) for module, _ in modules()} == set(ROOMS)


def test_no_room_uses_one_above_it() -> None:
    wrong = [
        str(found)
        for found in imports()
        if ROOMS.index(found.target_room) > ROOMS.index(found.room)
    ]
    assert wrong == []


def test_the_core_is_pure() -> None:
    used = {f.target for f in imports() if (f.room, f.target_room) == ("core", "system")}
    assert used <= OF_SYSTEM_FOR_CORE


def test_rooms_and_the_house_are_small() -> None:
    files = [path for _, path in modules()]
    in_a_room = Counter(path.parent for path in files)
    assert {room: n for room, n in in_a_room.items() if n > LIMIT_FILES_OF_A_ROOM} == {}
    assert len(files) <= LIMIT_FILES


def test_no_modules_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {}
    for found in imports():
        if found.module != found.target:
            needs.setdefault(found.module, set()).add(found.target)
    sorter = TopologicalSorter(
        {m: {t for t in ts if not m.startswith(f"{t}.")} for m, ts in needs.items()}
    )
    sorter.prepare()  # raises an error that names a circle


def test_no_two_public_classes_have_one_name() -> None:
    """But for a Trainer that is another library's."""
    texts = [path.read_text() for module, path in modules() if room_of(module) != "integrations"]
    names = Counter(re.findall(r"(?m)^class ([A-Z]\w*)", "\n".join(texts)))
    assert {name for name, count in names.items() if count > 1} == set()


def test_only_placements_know_which_one_it_is() -> None:
    """What differs between placements is a method of `Placement`, and no question elsewhere."""
    asked = re.compile(r"is_partitioned|placement_kind|options\.placement\b")
    found = {
        f"{module}: {match}"
        for module, path in modules()
        if room_of(module) in WITHOUT_PLACEMENTS
        for match in asked.findall(path.read_text())
    }
    # Devices compare what they were launched with.
    assert found == {"onefold.checks.description: options.placement"}


def test_one_module_knows_what_only_cuda_has() -> None:
    """All else goes by `torch.accelerator`, so that other accelerators run by the same code."""
    asked = re.compile(r"torch\.cuda\b|\.is_cuda\b|\.cuda\(")
    found = {module for module, path in modules() if asked.search(path.read_text())}
    # The launcher names PyTorch's function in an advice.
    assert found == {"onefold.system.cuda", "onefold.system.capture", "onefold.launcher.devices"}


def test_no_file_is_two() -> None:
    """Lines of code: nobody is punished for a docstring, a comment or an empty line."""
    long = {m: n for m, path in modules() if (n := code_lines(path)) > LIMIT_CODE_LINES}
    assert long == {}


def code_lines(path: Path) -> int:
    text = path.read_text()
    explained: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            explained.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and number not in explained
    )


def test_no_module_needs_many_others() -> None:
    """Those that `onefold.core.late` imports when they are needed included."""
    needs: dict[str, set[str]] = {}
    for found in imports():
        if found.room not in OUTER:
            needs.setdefault(found.module, set()).add(found.target)
    for module, path in modules():
        late = re.findall(r"\bload\(\"([a-z_.]+)\"\)", path.read_text())
        needs.setdefault(module, set()).update(f"onefold.{name}" for name in late)
    many = {module: len(used) for module, used in needs.items() if len(used) > LIMIT_IMPORTS}
    assert many == {}


def test_the_session_is_short() -> None:
    assert code_lines(SOURCE / "session" / "session.py") <= LIMIT_SESSION_LINES


def test_no_function_is_several() -> None:
    """Lines of code: without its docstring, comments and empty lines."""
    long = {}
    for module, path in modules():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and body_lines(node, text) > LIMIT_BODY_LINES:
                long[f"{module}.{node.name}"] = body_lines(node, text)
    assert long == {}


def body_lines(function: ast.FunctionDef, text: str) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if not body:
        return 0
    lines = text.splitlines()[body[0].lineno - 1 : function.end_lineno]
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def test_commands_and_integrations_use_what_every_program_may_use() -> None:
    public = {*onefold.__all__, ""}
    wrong = [
        str(found)
        for found in imports()
        if found.room in OUTER
        and (
            found.target_room not in OPEN_TO_OUTER
            or (found.target == "onefold" and found.name not in public)
        )
    ]
    assert wrong == []


def test_all_text_of_commands_leaves_by_one_screen() -> None:
    """It takes nothing for markup and spells out control characters, as `tell` does."""
    others = re.compile(r"rich\.markup|from_markup|markup=True|outcome\.traceback, file")
    for module in (onefold, onefold_jobs):
        assert module.__file__ is not None
        for path in Path(module.__file__).parent.rglob("*.py"):
            text, is_home = path.read_text(), path.parts[-3:] == ("onefold", "cli", "__init__.py")
            assert is_home or "rich.console" not in text, path
            assert not others.search(text), path


PUBLIC_MODULES = {
    *("cli", "errors", "files", "integrations.ipython", "losses", "options", "testing", "weights"),
}
"""The modules of onefold that its reference documents."""


def test_the_jobs_use_public_names_of_onefold_alone() -> None:
    wrong = []
    for path in sorted(Path(onefold_jobs.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "onefold":
                used = [(onefold, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("onefold."):
                module = importlib.import_module(str(node.module))
                public = str(node.module).removeprefix("onefold.") in PUBLIC_MODULES
                used = [(module, alias.name if public else "") for alias in node.names]
            elif isinstance(node, ast.Import):
                used = [(onefold, "") for a in node.names if a.name.startswith("onefold.")]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "onefold":
                used = [(onefold, node.attr)]
            else:
                continue
            wrong += [
                f"{path.name}: {m.__name__}.{name}" for m, name in used if name not in m.__all__
            ]
    assert wrong == []


def test_the_picture_has_every_room() -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra [report]")
    drawing = importlib.import_module("docs.draw_architecture")
    assert set(drawing.BOXES) == set(ROOMS)


def test_no_file_has_the_marks_of_an_unfinished_merge() -> None:
    # Python files would not run; templates, styles and documents show them to the reader.
    kinds = {".py", ".j2", ".css", ".md", ".toml", ".html", ".svg"}
    root = Path(__file__).parent.parent
    files = (root / name for name in ("src", "docs", "tests", "examples", "benchmarks"))
    texts = [path for each in files for path in each.rglob("*") if path.suffix in kinds]
    assert len(texts) > 200
    marks = re.compile(r"^(?:<{7} |>{7} )", re.MULTILINE)
    assert [path for path in texts if marks.search(path.read_text(errors="replace"))] == []
