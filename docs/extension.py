"""Sphinx extensions of the site: docstrings, links to names, the page of commands."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.ext import intersphinx, napoleon
from sphinx.util.docutils import SphinxDirective, SphinxRole

MODULES = (
    "onefold",
    "onefold_jobs",
    "onefold.errors",
    "onefold.files",
    "onefold.weights",
    "onefold.cli",
    "onefold.losses",
    "onefold.testing",
    "onefold.integrations.ipython",
    "onefold.integrations.loggers",
    "onefold.integrations.transformers",
)
"""Public modules. Each of their public names is on one page."""
JOBS = Path(__file__).resolve().parent.parent / "packages/onefold-jobs/pyproject.toml"


class CodeOrLink(SphinxRole):
    """`name` in a docstring: a link if the reference has this name, otherwise code."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        shown = nodes.literal(self.rawtext, self.text)
        if not re.fullmatch(r"[\w.]+", self.text):
            return [shown], []
        link = pending_xref(self.rawtext, shown, refdomain="py", reftype="obj", refexplicit=True)
        link["reftarget"], link["refwarn"] = self.text, False
        link["py:module"] = self.env.ref_context.get("py:module")
        link["py:class"] = self.env.ref_context.get("py:class")
        return [link], []


def as_rst(
    app: Sphinx, what: str, name: str, found: object, options: Any, lines: list[str]
) -> None:
    """Turn a docstring in Google's style into Sphinx's own.

    Docstrings of fields stay text: napoleon would read the words before a colon as a type.
    """
    if what not in ("attribute", "property"):
        config = napoleon.Config(napoleon_use_rtype=False)
        lines[:] = napoleon.GoogleDocstring(lines, config, app, what, name, found, options).lines()
    lines[:] = [re.sub(r"``((?:onefold|torch)\.[\w.]+)``", r"`\1`", line) for line in lines]


@cache
def public_names(inventories: frozenset[str]) -> dict[str, str]:
    """Return the documented name of each object, by its name in the defining module."""
    public = {f"{module}.{name}" for module in MODULES for name in _import(module).__all__}
    found = {}
    for name in sorted(public | inventories):
        module, _, last = name.rpartition(".")
        each = getattr(_import(module), last, None) if module else None
        if home := getattr(each, "__module__", None):
            found[f"{home}.{getattr(each, '__qualname__', last)}"] = name
    return found


def _import(name: str) -> Any:
    return importlib.import_module(name)


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Node
) -> nodes.Node | None:
    """Resolve names that are public elsewhere; show other names without a link."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    inventory = intersphinx.InventoryAdapter(env).main_inventory
    elsewhere = frozenset(name for kind in inventory.values() for name in kind if "." in name)
    parts = target.split(".")
    for count in range(len(parts), 1, -1):
        if name := public_names(elsewhere).get(".".join(parts[:count])):
            node["reftarget"] = name = ".".join([name, *parts[count:]])
            domain = env.domains.python_domain
            found = domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", name, node, shown
            ) or intersphinx.missing_reference(app, env, node, shown)
            return found or shown
    return shown if target.startswith("onefold.") or not node.get("refwarn", True) else None


class Commands(SphinxDirective):
    """All commands of ``onefold``, with their ``--help``."""

    def run(self) -> list[nodes.Node]:
        group = typer.main.get_command(_import("onefold.cli.main").app)
        jobs = tomllib.loads(JOBS.read_text())["project"]["entry-points"]["onefold.commands"]
        for name, target in jobs.items():  # onefold-jobs itself may not be installed
            group.commands.setdefault(name, EntryPoint(name, target, "onefold.commands").load())
        text = "\n".join(_described(group, "onefold"))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class Notebook(SphinxDirective):
    """The cells of a notebook, with the outputs that `docs.execute` wrote into it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(name)
        text = "\n\n".join(self._blocks(json.loads(Path(path).read_text())["cells"]))
        return self.parse_text_to_nodes(text, allow_section_headings=True)

    def _blocks(self, cells: list[dict[str, Any]]) -> Iterator[str]:
        """Yield the cells as Markdown."""
        for cell in cells:
            source = "".join(cell["source"])
            yield source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````"
            for output in cell.get("outputs", ()):
                shown = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
                if "text/html" in shown and not self.env.app.tags.has("markdown"):
                    html = f'<div class="output">{shown["text/html"]}</div>'
                    yield f"````{{raw}} html\n{html}\n````"
                else:
                    lines = (shown.get("text/plain") or "".join(output["text"])).splitlines()
                    text = "\n".join(line.rstrip() for line in lines)
                    yield f"````{{code-block}} text\n:class: output\n\n{text}\n````"


