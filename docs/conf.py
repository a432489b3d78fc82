"""The site: `make docs` builds it into build/docs. Pages are Markdown, and read as well without it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from pygments.lexers import TextLexer
from sphinx.application import Sphinx
from sphinx.highlighting import lexers

import gigagrad
from gigagrad.cli.flags import COMMANDS, build_parser

project = "gigagrad"
author = "the gigagrad authors"
version = release = gigagrad.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["qupath"]
html_theme = "furo"
html_title = "gigagrad"
html_copy_source = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"
default_role = "code"  # in docstrings, as in the pages, backticks are code
highlight_language = "text"
smartquotes = False  # two hyphens begin a flag
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature's are enough, and the text says the rest
autodoc_preserve_defaults = True
napoleon_google_docstring = True
suppress_warnings = ["myst.header"]  # a page of decisions begins with its number

PLACES = "<!-- the commands and their flags, from the command line's own help -->", "<!-- blocks that no test runs -->"
ROOT = Path(__file__).resolve().parents[1]


def _flags(parser: argparse.ArgumentParser) -> str:
    """Write the flags of a command as a list of definitions."""
    found = []
    for action in parser._actions:  # argparse has no public list
        if isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
        choices = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
        meaning = (action.help or "see above").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")
        found.append(f"{names}\n: {meaning}{choices}{'; required' if action.required else ''}\n")
    return "\n".join(found)


def commands() -> str:
    """Write each command's summary, description and flags."""
    parser = build_parser(list(COMMANDS))
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return "\n".join(
        f"## gigagrad {name}\n\n{command.description}\n\n{_flags(command)}" for name, command in found.choices.items()
    )


def not_run() -> str:
    """Write a table of the blocks of code that no test runs, and where they are."""
    lines = ["| page | a block that is not run begins with | because it |", "|---|---|---|"]
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        found = re.findall(r"^```\w+ not-run: (.*)\n(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        lines += [f"| {path.relative_to(ROOT)} | `{' '.join(line.split()[:2])}` | {why} |" for why, line in found]
    return "\n".join(lines)


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:
    for place, write in zip(PLACES, (commands, not_run), strict=True):
        if place in source[0]:
            source[0] = source[0].replace(place, write())
    # Links to files beside this folder that are pages here, too.
    source[0] = source[0].replace("](../SECURITY.md", "](development/security.md")
    source[0] = source[0].replace("](../../SECURITY.md", "](../development/security.md")


def setup(app: Sphinx) -> None:
    """Fill the page of the command line when it is read; tables of commas are shown as they are."""
    lexers["csv"] = TextLexer()
    app.connect("source-read", _fill)
