"""What each setting of training does to a run: against a loop of plain PyTorch, and across interruptions."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F

from gigagrad.errors import ConfigError
from gigagrad.events import JobAdvanced, Notice
from gigagrad.losses import named_loss
from gigagrad.models import load_model, resolve
from gigagrad.training import FitConfig, fit
from gigagrad.training.dataset import order_of
from gigagrad.training.folder import Checkpoint, RunFolder
from gigagrad.training.learner import rate_share


@pytest.fixture
def config(cohort_csv, tmp_path):
    return FitConfig(
        slides=str(cohort_csv), out=str(tmp_path / "run"), epochs=2, checkpoint_seconds=0, augment=False, seed=3
    )


def trained(config: FitConfig) -> dict[str, torch.Tensor]:
    return Checkpoint.load(RunFolder(Path(config.out)).checkpoint).model


def slides_of(cohort_csv: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for index in range(3):
        slide = tifffile.imread(cohort_csv.parent / f"slide{index}.tif").transpose(2, 0, 1)
        mask = tifffile.imread(cohort_csv.parent / f"slide{index}.mask.tif")
        found.append((torch.from_numpy(slide.copy())[None], torch.from_numpy(mask)[None, None]))
    return found


@pytest.mark.parametrize("clip", [0.05, None])
def test_accumulated_clipped_and_scheduled_steps_are_those_of_a_plain_loop(config, cohort_csv, clip):
    settings = replace(
        config,
        optimizer="sgd?momentum=0.9",
        learning_rate=0.05,
        weight_decay=0.01,
        schedule="cosine",
        warmup=1,
        accumulate=2,
        clip=clip,
        ema=0.9,
    )
    assert fit(settings).steps == 4  # of two slides and of one, in both epochs
    torch.manual_seed(3)
    model = resolve("paper-unet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    slides, step = slides_of(cohort_csv), 0
    for epoch in range(2):
        order = order_of(3, epoch, 3)
        for group in (order[:2], order[2:]):
            optimizer.zero_grad()
            for index in group:
                slide, mask = slides[index]
                (F.binary_cross_entropy_with_logits(model(slide), mask.float()) / len(group)).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for parameters in optimizer.param_groups:
                parameters["lr"] = 0.05 * rate_share("cosine", 1, step, 4)
            optimizer.step()
            step += 1
            decay = min(0.9, (1 + step) / (10 + step))
            for name, parameter in model.named_parameters():
                average[name] = decay * average[name] + (1 - decay) * parameter.detach()
    for name, tensor in trained(settings).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)
    checkpoint = Checkpoint.load(RunFolder(Path(settings.out)).checkpoint)
    for name, tensor in checkpoint.average.items():
        torch.testing.assert_close(tensor, average[name], rtol=1e-4, atol=1e-6)
    assert checkpoint.progress.best_epoch == 2
    _, kept = load_model(RunFolder(Path(settings.out)).best)
    for name, parameter in kept.named_parameters():
        torch.testing.assert_close(parameter.detach(), checkpoint.average[name], rtol=0, atol=0)


@pytest.mark.parametrize("stop", [1, 3])
def test_an_interrupted_run_of_all_settings_ends_with_the_same_bits(config, tmp_path, stop):
    settings = replace(
        config,
        augment=True,
        optimizer="adamw",
        schedule="linear",
        accumulate=2,
        ema=0.9,
        clip=1.0,
        stain_jitter=0.1,
        colour_jitter=0.1,
        checkpoint_seconds=1000,
    )
    whole = replace(settings, out=str(tmp_path / "whole"))
    fit(whole)

    def stopping(event: Any) -> None:
        if isinstance(event, JobAdvanced) and event.job == "train" and event.done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(settings, [stopping])
    saved = Checkpoint.load(RunFolder(Path(settings.out)).checkpoint).progress
    # Whole steps of two slides, the third of an epoch by itself.
    assert (saved.epoch, saved.index) == {1: (0, 0), 3: (0, 3)}[stop]
    fit(settings)
    one, other = trained(whole), trained(settings)
    assert all(torch.equal(one[key], other[key]) for key in one)
    averages = [Checkpoint.load(RunFolder(Path(run.out)).checkpoint).average for run in (whole, settings)]
    assert all(torch.equal(averages[0][key], averages[1][key]) for key in averages[0])


class Slowing(torch.optim.SGD):
    """Keeps the number of its steps by group, and steps less and less."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= group["steps"]
        return super().step(closure)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_what_an_optimizer_keeps_by_group_is_continued_where_ranks_share_it(config, tmp_path, before, after):
    settings = replace(config, optimizer=f"{__name__}:Slowing?momentum=0.9", learning_rate=0.05)
    whole = replace(settings, out=str(tmp_path / "whole"))
    fit(whole)

    def stopping(event: Any) -> None:
        if isinstance(event, JobAdvanced) and event.job == "train" and event.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(replace(settings, shard_optimizer=before), [stopping])
    fit(replace(settings, shard_optimizer=after))
    one, other = trained(whole), trained(settings)
    assert all(torch.equal(one[key], other[key]) for key in one)