def _described(command: Any, name: str) -> Iterator[str]:
    """Yield a command and its subcommands, as Markdown."""
    command = getattr(command, "made", command)
    context = typer.Context(command, info_name=name, terminal_width=80)
    below = {
        each: command.get_command(context, each)
        for each in getattr(command, "list_commands", lambda _: [])(context)
    }
    if not below and not command.hidden:
        yield from (f"### {name}", "", "```text", command.get_help(context).strip(), "```", "")
    for each in below:
        yield from _described(below[each], f"{name} {each}")


def offer_markdown(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.Node | None
) -> None:
    """Announce the Markdown version of a page to programs."""
    if doctree is not None:
        name = f"{page.rpartition('/')[2]}.md"
        context["metatags"] += f'<link rel="alternate" type="text/markdown" href="{name}">'


def prepare_markdown(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Keep in Markdown what its builder drops: stars of signatures, and links within a page."""
    if app.builder.name == "markdown":
        for each in list(doctree.findall(nodes.abbreviation)):
            each.replace_self(each.children)
        for link in doctree.findall(nodes.reference):
            if "refid" in link and "refuri" not in link:
                link["refuri"] = f"#{link['refid']}"


def write_lists(app: Sphinx, error: Exception | None) -> None:
    """After the Markdown, write ``llms.txt``: all pages by part, with the first sentence of each.

    ``external-links.txt`` has the addresses outside of the site, by page.
    """
    if error is not None or app.builder.name != "markdown":
        return
    env = app.env
    if lost := [
        page for page in env.found_docs if "]()" in (app.outdir / f"{page}.md").read_text()
    ]:
        raise ExtensionError(
            f"the Markdown of {', '.join(sorted(lost))} has a link without a target"
        )
    lines = [f"# {env.titles['index'].astext()}", "", f"> {_first_sentence(env, 'index')}"]
    for part in env.toctree_includes["index"]:
        lines += ["", f"## {env.titles[part].astext()}", ""]
        for page in _in_menu(env, part):
            lines.append(
                f"- [{env.titles[page].astext()}]({page}.md): {_first_sentence(env, page)}"
            )
    (app.outdir / "llms.txt").write_text("\n".join(lines) + "\n")
    links = [
        f"{link} {page}"
        for page in sorted(env.found_docs)
        for link in sorted({each["refuri"] for each in _references(env.get_doctree(page))})
    ]
    (app.outdir / "external-links.txt").write_text("\n".join(links) + "\n")


def _in_menu(env: BuildEnvironment, page: str) -> Iterator[str]:
    yield page
    for each in env.toctree_includes.get(page, []):
        yield from _in_menu(env, each)


def _first_sentence(env: BuildEnvironment, page: str) -> str:
    for paragraph in env.get_doctree(page).findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            return re.split(r"(?<=\.)\s", " ".join(paragraph.astext().split()))[0]
    return ""


def _references(page: nodes.document) -> Iterator[nodes.reference]:
    return (
        each
        for each in page.findall(nodes.reference)
        if each.get("refuri", "").startswith(("http://", "https://"))
    )


def import_modules(app: Sphinx) -> None:
    """Fail before any page is read: Sphinx waits forever if a parallel worker raises an error."""
    for name in MODULES:
        _import(name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", import_modules)
    app.add_directive("commands", Commands)
    app.add_directive("notebook", Notebook)
    app.add_role("code-or-link", CodeOrLink())
    app.connect("html-page-context", offer_markdown)
    app.connect("doctree-resolved", prepare_markdown)
    app.connect("build-finished", write_lists)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("missing-reference", resolve, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
