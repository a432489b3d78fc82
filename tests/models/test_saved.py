"""Saved models: what comes back, what is refused, and that nothing in them is executed."""

import pickle

import pytest
import torch

from gigagrad.errors import ModelError
from gigagrad.models import load_model, resolve, save_model


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


def test_a_folder_of_runs_or_a_file_beside_the_weights_is_told_which_run_to_name(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("epochs: 1")
    save_model(tmp_path / "runs" / "first" / "best.pt", "paper-unet", resolve("paper-unet"))
    with pytest.raises(ModelError, match=r"runs holds runs and is none itself; name one of them, such as .*first$"):
        load_model(tmp_path / "runs")
    with pytest.raises(ModelError, match=r"config\.yaml is no model; name the run's folder, .*first$"):
        load_model(tmp_path / "runs" / "first" / "config.yaml")


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
