"""The documents point at what is there, say only what runs or parses, in short sentences; and a decision is short."""

import re
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name

import pytest

import gigagrad as gg
from gigagrad.cli.flags import SETTINGS, build_parser
from tests.pages import DOCS, ROOT, blocks, commands, launched, prose, sentences

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CODE_OF_CONDUCT.md",
    *sorted(DOCS.rglob("*.md")),
]
PAGES = [path for path in DOCUMENTS if "decisions" not in path.parts]
RECORDS = ("ARCHITECTURE.md", "math.md", "results.md", "zoo.md", "changes.md", "security.md", "index.md")
"""Pages of numbers, proofs and names for whoever works on gigagrad, and those that only include or list others."""
LANGUAGES = {"sh", "bash", "python", "text", "csv", "json", "{toctree}", "{eval-rst}", "{include}"}
ELSEWHERE = {
    "README.md": "its commands are those of start/first-result.md",
    "docs/in-other-programs.md": "tests/integrations/test_page.py",
    "docs/how-to/lightning.md": "tests/integrations/test_page.py",
    "docs/how-to/monai.md": "tests/integrations/test_page.py",
    "docs/how-to/tiatoolbox.md": "tests/integrations/test_page.py",
    "docs/how-to/torchgeo.md": "tests/integrations/test_page.py",
    "docs/how-to/hugging-face.md": "tests/integrations/test_page.py",
    "docs/how-to/napari.md": "tests/integrations/test_napari.py",
    "docs/operators.md": "tests/graphs/test_own_operator.py",
}
"""Pages whose code is run by other tests than those of `tests/journeys`."""
PLACES = [ROOT, ROOT / "src" / "gigagrad", *(p for p in (ROOT / "src" / "gigagrad").rglob("*") if p.is_dir())]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    written = {block.title for block in blocks(text)}
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert not [link for link in links if link and not (path.parent / link).exists()]
    named = set(re.findall(r"`([\w/]+\.py)`", text)) | set(re.findall(r"python (bench/\w+\.py)", text))
    assert not [name for name in named - written if not any((place / name).exists() for place in PLACES)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_called_gg_is_there(path: Path) -> None:
    for name in set(re.findall(r"\bgg((?:\.[A-Za-z_]\w*)+)", path.read_text(encoding="utf-8"))):
        attrgetter(name[1:])(gg)


def test_every_room_is_there_and_entered_when_it_is_named() -> None:
    """A process that has just imported the package has imported little, PyTorch least of all."""
    code = (
        "import sys, gigagrad as gg\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "gg.images.write_pyramid, gg.masks.ignoring_missing, gg.errors.GigagradError\n"
        "assert {'images', 'masks', 'plans', 'fit'} <= set(dir(gg)) and not hasattr(gg, 'nothing')\n"
        "assert not hasattr(gg, '__wrapped__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "decisions").glob("*.md")), ids=lambda path: path.name)
def test_a_decision_has_300_words_at_most(path: Path) -> None:
    words = [word for word in path.read_text(encoding="utf-8").split() if any(map(str.isalnum, word))]
    assert len(words) <= 300


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_are_known_and_python_is_python(path: Path) -> None:
    """Blocks say their language. What no test runs is parsed: commands by the command line's parser and settings."""
    for block in blocks(path.read_text(encoding="utf-8")):
        assert block.language in LANGUAGES, block
        if block.language == "python":
            compile(block.text, name(path), "exec")
        for line in commands(block) if block.language in ("sh", "bash") else ():
            words = shlex.split(re.sub(r"\$\w+", "1", line), comments=True)
            if "torchrun" in words:
                launched(words[words.index("torchrun") + 1 :])
            if "gigagrad" in words and words[0] not in ("git", "cd", "pip"):
                given = [word for word in words[words.index("gigagrad") + 1 :] if word != "..."]
                args = vars(build_parser(given).parse_args(given))
                if given[0] in SETTINGS:
                    of_the_command = ("command", "traceback", "config", "trust", "overwrite", "folds")
                    settings = {key: value for key, value in args.items() if key not in of_the_command}
                    some = {"slides": "a" if given[0] == "fit" else ["a"], "out": "b"}
                    resolve_name(SETTINGS[given[0]]).from_dict(some | settings)


def test_each_block_of_code_is_run_or_says_why_it_is_not() -> None:
    typed = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "journeys").glob("*.py"))
    played = {name((DOCS / page).resolve()) for page in re.findall(r'"([\w./-]+\.md)"', typed)}
    found = {path: list(blocks(path.read_text(encoding="utf-8"))) for path in PAGES}
    assert not [(path, block) for path, read in found.items() for block in read if block.why == ""]
    assert {name(path) for path, read in found.items() if any(block.is_run for block in read)} == played | set(
        ELSEWHERE
    )
    readme, start = (
        {line for block in blocks(path.read_text(encoding="utf-8")) if block.is_run for line in commands(block)}
        for path in (ROOT / "README.md", DOCS / "start" / "first-result.md")
    )
    assert readme == start


@pytest.mark.parametrize("path", [path for path in PAGES if path.name not in RECORDS], ids=name)
def test_sentences_are_short_and_the_first_lines_say_what_a_page_is_for(path: Path) -> None:
    text = prose(path.read_text(encoding="utf-8"))
    assert not [sentence for sentence in sentences(text) if len(sentence.split()) > 30]
    assert text.startswith("# ")
    assert len(sentences(text.split("\n\n")[1])) in (1, 2, 3)


def test_what_the_script_for_qupath_runs_is_a_command() -> None:
    script = (DOCS / "qupath" / "predict_open_image.groovy").read_text(encoding="utf-8")
    (words,) = re.findall(r"def command = \[program, (.*)\]", script)
    given = [word.strip(" '*") for word in words.split(",")]
    assert build_parser(given).parse_args(given).command.__name__ == "predict"


def test_all_public_names_are_in_the_reference() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert not [each for each in gg.__all__ if not re.search(rf"auto\w+:: (gigagrad\.)?{each}$", page, re.MULTILINE)]


def test_every_page_is_in_the_index() -> None:
    """Sphinx says so, too; this needs no Sphinx."""
    listed = set(re.findall(r"^([\w/-]+)$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {name(path).removeprefix("docs/").removesuffix(".md") for path in PAGES if path.is_relative_to(DOCS)}
    assert pages - {"index"} == listed - {"decisions/index"}
