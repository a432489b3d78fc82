"""Lightning: a module that trains on whole images, and a callback that watches its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gigagrad.errors import ConfigError, extra
from gigagrad.events import Event, StepMeasured, TileDone
from gigagrad.execution import Engine, compile
from gigagrad.models import torchvision_operators as torchvision_operators  # Lightning imports torchvision where it is

with extra("lightning"):
    import lightning.pytorch as pl
    from tqdm.auto import tqdm


class GigagradModule(pl.LightningModule):  # type: ignore[misc]
    """`model` and `loss` as `gigagrad.compile` takes them, for a `Trainer` on one device.

    Batches are one `(image, target)` each, paths for instance: `DataLoader(pairs, batch_size=None)`, or of size 1 with
    PyTorch's own collation. Images stay where they are, and boxes of them are read. Logged are `train/loss`, `val/loss`
    and `test/loss`; predictions are tensors `(1, C, H, W)` or whatever the model returns. `bf16-mixed` means what it
    does elsewhere, and so do `accumulate_grad_batches` and `gradient_clip_val`. Other settings of an engine (`memory`,
    `scratch`, ...) are passed on.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam,
        scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        **settings: Any,
    ) -> None:
        """Keep what training needs: `optimizer` and `scheduler` make one, as in `partial(torch.optim.AdamW, lr=1e-4)`;
        the latter steps once an epoch. Without a `loss` the module only predicts.
        """
        super().__init__()
        self.model, self.loss = model, loss
        self._make_optimizer, self._make_scheduler, self._settings = optimizer, scheduler, settings

    def setup(self, stage: str) -> None:
        """Raise `ConfigError` for a `Trainer` of several devices, or one that scales gradients."""
        if self.trainer.world_size > 1:
            raise ConfigError(f"GigagradModule trains on one device, got {self.trainer.world_size}; say devices=1")
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            raise ConfigError(
                f"precision={self.trainer.precision!r} scales losses, which gigagrad does inside where it has to; "
                "leave the Trainer's precision as it is and say GigagradModule(precision='float16')"
            )
        settings = {"device": self.trainer.strategy.root_device, "progress": False, **self._settings}
        earlier = [vars(self)[name].state_dict() for name in ("engine", "predictor") if name in vars(self)]
        self.engine = compile(self.model, self.loss, **settings)
        self.predictor = compile(self.model, **settings)
        for engine, state in zip((self.engine, self.predictor), earlier, strict=False):
            engine.load_state_dict(state)  # a further fit goes on with the random numbers of a seed

    def configure_optimizers(self) -> Any:
        learned = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = self._make_optimizer(learned)
        return optimizer if self._make_scheduler is None else ([optimizer], [self._make_scheduler(optimizer)])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave the batch where it is: an engine moves boxes."""
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss; its gradients wait until Lightning has set back those of the step before and asks."""
        parameters = list(self.parameters())
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            loss = self.engine.backward(*map(_one, batch))
            self._found = [(p, p.grad) for p in parameters if p.grad is not None]
        finally:
            for parameter, gradient in zip(parameters, earlier, strict=True):
                parameter.grad = gradient
        self.log("train/loss", loss, prog_bar=True, batch_size=1)
        return loss

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of the last `training_step`, a share of them where several steps are accumulated."""
        for parameter, gradient in self._found:
            share = gradient / self.trainer.accumulate_grad_batches
            parameter.grad = share if parameter.grad is None else parameter.grad.add_(share)
        self._found = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.engine.forward(*map(_one, batch)), prog_bar=True, batch_size=1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.engine.forward(*map(_one, batch)), batch_size=1)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Predict a batch, which is an image, or an image and more, which is left out."""
        return self.predictor.forward(_one(batch[0] if isinstance(batch, tuple | list) else batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["gigagrad"] = self.engine.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is not None and "gigagrad" in checkpoint:  # else weights alone are wanted
            self.engine.load_state_dict(checkpoint["gigagrad"])


class EngineMonitor(pl.Callback):  # type: ignore[misc]
    """Shows the tiles of a long step in a bar of its own, and logs what steps take beside what their plans said.

    Logged are `engine/seconds`, `engine/peak_bytes` and `engine/predicted_peak_bytes` of each training step.
    """

    def __init__(self) -> None:
        self._bar: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _engine_of(pl_module).events.subscribe(self._tell)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (run := _engine_of(pl_module).last_run) is not None:
            values = ("seconds", "peak_bytes", "predicted_peak_bytes")
            pl_module.log_dict({f"engine/{name}": float(getattr(run, name)) for name in values}, batch_size=1)

    def _tell(self, event: Event) -> None:
        match event:
            case TileDone(phase, done, total):
                if self._bar is None:
                    self._bar = tqdm(total=total, desc=phase, unit="tile", leave=False, position=2, disable=None)
                self._bar.update(done - self._bar.n)
            case StepMeasured() if self._bar is not None:
                self._bar.close()
                self._bar = None


def _engine_of(module: pl.LightningModule) -> Engine:
    """Raise `ConfigError` for another module."""
    if not isinstance(module, GigagradModule):
        raise ConfigError(f"EngineMonitor watches a GigagradModule, got {type(module).__name__}")
    return module.engine


def _one(item: Any) -> Any:
    """Make an input of the engine; collation makes a list of one path, and of several images for one model."""
    if not isinstance(item, list):
        return item
    return item[0] if len(item) == 1 else tuple(item)
