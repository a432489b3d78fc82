"""`gigagrad.compile`: from what a user says to an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gigagrad.devices import Device, device_for
from gigagrad.errors import ConfigError
from gigagrad.execution.engine import Engine, Loss
from gigagrad.execution.planner import EngineOptions
from gigagrad.models.registry import unwrapped
from gigagrad.ranks import Ranks, SingleRank, ranks_of
from gigagrad.stores import DiskTier, HostTier, MemoryTier, Quantised, Tier, parse_storage
from gigagrad.stores.store import registered_tier
from gigagrad.units import parse_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PRECISIONS = {
    None: None,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compile(
    model: nn.Module,
    loss: Loss | None = None,
    *,
    memory: str | int | None = None,
    device: str | torch.device | Device = "cpu",
    precision: str | None = None,
    scratch: str | Path | Tier | None = None,
    scratch_bytes: str | int | None = None,
    host_memory: str | int | None = None,
    storage: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    tile: tuple[int, int] | None = None,
    seed: int | None = None,
    progress: bool = True,
    mesh: DeviceMesh | Ranks | None = None,
    journal: str | Path | None = None,
) -> Engine:
    """Make an engine for `model` and `loss`; nothing runs yet.

    Args:
        model: any module; takes `(1, C, H, W)` in the dtype the image holds (uint8 for a slide), several images as
            several arguments. Operators without a tile rule run on whole activations; the plan names them. Out of
            `torch.compile`, `DataParallel` and `DistributedDataParallel` (of one process) it is taken.
        loss: `loss(output, target)` returns a scalar; `output` is whatever the model returns, `target` what its image
            holds, with a batch axis. PyTorch's `cross_entropy` and `nll_loss` take class ids `(1, 1, H, W)` of any
            integers as they come. Without a loss the engine predicts.
        memory: the budget, e.g. `"2 GiB"` or bytes: peak resident memory of the whole process on the CPU (interpreter
            and libraries included), device memory on a GPU. None: no bound, only speed decides.
        device: where tiles are computed, by PyTorch's name for it. The model may stay where it is.
        precision: `"bfloat16"` or `"float16"` as autocast would, `"float32"` or `"float64"` as if the model and the
            image were cast; None: the model's own dtype. Sums over tiles are in float64, and gradients in their
            parameters' dtypes. In float16 no loss needs scaling: that happens inside (docs/math.md).
        scratch: an existing folder, on a fast disk, for activations that do not fit in `memory`: in a folder of this
            run's own, which goes when the run ends. Or another `Tier`. Without it they are computed again.
        scratch_bytes: the most that these files may take; None: what is free. `host_memory`: the same beside a GPU.
        storage: how activations that a plan saves are stored; `"exact"` (None): bit for bit. Lossy, so never by itself:
            `"bfloat16"`, `"float16"` (half the bytes of float32), or `"error 0.01"`: quantised, in files only, with
            errors of at most that. The run goes on from what was stored, and its gradient is exact for that
            (docs/math.md).
        optimizer: plans keep room for the state that its first step makes; None: room for Adam's.
        tile: `(height, width)` in pixels of the last activation, to force the tile's shape (tests, experiments).
        seed: of random operators (dropout, stochastic depth), which otherwise draw from PyTorch's own generator. With
            one, the n-th run of an engine draws the same numbers as the n-th run of another.
        mesh: the ranks that compute the tiles of one image together, of `torch.distributed.init_device_mesh`: its only
            dimension, or the one named "tile". Every rank then calls the same methods with the same arguments, which
            are compared before every step, holds its share of the activations in `memory`, and gets the whole loss and
            gradients: the same bits as one process gets with the same plan. Images that a model returns come from one
            process. Or `gigagrad.ranks.Ranks` themselves.
        journal: a folder where `backward` writes down its finished chunks, in a folder of this step's own that
            goes when the step is over. One that was killed goes on behind them when it is asked for again, of the same
            weights, by any number of ranks that see the folder; images are read again and compared by hash. Takes as
            much room as the activations that the plan saves and their cotangents, and the time to write these.
        progress: a step that takes seconds shows its tiles on standard error, where that is a terminal or a notebook,
            unless somebody listens to `Engine.events`.

    Raises:
        ConfigError: an argument cannot be used.
        ModelError: the model is TorchScript, sharded or quantised, or averages its gradients itself.
    """
    again = partial(compile, **locals())  # as it was called: nothing else is there yet
    model, loss = unwrapped(model, "model"), unwrapped(loss, "loss")
    used = device_for(device)
    tiers = tiers_for(used, host_memory, scratch, scratch_bytes)
    rounding = parse_storage(storage)
    if isinstance(rounding, Quantised) and scratch is None:
        raise ConfigError(f"storage={storage!r} makes fields in files smaller; name a folder for them with scratch=")
    if journal is not None and isinstance(rounding, Quantised):
        raise ConfigError(f"a journal holds no steps with storage={storage!r}; leave one of them out")
    budget_bytes, ranks = bytes_or_none(memory), SingleRank() if mesh is None else ranks_of(mesh)
    _check(model, loss, optimizer, tile, precision)
    options = EngineOptions(
        device=used,
        budget_bytes=budget_bytes,
        tiers=tiers,
        precision=_PRECISIONS[precision],
        rounding=rounding,
        optimizer=optimizer,
        tile=tile,
        seed=seed,
        progress=progress,
        ranks=ranks,
        journal=None if journal is None else Path(journal),
    )
    return Engine(model, loss, options, again)


def _check(model: object, loss: object, optimizer: object, tile: Any, precision: str | None) -> None:
    """Raise ConfigError for what cannot be used."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss must be a callable loss(output, target), got {type(loss).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if tile is not None and not (isinstance(tile, tuple | list) and len(tile) == 2 and min(tile) >= 1):
        raise ConfigError(f"tile must be (height, width) in pixels, both at least 1, got {tile!r}")
    if precision not in _PRECISIONS:
        raise ConfigError(f"unknown precision {precision!r}; use one of {', '.join(map(str, _PRECISIONS))}")


def tiers_for(
    device: Device, host_memory: str | int | None, scratch: str | Path | Tier | None, scratch_bytes: str | int | None
) -> tuple[Tier, ...]:
    """Return the tiers in which a device's fields may be kept: its own memory, the host's if that is another, and
    `scratch`.

    Raises ConfigError for what is no number of bytes, and for `scratch_bytes` without `scratch`.
    """
    if scratch is None and scratch_bytes is not None:
        raise ConfigError("scratch_bytes bounds the files in a scratch folder; name one with scratch=")
    tiers: list[Tier] = [MemoryTier(device.torch_device, device.buffer_pool())]
    if not device.is_host:
        tiers.append(HostTier(bytes_or_none(host_memory)))
    if isinstance(scratch, Tier):
        tiers.append(scratch)
    elif scratch is not None:
        room = bytes_or_none(scratch_bytes)
        tiers.append(registered_tier(str(scratch), room) or DiskTier(Path(scratch), room))
    return tuple(tiers)


def bytes_or_none(given: str | int | None) -> int | None:
    """Return a size as `compile` takes it. Raises ConfigError for what is no number of bytes."""
    try:
        return None if given is None else parse_bytes(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
