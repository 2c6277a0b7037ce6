"""Build of the documentation: `sphinx-build -W -b html docs docs/_build/html`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from raysim.version import __version__

project = "raysim"
author = "the raysim authors"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "docstrings",
    "generated_pages",
]

exclude_patterns = ["_build", "generated"]
suppress_warnings = ["myst.header"]  # a method's page starts with the headings of its docstring

html_theme = "furo"
html_title = f"raysim {release}"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

smartquotes = False  # would turn the dashes of --option into one

default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {  # shown by name, not with their validators
    name: name for name in ("PositiveScheduled", "Scheduled", "UnitScheduled")
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Writes", "returns_style")]
