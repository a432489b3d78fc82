"""What the documents point at is there, and a decision is short."""

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import gigagrad as gg

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACES = [ROOT, ROOT / "src" / "gigagrad", *(p for p in (ROOT / "src" / "gigagrad").rglob("*") if p.is_dir())]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert not [link for link in links if link and not (path.parent / link).exists()]
    named = set(re.findall(r"`([\w/]+\.py)`", text)) | set(re.findall(r"python (bench/\w+\.py)", text))
    assert not [name for name in named if not any((place / name).exists() for place in PLACES)]


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
