"""Names, docstrings and documents are in the field's words: a docstring begins with what a thing does or is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT, prose

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gigagrad"
ROOMS = sorted(path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
BEGINNINGS = re.compile(r"(Of|As|The same|What|Where|Whether|How|By)\b")
OURS = {
    *("dealt", "fate", "fates", "fleet", "front", "heard", "hoard", "joining", "keeping", "ledger", "look", "meet"),
    *("meeting", "meetings", "offer", "option", "owners", "pairs", "parcel", "pulse", "rehearsal", "said", "seam"),
    *("shared_out", "slack", "strip", "swap", "sweep", "sweeps", "swept", "tape", "tested", "tilings", "told", "turn"),
    *(
        "part",
        "parts",
        "stage",
        "stages",
        "turned",
        "turns",
        "words",
        "worth_saying",
        "composite",
        "originals",
        "ran",
        "walk",
    ),
}
"""Words of this house alone; the field says assign, placement, halo, message, step, scalar graph and so on."""
RECORDS = ("ARCHITECTURE.md", "results.md", "zoo.md", "glossary.md", "changes.md")
"""Pages for whoever reads the code, numbers as they were printed, and the page that explains the program's words."""
NOT_IN_DOCUMENTS = re.compile(
    r"\b(fields?|sweeps?|swept|seams?|crops?|tapes?|parcels?|swaps?|hoards?|slack|fates?|ledgers?|lifetimes?|fleet|pulse|"
    r"rehearsals?|tilings?|gathers|dealt|deals? out|shared out|told|heard|foretells?|mended|hungr\w+)\b",
    re.IGNORECASE,
)


def nodes(room: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield each node of a room's syntax trees, and where it is."""
    path = SOURCE / room
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield f"{file.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}", node


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_what_a_thing_does_or_is(room: str) -> None:
    """Those of modules, classes and functions, and of what is assigned: texts that stand by themselves."""
    found = [
        (place, node.value.value.strip())
        for place, node in nodes(room)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert found
    assert not [f"{place}: {text.splitlines()[0]}" for place, text in found if BEGINNINGS.match(text)]


@pytest.mark.parametrize("room", ROOMS)
def test_names_are_the_field_s(room: str) -> None:
    found = [(place, node.name) for place, node in nodes(room) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    found += [
        (place, Path(place.partition(":")[0]).stem) for place, node in nodes(room) if isinstance(node, ast.Module)
    ]
    spelt = [(place, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")) for place, name in found]
    assert not [f"{place}: {name}" for place, name in spelt if name in OURS]


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        ROOT / "SECURITY.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CODE_OF_CONDUCT.md",
        *(path for path in sorted(DOCS.rglob("*.md")) if "decisions" not in path.parts),
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_documents_are_in_the_field_s_words(path: Path) -> None:
    """Output of the program, which is quoted or in italics, and code are as they are."""
    text = re.sub(r"\*[^*\n]+\*", "", prose(path.read_text(encoding="utf-8"), tables=True))
    found = [
        (match.group(), text[max(0, match.start() - 40) : match.end() + 20])
        for match in NOT_IN_DOCUMENTS.finditer(text)
    ]
    assert path.name in RECORDS or not found
