"""The pages of the documents as tests see them: their blocks of code, and a reader who types what they say."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gigagrad.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block between fences. Its first line names the language, then `title=FILE` or `not-run: WHY`."""

    language: str
    words: str
    text: str

    @property
    def is_code(self) -> bool:
        return self.language in ("sh", "bash", "python")

    @property
    def is_run(self) -> bool:
        return self.is_code and self.why is None

    @property
    def why(self) -> str | None:
        """Why no test runs it, empty where it does not say; None where one does."""
        return self.words.removeprefix("not-run").removeprefix(":").strip() if "not-run" in self.words else None

    @property
    def title(self) -> str | None:
        return self.words.removeprefix("title=") if self.words.startswith("title=") else None


def blocks(text: str) -> Iterator[Block]:
    for _, _, info, code in FENCE.findall(text):
        language, _, words = info.strip().partition(" ")
        yield Block(language, words.strip(), code)


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

    `smaller` are replacements, each of which has to be there: less data and fewer epochs than a reader wants, and what
    `...` stands for. Budgets are for a reader's process, not for one that runs tests. `$NAME` is what the environment
    has, and `export` sets it for the page.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    for old, new in smaller:
        assert old in text, f"{page} no longer says {old!r}"
        text = text.replace(old, new)
    text = re.sub(r'(--memory |memory=")[\d.]+ ?GiB', r"\g<1>16GiB", text)
    with pytest.MonkeyPatch.context() as patch:
        for block in blocks(text):
            if block.title is not None:
                Path(block.title).write_text(block.text, encoding="utf-8")
            elif block.is_run and block.language == "python":
                exec(compile(block.text, page, "exec"), names)
            elif block.is_run:
                for line in commands(block):
                    program, *arguments = shlex.split(os.path.expandvars(line), comments=True)
                    if program == "export":
                        patch.setenv(*arguments[0].split("=", 1))
                    elif program == "torchrun":
                        launch(arguments)
                    else:
                        assert program == "gigagrad", f"{page}: {line}: say not-run and why"
                        assert main(arguments) == 0, line
    return names


def launched(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Read a command of torchrun's by its own parser: how many ranks there are on all machines, and what each runs."""
    from torch.distributed.run import get_args_parser

    flags = get_args_parser().parse_args(list(arguments))
    most = int(flags.nnodes.rpartition(":")[2]) * int(flags.nproc_per_node)
    script = [word for word in (flags.training_script, *flags.training_script_args) if word != "--"]
    return most, script


def launch(arguments: Sequence[str]) -> None:
    """Stand in for torchrun, for ranks that need not know each other: they run one after the other."""
    count, (program, *own) = launched(arguments)
    assert program == "gigagrad"
    assert own[0] != "fit", "say not-run and why: tests/training has ranks that train together"
    for rank in range(count):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(count))
            assert main(own) == 0
