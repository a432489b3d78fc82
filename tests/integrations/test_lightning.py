"""Lightning's Trainer trains as a plain loop does, whatever it is asked for, and refuses what would be wrong."""

from copy import deepcopy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from gigagrad.errors import ConfigError
from gigagrad.integrations.lightning import EngineMonitor, GigagradModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
SGD = partial(torch.optim.SGD, lr=0.5)


def trainer(folder, **settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(default_root_dir=folder, **{"max_epochs": 1, "logger": False, **quiet, **settings})


def batches(pairs):
    return DataLoader(pairs, batch_size=None)


def test_fit_takes_the_steps_of_a_plain_loop(model, pairs, paths, bce, trained, assert_same, tmp_path):
    expected = trained(model, [[pair] for pair in pairs * 2], lambda step: 0.5 if step < 3 else 0.05)
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)
    module = GigagradModule(model, bce, optimizer=SGD, scheduler=halved, tile=(16, 16))
    logger = CSVLogger(tmp_path / "logs")
    saved = ModelCheckpoint(tmp_path / "kept", monitor="val/loss")
    fitted = trainer(tmp_path, max_epochs=2, logger=logger, callbacks=[saved, EngineMonitor()], log_every_n_steps=1)
    # By path, as PyTorch's own collation has them.
    fitted.fit(module, DataLoader(paths), DataLoader(paths[:1]))
    assert_same(model, expected)
    assert fitted.global_step == 6
    logged = (tmp_path / "logs/lightning_logs/version_0/metrics.csv").read_text()
    assert all(
        name in logged for name in ("train/loss", "val/loss", "engine/peak_bytes", "engine/predicted_peak_bytes")
    )
    expected.eval()
    image, mask = pairs[0]
    assert float(fitted.callback_metrics["val/loss"]) == pytest.approx(float(bce(expected(image[None]), mask[None])))

    # A checkpoint is a Lightning one: weights load without a trainer, and fitting goes on from it.
    again = GigagradModule.load_from_checkpoint(saved.last_model_path or saved.best_model_path, model=model, loss=bce)
    assert again.model is model
    more = GigagradModule(model, bce, optimizer=SGD, scheduler=halved, tile=(16, 16))
    trainer(tmp_path, max_epochs=2).fit(more, batches(pairs), ckpt_path=saved.best_model_path)
    assert more.engine.state_dict().keys() == module.engine.state_dict().keys()


def test_predictions_are_those_of_the_whole_image(model, pairs, bce, tmp_path):
    module = GigagradModule(model.eval(), tile=(16, 16))
    found = trainer(tmp_path).predict(module, batches(pairs))
    for output, (image, _) in zip(found, pairs, strict=True):
        torch.testing.assert_close(output, model(image[None]).detach(), rtol=1e-4, atol=1e-5)


def test_mixed_precision_is_autocast(model, pairs, tmp_path):
    def of_one_pixel(output, target):
        return output[0, 0, 5, 7].float()

    image = pairs[0][0][None]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = float(of_one_pixel(model(image), None))
    assert mixed != pytest.approx(float(of_one_pixel(model(image), None)), rel=1e-4)
    fitted = trainer(tmp_path, precision="bf16-mixed", max_steps=1)
    fitted.fit(GigagradModule(model, of_one_pixel, optimizer=SGD, tile=(16, 16)), batches(pairs))
    assert float(fitted.callback_metrics["train/loss"]) == pytest.approx(mixed, rel=1e-6)


def test_scaled_gradients_are_refused(model, pairs, bce, tmp_path):
    scaling = trainer(tmp_path, plugins=[MixedPrecision("16-mixed", "cpu")])
    with pytest.raises(ConfigError, match="precision='float16'"):
        scaling.fit(GigagradModule(model, bce), batches(pairs))


def test_several_devices_are_refused(model, pairs, bce, tmp_path, monkeypatch):
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    with pytest.raises(ConfigError, match="devices=1"):
        trainer(tmp_path).fit(GigagradModule(model, bce), batches(pairs))


def test_a_step_has_a_bar_of_tiles(model, pairs, bce, tmp_path, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, total, **_):
            self.total, self.n, self.closed = total, 0, False
            bars.append(self)

        def update(self, count):
            self.n += count

        def close(self):
            self.closed = True

    monkeypatch.setattr("gigagrad.integrations.lightning.tqdm", Bar)
    module = GigagradModule(model, bce, tile=(16, 16))
    trainer(tmp_path, callbacks=[EngineMonitor()], max_steps=2).fit(module, batches(pairs))
    assert [(bar.n, bar.closed) for bar in bars] == [(bars[0].total, True)] * 2
    assert bars[0].total > 4


def test_a_further_fit_draws_further_numbers_of_a_seed(model, pairs, bce, tmp_path):
    """It drew those of the first one again."""

    class Dropped(torch.nn.Module):
        def forward(self, output, target):
            return torch.nn.functional.dropout(torch.ones_like(output), 0.5).mean() + 0 * bce(output, target)

    def losses(*epochs):
        module, found = GigagradModule(deepcopy(model), Dropped(), tile=(16, 16), seed=3), []
        for count in epochs:
            fitted = trainer(tmp_path, max_epochs=count)
            fitted.fit(module, batches(pairs[:1]))
            found.append(float(fitted.callback_metrics["train/loss"]))
        return found

    (second,) = losses(2)
    first, further = losses(1, 1)
    assert further == second != first


def test_the_monitor_watches_engines_only(tmp_path):
    class Other(pl.LightningModule):  # type: ignore[misc]
        def training_step(self, batch):
            return None

        def configure_optimizers(self):
            return None

    with pytest.raises(ConfigError, match="got Other"):
        trainer(tmp_path, callbacks=[EngineMonitor()]).fit(Other(), batches([torch.zeros(1)]))


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulation_and_clipping_are_those_of_automatic_optimisation(model, pairs, bce, accumulated, clip, tmp_path):
    class Plain(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            image, mask = batch
            return bce(self.net(image[None]), mask[None])

        def configure_optimizers(self):
            return SGD(self.parameters())

    settings = {"accumulate_grad_batches": accumulated, "gradient_clip_val": clip, "max_epochs": 2}
    other = deepcopy(model)
    trainer(tmp_path, **settings).fit(Plain(other), batches(pairs))
    ours = trainer(tmp_path, **settings)
    ours.fit(GigagradModule(model, bce, optimizer=SGD, tile=(16, 16)), batches(pairs))
    assert ours.global_step == 2 * -(-len(pairs) // accumulated)
    for value, expected in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
