"""What documents, guides and docstrings show is run as it stands there; what they name exists."""

import ast
import copy
import doctest
import importlib
import inspect
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sklearn  # noqa: F401  # sets variables of the environment when it is loaded
import torch
import torch.nn.functional as F
from docs import execute
from typer.main import get_command

import onefold
import onefold_jobs
from onefold.cli.main import app
from tests.checkpoint.folders import steps_in
from tests.conftest import ROOT
from tests.tables import for_each

DOCS = ROOT / "docs"
GUIDES = DOCS / "do"
SOURCE = Path(onefold.__file__).parent
JOBS = Path(onefold_jobs.__file__).parent

NO_ONEFOLD_AND_NO_GPU = """
import sys
sys.modules["onefold"] = None
import torch
assert not torch.cuda.is_available()
"""


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def output_of(folder: Path, *arguments: str) -> str:
    """What Python prints for them."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.fresh
def test_a_checkpoint_of_two_devices_is_read_by_plain_pytorch(tmp_path: Path) -> None:
    """The README's script, saved without a line changed, and ten lines of the documents."""
    (script,) = blocks(ROOT / "README.md")
    (reading,) = (b for b in blocks(ROOT / "docs/do/checkpoints.md") if "load_state_dict" in b)
    (tmp_path / "train.py").write_text(script)
    options = [
        "--devices",
        "cpu:2",
        "--checkpoint",
        "run",
        "--save-every",
        "20",
        "--keep-last",
        "9",
    ]
    output_of(tmp_path, "-m", "onefold", "run", *options, "train.py")
    assert steps_in(tmp_path / "run") == [20, 40, 60, 80, 100]
    run = json.loads((tmp_path / "run/step-00000020/run.json").read_text())
    parameters = 20 * 64 + 64 + 64 * 2 + 2
    found = output_of(tmp_path, "-c", NO_ONEFOLD_AND_NO_GPU + reading)
    assert found == f"{run['fingerprint']} {parameters} {4 * 3}\n"


# Guides


def script_of(page: str, folder: Path, part: slice = slice(None)) -> dict[str, Any]:
    """The names of a page's script, and of the functions that follow it."""
    (folder / "script.py").write_text("\n\n".join(blocks(GUIDES / page)[part]))
    return runpy.run_path(str(folder / "script.py"))


PAGES = [str(page.relative_to(ROOT)) for page in execute.pages() if execute.files(page)]


@for_each("page", PAGES)
def test_the_examples_of_a_guide_run(page: str, tmp_path: Path) -> None:
    """On one device; what a page shows of commands is compared by the tests marked full."""
    assert {"README.md", "docs/do/several-models.md"} <= set(PAGES)
    for name, text in execute.files(ROOT / page).items():
        (tmp_path / name).write_text(text)
        assert "sys.argv" in text or runpy.run_path(str(tmp_path / name))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.fresh
@pytest.mark.timeout(2400)  # examples.md trains twenty times
@pytest.mark.parametrize(
    "page",
    [
        str(page.relative_to(ROOT))
        for page in (*execute.notebooks(), *execute.pages())
        if execute.is_run(page)
    ],
)
def test_every_command_of_a_page_prints_what_stands_there(page: str) -> None:
    assert execute.run(ROOT / page) == []


@for_each(
    ("shown", "printed", "same"),
    [
        ("loss 0.25\n", "loss 0.26\n", True),
        ("loss 0.25\n", "less 0.25\n", False),
        ("step 3\n", "step 4\n", False),
        (f"{'a' * 16} {'a' * 16}\n", f"{'b' * 16} {'b' * 16}\n", True),
        (f"{'a' * 16} {'a' * 16}\n", f"{'b' * 16} {'c' * 16}\n", False),
        ("one\n...\nfour\n", "one\ntwo\nthree\nfour\n", True),
        ("one\n...\nfour\n", "one\ntwo\nthree\n", False),
        ("│ a   │\n", "│ a │\n", True),
    ],
)
def test_what_a_page_shows_and_what_is_printed(shown: str, printed: str, same: bool) -> None:
    assert execute.agrees(shown, printed) is same


