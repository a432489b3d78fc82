"""Output files: whole or not there, however the writing ends."""

import errno
import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gigagrad import files
from gigagrad.errors import WriteError
from gigagrad.files import (
    check_destination,
    read_json,
    read_tensors,
    replacing,
    replacing_folder,
    write_agreed,
    write_csv,
    write_error,
    write_json,
    write_tensors,
    write_text,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail_with(error):
        with replacing(path) as file:
            file.write(b"ne")
            raise error

    with pytest.raises(WriteError, match="No space left"):
        fail_with(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(KeyboardInterrupt):
        fail_with(KeyboardInterrupt())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_not_there_before_it_is_whole(tmp_path):
    path = tmp_path / "new" / "a.bin"
    with replacing(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.seek(0)
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_process_left_goes_when_the_next_file_is_written_and_nothing_else(tmp_path):
    program = (
        "import os, pathlib, sys; from gigagrad.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.txt")]).returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.read_bytes() == b"half"
    foreign = tmp_path / ".b.txt.partial"
    foreign.touch()
    with replacing(tmp_path / "c.txt") as alive:
        assert not left.exists()
        write_text(tmp_path / "d.txt", "new")
        alive.write(b"whole")
    assert (tmp_path / "c.txt").read_bytes() == b"whole"
    assert {path.name for path in tmp_path.iterdir()} == {".b.txt.partial", "c.txt", "d.txt"}


def test_a_folder_is_replaced_as_a_whole_and_what_a_killed_process_left_goes(tmp_path):
    program = (
        "import os, pathlib, sys\nfrom gigagrad.files import replacing_folder\n"
        "with replacing_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').touch(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.zarr")]).returncode == -9
    (left,) = tmp_path.iterdir()
    for content in ("old", "new"):
        with replacing_folder(tmp_path / "a.zarr") as alive:
            assert not left.exists()
            write_text(tmp_path / "d.txt", "new")  # which cleans up
            (alive / content).touch()
    assert [path.name for path in (tmp_path / "a.zarr").iterdir()] == ["new"]
    assert {path.name for path in tmp_path.iterdir()} == {"a.zarr", "d.txt"}


def test_a_folder_stays_as_it_was_where_the_new_one_cannot_be_written(tmp_path):
    with replacing_folder(tmp_path / "a.zarr") as folder:
        (folder / "old").touch()

    def full():
        with replacing_folder(tmp_path / "a.zarr") as folder:
            (folder / "new").touch()
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WriteError, match="No space left"):
        full()
    assert [path.name for path in tmp_path.rglob("*")] == ["a.zarr", "old"]


def test_a_folder_that_was_taken_for_abandoned_is_begun_again(tmp_path, monkeypatch):
    flock = fcntl.flock
    taken: list[Any] = []

    def late(file, how):
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with replacing_folder(tmp_path / "a.zarr") as folder:
        (folder / "new").touch()
    assert len(taken) == 1
    assert (tmp_path / "a.zarr" / "new").exists()


def test_a_file_that_was_taken_for_abandoned_is_begun_again(tmp_path, monkeypatch):
    """Between its creation and its lock, somebody cleaned up."""
    flock = fcntl.flock
    taken: list[Any] = []

    def late(file, how):
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_text(tmp_path / "a.txt", "new")
    assert len(taken) == 1
    assert (tmp_path / "a.txt").read_text() == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.txt"]


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with replacing(tmp_path / "a.txt") as alive:
        write_text(tmp_path / "b.txt", "new")
        alive.write(b"whole")
    assert (tmp_path / "a.txt").read_bytes() == b"whole"


def test_two_who_write_the_same_file_do_not_mix(tmp_path):
    """The later one wins, and the earlier one says that it lost."""
    path = tmp_path / "a.txt"

    def both():
        with replacing(path) as first:
            first.write(b"first")
            with replacing(path) as second:
                second.write(b"second")
                first.write(b"more of the first")

    with pytest.raises(WriteError, match="another process is writing it too"):
        both()
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_what_another_machine_writes_is_not_taken_for_abandoned(tmp_path):
    """Where its lock does not reach us, as on some shared disks, it looks so."""
    theirs = tmp_path / ".b.tif.0123abcd.gigagrad-partial"
    theirs.write_bytes(b"half")
    (tmp_path / f".c.tif.{files.HOST}.gigagrad-partial").write_bytes(b"of a process that is gone")
    write_text(tmp_path / "a.txt", "a")
    assert set(tmp_path.iterdir()) == {theirs, tmp_path / "a.txt"}


def test_files_made_of_records_are_of_all_that_came_while_they_were_written(tmp_path, monkeypatch):
    records, path, other = ["a"], tmp_path / "all.txt", tmp_path / "count.txt"
    written = []

    def write(to, text):
        if len(records) < 3:
            records.append("b")
            raise files._RivalError("cannot write")  # the other writes it too, of what it has seen
        write_text(to, text)
        written.append(to)

    monkeypatch.setattr(files, "write_text", write)
    made = lambda: {path: ",".join(records), other: f"{len(records)}"}  # noqa: E731
    write_agreed(made)
    assert (path.read_text(), other.read_text()) == ("a,b,b", "3")
    other.write_text("2")  # of another, who has not seen the last one
    written.clear()
    write_agreed(made)
    assert written == [other]


