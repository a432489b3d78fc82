"""The bits that a step leaves, by one process or by ranks: threads stand for these (`gigagrad.ranks.run_threaded`)."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gigagrad as gg
from gigagrad.ranks import Ranks, run_threaded

Loss = Callable[[Any, Any], Tensor]


def bits_of(engine: gg.Engine, image: Tensor, target: Tensor) -> str:
    """Hashes one step: the loss, the gradients of model, loss and image, and all buffers."""
    digest = hashlib.sha256(_bytes(engine.backward(image, target)))
    for part in (engine.model, engine.loss):
        if isinstance(part, nn.Module):
            gradients = [(name, p.grad) for name, p in part.named_parameters() if p.grad is not None]
            for name, value in (*gradients, *part.named_buffers()):
                digest.update(name.encode() + _bytes(value))
    if image.grad is not None:
        digest.update(_bytes(image.grad))
    return digest.hexdigest()


def in_tiles(engine: gg.Engine) -> gg.Engine:
    """Keeps an engine from running what fits as PyTorch would, where it can."""
    if hasattr(engine, "in_tiles"):
        engine.in_tiles = True
    return engine


def bits_by_ranks(
    model: nn.Module, loss: Loss, image: Tensor, target: Tensor, *, ranks: Sequence[int] = (), **options: Any
) -> list[str]:
    """Hashes a step by one process, and by each of these numbers of ranks with the plan of that one.

    The hash of several ranks is that of the first, and names those that differ from it. `options` are those of
    `gigagrad.compile`.
    """

    def made(**more: Any) -> tuple[gg.Engine, Tensor]:
        own = copy.deepcopy((model, loss, image))
        return in_tiles(gg.compile(own[0], own[1], **options, **more)), own[2]

    engine, own = made()
    engine.plan(own, target)
    state = engine.state_dict()
    found = [bits_of(engine, own, target)]

    def by_one(all_of_them: Ranks) -> str:
        engine, own = made(mesh=all_of_them)
        engine.load_state_dict(state)
        return bits_of(engine, own, target)

    for count in ranks:
        bits = run_threaded(count, by_one)
        others = [str(rank) for rank, one in enumerate(bits) if one != bits[0]]
        found.append(f"{bits[0]}, other than by ranks {', '.join(others)}" if others else bits[0])
    return found


def _bytes(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return str((tuple(value.shape), value.dtype)).encode() + flat.view(torch.uint8).numpy().tobytes()
