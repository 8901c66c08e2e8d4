"""How Sphinx makes the site: `make docs` writes it to build/docs. Needs no network."""

import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / each) for each in ("src", "packages/onefold-jobs/src", ".")]

metadata = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
project = metadata["name"]
author = metadata["authors"][0]["name"]
project_copyright = f"{author}, {metadata['license']}"
version = release = metadata["version"]
html_baseurl = metadata["urls"]["Documentation"]
linkcheck_ignore = [rf"{html_baseurl}.*"]  # docstrings name pages of this site

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_markdown_builder",
    "docs.extension",
]
exclude_patterns = ["inventories"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:(class|obj)", r"[^\[]*\[[^\]]*"),  # a field's type, which Sphinx cuts
    ("py:class", r"(rich|typer)\..*"),  # without an inventory
    ("py:class", "Collate|DataSource|ScoreFunction|TorchNames"),  # of the source, not of the pages
]
smartquotes = False  # -- is an option, not a dash
default_role = "code-or-link"  # of single backticks in docstrings

myst_heading_anchors = 4  # as GitHub makes them
myst_links_external_new_tab = False

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# Each line of these files is a name and the address of its documentation.
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.txt"),
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.txt"),
}
if tags.has("markdown"):  # noqa: F821  # a name that Sphinx gives this file
    intersphinx_mapping, nitpicky = {}, False  # signatures without a link in each word

html_theme = "furo"
html_title = "onefold"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
