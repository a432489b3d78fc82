"""Runs that begin with weights of another, and the folder that a run leaves to pass on."""

import json
from dataclasses import replace

import pytest
import tifffile
import torch
import yaml
from safetensors.torch import load_file

import gigagrad as gg
from gigagrad.errors import ConfigError, ModelError
from gigagrad.events import JobAdvanced, Notice
from gigagrad.models import load_model
from gigagrad.prediction import PredictConfig, predict
from gigagrad.training import FitConfig, fit
from gigagrad.training.folder import Checkpoint, RunFolder


@pytest.fixture
def config(cohort_csv, tmp_path):
    return FitConfig(slides=str(cohort_csv), out=str(tmp_path / "run"), epochs=1, checkpoint_seconds=0, memory="16 GiB")


@pytest.fixture
def heads(tmp_path, monkeypatch):
    """Names of one network with one output channel and with three, in a module of the user's own."""
    (tmp_path / "networks_of_test_weights.py").write_text(
        "from torch import nn\n"
        "from gigagrad.models import Preprocess\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, classes=1):\n"
        "        super().__init__(Preprocess(), nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, classes, 1))\n"
    )
    monkeypatch.chdir(tmp_path)
    return ("networks_of_test_weights:Net", "networks_of_test_weights:Net?classes=3")


def state(run):
    return Checkpoint.load(RunFolder(run).checkpoint).model


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def stop_after(steps):
    def listener(event):
        if isinstance(event, JobAdvanced) and event.job == "train" and event.done == steps:
            raise KeyboardInterrupt

    return listener


def stop_at_once(event):
    """End the run before its first step, with the checkpoint that it begins from."""
    if isinstance(event, JobAdvanced) and event.job == "label":
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "named", ["run", "run/best.pt", "run/model", "run/model/model.safetensors", "run/checkpoint.pt"]
)
def test_a_run_begins_with_the_weights_of_another(config, tmp_path, named):
    fit(config)
    second = replace(config, out=str(tmp_path / "second"), seed=7, weights=str(tmp_path / named))
    notices: list[Notice] = []
    with pytest.raises(KeyboardInterrupt):
        fit(second, [lambda event: notices.append(event) if isinstance(event, Notice) else None, stop_at_once])
    assert same(state(tmp_path / "second"), state(tmp_path / "run"))
    assert notices == [Notice(f"14 of 14 tensors begin as in {tmp_path / named}")]


def test_heads_of_another_class_count_are_replaced_and_told(config, heads, tmp_path):
    one, three = heads
    fit(replace(config, model=one))
    notices: list[Notice] = []
    second = replace(config, model=three, loss="ce", out=str(tmp_path / "second"), weights=str(tmp_path / "run"))
    with pytest.raises(KeyboardInterrupt):
        fit(second, [lambda event: notices.append(event) if isinstance(event, Notice) else None, stop_at_once])
    begun, ended = state(tmp_path / "second"), load_model(tmp_path / "run", [one])[1].state_dict()
    assert torch.equal(begun["1.weight"], ended["1.weight"])
    assert begun["2.weight"].shape == (3, 4, 1, 1)
    (told,) = [notice for notice in notices if "tensors begin" in notice.text]
    assert told.warning
    assert "2 of 4 tensors" in told.text
    assert "2.weight (1 x 4 x 1 x 1 there, 3 x 4 x 1 x 1 here)" in told.text


def test_a_run_that_goes_on_needs_them_no_more(config, tmp_path):
    fit(config)
    weights = tmp_path / "weights.pt"
    torch.save(state(tmp_path / "run"), weights)
    whole = replace(config, out=str(tmp_path / "whole"), weights=str(weights))
    fit(whole)
    parts = replace(whole, out=str(tmp_path / "parts"))
    with pytest.raises(KeyboardInterrupt):
        fit(parts, [stop_after(2)])
    weights.unlink()
    fit(parts)
    assert same(state(tmp_path / "parts"), state(tmp_path / "whole"))
    with pytest.raises(ConfigError, match="weights: "):
        fit(replace(parts, weights=None, epochs=2))


