"""What an sdist and a wheel contain, built by setuptools without a network, from a copy of the sources."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import gigagrad as gg
from gigagrad.view.page import _NAMES
from tests.pages import ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("setuptools", minversion="77", reason="needs setuptools 77 or later")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(kind: str, folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build an `sdist` or a `wheel` of a folder, as `python -m build --no-isolation` asks for it."""
    out.mkdir(exist_ok=True)
    argv = [sys.executable, "-W", "ignore", "-c", HOOK, f"build_{kind}", str(out)]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what is built from, without the page."""
    copy = tmp_path / "sources"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "page", "node_modules")
    for name in ("src", "web", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=left_out)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, copy)
    return copy


@pytest.fixture
def page(sources: Path) -> Path:
    """Files that stand for those of the built page: its own need Node.js."""
    folder = sources / "src" / "gigagrad" / "view" / "page"
    folder.mkdir()
    for name in _NAMES:
        (folder / name).write_text(name)
    return folder


def contents(wheel: Path) -> dict[str, int]:
    """Return the files of a wheel and their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def test_the_sdist_builds_the_wheel_that_the_sources_build(sources: Path, page: Path, tmp_path: Path) -> None:
    for kind in ("sdist", "wheel"):
        built = build(kind, sources, tmp_path / "dist")
        assert built.returncode == 0, built.stderr
    (sdist,), (wheel,) = (tmp_path / "dist").glob("*.tar.gz"), (tmp_path / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"web/src/main.ts", "web/package-lock.json", "LICENSE", "CHANGELOG.md"} <= packed
    assert not [name for name in packed if name.startswith(("tests", "docs", "bench"))]
    assert build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "again").returncode == 0
    assert contents(tmp_path / "again" / wheel.name) == contents(wheel)

    found = contents(wheel)
    package = ROOT / "src" / "gigagrad"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    ours = {f"gigagrad/{path.relative_to(package).as_posix()}" for path in files}
    ours |= {f"gigagrad/view/page/{name}" for name in _NAMES}
    assert {name for name in found if not name.startswith("gigagrad-")} == ours
    assert "gigagrad/py.typed" in ours


def test_metadata_says_what_pyproject_says(sources: Path, tmp_path: Path) -> None:
    """A wheel of a checkout can lack the page: whoever tries gigagrad from one may have no Node.js."""
    built = build("wheel", sources, tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        assert name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    assert metadata["License-Expression"] == PROJECT["license"]
    assert metadata.get_all("Provides-Extra") == list(PROJECT["optional-dependencies"])
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_recipe_for_conda_asks_for_what_pyproject_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))
    theirs = {"torch": "pytorch", "openslide-bin": "openslide"}
    wanted = [re.fullmatch(r"([\w-]+)(.+)", line).groups() for line in PROJECT["dependencies"]]
    expected = {f"{theirs.get(name, name)} {versions}" for name, versions in wanted}
    assert set(recipe["requirements"]["run"]) == expected | {f"python {PROJECT['requires-python']}"}
    assert PROJECT["version"] in recipe["context"].values()


def test_the_version_is_the_same_everywhere() -> None:
    assert gg.__version__ == PROJECT["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == PROJECT["version"]
    assert f"gigagrad-{PROJECT['version']}-py3" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()), ids=lambda path: path.name)
def test_templates_of_issues_are_forms(path: Path) -> None:
    """As GitHub asks: a name, a description, and fields with an id and a label; one at least is not only text."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["type"] in ("input", "textarea") and field["attributes"]["label"] for field in fields)


def test_an_sdist_without_the_page_is_refused(sources: Path, tmp_path: Path) -> None:
    built = build("sdist", sources, tmp_path / "dist")
    assert built.returncode != 0
    assert "page.js is missing: build the page of 'gigagrad view' first, with 'make page'" in built.stderr
    assert not list((tmp_path / "dist").iterdir())
