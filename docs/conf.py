"""How the site is built: `sphinx-build -W docs build/docs`. Nothing is fetched while building."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from placewright._version import VERSION  # noqa: E402

project = "Placewright"
author = "the Placewright authors"
version = release = VERSION

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "reference",  # beside this file: the parts that are made from the code
]

myst_heading_anchors = 3
nitpicky = False
default_role = "literal"  # docstrings write `names` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"Placewright {VERSION}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
