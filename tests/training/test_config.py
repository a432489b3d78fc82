"""Settings: strict about names and types, forgiving about what YAML makes of numbers."""

import dataclasses
from pathlib import Path

import pytest

from gigagrad.errors import ConfigError, ModelError
from gigagrad.ranks import TIMEOUT_SECONDS
from gigagrad.training import FitConfig, fit
from gigagrad.training.trackers import TRACKERS


def test_yaml_round_trip_resolves_paths_against_the_file_and_keeps_every_setting(tmp_path):
    (tmp_path / "run.yaml").write_text("slides: data/cohort.csv\nout: runs/a\nlearning_rate: 1e-3\nmemory: 2 GiB\n")
    config = FitConfig.from_yaml(tmp_path / "run.yaml")
    assert config.slides == str(tmp_path / "data/cohort.csv")
    assert config.out == str(tmp_path / "runs/a")
    assert config.learning_rate == 1e-3  # YAML 1.1 reads 1e-3 as text
    config.save(tmp_path / "elsewhere" / "config.yaml")
    again = FitConfig.from_yaml(tmp_path / "elsewhere" / "config.yaml")
    assert again == config
    text = (tmp_path / "elsewhere" / "config.yaml").read_text()
    assert all(f"{field.name}:" in text for field in dataclasses.fields(FitConfig))


def test_relative_paths_are_taken_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = FitConfig.from_dict({"slides": "c.csv", "out": Path("run")}).relative_to(Path.cwd())
    assert config.slides == str(tmp_path / "c.csv")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lerning_rate": 1e-3}, "unknown setting 'lerning_rate', did you mean 'learning_rate'"),
        ({"zzz": 1}, "known settings are slides"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"clip": 0}, "clip must be above 0, got 0"),
        ({"ema": 1}, "ema must be below 1, got 1"),
        ({"epochs": 1.5}, "epochs must be int, got 1.5"),
        ({"epochs": True}, "epochs must be int, got True"),
        ({"augment": 1}, "augment must be bool, got 1"),
        ({"learning_rate": "fast"}, "learning_rate must be float, got 'fast'"),
        ({"learning_rate": 0}, "above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be"),
        ({"seed": -1}, "seed must be from 0"),
        ({"level": -1}, "level must be at least 0"),
        ({"memory": "2 GoB"}, "cannot read '2 GoB'"),
        ({"memory": 2}, "memory must be str or nothing, got 2"),
        ({"model": None}, "model must be str, got None"),
    ],
)
def test_an_unusable_setting_gets_one_clear_line(changes, words):
    with pytest.raises(ConfigError) as caught:
        FitConfig.from_dict({"slides": "c.csv", "out": "run"} | changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n", "", "slides: [\n", "out: run\n"])
def test_a_file_that_is_no_config_names_itself(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        FitConfig.from_yaml(tmp_path / "run.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_itself(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        FitConfig.from_yaml(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("line", ["model: subprocess:getoutput?cmd=touch+ran", "loss: mine:bad", "loss: os:system"])
def test_a_file_imports_nothing_that_the_user_has_not_named(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import pathlib; pathlib.Path('ran').touch()\n")
    path = tmp_path / "run.yaml"
    path.write_text(f"slides: c.csv\nout: run\n{line}\n")
    asked = line.partition(" ")[2].partition("?")[0]
    for attempt in (FitConfig.from_yaml, fit):
        with pytest.raises(ModelError, match=rf"run\.yaml asks to import '{asked}'.* --trust {asked} "):
            attempt(path)
    assert not (tmp_path / "ran").exists()
    overrides = {line.partition(":")[0]: asked}
    assert FitConfig.from_yaml(path, overrides).to_dict().items() >= overrides.items(), "typed, so allowed"


def test_a_file_s_network_is_a_class_and_its_loss_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("slides: c.csv\nout: run\nmodel: torch.nn:Conv2d\nloss: torch.nn:functional.mse_loss\n")
    config = FitConfig.from_yaml(path, trust=("torch.nn:Conv2d", "torch.nn:functional.mse_loss"))
    assert config.model == "torch.nn:Conv2d"
    path.write_text("slides: c.csv\nout: run\nmodel: subprocess:getoutput\n")
    with pytest.raises(ModelError, match="was not called"):
        FitConfig.from_yaml(path, trust=("subprocess:getoutput",))
    path.write_text("slides: c.csv\nout: run\ntrust: [subprocess:getoutput]\n")
    with pytest.raises(ConfigError, match="unknown setting 'trust'"):
        FitConfig.from_yaml(path)


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch ran']\n",
        "".join(f"x{n}: &x{n} [{f'*x{n - 1},' * 9 if n else 0}]\n" for n in range(30)),
        "slides: &a [0]\nout: [*a]\n",
        "model: &a " + "[" * 40 + "]" * 40,
        "[" * 3000,
        "epochs: 2001-99-99\n",
        "epochs: " + "9" * 5000,
        "a: 1\n".encode("utf-16").decode("latin-1"),
    ],
)
def test_a_hostile_file_is_one_short_line(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        FitConfig.from_yaml(tmp_path / "run.yaml")
    assert len(str(caught.value)) < 1000
    assert not (tmp_path / "ran").exists()


def test_a_short_file_cannot_make_a_message_without_end(tmp_path):
    bomb = "".join(f"- &x{n} [{f'*x{n - 1},' * 9 if n else 0}]\n  " for n in range(30))
    (tmp_path / "run.yaml").write_text(f"slides: a\nout: b\nmodel:\n  {bomb}\n")
    with pytest.raises(ConfigError, match="model must be str") as caught:
        FitConfig.from_yaml(tmp_path / "run.yaml")
    assert len(str(caught.value)) < 1000


def test_known_trackers_and_the_timeout_are_those_that_there_are():
    assert list(FitConfig.CHOICES["trackers"]) == list(TRACKERS)
    assert FitConfig.rank_timeout == TIMEOUT_SECONDS
