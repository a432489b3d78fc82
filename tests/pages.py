"""The pages of the documents as tests see them: their blocks of code, and a reader who types what they say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gigagrad.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block between fences. Its first line names the language, then `not-run` or `title=FILE`."""

    language: str
    words: tuple[str, ...]
    text: str

    @property
    def is_run(self) -> bool:
        return self.language in ("sh", "bash", "python") and "not-run" not in self.words

    @property
    def title(self) -> str | None:
        return next((word.removeprefix("title=") for word in self.words if word.startswith("title=")), None)


def blocks(text: str) -> Iterator[Block]:
    for _, _, info, code in FENCE.findall(text):
        language, *words = info.split() or [""]
        yield Block(language, tuple(words), code)


def commands(block: Block) -> Iterator[str]:
    """Yield the lines of a block of commands, those that go on behind a backslash as one, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def prose(text: str, tables: bool = False) -> str:
    """Return a page without code, pictures, comments and, unless asked for, tables; code in a line is one word."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    if not tables:
        text = re.sub(r"^\|.*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"^!\[.*\)$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]+`", "`code`", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))


def sentences(text: str) -> list[str]:
    """Split prose at full stops, and at the ends of paragraphs, headings and points of a list."""
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-#]|\d+\.) )|^: ", text, flags=re.MULTILINE)
    found = [each for part in parts for each in re.split(r"(?<=[.?!])\s+(?=[^a-z])", " ".join(part.split()))]
    return [each for each in found if each]


def play(page: str, smaller: Sequence[tuple[str, str]] = (), **names: Any) -> dict[str, Any]:
    """Type in the working directory what a page says, block by block, and return the names that its Python has left.

    `smaller` are replacements, each of which has to be there: less data and fewer epochs than a reader wants. Budgets
    are for a reader's process, not for one that runs tests.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    for old, new in smaller:
        assert old in text, f"{page} no longer says {old!r}"
        text = text.replace(old, new)
    text = re.sub(r'(--memory |memory=")[\d.]+ ?GiB', r"\g<1>16GiB", text)
    for block in blocks(text):
        if block.title is not None:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.is_run and block.language == "python":
            exec(compile(block.text, page, "exec"), names)
        elif block.is_run:
            for line in commands(block):
                program, *arguments = shlex.split(line, comments=True)
                assert program == "gigagrad", f"{page}: {line}: mark the block with not-run"
                assert main(arguments) == 0, line
    return names
