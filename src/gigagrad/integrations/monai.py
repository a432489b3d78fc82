"""MONAI: an inferer for its evaluators and bundles, what a trainer does with a batch, and a handler that logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gigagrad.errors import ConfigError, extra
from gigagrad.execution import Engine, compile

with extra("monai"):
    from ignite.engine import Engine as Workflow
    from ignite.engine import Events
    from monai.data.meta_tensor import MetaTensor
    from monai.engines.utils import IterationEvents
    from monai.inferers import Inferer
    from monai.utils import CommonKeys


class WholeImageInferer(Inferer):  # type: ignore[misc]
    """`network(inputs)` exactly, in bounded memory, in the place of a `SlidingWindowInferer`.

    Takes the settings of `gigagrad.compile`: `memory="4 GiB"`. `inputs` is a batch `(N, C, H, W)`, or an image that
    `gigagrad.open_image` takes, a path for instance.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._network: Callable[..., Any] | None = None
        self.engine: Engine | None = None

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output `(N, C, H, W)` on the device of `inputs`, with their metadata, if they have any: where a
        file of it goes, and how it is turned back. Raises `ConfigError` for further arguments.
        """
        if args or kwargs or not isinstance(network, nn.Module):
            raise ConfigError("WholeImageInferer takes a torch.nn.Module of one image; make a module of what calls it")
        if self.engine is None or self._network is not network:
            self.engine, self._network = compile(network, **self._settings), network
        if not isinstance(inputs, torch.Tensor):
            found: torch.Tensor = self.engine.forward(inputs)
            return found
        output = torch.cat([self.engine.forward(image) for image in _each(inputs)]).to(inputs.device)
        return MetaTensor(output).copy_meta_from(inputs) if isinstance(inputs, MetaTensor) else output


class WholeImageStep:
    """A trainer's `iteration_update`: exact loss and gradients of whole images, then a step of its optimizer.

    Takes the settings of `gigagrad.compile`. The loss is the mean over a batch, whose images are seen one by one, by
    batch norms too, and `accumulation_steps` means what it does elsewhere. The trainer's own inferer and loss are not
    asked, and predictions are not kept. `IterationEvents` are fired in MONAI's order, all of them once the whole batch
    is computed: of the loss, which is in the output then, handlers may read and not change what is minimised.
    """

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor], **settings: Any) -> None:
        self._loss, self._settings = loss, settings
        self._network: nn.Module | None = None
        self.engine: Engine | None = None

    def __call__(self, trainer: Any, batch: Any) -> Any:
        """Take an iteration of `trainer`. Raises `ConfigError` for one with `amp`, which scales losses, and where a
        handler changes the loss.
        """
        if trainer.amp:
            raise ConfigError(
                "amp=True scales losses, which gigagrad does inside where it has to; leave it out of the trainer and "
                "say WholeImageStep(precision='float16')"
            )
        if self.engine is None or self._network is not trainer.network:
            self._network = trainer.network
            self.engine = compile(trainer.network, self._loss, optimizer=trainer.optimizer, **self._settings)
        device = torch.device("cpu")
        images, targets = trainer.prepare_batch(batch, device, trainer.non_blocking, **trainer.to_kwargs)
        # As MONAI counts: from the epoch's first iteration, whose last one steps whatever has come together.
        accumulated, length = getattr(trainer, "accumulation_steps", 1), trainer.state.epoch_length
        before = trainer.state.iteration - 1
        before = before if length is None else before % length
        trainer.network.train()
        if before % accumulated == 0:
            trainer.optimizer.zero_grad(set_to_none=trainer.optim_set_to_none)
        output = trainer.state.output = {CommonKeys.IMAGE: images, CommonKeys.LABEL: targets}
        pairs = list(zip(_each(images), _each(targets), strict=True))
        parameters = list(trainer.network.parameters())
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            loss = torch.stack([self.engine.backward(image, target) for image, target in pairs]).mean()
            found = [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, earlier, strict=True):
                parameter.grad = gradient
        trainer.fire_event(IterationEvents.FORWARD_COMPLETED)
        output[CommonKeys.LOSS], version = loss, loss._version
        trainer.fire_event(IterationEvents.LOSS_COMPLETED)
        if trainer.state.output.get(CommonKeys.LOSS) is not loss or loss._version != version:
            raise ConfigError(
                "a handler of LOSS_COMPLETED changed the loss, whose gradients are known by then; make it part of "
                "WholeImageStep(loss)"
            )
        for parameter, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                gradient /= len(pairs) * accumulated
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        trainer.fire_event(IterationEvents.BACKWARD_COMPLETED)
        if (before + 1) % accumulated == 0 or before + 1 == length:
            trainer.optimizer.step()
        trainer.fire_event(IterationEvents.MODEL_COMPLETED)
        return trainer.state.output  # of each image by itself, and postprocessed, where that was asked for


class EngineHandler:
    """Puts what the last image took into a workflow's metrics, for MONAI's loggers to find.

    `source` is the inferer or step whose engine is watched: `seconds`, `peak_bytes` and `predicted_peak_bytes`.
    """

    def __init__(self, source: WholeImageInferer | WholeImageStep) -> None:
        self._source = source

    def attach(self, workflow: Workflow) -> None:
        workflow.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self, workflow: Workflow) -> None:
        engine = self._source.engine
        if engine is not None and (run := engine.last_run) is not None:
            for name in ("seconds", "peak_bytes", "predicted_peak_bytes"):
                workflow.state.metrics[name] = float(getattr(run, name))


def _each(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Yield batches of one, without MONAI's metadata, which PyTorch's export does not trace."""
    plain = batch.as_subclass(torch.Tensor)
    return tuple(plain[index : index + 1] for index in range(len(plain)))