def test_published_weights_are_asked_for_once(config, tmp_path, monkeypatch):
    """Not when the run goes on, nor for its test."""
    asked = []

    def resolve(name, *, published=True):
        asked.append(published)
        return gg.models.resolve(name)

    monkeypatch.setattr("gigagrad.training.loop.resolve", resolve)
    with pytest.raises(KeyboardInterrupt):
        fit(config, [stop_after(2)])
    fit(config)
    assert asked == [True, False, False]


def test_weights_that_do_not_fit_stop_it_before_the_folder_is_touched(config, tmp_path):
    torch.save({"x": torch.zeros(3)}, tmp_path / "weights.pt")
    with pytest.raises(ModelError, match="fits the network"):
        fit(replace(config, weights=str(tmp_path / "weights.pt")))
    assert not (tmp_path / "run").exists()


def test_a_settings_file_names_weights_beside_itself_or_published_ones(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("slides: cohort.csv\nout: run\nweights: first.pt\n")
    assert FitConfig.from_yaml(path).weights == str(tmp_path / "first.pt")
    path.write_text("slides: cohort.csv\nout: run\nmodel: timm:resnet18?pretrained=true\n")
    assert FitConfig.from_yaml(path).model == "timm:resnet18?pretrained=true"


def test_a_run_leaves_a_folder_that_loads_back_in_one_line(config, cohort_csv, tmp_path):
    result = fit(replace(config, classes=("tissue",), epochs=2))
    folder = tmp_path / "run" / "model"
    best = load_model(result.best)[1]
    assert same(load_file(folder / "model.safetensors"), best.state_dict())
    pixels = torch.from_numpy(tifffile.imread(cohort_csv.with_name("slide4.tif"))).permute(2, 0, 1).unsqueeze(0)
    with torch.no_grad():
        for path in (folder, tmp_path / "run", result.best):
            loaded = gg.models.load(path)
            assert isinstance(loaded, torch.nn.Module)
            assert not loaded.training
            assert torch.equal(loaded(pixels), best(pixels))
    settings = json.loads((folder / "config.json").read_text())
    assert settings == {
        "format": "gigagrad model", "version": 1, "spec": "paper-unet", "level": 0, "grey": False, "mpp": None,
        "bands": [], "classes": ["tissue=1", "unlabelled=0"], "loss": "bce",
    }  # fmt: skip


def test_the_card_says_how_it_was_made_and_nothing_of_whose_slides(config, tmp_path):
    result = fit(replace(config, grey=True))
    text = (tmp_path / "run" / "model" / "README.md").read_text()
    _, front, page = text.split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["library_name"] == "gigagrad"
    assert "image-segmentation" in front["tags"]
    assert "license" not in front
    for said in (
        "3 train, 1 val, 2 test", "`paper-unet`, 4,492 parameters", "`bce`", "16 GiB", "3 in 1 epochs", "grey",
        f"dice {result.mean:.4f}", f"{result.best_loss:.6g}", "no patches", f"torch {torch.__version__}", "level 0",
    ):  # fmt: skip
        assert said in page
    assert str(tmp_path) not in text
    assert "slide4" not in text


def test_the_folder_predicts_as_the_run_does(config, cohort_csv, tmp_path):
    fit(replace(config, grey=True, classes=("tissue",)))
    for run in ("run", "run/model"):
        settings = PredictConfig(
            run=tmp_path / run, slides=(cohort_csv,), out=tmp_path / "out" / run, split="test", memory="16 GiB"
        )
        assert settings.resolved_input_view.grey
        assert settings.resolved_table is not None
        predict(settings)
    one, other = (tifffile.imread(tmp_path / "out" / run / "masks" / "slide4.tif") for run in ("run", "run/model"))
    assert (one == other).all()


def test_a_network_that_safetensors_cannot_hold_still_ends_its_run(config, tmp_path, monkeypatch):
    def refuse(*args, **settings):
        raise ModelError("safetensors cannot hold it")

    monkeypatch.setattr("gigagrad.training.evaluation.save_folder", refuse)
    notices: list[Notice] = []
    fit(config, [lambda event: notices.append(event) if isinstance(event, Notice) else None])
    assert notices[-1] == Notice(f"there is no {tmp_path / 'run' / 'model'}: safetensors cannot hold it", warning=True)
    assert (tmp_path / "run" / "summary.json").exists()
