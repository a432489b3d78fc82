"""Run the caller's own model and loss on the whole image, as PyTorch does, where that fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors
from torch.utils._pytree import tree_map_only

from gigagrad.events import Events, TileDone
from gigagrad.execution.drawn import DrawnAsInTiles, NotAtOnce, draws_by_call
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.probes import whole_begun
from gigagrad.execution.refusals import refused_by_pytorch
from gigagrad.execution.seeds import drawing
from gigagrad.execution.sources import Source
from gigagrad.graphs import LossModule
from gigagrad.plans.program import Whole
from gigagrad.plans.whole import unseen_bytes


def restoring(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Return a function that gives tensors the values again that they have now, copied at once for all of a dtype, as
    each copy costs a launch.
    """
    alike = defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]](list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device].append(tensor)
    with torch.no_grad():
        copies = [(parts, _flat_copy(parts)) for parts in alike.values()]

    @torch.no_grad()
    def restore() -> None:
        for parts, values in copies:
            for part, value in zip(parts, torch.split(values, [part.numel() for part in parts]), strict=True):
                part.copy_(value.view(part.shape))

    return restore


class WholeRun:
    """One forward, or forward and backward, of one image at once. The model leaves its buffers as in PyTorch."""

    def __init__(
        self,
        prepared: Prepared,
        sources: dict[str, Source],
        composite: LossModule,
        events: Events,
        filled: list[torch.Tensor],
        draws: int,
    ) -> None:
        """Prepare a run; leaves whose empty `.grad` autograd fills are added to `filled` before it does. `draws`: what
        random operators draw from.
        """
        self._prepared, self._sources, self._composite, self._events = prepared, sources, composite, events
        self._backward, self._draws = prepared.problem.backward, draws
        self._filled = filled
        self.outputs: Any = None
        """The value that the loss or the model returned, detached."""
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The parameters, images and labels that are still to get a gradient, each with it."""
        self.hooked: list[torch.Tensor] = []
        """Those among them whose hooks autograd has called."""

    @property
    def output(self) -> torch.Tensor:
        """The loss, or the only value that the model returns."""
        found: torch.Tensor = self.outputs
        return found

    def run(self) -> None:
        """Run it. Raises NotAtOnce, with the model's buffers as they were, where the device's allocator needs more
        memory than the plan says, or the model draws random numbers otherwise than when it was captured; else whatever
        the model raises.
        """
        device, plan = self._prepared.device, self._prepared.plan
        (step,) = plan.steps
        assert isinstance(step, Whole)
        cost = self._prepared.graph.whole[self._backward]
        restore = restoring([] if device.is_host and not drawing(self._prepared.graph) else self._written())
        watch = device.memory_guard(plan.predicted_peak_bytes, plan.budget_bytes)
        self._events.emit(whole_begun(plan, "whole image"))
        try:
            watch.begin_pass(cost.peak_bytes, 0, unseen_bytes(cost) if step.from_heap else 0)
            with watch.computing_whole():
                self._run()
                if not step.keeps:
                    watch.tile_done()
        except NotAtOnce:
            self._undo(restore)
            raise
        except torch.OutOfMemoryError as error:
            if device.is_host:
                raise
            self._undo(restore)
            raise NotAtOnce(f"the whole image takes more memory than was predicted ({error})") from error
        except Exception as error:
            if (refused := refused_by_pytorch(error)) is not None:
                raise refused from error
            raise
        finally:
            watch.close(keeps=step.keeps)
        self._events.emit(TileDone("whole image", 1, 1, 0.0))

    @cached_property
    def _known(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and tensors from outside by their names."""
        return {**self._composite.named_tensors(), **self._prepared.graph.closed}

    def _undo(self, restore: Callable[[], None]) -> None:
        restore()
        _empty(self._filled)

    def _written(self) -> list[torch.Tensor]:
        """Return what the model writes: buffers, weights, tensors from outside."""
        known = self._known
        return list({id(known[name]): known[name] for name in self._prepared.graph.updates if name in known}.values())

    def _run(self) -> None:
        with torch.inference_mode(False), torch.set_grad_enabled(self._backward), self._autocast():
            self._compute()

    def _compute(self) -> None:
        inputs = {name: self._input(source) for name, source in self._sources.items()}
        images, targets = (
            tuple(value for name, value in inputs.items() if name.startswith(kind)) for kind in ("image", "target")
        )
        with self._drawn():
            result = self._composite.plainly(images, targets[0] if len(targets) == 1 else targets or None)
        if self._backward:
            self._differentiate(result, inputs)
        alone = isinstance(result, torch.Tensor)
        self.outputs = result.detach() if alone else tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        """Have the model draw what it would draw in tiles, in the block."""
        graph, device = self._prepared.graph, self._prepared.device
        if not drawing(graph):
            yield
            return
        by_call = draws_by_call(graph, graph.whole[self._backward].draws)
        assert by_call is not None
        with DrawnAsInTiles(graph, by_call, self._draws, device) as drawn:
            yield
        drawn.finish()

    def _differentiate(self, loss: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
        graph, known = self._prepared.graph, self._known
        named = {node.arguments["name"] for node in graph.nodes if node.op == "parameter" and node.differentiable}
        # A model that counts its calls may have read other parameters in this one than when it was captured.
        learned = {
            id(tensor): tensor
            for name, tensor in known.items()
            if name in named or (tensor.requires_grad and isinstance(tensor, nn.Parameter))
        }
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [(each, each) for each in learned.values()]
        pairs += [(value, self._sources[name].given) for name, value in inputs.items() if value.requires_grad]
        if not (pairs and loss.requires_grad):
            return
        leaves = [leaf for leaf, _ in pairs]
        if not any(map(_may_not_be_undone, leaves)):
            self._accumulate_as_they_come(loss, pairs)
            return
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for (_, given), gradient in zip(pairs, gradients, strict=True):
            if gradient is not None and given is not None:
                self.gradients.append((given, gradient.reshape(given.shape)))
        self.hooked = [leaf for leaf, given in pairs if leaf is given]

    def _accumulate_as_they_come(
        self, loss: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor | None]]
    ) -> None:
        """Let autograd fill `.grad`s that are empty: where each gradient is made it is still in the caches. Images and
        labels get theirs later.
        """
        self._filled += [leaf for leaf, _ in pairs]
        torch.autograd.backward(loss)
        for leaf, given in pairs:
            if given is not None and leaf is not given and leaf.grad is not None:
                self.gradients.append((given, leaf.grad.reshape(given.shape)))

    def _input(self, source: Source) -> torch.Tensor:
        """Return an image or a label on the device; a leaf of its own where its gradient is asked for."""
        device, value = self._prepared.device, source.tensor
        if device.is_host:
            value = source.whole(own=True) if value is None else value
        else:
            value = source.whole() if value is None else value
            waits = device.torch_device.type != "cuda" or value.is_pinned()  # else CUDA has read it when it returns
            value = value.to(device.torch_device, copy=True, non_blocking=not waits)
            if value.ndim == 4:  # whose convolutions are twice as fast so
                value = value.contiguous(memory_format=self._prepared.layout)
        return value.detach().requires_grad_() if source.spec.differentiable else value

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._composite.autocast
        return nullcontext() if dtype is None else torch.autocast(self._prepared.device.torch_device.type, dtype=dtype)


def _flat_copy(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:  # which the function below returns as it is
        return tensors[0].clone(memory_format=torch.contiguous_format).view(-1)
    flat: torch.Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def _may_not_be_undone(leaf: torch.Tensor) -> bool:
    """Say whether a backward that fails might leave more behind than a `.grad` that was empty."""
    return leaf.grad is not None or not leaf.is_leaf or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


@contextmanager
def filling() -> Iterator[list[torch.Tensor]]:
    """Yield a list for leaves whose empty `.grad` is filled in the block; an error there empties it again."""
    filled: list[torch.Tensor] = []
    try:
        yield filled
    except BaseException:
        _empty(filled)
        raise


def _empty(filled: list[torch.Tensor]) -> None:
    while filled:
        filled.pop().grad = None


@contextmanager
def hooks_called(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Leave hooks on these gradients out, in the block: autograd has called them where it found the gradients."""
    hooked = [(leaf._backward_hooks, dict(leaf._backward_hooks)) for leaf in leaves if leaf._backward_hooks]
    try:
        for hooks, _ in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, own in hooked:
            hooks.update(own)
