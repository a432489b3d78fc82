"""Models and tensors on disk: whole or not there, and nothing in them is executed."""

import pickle

import pytest
import torch

from gigagrad.errors import ModelError, WriteError
from gigagrad.models import load_model, resolve, save_model
from gigagrad.models.files import read_tensors, replacing, write_tensors, write_text


def test_round_trip_gives_the_same_weights_in_eval_mode(tmp_path):
    model = resolve("paper-unet")
    save_model(tmp_path / "best.pt", "paper-unet", model)
    spec, loaded = load_model(tmp_path / "best.pt")
    assert spec == "paper-unet"
    assert not loaded.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key])
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_a_missing_or_damaged_or_foreign_file_is_one_clear_line(tmp_path):
    save_model(tmp_path / "best.pt", "paper-unet", resolve("paper-unet"))
    whole = (tmp_path / "best.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    for name in ("missing.pt", "cut.pt", "empty.pt", "foreign.pt"):
        with pytest.raises(ModelError, match=name) as caught:
            load_model(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_code_in_a_file_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    torch.save({"format": "gigagrad model", "spec": Trap()}, tmp_path / "trap.pt", pickle_module=pickle)
    with pytest.raises(ModelError, match="damaged"):
        load_model(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


def test_weights_of_another_network_are_refused(tmp_path):
    save_model(tmp_path / "best.pt", "paper-unet", torch.nn.Conv2d(1, 1, 1))
    with pytest.raises(ModelError, match="do not fit what 'paper-unet' builds"):
        load_model(tmp_path / "best.pt")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail_with(error):
        with replacing(path) as partial:
            partial.write_text("ne")
            raise error

    with pytest.raises(WriteError, match="No space left"):
        fail_with(OSError(28, "No space left on device"))
    with pytest.raises(KeyboardInterrupt):
        fail_with(KeyboardInterrupt())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_while_tensors_are_written_is_a_write_error(tmp_path, monkeypatch):
    def full(payload, stream):
        stream.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(WriteError, match="free some space"):
        write_tensors(tmp_path / "a.pt", {"format": "x"})
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