class Doubling(torch.optim.SGD):
    """Has other weights in eval mode, as schedule-free optimizers have."""

    def eval(self) -> None:
        self._scale(2)

    def train(self) -> None:
        self._scale(0.4)

    def _scale(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter *= factor


@pytest.mark.parametrize("shard", [False, True])
def test_weights_that_an_optimizer_has_in_eval_mode_are_validated_and_kept(config, tmp_path, shard):
    plain = replace(config, optimizer="sgd", learning_rate=0.05, epochs=1, out=str(tmp_path / "plain"))
    settings = replace(plain, optimizer=f"{__name__}:Doubling", out=config.out, shard_optimizer=shard)
    others = fit(plain).best_loss, fit(settings).best_loss
    assert others[0] != pytest.approx(others[1], rel=1e-3)
    one, other = trained(plain), trained(settings)
    assert all(torch.equal(one[key], other[key]) for key in one), "training goes on with its own"
    _, kept = load_model(RunFolder(Path(settings.out)).best)
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter.detach(), 2 * one[name])


def test_an_interrupt_within_a_step_leaves_the_step_before(config, tmp_path, monkeypatch):
    """Half a step has been written to the weights by then, which no checkpoint may hold."""
    whole = replace(config, out=str(tmp_path / "whole"))
    fit(whole)
    settings = replace(config, checkpoint_seconds=1000)
    original, steps = torch.optim.Adam.step, []

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        done = original(self, *args, **options)
        steps.append(done)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(torch.optim.Adam, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(settings)
    monkeypatch.setattr(torch.optim.Adam, "step", original)
    # The weights of the second step are gone; what there is to go on from is the beginning.
    assert Checkpoint.load(RunFolder(Path(settings.out)).checkpoint).progress.step == 0
    fit(settings)
    one, other = trained(whole), trained(settings)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_frozen_network_stays_as_it_was(config):
    fit(replace(config, frozen=("network.down8", "network.down40"), rates=("network.down160=0",)))
    torch.manual_seed(3)
    before = resolve("paper-unet").state_dict()
    after = trained(config)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith(("network.down8", "network.down40", "network.down160")) for name in moved)


def test_a_run_that_no_longer_improves_ends(config):
    said = []
    settings = replace(config, epochs=50, patience=2, learning_rate=1e-12)
    result = fit(settings)
    checkpoint = Checkpoint.load(RunFolder(Path(settings.out)).checkpoint)
    assert checkpoint.progress.epoch < 50
    assert checkpoint.progress.epoch == checkpoint.progress.best_epoch + 2
    again = fit(settings, [lambda event: said.append(event.text) if isinstance(event, Notice) else None])
    assert any("finished" in text for text in said)
    assert again.scores == result.scores


def test_a_warm_up_that_outlasts_the_run_is_told(config):
    """The rate that was asked for was never reached, silently."""
    said = []
    settings = replace(config, epochs=1, warmup=4)
    fit(settings, [lambda event: said.append(event.text) if isinstance(event, Notice) else None])
    assert any("rises over 4 steps, and the run has" in text for text in said)


