"""Names and docstrings are in the field's words: a docstring begins with what a thing does or is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
