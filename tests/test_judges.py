"""The judges speak to the public interface alone, so that they judge a new inside as they judged the old one.

Judges are the tests in `FOLDERS`, the campaigns in `CAMPAIGNS`, whatever of tests/ and bench/ these import, and the
programs that they hold as text.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "exactness", "faults", "memory", "ranks"
CAMPAIGNS = "budgets", "deep_step", "exactness", "gigapixel_step", "hashes", "kills", "networks", "ranks", "zoo"
PUBLIC: dict[str, set[str] | None] = {
    "gigagrad": None,
    "gigagrad.boxes": {"Box"},
    "gigagrad.cli": {"main"},
    "gigagrad.devices": {"Device", "Machine", "MemoryGuard", "register_device"},
    "gigagrad.devices.streams": {"Event", "Streams"},
    "gigagrad.errors": None,
    "gigagrad.events": None,
    "gigagrad.images": None,
    "gigagrad.losses": None,
    "gigagrad.masks": None,
    "gigagrad.models": None,
    "gigagrad.models.torchvision_operators": set(),
    "gigagrad.ranks": {"Mesh", "Ranks", "SingleRank", "from_environment", "launch", "run_threaded"},
    "gigagrad.threads": {"settle"},
    "gigagrad.training": None,
    "gigagrad.units": None,
}
"""What a judge may import, and which names of it; None: all that do not begin with an underscore."""
PLANS = {
    "budget_bytes",
    "bytes_in",
    "device",
    "image_shape",
    "memory_format",
    "memory_parts",
    "predicted_peak_bytes",
    "predicted_seconds",
    "tile",
    "tile_count",
    "to_dict",
    "whole_field",
    "workers",
}
"""What a judge may ask a plan for: the rest is how this inside plans."""
PYTORCHS = {"_assert", "_assert_async", "_base", "_foreach_mul_", "_higher_order_ops", "_input_metadata", "_version"}
PYTORCHS |= {"_make_wrapper_subclass", "_schema"}
OTHERS = {"_blocks", "_exit_callbacks", "_run_exitfuncs"}
"""Attributes with an underscore that are PyTorch's, and those of objects that the judges make or take from Python."""


def is_module(name: str) -> bool:
    path = ROOT / "src" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def fault_of(module: str, name: str | None = None) -> str | None:
    """Says what is wrong with importing a module of gigagrad, or a name of it."""
    names = PUBLIC.get(module, set())
    if name is None:
        return None if module in PUBLIC else module
    if names is not None and name in names:
        return None
    if is_module(f"{module}.{name}"):
        return fault_of(f"{module}.{name}")
    hidden = name.startswith("_") and not name.startswith("__")
    return f"{module}.{name}" if hidden or names is not None else None


def faults(source: str) -> Iterator[str]:
    """Yields what a judge's source uses that is not public, with the line."""
    tree = ast.parse(source)
    aliases = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "gigagrad"
    }
    for node in ast.walk(tree):
        found: list[str | None] = []
        if isinstance(node, ast.Import):
            found = [fault_of(a.name) for a in node.names if a.name.split(".")[0] == "gigagrad"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gigagrad":
            found = [fault_of(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            base = node.value
            if isinstance(base, ast.Name) and base.id in aliases:
                found = [fault_of("gigagrad", node.attr)]
            if is_plan(base) and node.attr not in PLANS:
                found.append(f"plan.{node.attr}")
            own = isinstance(base, ast.Name) and base.id in ("self", "cls")
            if re.match(r"_(?!_)", node.attr) and not own and node.attr not in PYTORCHS | OTHERS:
                found.append(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = list(faults_in_text(node.value))
        yield from (f"line {getattr(node, 'lineno', 0)}: {fault}" for fault in found if fault is not None)


def is_plan(node: ast.expr) -> bool:
    """Tells whether an expression is called a plan, or is what a method `plan` returns."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "plan"
    return (
        isinstance(node, ast.Name | ast.Attribute) and (node.id if isinstance(node, ast.Name) else node.attr) == "plan"
    )


def faults_in_text(text: str) -> Iterator[str]:
    """Yields the faults of a string that names a module of gigagrad, or is a program that imports it."""
    if re.fullmatch(r"gigagrad(\.[a-z_]+)+", text) and is_module(text):
        fault = fault_of(text)
        if fault is not None:
            yield fault
    elif re.search(r"\bimport\b", text) and "gigagrad" in text:
        try:
            yield from faults(textwrap.dedent(text))
        except SyntaxError:  # prose
            return


def imported(path: Path) -> Iterator[Path]:
    """Yields the files of tests/ and bench/ that a file imports."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = [*package[: len(package) + 1 - node.level], *filter(None, (node.module or "").split("."))]
        if not node.level:
            parts = (node.module or "").split(".")
        if parts and parts[0] in ("tests", "bench"):
            place = ROOT.joinpath(*parts)
            candidates = [place.with_suffix(".py"), place / "__init__.py"]
            candidates += [place / f"{alias.name}.py" for alias in node.names]
            yield from (candidate for candidate in candidates if candidate.is_file())


def judges() -> list[Path]:
    """Lists the judges, and the files of tests/ and bench/ that they import."""
    due = [path for folder in FOLDERS for path in (ROOT / "tests" / folder).rglob("*.py")]
    due += [*(ROOT / "bench").glob("attack*.py"), *(ROOT / "bench" / f"{name}.py" for name in CAMPAIGNS)]
    due += [ROOT / "bench" / f"{name}.py" for name in ("budgets_case", "zoo_step")]  # started as processes
    found: set[Path] = set()
    while due:
        path = due.pop()
        if path not in found:
            found.add(path)
            due += imported(path)
    return sorted(found)


@pytest.mark.parametrize("path", judges(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_judge_uses_public_names_alone(path: Path) -> None:
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import gigagrad as gg\nfrom gigagrad.images import open_image\ngg.compile(gg.models.Normalise())", None),
        ("from gigagrad.plans import estimate", "line 1: gigagrad.plans.estimate"),
        ("import gigagrad.execution.run", "line 1: gigagrad.execution.run"),
        ("from gigagrad.images import opening", "line 1: gigagrad.images.opening"),
        ("from gigagrad import allowances", "line 1: gigagrad.allowances"),
        ("from gigagrad.errors import _hidden", "line 1: gigagrad.errors._hidden"),
        ("import gigagrad as gg\ngg.plans", "line 2: gigagrad.plans"),
        ("engine = None\nengine._planner", "line 2: ._planner"),
        ("patch('gigagrad.execution.scalars')", "line 1: gigagrad.execution.scalars"),
        ("engine = None\nplan = engine.plan(0)\nplan.segments, plan.tile", "line 3: plan.segments"),
        ("engine = None\nengine.plan(0).kept", "line 2: plan.kept"),
        ("RUN = '''\nfrom gigagrad.plans import Plan\n'''", "line 1: line 2: gigagrad.plans.Plan"),
    ],
)
def test_what_is_private_is_found(source: str, found: str | None) -> None:
    assert list(faults(source)) == ([] if found is None else [found])
