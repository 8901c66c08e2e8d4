"""Builds all distributions and tries them as a user would: ``make release-check``.

Source distributions are built from the tracked files, and wheels from the source distributions.
They are installed into fresh environments, and every command runs in an empty folder, so nothing of
the checkout is on a path. ``dist`` then has the files to upload. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT, *sorted(each.parent for each in ROOT.glob("packages/*/pyproject.toml")))
"""Folder of each distribution."""
PROJECTS: dict[str, dict[str, Any]] = {
    project["name"]: project
    for folder in FOLDERS
    for project in [tomllib.loads((folder / "pyproject.toml").read_text())["project"]]
}
LIBRARIES = ("timm", "segmentation-models-pytorch")
"""What `onefold_jobs.models.catalog.import_library` is called with."""
WORD = r"""(?:"[^"\n]+"|'[^'\n]+'|[\w{.][\w.{}\[\],-]*)"""
INSTALL = re.compile(rf"pip install\s+({WORD}(?: +{WORD})*)")
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?")
LIMIT_S = 3600

IMPORT_ALL = """
import importlib, pkgutil, sys
without = sys.argv[2:]
package = importlib.import_module(sys.argv[1])
for each in pkgutil.walk_packages(package.__path__, f"{sys.argv[1]}."):
    if not each.name.endswith((".__main__", *without)):
        importlib.import_module(each.name)
"""
README = "from importlib.metadata import metadata; print(metadata('onefold').get_payload())"
JOB = "onefold train classify --data digits --model lenet --epochs 1 --devices 2 --name fresh"


# Install commands of pages and messages


def install_commands() -> dict[str, str]:
    """Return the arguments of each ``pip install`` in a page or message, with its place."""
    found: dict[str, str] = {}
    for path, text in mentions():
        for words in INSTALL.findall(text):
            for each in _filled(words.strip()):
                found.setdefault(each, str(path.relative_to(ROOT)))
    return found


def mentions() -> Iterator[tuple[Path, str]]:
    """Yield the texts of the pages, and the strings of the modules, that speak of pip."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
    code = [path for folder in FOLDERS for path in folder.glob("src/**/*.py")]
    for path in sorted([*pages, *ROOT.glob("examples/**/*.y*ml"), *code]):
        text = path.read_text()
        if re.search(r"\bpip\b", text):
            yield from ((path, each) for each in (_strings(text) if path in code else [text]))


def _strings(source: str) -> Iterator[str]:
    """Yield the strings of a module, with ``{value}`` for the values of f-strings."""
    nodes = list(ast.walk(ast.parse(source)))
    formatted = [each.values for each in nodes if isinstance(each, ast.JoinedStr)]
    yield from ("".join(map(_shown, parts)) for parts in formatted)
    inner = {id(part) for parts in formatted for part in parts}
    for each in nodes:
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in inner:
            yield each.value


def _shown(part: ast.expr) -> str:
    """Return a part of an f-string: its text, or the value's expression in braces."""
    if isinstance(part, ast.FormattedValue):
        return f"{{{ast.unparse(part.value)}}}"
    return str(ast.literal_eval(part))


def _filled(words: str) -> list[str]:
    """Return the commands of a message: one for each value that it can have."""
    for hole, values in (
        ("{extra}", PROJECTS["onefold-jobs"]["optional-dependencies"]),
        ("{package}", LIBRARIES),
    ):
        if hole in words:
            return [words.replace(hole, each) for each in values]
    return [words]


def unknown(requirement: str) -> list[str]:
    """Return the name of a requirement and its extras, if onefold has no such distributions."""
    match = REQUIREMENT.fullmatch(requirement)
    name, extras = match.groups("") if match else (requirement, "")
    if not name.startswith("onefold"):
        return []
    project = PROJECTS.get(name)
    known = {} if project is None else project.get("optional-dependencies", {})
    return [*([] if project else [name]), *sorted({*filter(None, extras.split(","))} - {*known})]


# A release