def test_a_disk_without_room_for_them_is_no_rival(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError):
        write_agreed(lambda: {tmp_path / "file" / "all.txt": "a"})


def test_an_earlier_writer_that_fails_leaves_the_later_one_alone(tmp_path):
    path = tmp_path / "a.txt"
    first = replacing(path)
    first.__enter__()
    with replacing(path) as second:
        assert not first.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        second.write(b"second")
    assert path.read_bytes() == b"second"


def test_a_full_disk_names_the_bytes_where_they_are_known(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    known = write_error(tmp_path / "a.tif", full, 3 << 30)
    assert "a.tif" in str(known)
    assert "free, about 3 GiB needed; free some space" in str(known)
    assert "No space left on device; free some space" in str(write_error(tmp_path / "a.tif", full))
    file = write_error(tmp_path / "a.tif", OSError(errno.EEXIST, "File exists"))
    assert str(file).endswith("File exists; choose another folder")
    locked = OSError(errno.EROFS, "Read-only file system")
    assert str(write_error(tmp_path / "a.tif", locked)).endswith("Read-only file system; choose another folder")
    assert "Permission denied" in str(write_error(tmp_path / "a.tif", OSError(errno.EACCES, "Permission denied"), 99))


def test_a_folder_in_the_place_of_a_file_is_a_write_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path()):
        with pytest.raises(WriteError, match="it is a folder; name a file in it"), replacing(path) as file:
            file.write(b"text")
    assert not list(tmp_path.iterdir())


def test_a_destination_is_refused_early(tmp_path):
    path = tmp_path / "a.tif"
    check_destination(path, overwrite=False, expected_bytes=1)
    with pytest.raises(WriteError, match="too full"):
        check_destination(path, overwrite=False, expected_bytes=1 << 60)
    with pytest.raises(WriteError, match="no folder"):
        check_destination(path / "b.tif", overwrite=False, expected_bytes=0)
    with pytest.raises(WriteError, match="is a folder"):
        check_destination(tmp_path, overwrite=True, expected_bytes=0)
    path.touch()
    with pytest.raises(WriteError, match="exists already"):
        check_destination(path, overwrite=False, expected_bytes=0)
    check_destination(path, overwrite=True, expected_bytes=0)


def test_json_is_readable_and_holds_numbers_only(tmp_path):
    write_json(tmp_path / "a.json", {"name": "Prag\u00e9", "loss": 0.5})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "name": "Prag\u00e9",\n  "loss": 0.5\n}\n'
    assert json.loads((tmp_path / "a.json").read_bytes())["loss"] == 0.5
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "b.json", {"loss": float("nan")})


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"\xff", b"[" * 100_000], ids=["missing", "empty", "cut", "not text", "deep"]
)
def test_json_that_cannot_be_read_is_one_error(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="Error: "):
        read_json(path)


def test_a_table_quotes_what_needs_it(tmp_path):
    write_csv(tmp_path / "a.csv", [("slide", "split"), ("a, b.tif", "train")])
    assert (tmp_path / "a.csv").read_bytes() == b'slide,split\r\n"a, b.tif",train\r\n'


def test_a_full_disk_while_tensors_are_written_is_a_write_error(tmp_path, monkeypatch):
    def full(payload, stream):
        stream.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(WriteError, match="free some space"):
        write_tensors(tmp_path / "a.pt", {"format": "x"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_a_write_of_tensors_is_told_in_its_own_words(tmp_path, monkeypatch, error):
    """Not as PyTorch's zip writer has it, which finds itself in the wrong place of the file."""

    class Full:
        def __init__(self, file):
            self._file, self.left = file, 300

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise error
            return self._file.write(data)

        def __getattr__(self, name):
            return getattr(self._file, name)

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode, *rest: Full(opened(path, mode, *rest)))
    with pytest.raises(WriteError if isinstance(error, OSError) else KeyboardInterrupt) as told:
        write_tensors(tmp_path / "a.pt", {"format": "x", "y": torch.ones(1000)})
    assert isinstance(error, KeyboardInterrupt) or "a.pt: No space left on device; free some space" in str(told.value)
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_of_a_folder_is_a_write_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot write"):
        write_text(tmp_path / "file" / "a.txt", "text")


def test_the_kind_of_content_is_checked(tmp_path):
    write_tensors(tmp_path / "a.pt", {"format": "apples", "x": torch.ones(2)})
    assert torch.equal(read_tensors(tmp_path / "a.pt", "apples")["x"], torch.ones(2))
    with pytest.raises(ValueError, match="holds no pears"):
        read_tensors(tmp_path / "a.pt", "pears")
