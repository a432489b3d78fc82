"""No module of a room imports another one in a circle, be it inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
ROOMS = ("devices", "images", "ranks", "stores")


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a module imports and from where, wherever it runs: not what only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (found for other in node.orelse for found in imports(other))
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)
        else:
            yield from imports(node)


def importing(folder: Path, package: str) -> dict[str, set[str]]:
    """Find, of each module of a package, the others that it imports."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join((package, *parts[: -1 if parts[-1] == "__init__" else None]))] = path
    read = {module: list(imports(ast.parse(path.read_text(encoding="utf-8")))) for module, path in found.items()}
    return {
        module: {f"{source}.{name}" if f"{source}.{name}" in found else source for source, name in names} & found.keys()
        for module, names in read.items()
    }


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Find the modules that import each other in circles: those left when all that import none, or are imported by
    none, of the others have been taken away."""
    left = {module: others - {module} for module, others in graph.items()}
    while ends := left.keys() - {module for module, others in left.items() if others & left.keys()} or (
        left.keys() - {other for others in left.values() for other in others}
    ):
        left = {module: others for module, others in left.items() if module not in ends}
    return sorted(left)


@pytest.mark.parametrize("room", ROOMS)
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    graph = importing(SOURCE / "gigagrad" / room, f"gigagrad.{room}")
    assert len(graph) > 1
    assert circles(graph) == []


@pytest.mark.parametrize(
    ("second", "circle"),
    [
        ("import room.first", True),
        ("def late():\n    from room import first", True),
        ("def late():\n    from room.first import name", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.first import Name", False),
        ("import json", False),
    ],
)
def test_a_circle_is_found_also_inside_a_function(tmp_path: Path, second: str, circle: bool) -> None:
    (tmp_path / "__init__.py").write_text("from room.first import name")
    (tmp_path / "first.py").write_text("from room.second import other")
    (tmp_path / "second.py").write_text(second)
    assert bool(circles(importing(tmp_path, "room"))) is circle
