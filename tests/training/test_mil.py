"""Networks of bags in runs: trained with their own losses, frozen in part, loaded again and scored."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from gigagrad.errors import GigagradError, ModelError
from gigagrad.models import load_model
from gigagrad.prediction.cohort_scores import evaluate_model
from gigagrad.training import FitConfig, fit

ENCODER = "encoders_of_test_mil:Encoder"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Slides of one patch: every second one is dark."""
    random, lines = np.random.default_rng(0), ["slide,label,split"]
    for index, split in enumerate(["train", "train", "val", "test", "test"]):
        pixels = random.integers(0, 60, (32, 32, 3)) + (60 if index % 2 else 180)
        path = tmp_path / f"s{index}.tif"
        tifffile.imwrite(path, pixels.astype(np.uint8), tile=(32, 32), photometric="rgb")
        lines.append(f"{path},{index % 2},{split}")
    (tmp_path / "cohort.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "encoders_of_test_mil.py").write_text(
        "from torch import nn\n"
        "class Encoder(nn.Sequential):\n"
        "    def __init__(self, norm=False):\n"
        "        norm = nn.BatchNorm2d(8) if norm else nn.Identity()\n"
        "        super().__init__(nn.Conv2d(3, 8, 1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    monkeypatch.chdir(tmp_path)
    name = f"mil:encoder={ENCODER}&mean=0.5,0.5,0.5&std=0.5,0.5,0.5&classes=2"
    patches: dict[str, Any] = {"patch_size": 32, "patch_mpp": None, "tissue": "all"}
    return FitConfig(slides="cohort.csv", out="run", model=name, loss="ce", epochs=20, learning_rate=0.02, **patches)


@pytest.mark.parametrize(("head", "loss"), [("abmil", "ce"), ("clam", "clam?subtyping=true")])
def test_heads_learn_and_are_loaded_again(config, head, loss):
    small = "&head.width=16&head.dropout=0&head.hidden=8"
    changed = replace(config, model=f"{config.model}&head={head}{small}", loss=loss, class_weights=("1", "2"))
    result = fit(changed)
    assert result.accuracy == 1
    with pytest.raises(ModelError, match=f"--trust {ENCODER} "):
        evaluate_model("run", "cohort.csv", split="test")
    found: Any = evaluate_model("run", "cohort.csv", split="test", trust=[ENCODER])
    assert found.confusion == ((1, 0), (0, 1))


def test_a_frozen_encoder_is_left_as_it_was_and_others_are_slow(config):
    config = replace(config, model=f"{config.model}&encoder.norm=true&head=mean", epochs=2)
    fit(replace(config, epochs=1, learning_rate=1e-12))
    fit(replace(config, out="frozen", frozen=("network.encoder",)))
    fit(replace(config, out="slow", rates=("network.encoder=0",)))
    begun, frozen, slow = (load_model(run, [ENCODER])[1].state_dict() for run in ("run", "frozen", "slow"))
    weights = [name for name in begun if "encoder" in name and "running" not in name and "batches" not in name]
    for name in weights:
        torch.testing.assert_close(frozen[name], begun[name], rtol=0, atol=1e-9)
        assert torch.equal(slow[name], frozen[name])
    assert torch.equal(frozen["network.encoder.1.running_mean"], torch.zeros(8))
    assert not torch.equal(slow["network.encoder.1.running_mean"], torch.zeros(8))
    assert not torch.equal(frozen["network.head.classifier.weight"], begun["network.head.classifier.weight"])


def test_clam_by_another_loss_is_told(config):
    with pytest.raises(GigagradError, match="the head clam trains with the loss clam"):
        fit(replace(config, model=f"{config.model}&head=clam&head.width=8"))