class Environment:
    """A virtual environment, and an empty folder in which its commands run."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.home = folder / "empty"
        self.home.mkdir(parents=True)
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True, timeout=LIMIT_S)

    def run(self, *command: str, at: Path | None = None) -> str:
        """Return the standard output of a command. Show all output and exit if it fails."""
        theirs = ("PYTHON", "ONEFOLD_", "VIRTUAL_ENV")
        variables = {key: each for key, each in os.environ.items() if not key.startswith(theirs)}
        variables["PATH"] = f"{self.folder / 'venv/bin'}:{variables['PATH']}"
        done = subprocess.run(
            command,
            cwd=at or self.home,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(
                f"{shlex.join(command)} fails with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def install(self, dist: Path, *requirements: str, at: Path | None = None) -> None:
        limits = ["--constraint", str(ROOT / "constraints.txt"), "--find-links", str(dist)]
        self.run("python", "-m", "pip", "install", "--quiet", *limits, *requirements, at=at)

    def import_all(self, package: str, *without: str) -> None:
        self.run("python", "-P", "-W", "error", "-c", IMPORT_ALL, package, *without)


def _copy_tracked(target: Path) -> Path:
    """Copy the files that git knows, or would add."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def build(tools: Environment, source: Path, dist: Path) -> None:
    """Build all distributions and check their metadata and contents."""
    shutil.rmtree(dist, ignore_errors=True)
    tools.run("python", "-m", "pip", "install", "--quiet", "build", "twine")
    for folder in FOLDERS:
        at = source / folder.relative_to(ROOT)
        tools.run("python", "-m", "build", "--outdir", str(dist), ".", at=at)
    tools.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    version = PROJECTS["onefold"]["version"]
    for folder, name in zip(FOLDERS, PROJECTS, strict=True):
        stem = f"{name.replace('-', '_')}-{version}"
        (wheel,) = dist.glob(f"{stem}-*.whl")
        assert (dist / f"{stem}.tar.gz").is_file()
        with zipfile.ZipFile(wheel) as archive:
            contents = set(archive.namelist())
        own = {str(each.relative_to(folder / "src")) for each in _files(folder / "src")}
        info = f"{stem}.dist-info"
        assert {each for each in contents if not each.startswith(info)} == own, wheel
        assert f"{info}/licenses/LICENSE" in contents, wheel


def _files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file() and each.suffix != ".pyc"]


def try_wheels(env: Environment, dist: Path) -> None:
    """Install everything that pages and messages name, and run what the README shows."""
    env.install(dist, "torch")  # the pinned one, before a package pulls in another
    env.install(dist, "onefold")
    env.run("python", "-m", "pip", "check")
    assert env.run("onefold", "--version") == f"onefold {PROJECTS['onefold']['version']}\n"
    env.import_all("onefold", ".transformers")
    (script,) = re.findall(r"(?s)```python\n(.*?)```", env.run("python", "-c", README))
    (env.home / "train.py").write_text(script)
    plain = env.run("python", "train.py")
    assert len(plain.splitlines()) == 5, plain
    for devices in ("cpu:1", "cpu:2"):
        printed = env.run("onefold", "run", "--devices", devices, "train.py")
        assert printed == plain, f"{devices}:\n{printed}\npython train.py:\n{plain}"
    for command, place in install_commands().items():
        print(f"  pip install {command}  ({place})", flush=True)
        env.install(dist, *shlex.split(command))
    env.run("python", "-m", "pip", "check")
    env.run("onefold", "demo", "--devices", "cpu:2")
    env.run(*JOB.split())
    assert (env.home / "runs/fresh/report.html").is_file()
    env.install(dist, "onefold[transformers]")
    for name in PROJECTS:
        env.import_all(name.replace("-", "_"))


def build_site(env: Environment, source: Path) -> None:
    """Build the site from a checkout with the extra ``[docs]`` alone."""
    env.install(source, "torch")
    env.install(source, ".[docs]", at=source)
    site = env.folder / "site"
    strict = ["--fail-on-warning", "--keep-going", "--jobs", "auto"]
    env.run("sphinx-build", *strict, "docs", str(site), at=source)
    for image in re.findall(r"\]\(docs/([\w-]+\.svg)\)", (ROOT / "README.md").read_text()):
        assert (site / f"_images/{image}").is_file(), image


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="*", default=[sys.executable], help="interpreters to try")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the files")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="onefold-release-") as name:
        folder, dist = Path(name), options.dist.resolve()
        source = _copy_tracked(folder / "source")
        wheels = partial(try_wheels, dist=dist)
        steps: list[tuple[str, Callable[[Environment], None], str]] = [
            ("build", partial(build, source=source, dist=dist), options.python[0]),
            *((f"wheels with {each}", wheels, each) for each in options.python),
            ("site", partial(build_site, source=source), options.python[0]),
        ]
        for number, (step, check, python) in enumerate(steps):
            began = time.monotonic()
            print(f"{step} ...", flush=True)
            env = Environment(folder / str(number), python)
            check(env)
            shutil.rmtree(env.folder)
            print(f"{step}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"Ready to upload: {', '.join(sorted(each.name for each in dist.iterdir()))}")
    if "onefold.example" in PROJECTS["onefold"]["urls"]["Documentation"]:
        print("The addresses in pyproject.toml are not those of published pages yet.")


if __name__ == "__main__":
    main()
