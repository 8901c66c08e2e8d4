"""Metadata, addresses and install commands of the distributions; `tests.release` tries them."""

import re
import shlex
import tomllib
from importlib.metadata import requires
from pathlib import Path
from urllib.parse import urldefrag

import yaml

import onefold
from tests import release
from tests.conftest import ROOT
from tests.tables import for_each
from tests.test_docs import anchors

PROJECT = release.PROJECTS["onefold"]
SITE, REPOSITORY = (PROJECT["urls"][each] for each in ("Documentation", "Repository"))
DOMAIN = SITE.removeprefix("https://").rstrip("/")
IN_WHEELS = [
    path
    for folder in release.FOLDERS
    for path in [*folder.glob("src/**/*.*"), folder / "README.md"]
    if path.suffix in {".py", ".j2", ".md"}
]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def published(readme: Path) -> str:
    """Return a README as a package index shows it."""
    text = readme.read_text()
    hooks = tomllib.loads((readme.parent / "pyproject.toml").read_text())["tool"]["hatch"][
        "metadata"
    ]
    for each in hooks["hooks"].get("fancy-pypi-readme", {}).get("substitutions", []):
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def leads_nowhere(address: str) -> bool:
    """Whether an address of ours has no page, picture or file in this checkout."""
    page, anchor = urldefrag(address)
    if page.startswith(REPOSITORY):
        file = page.removeprefix(REPOSITORY).removeprefix("/blob/main")
        return not (ROOT / file.lstrip("/")).exists()
    name = page.removeprefix(SITE)
    if name.startswith("_images/"):
        return not [*ROOT.glob(f"docs/**/{Path(name).name}")]
    source = (ROOT / "docs" / (name or "index")).with_suffix(".md")
    if source.read_text().startswith("```{include}"):
        return False  # of a file beside the README, which test_docs.py reads
    return bool(anchor) and anchor not in anchors(source)


@for_each("folder", release.FOLDERS)
def test_a_readme_needs_no_checkout(folder: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", published(folder / "README.md"))
    ours = [each for each in links if DOMAIN in each]
    assert [each for each in links if not each.startswith("https://")] == []
    assert ours
    assert [each for each in ours if leads_nowhere(each)] == []


def test_addresses_of_pages_are_those_of_the_project() -> None:
    """In docstrings, messages and metadata; a wheel has no file of the docs to name."""
    found = {
        address.rstrip("."): path.name
        for path in [*IN_WHEELS, ROOT / "CITATION.cff"]
        for address in re.findall(rf"https://[\w.]*{re.escape(DOMAIN)}[\w/.#-]*", path.read_text())
    }
    found |= dict.fromkeys(PROJECT["urls"].values(), "pyproject.toml")
    assert len(found) > 10
    assert {each for each in found if not each.startswith((SITE, REPOSITORY))} == set()
    assert {each: place for each, place in found.items() if leads_nowhere(each)} == {}
    named = {
        f"{path.name}: {name}"
        for path in IN_WHEELS
        if path.suffix != ".md"
        for name in re.findall(
            r"(?<![\w/.])(?:docs/[\w/.-]+|[\w/-]+\.(?:md|rst))\b", path.read_text()
        )
    }
    assert named == set()


def test_the_version_and_the_authors_have_one_place() -> None:
    version = PROJECT["version"]
    assert onefold.__version__ == version
    assert f"onefold=={version}" in (requires("onefold-jobs") or ())
    assert release.PROJECTS["onefold-jobs"].keys().isdisjoint({"version", "authors", "urls"})
    assert "version" not in CITATION
    assert CITATION["authors"] == PROJECT["authors"]
    assert CITATION["license"] == PROJECT["license"]
    assert (CITATION["url"], CITATION["repository-code"]) == (SITE, REPOSITORY)
    assert set(CITATION["keywords"]) == set(PROJECT["keywords"])
    licenses = {(folder / "LICENSE").read_text() for folder in release.FOLDERS}
    assert len(licenses) == 1


def test_the_supported_pythons_are_tried() -> None:
    versions = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    assert PROJECT["requires-python"] == f">={versions[0]}"
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    for name in ("matrix", "release"):
        assert jobs[name]["strategy"]["matrix"]["python"] == versions
    assert f"PYTHONS := {' '.join(versions)}\n" in (ROOT / "Makefile").read_text()


def test_install_commands_name_what_exists() -> None:
    commands = release.install_commands()
    assert {'"onefold[demo]"', '"onefold-jobs[images]"', "timm", "onefold"} <= commands.keys()
    requirements = [each for command in commands for each in shlex.split(command)]
    assert [name for each in requirements for name in release.unknown(each)] == []
    assert release.unknown("onefold[nothing]") == ["nothing"]
    assert release.unknown("onefold-job") == ["onefold-job"]


def test_each_install_command_is_found() -> None:
    """So that none is left out of the release check for its form."""
    missed = [
        f"{path.name}: {text[at.start() : at.start() + 60]}"
        for path, text in release.mentions()
        for at in re.finditer(r"\bpip install\b", text)
        if not release.INSTALL.match(text, at.start())
    ]
    assert missed == []


def test_extras_that_pages_and_messages_name_exist() -> None:
    named = {
        (each, path.name)
        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *IN_WHEELS]
        if path.name not in ("CHANGELOG.md", "log.md")
        for each in re.findall(r"\bonefold(?:-jobs)?\[[\w,-]+\]", path.read_text())
    }
    assert len(named) > 10
    assert [(each, place) for each, place in named if release.unknown(each)] == []
    code = "".join(path.read_text() for path in IN_WHEELS if path.suffix == ".py")
    asked = set(re.findall(r'\brequire\(\s*f?"[^"]*",\s*"(\w+)"', code))
    assert len(asked) > 5
    assert asked <= release.PROJECTS["onefold-jobs"]["optional-dependencies"].keys()
    libraries = {each.replace("_", "-") for each in re.findall(r'import_library\("(\w+)"', code)}
    assert libraries == set(release.LIBRARIES)