def test_balanced_weights_are_the_inverse_of_the_shares(config, cohort_csv):
    said = []
    fit(
        replace(config, class_weights=("balanced",), epochs=1),
        [lambda event: said.append(event.text) if isinstance(event, Notice) else None],
    )
    share = np.mean([mask.float().mean().item() for _, mask in slides_of(cohort_csv)])
    expected = np.array([1 / (1 - share), 1 / share])
    expected /= expected.mean()
    (text,) = [text for text in said if text.startswith("class weights")]
    assert [float(word) for word in text.partition(": ")[2].split(", ")] == pytest.approx(expected, rel=1e-3)
    torch.manual_seed(3)
    model = resolve("paper-unet")
    weights = torch.tensor(expected, dtype=torch.float32)
    first = order_of(3, 0, 3)[0]
    slide, mask = slides_of(cohort_csv)[first]
    value = named_loss("bce").weighted(weights.tolist()).function(model(slide), mask)
    entropy = F.binary_cross_entropy_with_logits(model(slide), mask.float(), reduction="none")
    torch.testing.assert_close(value, (entropy * weights[mask.long()]).mean())
    logged = [json.loads(line) for line in RunFolder(Path(config.out)).metrics.read_text().splitlines()]
    loss = next(line["values"]["loss"] for line in logged if line.get("split") == "train")
    assert loss == pytest.approx(float(value.detach()), rel=1e-5)


def test_balanced_weights_are_those_of_every_term(config):
    """Only the first term had them."""
    found = []
    for loss in ("bce", "0.5*bce + 0.5*bce"):
        fit(replace(config, class_weights=("balanced",), epochs=1, loss=loss, out=f"{config.out} {loss}"))
        lines = RunFolder(Path(f"{config.out} {loss}")).metrics.read_text().splitlines()
        found.append(next(one["values"]["loss"] for one in map(json.loads, lines) if one.get("split") == "train"))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_weights_of_class_ids_are_pytorchs():
    output, ids = torch.randn(1, 3, 8, 8), torch.randint(0, 3, (1, 1, 8, 8), dtype=torch.uint8)
    ids[0, 0, 0] = 255
    weights = [0.2, 1.0, 3.0]
    value = named_loss("ce?label_smoothing=0.1").weighted(weights).function(output, ids)
    expected = F.cross_entropy(output, ids[:, 0].long(), torch.tensor(weights), ignore_index=255, label_smoothing=0.1)
    torch.testing.assert_close(value, expected)


def test_losses_add_up():
    output, mask = torch.randn(1, 1, 8, 8), torch.randint(0, 2, (1, 1, 8, 8), dtype=torch.uint8)
    loss = named_loss("bce + 0.5*tversky?false_negatives=0.8")
    own = [named_loss("bce").function, named_loss("tversky?false_negatives=0.8").function]
    torch.testing.assert_close(loss.function(output, mask), own[0](output, mask) + 0.5 * own[1](output, mask))
    assert loss.binary
    assert copy.deepcopy(loss.ignoring().function)(output, mask) == loss.function(output, mask)
    module = named_loss("torch.nn:HuberLoss?delta=2").function
    torch.testing.assert_close(module(output, mask.float()), F.huber_loss(output, mask.float(), delta=2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "cross_entropy"}, "unknown loss 'cross_entropy', did you mean 'ce'"),
        ({"loss": "ce + dice"}, "a target is one or the other"),
        ({"loss": "bce +"}, "cannot read the loss"),
        ({"loss": "focal?gamma=1&beta=2"}, "has no setting 'beta'; it has gamma"),
        ({"class_weights": ("1", "2", "3")}, "class_weights must be 'balanced' or 2 numbers"),
        ({"class_weights": ("1", "2"), "loss": "dice"}, "weights of classes are for ce"),
        ({"schedule": "cosin"}, "schedule must be one of constant, cosine, linear, got 'cosin'"),
        ({"precision": "half"}, "precision must be one of bfloat16, float16, got 'half'"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(config, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        fit(replace(config, **changes))
    assert not (tmp_path / "run").exists()
