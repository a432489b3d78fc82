"""Settings that make no sense are refused."""

import dataclasses
from pathlib import Path

import pytest

from gigagrad.cohorts.records import FORMATS
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError
from gigagrad.images import InputView
from gigagrad.prediction.outputs import OUTPUTS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0}, "threshold"),
        ({"threshold": 1.0}, "threshold"),
        ({"mpp": -1}, "mpp"),
        ({"memory": "much"}, "much"),
        ({"slides": ()}, "no slides"),
        ({"treshold": 0.4}, "treshold"),
        ({"outputs": ("mask", "probabilites")}, "'probabilites', did you mean 'probabilities'"),
        ({"outputs": ("polygons",)}, "must be one of mask, probabilities, geojson"),
        ({"format": "ome.tif"}, "'ome.tif', did you mean 'ome-tiff'"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        PredictConfig.from_dict({"run": "r", "slides": ("s",), "out": "o", **settings})


def test_settings_from_a_mapping():
    with pytest.raises(ConfigError, match="'out'"):
        PredictConfig.from_dict({"run": "r", "slides": "s"})
    config = PredictConfig.from_dict({"run": "r", "slides": "s.svs", "out": "o"})
    assert config.slides == ("s.svs",)
    assert PredictConfig.from_dict(dataclasses.asdict(config)) == config
    assert config.model_path == Path("r")


def test_level_and_colours_are_those_of_the_run(tmp_path):
    config = PredictConfig(run=tmp_path, slides=("s",), out="o")
    assert config.resolved_level == 0
    (tmp_path / "config.yaml").write_text("level: 2\n")
    assert config.resolved_level == 2
    assert PredictConfig(run=tmp_path, slides=("s",), out="o", level=1).resolved_level == 1
    assert not config.resolved_input_view.grey
    (tmp_path / "config.yaml").write_text("grey: true\n")
    assert config.resolved_input_view.grey
    assert not PredictConfig(run=tmp_path, slides=("s",), out="o", grey=False).resolved_input_view.grey
    (tmp_path / "config.yaml").write_text("bands: [4, 1]\n")
    assert config.resolved_input_view == InputView(False, (4, 1))
    assert PredictConfig(run=tmp_path, slides=("s",), out="o", bands=(2,)).resolved_input_view.bands == (2,)
    (tmp_path / "config.yaml").write_text("bands: [1.5]\n")
    with pytest.raises(ConfigError, match="give them as --bands"):
        _ = config.resolved_input_view
    (tmp_path / "config.yaml").write_text("- no mapping\n")
    with pytest.raises(ConfigError, match="level"):
        _ = config.resolved_level


@pytest.mark.parametrize(
    "text", ["[" * 5000, "level: .inf", "level: [1]", "level: 2001-99-99", "level: !!python/name:os.system"]
)
def test_a_level_that_is_none_is_one_line(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="give it as --level"):
        _ = PredictConfig(run=tmp_path, slides=("a",), out="out").resolved_level


def test_known_outputs_and_formats_are_those_that_are_written():
    assert list(PredictConfig.CHOICES["outputs"]) == list(OUTPUTS)
    assert list(PredictConfig.CHOICES["format"]) == list(FORMATS)
