"""Processes of users who have no name, no home, no docstrings, a full disk, or a terminal that cannot spell a slide."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile

from gigagrad.cli.running import settle_streams
from gigagrad.config import described
from gigagrad.devices import heap, machine
from gigagrad.devices.machine import profile_path
from gigagrad.files import read_json, write_json, write_text
from gigagrad.training import FitConfig

NAMES = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME")


@pytest.fixture
def slide(tmp_path):
    path = tmp_path / "плёнка.tif"
    picture = np.full((96, 96, 3), 240, np.uint8)
    picture[24:72, 24:72] = (120, 60, 140)
    tifffile.imwrite(path, picture, photometric="rgb", tile=(32, 32), metadata=None)
    return path


def command(words, *, before=(), shell="", **variables):
    """`gigagrad WORDS`, with variables of the environment, and in a shell that does something first."""
    environment = {key: value for key, value in os.environ.items() if key not in NAMES} | variables
    argv = [sys.executable, *before, "-m", "gigagrad", *map(str, words)]
    if shell:
        argv = ["sh", "-c", shell, "sh", *argv]
    return subprocess.run(argv, env=environment, capture_output=True, timeout=120)


def test_a_slide_that_the_terminal_cannot_spell_is_labelled(slide, tmp_path):
    spelt = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8", "COLUMNS": "1", "TERM": "dumb"}
    run = command(["label", slide, "--out", tmp_path / "masks"], TMPDIR="/nowhere", **spelt)
    assert (run.returncode, run.stderr) == (0, b"")
    assert rb"\u043f\u043b\u0451\u043d\u043a\u0430.tif" in run.stdout
    assert (tmp_path / "masks" / slide.name).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="file systems of others have no such names")
def test_a_file_whose_name_is_no_text_is_labelled(slide, tmp_path):
    odd = slide.with_name(os.fsdecode(b"\xff\xfe.tif"))
    shutil.move(slide, odd)
    run = command(["label", odd, "--out", tmp_path / "masks"])
    assert (run.returncode, run.stderr) == (0, b"")
    assert (tmp_path / "masks" / odd.name).exists()


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ('exec "$@" > /dev/full', 2, "standard output: No space left on device; free some space or write elsewhere"),
        ('exec "$@" 2> /dev/full > /dev/full', 2, ""),
        ('exec "$@" <&- >&- 2>&-', 0, ""),
        ('mkdir gone; cd gone; rmdir ../gone; exec "$@"', 2, "the current folder does not exist any more; change to"),
    ],
)
def test_streams_that_are_full_or_closed_and_a_folder_that_is_gone(slide, tmp_path, monkeypatch, shell, code, said):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, filter(None, sys.path))))
    run = command(["label", slide, "--out", tmp_path / "masks"], shell=shell)
    assert run.returncode == code, run.stderr
    assert said in run.stderr.decode()
    assert run.stderr.count(b"\n") == bool(said)


def test_settings_are_described_without_docstrings(monkeypatch):
    """As `python -OO` has it: a dataclass without one is given its signature."""
    meanings = described(FitConfig)
    monkeypatch.setattr(FitConfig, "__doc__", "FitConfig(*, slides: str, out: str)")
    assert described(FitConfig) == meanings
    assert meanings["slides"].startswith("the cohort file")


def test_a_user_without_a_name_gets_one_in_a_process_of_ours(monkeypatch):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("USER", "")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("OMP_WAIT_POLICY", "TORCH_CPP_LOG_LEVEL", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    heap.before_pytorch()
    assert not os.environ["USER"]
    heap.before_pytorch(own_process=True)
    assert os.environ["USER"] == f"user-{os.getuid()}"


@pytest.mark.parametrize("home", ["", "a file", "a" * 5000], ids=["none", "file", "long"])
def test_a_machine_is_known_without_a_home(monkeypatch, tmp_path, home):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    (tmp_path / "a file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "profile_path", profile_path)  # and not that of all other tests
        patch.setattr("pwd.getpwuid", unknown)
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.delenv("HOME", raising=False)
        if home:
            patch.setenv("HOME", str(tmp_path / home))
        assert machine.profile_path().is_absolute()
        assert not machine.Machine.detect(1).calibrated


def test_names_that_are_no_text_are_written_and_read(tmp_path):
    name = os.fsdecode(b"\xff.tif")
    write_json(tmp_path / "a.json", {"slide": name, "other": "Pragué"})
    assert read_json(tmp_path / "a.json") == {"slide": name, "other": "Pragué"}
    write_text(tmp_path / "a.csv", f"slide\n{name}\n")
    assert (tmp_path / "a.csv").read_bytes() == b"slide\n\xff.tif\n"


def test_streams_are_settled_once_and_again(capfd):
    settle_streams()
    settle_streams()
    sys.stdout.write("плёнка \udcff")
    assert "\\udcff" in capfd.readouterr().out
