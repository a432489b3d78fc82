"""MONAI's evaluators and trainers with whole images give what they give without, and a bundle can name the inferer."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from ignite.engine import Events
from monai.bundle import ConfigParser
from monai.data import DataLoader as MonaiLoader
from monai.data import MetaTensor
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.engines.utils import IterationEvents
from torch.utils.data import DataLoader

from gigagrad.errors import ConfigError
from gigagrad.integrations.monai import EngineHandler, WholeImageInferer, WholeImageStep

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
CPU = torch.device("cpu")


@pytest.fixture
def batches(pairs):
    """Batches of two and of one, as dictionaries."""
    rows: Any = [{"image": image, "label": mask} for image, mask in pairs]
    return DataLoader(rows, batch_size=2)


def test_an_evaluator_predicts_whole_images(model, pairs, batches):
    inferer = ConfigParser(
        {"inferer": {"_target_": "gigagrad.integrations.monai.WholeImageInferer", "tile": (16, 16)}}
    ).get_parsed_content("inferer")
    assert isinstance(inferer, WholeImageInferer)
    evaluator = SupervisedEvaluator(CPU, batches, model, inferer=inferer, decollate=False)
    found = []
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: found.append(engine.state.output["pred"]))
    EngineHandler(inferer).attach(evaluator)
    evaluator.run()
    expected = model.eval()(torch.stack([image for image, _ in pairs]))
    torch.testing.assert_close(torch.cat(found), expected.detach(), rtol=1e-4, atol=1e-5)
    assert evaluator.state.metrics["predicted_peak_bytes"] > 2**20
    assert evaluator.state.metrics["peak_bytes"] == inferer.engine.last_run.peak_bytes


def test_predictions_keep_the_metadata_of_images(model, pairs):
    """Without them files had other names and places, and nothing was turned back."""
    affine = torch.diag(torch.tensor([0.5, 2.0, 1.0, 1.0], dtype=torch.float64))
    rows: Any = [
        {"image": MetaTensor(image, affine=affine, meta={"filename_or_obj": f"{number}.nii"}), "label": mask}
        for number, (image, mask) in enumerate(pairs)
    ]

    def predicted(**settings):
        found: list[Any] = []
        evaluator = SupervisedEvaluator(CPU, MonaiLoader(rows, batch_size=2), model.eval(), **settings)
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: found.extend(engine.state.output))
        evaluator.run()
        return [one["pred"] for one in found]

    ours, expected = predicted(inferer=WholeImageInferer(tile=(16, 16))), predicted()
    assert len(ours) == 3
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.as_tensor(), other.as_tensor().detach(), rtol=1e-4, atol=1e-5)
        assert (one.meta["filename_or_obj"], one.affine.tolist()) == (
            other.meta["filename_or_obj"],
            other.affine.tolist(),
        )


def test_an_image_by_path(model, pairs, paths):
    inferer = WholeImageInferer(tile=(16, 16))
    found = inferer(paths[0][0], model.eval())
    engine = inferer.engine
    assert torch.equal(inferer(paths[0][0], model), found)
    assert inferer.engine is engine, "captured and planned once for a network"
    torch.testing.assert_close(found, model(pairs[0][0][None]).detach(), rtol=1e-4, atol=1e-5)


def test_a_trainer_takes_the_steps_of_a_plain_loop(model, pairs, batches, bce, trained, assert_same):
    expected = trained(model, [pairs[:2], pairs[2:]] * 2)
    step = WholeImageStep(bce, tile=(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = SupervisedTrainer(CPU, 2, batches, model, optimizer, bce, iteration_update=step, decollate=False)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output["loss"]))
    EngineHandler(step).attach(trainer)
    trainer.run()
    assert_same(model, expected)
    assert len(losses) == 4
    assert trainer.state.metrics["seconds"] > 0


@pytest.mark.parametrize("accumulated", [2, 3])
def test_a_trainer_accumulates_as_monai_does_and_steps_at_the_end_of_an_epoch(
    model, pairs, bce, accumulated, assert_same
):
    def train(network, **settings):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        rows: Any = [{"image": image, "label": mask} for image, mask in (*pairs, *pairs[:1])]
        batches = DataLoader(rows, batch_size=1)
        SupervisedTrainer(
            CPU, 2, batches, network, optimizer, bce, decollate=False, accumulation_steps=accumulated, **settings
        ).run()
        return network

    expected = train(deepcopy(model))
    assert_same(train(model, iteration_update=WholeImageStep(bce, tile=(16, 16))), expected)


def test_events_of_an_iteration_are_those_of_monai(model, pairs, bce):
    def heard(network, **settings):
        optimizer, found = torch.optim.SGD(network.parameters(), lr=0.5), []
        rows: Any = [{"image": image, "label": mask} for image, mask in pairs]
        settings |= {"accumulation_steps": 2, "postprocessing": lambda one: {**one, "image": one["image"][:1]}}
        batches = DataLoader(rows, batch_size=1)
        trainer = SupervisedTrainer(CPU, 1, batches, network, optimizer, bce, **settings)

        def note(name):
            output, weight = trainer.state.output, next(network.parameters())
            output = output[0] if isinstance(output, list) else output
            loss = None if "loss" not in output else pytest.approx(float(output["loss"]), rel=1e-4)
            gradient = None if weight.grad is None else pytest.approx(float(weight.grad.sum()), rel=1e-3, abs=1e-6)
            found.append((name, output["image"].shape, loss, gradient, float(weight.detach().sum())))

        for event in (
            IterationEvents.FORWARD_COMPLETED,
            IterationEvents.LOSS_COMPLETED,
            IterationEvents.BACKWARD_COMPLETED,
            IterationEvents.MODEL_COMPLETED,
        ):
            trainer.add_event_handler(event, note, event.value)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, note, "iteration")
        trainer.run()
        return [(*one[:-1], pytest.approx(one[-1], rel=1e-4)) for one in found]

    expected = heard(deepcopy(model))
    ours = heard(model, iteration_update=WholeImageStep(bce, tile=(16, 16)))
    assert len(ours) == 15
    for one, other in zip(ours, expected, strict=True):
        assert [getattr(value, "expected", value) for value in one] == list(other)


def test_a_handler_that_changes_the_loss_is_refused(model, batches, bce):
    """What it changed counted for nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = SupervisedTrainer(
        CPU, 1, batches, model, optimizer, bce, iteration_update=WholeImageStep(bce), decollate=False
    )
    trainer.add_event_handler(
        IterationEvents.LOSS_COMPLETED, lambda engine: engine.state.output.update(loss=engine.state.output["loss"] * 2)
    )
    with pytest.raises(ConfigError, match="part of WholeImageStep"):
        trainer.run()


def test_one_step_trains_the_network_of_each_trainer(model, pairs, batches, bce, trained, assert_same):
    step = WholeImageStep(bce, tile=(16, 16))
    expected = trained(model, [pairs[:2], pairs[2:]])
    for network in (deepcopy(model), model):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        SupervisedTrainer(CPU, 1, batches, network, optimizer, bce, iteration_update=step, decollate=False).run()
        assert_same(network, expected)


def test_a_trainer_that_scales_losses_is_refused(model, batches, bce):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = SupervisedTrainer(
        CPU, 1, batches, model, optimizer, bce, iteration_update=WholeImageStep(bce), decollate=False, amp=True
    )
    with pytest.raises(ConfigError, match="precision='float16'"):
        trainer.run()


def test_a_network_that_is_no_module_is_refused(model, pairs):
    with pytest.raises(ConfigError, match="make a module of what calls it"):
        WholeImageInferer()(pairs[0][0][None], lambda x: model(x))