def test_a_page_is_run_and_renewed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    script = "```python\n# a.py\nx = 1\n```\nand\n```python\nprint(x)\n```\n"
    page.write_text(f"{script}```console\n$ python a.py\n2\n$ python a.py\n...\n```\n")
    assert execute.files(page) == {"a.py": "# a.py\nx = 1\n\n\nprint(x)\n"}
    assert execute.run(page, write=True) == ["$ python a.py\nends with 0, and prints:\n1\n"]
    assert page.read_text() == f"{script}```console\n$ python a.py\n1\n$ python a.py\n...\n```\n"
    assert execute.run(page) == []
    page.write_text("```console\n$ exit 3\n```\n")
    assert execute.run(page) == ["$ exit 3\nends with 3, and prints:\n"]


def test_commands_of_a_page_print_the_same_fingerprint_where_the_page_does(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    both = "```console\n$ echo {}\n{}\n$ echo {}\n{}\n```\n"
    page.write_text(both.format("b" * 16, "a" * 16, "b" * 16, "a" * 16))
    assert execute.run(page) == []
    page.write_text(both.format("b" * 16, "a" * 16, "c" * 16, "a" * 16))
    assert execute.run(page) == [f"$ echo {'c' * 16}\nends with 0, and prints:\n{'c' * 16}\n"]


def test_pictures_of_a_page_are_compared_and_renewed(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "at" / "a.png"
    picture.parent.mkdir()
    command = f"echo made > a.png; echo 3 {'b' * 16}"
    text = "<!-- made on {} -->\n![A picture](at/a.png)\n```console\n$ {}\n{} {}\n```\n"
    page.write_text(text.format("another", command, 2, "a" * 16))
    picture.write_text("as made on another machine\n")
    assert execute.run(page) == [], "on another machine, everything may differ"
    assert execute.run(page, write=True) == []
    assert page.read_text() == text.format(execute.machine(), command, 3, "b" * 16)
    assert picture.read_text() == "made\n"
    assert execute.run(page) == []
    picture.write_text("older\n")
    assert execute.run(page) == ["at/a.png is another picture now"]
    page.write_text(text.format(execute.machine(), command, 4, "b" * 16))
    picture.write_text("made\n")
    assert execute.run(page) == [f"$ {command}\nends with 0, and prints:\n3 {'b' * 16}\n"]
    page.write_text(text.format("another", "echo", "", ""))
    assert "no command of the page makes a.png" in execute.run(page)


@pytest.mark.processes
def test_a_notebook_is_run_and_renewed(tmp_path: Path) -> None:
    page = tmp_path / "a.ipynb"
    cell: dict[str, Any] = {"cell_type": "code", "id": "a", "metadata": {}, "execution_count": None}
    cell |= {"source": "import sys\nprint('12% b', file=sys.stderr)\nprint(0.5, '7%|')\n6 * 7"}
    output = {"output_type": "execute_result", "metadata": {}, "execution_count": 1}
    cell["outputs"] = [output | {"data": {"text/plain": "41"}}]
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    notebook = {"cells": [cell], "metadata": {"kernelspec": kernel}}
    page.write_text(json.dumps(notebook | {"nbformat": 4, "nbformat_minor": 5}))
    (wrong,) = execute.run(page, write=True)
    assert wrong.endswith("6 * 7\nprints:\n42")
    shown = json.loads(page.read_text())["cells"][0]["outputs"]
    texts = {each.get("name"): "".join(each.get("text", "")) for each in shown}
    assert texts == {"stdout": "0.5 7%|\n", "stderr": "12% b\n", None: ""}
    assert execute.run(page) == []


@for_each("page", execute.notebooks())
def test_a_notebook_has_outputs_that_name_no_place(page: Path) -> None:
    cells = json.loads(page.read_text())["cells"]
    outputs = [each for cell in cells for each in cell.get("outputs", [])]
    assert len(outputs) > 5
    assert {each["output_type"] for each in outputs} == {"execute_result", "stream"}
    assert not re.search(r"/(?:home|tmp|root|work)/|ipykernel", json.dumps(outputs))


FRAGMENTS = [(page, text) for page in execute.pages() for text in execute.fragments(page)]


def surroundings_of_fragment() -> dict[str, Any]:
    """The names that fragments use, and files beside them that they read."""
    torch.manual_seed(0)
    parts = {"body": torch.nn.Linear(4, 8), "norm": torch.nn.BatchNorm1d(8)}
    model = torch.nn.Sequential(OrderedDict(**parts, head=torch.nn.Linear(8, 2)))
    given, optimizer = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    samples = torch.randn(1024, 4), torch.arange(1024) % 2
    train_set = test_set = torch.utils.data.TensorDataset(*samples)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def score(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": loss(model, batch), "accuracy": model(batch[0]).argmax(1) == batch[1]}

    def late_loss(*given: Any) -> Any:
        return names["loss"](*given)  # that of the fragment, if it has one

    names: dict[str, Any] = {"loss": loss}
    trainer = onefold.Trainer(model, given, late_loss, shards=8)
    trainer.save("runs/digits")
    torch.save(model.state_dict(), "resnet18.pth")
    train = loader = trainer.loader(train_set, batch_size=256, shuffle=True)
    self, embedded = SimpleNamespace(lstm=torch.nn.LSTM(4, 4)), torch.randn(3, 2, 4).bfloat16()
    log, clock, batch = io.StringIO(), time.monotonic, train_set[:64]
    width, depth, config = 4, 2, {"in_features": 4, "out_features": 1}
    moved = (ROOT / "examples/move/with_lightning.py").read_text()
    data = torch.utils.data.TensorDataset(torch.randn(128, 2), torch.arange(128) % 2)
    names |= {"Net": torch.nn.Linear}
    names |= {"AutoModelForCausalLM": SimpleNamespace(from_config=lambda c: torch.nn.Linear(**c))}
    names |= {**globals(), **locals(), "nn": torch.nn}
    names["LightningModule"] = type("", (torch.nn.Module,), {"log": lambda *a, **k: None})
    exec(moved[moved.index("\nclass ") : moved.index("\ndef ")], names)
    return names


@for_each(("page", "text"), FRAGMENTS)
def test_the_fragments_of_pages_run(
    page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(FRAGMENTS) > 10
    monkeypatch.chdir(tmp_path)
    if "run/step-00000020" not in text:  # which has a test of its own
        exec(compile(text, str(page), "exec"), surroundings_of_fragment())


FENCED = re.compile(r"(?ms)^ *```(\S+)[^\n]*\n(.*?)^ *```$")
BLOCKS = [(p, *found) for p in execute.pages() for found in FENCED.findall(p.read_text())]
RUN_OR_COMPARED = {"python", "console", "diff"}


@for_each(("page", "kind", "text"), BLOCKS)
def test_blocks_that_are_not_run_are_marked(page: Path, kind: str, text: str) -> None:
    """By their kind; what is Python or a shell's can at least be read."""
    if kind == "py":
        compile(text, str(page), "exec")
    elif kind == "sh":
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    else:
        assert kind in RUN_OR_COMPARED | {"yaml", "json"} or kind[0] == "{", page


LINES = [
    (page, line)
    for page, kind, block in BLOCKS
    if kind == "sh"
    for line in re.findall(r"(?m)^(?:exec |srun )*(onefold .*)$", block.replace("\\\n", " "))
]


@for_each(("page", "line"), LINES)
def test_the_commands_of_pages_are_read(page: Path, line: str) -> None:
    """Those that are not run: each option exists, and takes what it is given."""
    assert len(LINES) > 40
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    command: Any = get_command(app)
    while hasattr(command, "resolve_command"):
        _, command, words = command.resolve_command(command.context_class(command), words)
    command.make_context(command.name, words)


def test_what_may_be_done_between_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("between-steps.md", tmp_path, slice(1))
    assert len(script["main"]()) == 16
    assert capsys.readouterr().out.startswith("run 1 0 [[")
    script = script_of("between-steps.md", tmp_path, slice(1, 2))
    assert script["largest"] > 0
    assert script["saved"]["state"][0]["exp_avg"].tolist() == [[0.0] * 4]


def test_the_gradient_without_the_update(tmp_path: Path) -> None:
    script = script_of("gradient-without-update.md", tmp_path)
    start = copy.deepcopy(script["model"])
    assert script["main"]()[0] == 3
    found = set()
    for devices in (1, 2):
        model = copy.deepcopy(start)
        torch.manual_seed(1)
        trainer = onefold.Trainer(
            model, None, script["loss"], shards=4, devices=["cpu"] * devices, threads=1
        )
        optimizer, other = (torch.optim.Adam(model.parameters(), lr=0.01) for _ in range(2))
        script["sam"](trainer, optimizer, [script["batch"], (*script["batch"],)])
        script["noisy"](trainer, optimizer, (*script["batch"],))
        script["save"](trainer, optimizer, tmp_path / "run")
        script["load"](trainer, other, tmp_path / "run")
        assert str(other.state_dict()) == str(optimizer.state_dict())
        found.add(trainer.fingerprint())
    assert len(found) == 1
    trainer = onefold.Trainer(
        start, torch.optim.Adam(start.parameters()), script["critic_loss"], shards=2
    )
    inputs = script["batch"][0]
    assert trainer.step((inputs, inputs.flip(0))).number == 1


SHOWN = [*((p, t) for p, kind, t in BLOCKS if kind in ("python", "py"))]
SHOWN += [(p, p.read_text()) for p in sorted((ROOT / "examples").rglob("*.py"))]


@for_each(("page", "text"), SHOWN)
def test_no_script_calls_the_trainer_on_the_lead_alone(page: Path, text: str) -> None:
    """With a placement that partitions the model, not even its fingerprint."""
    assert len(SHOWN) > 50
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "trainer.is_lead":
            called = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            assert not [n for n in called if re.fullmatch(r"trainer\.(?!fork_rng)\w+", n)], page


# Docstrings

MODULES = sorted(
    ".".join(path.relative_to(source.parent).with_suffix("").parts)
    for source in (SOURCE, JOBS)
    for path in source.rglob("*.py")
    if ">>> " in path.read_text()
)
PUBLIC = (
    *("onefold", "onefold_jobs", "onefold.losses", "onefold.testing"),
    *("onefold.integrations.loggers", "onefold.integrations.transformers"),
)
FOR_OTHERS = ("onefold.cli", "onefold.files", "onefold.integrations.ipython", "onefold.weights")
"""Public modules for programs that are built on onefold, on one page of the reference."""
STARTS_PROCESSES = ("onefold.launcher.launch", "onefold_jobs.catalog")
WITH_A_TRAINER = ("core.batch", "integrations.loggers", "trainer")
WITH_PARTS = ("core.structure", "step.result")


def surroundings_of(name: str) -> dict[str, Any]:
    """What the examples of a module begin with, as in the example of Trainer."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if name.removeprefix("onefold.") in WITH_PARTS:
        return {"model": model, "optimizer": optimizer}
    loss = lambda model, x: model(x).square().mean(dim=1)  # noqa: E731
    trainer = onefold.Trainer(model, optimizer, loss, shards=2)
    given = {"model": model, "trainer": trainer}
    return given if name.removeprefix("onefold.") in WITH_A_TRAINER else {}


def run_examples(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))  # some leave their files
    module = importlib.import_module(name)
    tests = doctest.DocTestFinder().find(
        module, extraglobs={"onefold": onefold, "onefold_jobs": onefold_jobs, "torch": torch}
    )
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    reports: list[str] = []
    for test in tests:
        test.globs |= surroundings_of(name)
        runner.run(test, out=reports.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(reports)
    assert runner.tries > 0


@pytest.mark.parametrize("name", [name for name in MODULES if name not in STARTS_PROCESSES])
def test_the_examples_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"onefold.trainer", "onefold.core.mean", "onefold.core.shard"} <= set(MODULES)
    run_examples(name, tmp_path, monkeypatch)


def public_texts() -> Iterator[tuple[str, str]]:
    """Docstrings of public functions, classes and the methods that these add to their bases."""
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            found = getattr(module, name)
            if isinstance(found, type) or inspect.isfunction(found):
                yield name, inspect.getdoc(found) or ""
            if isinstance(found, type):
                inherited = {each for base in found.__mro__[1:] for each in vars(base)}
                for each in sorted(vars(found).keys() - inherited):
                    method = getattr(found, each)
                    if not each.startswith("_") and inspect.isroutine(method):
                        yield f"{name}.{each}", inspect.getdoc(method) or ""


def test_every_public_name_is_shown_at_work() -> None:
    """By an example of its own, or that of the name or the guide that it mentions."""
    pytest.importorskip("transformers")
    texts = dict(public_texts())
    assert len(texts) > 60
    shown = {name for name, text in texts.items() if ">>> " in text}
    for name, text in texts.items():
        elsewhere = re.search(r"see `([\w.]+)`|onefold\.example/(\w+/[\w-]+)\.html", text)
        there = elsewhere and (elsewhere[1] in shown or (DOCS / f"{elsewhere[2]}.md").exists())
        assert name in shown or there, name


@pytest.mark.processes
@pytest.mark.parametrize("name", STARTS_PROCESSES)
def test_the_examples_that_start_processes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_examples(name, tmp_path, monkeypatch)


# Names and lines

NOT_OURS = {"pickle.py", "sitecustomize.py"}
"""Files that somebody else may have put somewhere, of which the documents speak."""
WHOLE_PAGES = {*execute.pages()} - {DOCS / "studies" / "log.md"}  # which speaks of what was
COUNTER = runpy.run_path(str(ROOT / "examples" / "ports" / "count_lines.py"))
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)


@for_each("page", WHOLE_PAGES)
def test_every_module_and_link_of_a_page_leads_somewhere(page: Path) -> None:
    named = set(re.findall(r"`([\w/.]+\.py)`", page.read_text())) - NOT_OURS
    assert [
        name for name in named if not any((at / name).exists() for at in (ROOT, SOURCE, JOBS))
    ] == []
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    links = re.findall(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)", text)
    wrong = []
    for link, anchor in links:
        there = (page.parent / link).resolve() if link else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(f"{link}#{anchor}")
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def below(page: str) -> list[str]:
    """The pages that a page's tables of contents name."""
    entries = "\n".join(TOCTREE.findall((DOCS / f"{page}.md").read_text())).splitlines()
    names = [re.sub(r".*<(.*)>$", r"\1", each) for each in entries if each and each[0] != ":"]
    return [str(Path(page).parent / name) for name in names]


def in_menu(page: str) -> Iterator[str]:
    """A page, and those that the menu of the site has below it."""
    yield page
    for each in below(page):
        yield from in_menu(each)


def test_every_page_of_the_site_is_at_most_two_clicks_away() -> None:
    parts = below("index")
    assert parts[:5] == [
        "try",
        *(f"{part}/index" for part in ["move", "do", "understand", "reference"]),
    ]
    found = [*in_menu("index")]
    assert len(set(found)) == len(found), "a page has one place"
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert set(found) == pages - {"studies/log"}, "the log is for developers"
    linked = {page for part in parts for page in (*below(part), *links_of(part))}
    assert pages <= {"index", *parts, *linked}


def links_of(page: str) -> Iterator[str]:
    """The pages that a page links to."""
    at = DOCS / f"{page}.md"
    for link in re.findall(r"\]\((?!https?:)([\w./-]+)\.md[)#]", at.read_text()):
        there = (at.parent / f"{link}.md").resolve()
        if there.is_relative_to(DOCS):
            yield str(there.relative_to(DOCS).with_suffix(""))


def test_every_public_name_has_one_place_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    named = re.findall(r"(?m)\.\. auto(?:class|function):: (onefold\.\w+)$", text)
    modules = set(re.findall(r"\.\. automodule:: ([\w.]+)", text))
    assert modules == {*PUBLIC, *FOR_OTHERS, "onefold.errors"} - {"onefold"}
    expected = {f"onefold.{name}" for name in onefold.__all__} - modules - {"onefold.__version__"}
    assert sorted(named) == sorted(expected)


@for_each("inventory", sorted((DOCS / "inventories").glob("*.txt")))
def test_the_names_that_the_reference_links_to_exist(inventory: Path) -> None:
    lines = [line.split() for line in inventory.read_text().splitlines() if line[0] != "#"]
    assert lines == sorted(lines)
    for name, kind, place in lines:
        module, _, last = name.rpartition(".")
        home = importlib.import_module(name if kind == "mod" else module or "builtins")
        assert kind == "mod" or last == "None" or hasattr(home, last), name
        assert place.endswith(".html")


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.fresh
def test_the_site_is_made_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="the site needs the extra [docs]")
    pytest.importorskip("sphinx_markdown_builder", reason="the site needs the extra [docs]")
    strict = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "-d", str(tmp_path / "trees")]
    for kind in (["--builder", "html"], ["--builder", "markdown", "--tag", "markdown"]):
        output_of(ROOT, *strict, *kind, "docs", str(tmp_path / "site"))
    pages = {page.relative_to(DOCS) for page in DOCS.rglob("*.md")}
    listed = set(re.findall(r"\]\((\S+)\)", (tmp_path / "site/llms.txt").read_text()))
    assert listed == {str(page) for page in pages} - {"index.md", "studies/log.md"}
    for page in pages:
        assert "</html>" in (tmp_path / "site" / page.with_suffix(".html")).read_text()
        assert (tmp_path / "site" / page).read_text().startswith("# ")
    shown = (tmp_path / "site/reference/api/trainer.html").read_text()
    assert "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html" in shown


def test_what_the_architecture_names_is_in_the_module_that_it_names() -> None:
    text = (DOCS / "contribute" / "architecture.md").read_text()
    pairs = re.findall(r"`([\w.]+)` (?:in |\()`(\w+/\w+\.py)`", text)
    assert len(pairs) > 20
    for name, path in pairs:
        found = rf"(?m)(?:def|class) {name.split('.')[-1]}\b|^{name}\b"
        assert re.search(found, (SOURCE / path).read_text()), f"{name} in {path}"


def explained(node: ast.AST) -> Iterator[str]:
    """The arguments that a docstring explains."""
    text = ast.get_docstring(node, clean=True) or ""  # type: ignore[arg-type]
    _, _, rest = text.partition("Args:\n")
    for line in rest.partition("\n\n")[0].splitlines():
        if names := re.match(r" {4}(\**\w+(?:, \**\w+)*):(?: |$)", line):
            yield from (name.strip(" *") for name in names[1].split(","))


def test_arguments_that_docstrings_explain_are_those_of_the_function() -> None:
    wrong, seen = [], 0
    for path in sorted([*SOURCE.rglob("*.py"), *JOBS.rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            made = [node, *(node.body if isinstance(node, ast.ClassDef) else [])]
            taking = [
                each
                for each in made
                if isinstance(each, ast.FunctionDef)
                and (each is node or each.name in ("__init__", "__new__"))
            ]
            if not taking:
                continue
            names = {each.arg for each in ast.walk(taking[0].args) if isinstance(each, ast.arg)}
            found = list(explained(node))
            seen += len(found)
            wrong += [
                f"{path.name}: {taking[0].name}: {name}" for name in found if name not in names
            ]
    assert wrong == []
    assert seen > 1000


def test_the_lines_of_ports_are_those_that_are_counted() -> None:
    page = (DOCS / "studies" / "ports.md").read_text()
    assert COUNTER["table"]() in page
    described = re.findall(r"(?m)^\| \[(\w+)\.py\]\([^)]*\) \|", page)
    assert sorted(described) == sorted(COUNTER["counts"]())


def test_the_picture_of_the_report_is_of_the_run_that_is_shown() -> None:
    image = pytest.importorskip("PIL.Image")
    drawing = importlib.import_module("docs.draw_report")
    page = (DOCS / "try.md").read_text()
    (shown,) = re.findall(rf"(?ms)^\$ {re.escape(drawing.COMMAND)}\n(.*?)^```", page)
    assert len(drawing.LINES.findall(shown)) == 2
    with image.open(drawing.OUTPUT) as picture:
        assert dict(drawing.LINES.findall(shown)).items() <= picture.info.items()
    assert drawing.COMMAND in (GUIDES / "jobs.md").read_text()


def test_the_differences_of_pages_are_those_of_the_scripts() -> None:
    seen = 0
    for page in execute.pages():
        for kind, text in execute.BLOCK.findall(page.read_text()):
            if kind == "diff" and (pair := execute.PAIR.match(text)):
                before, after = (ROOT / name for name in pair.groups())
                assert text == pair[0] + execute.difference(before, after), page
                seen += 1
    assert seen >= 5
