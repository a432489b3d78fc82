"""A rank of the tests: `python worker.py WHAT [VICTIM]`, with torchrun's variables set."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gigagrad as gg
from gigagrad.errors import RankError
from gigagrad.ranks import from_environment


def step(mesh: object = None, choices: object = None) -> tuple[list[list[float]], object]:
    """The gradients of one step with random operators, and what the engine chose by measurement; or that is given."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.Dropout(0.2), nn.ReLU(), nn.Conv2d(4, 1, 3, 1, 1)
    )
    image, target = torch.rand(3, 40, 60), torch.rand(1, 40, 60)
    torch.set_rng_state(state)
    engine = gg.compile(net, nn.functional.mse_loss, tile=(11, 13), mesh=mesh)  # type: ignore[arg-type]
    if choices is not None:
        engine.load_state_dict({"choices": choices})
    engine.backward(image, target)
    gradients = [p.grad.flatten().tolist() for p in net.parameters() if p.grad is not None]
    return gradients, engine.state_dict()["choices"]


def told(what: object) -> None:
    sys.stdout.write(f"{what}\n")


def stop(victim: int) -> None:
    if int(os.environ["RANK"]) == victim:
        os.kill(os.getpid(), signal.SIGSTOP)


def stopped_while_they_gather(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = dist.init_process_group

    def init(*args: Any, **kwargs: Any) -> None:
        stop(victim)
        usual(*args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", init)
    from_environment(timeout=2)


def main(what: str, victim: int = 0) -> None:
    torch.set_num_threads(1)
    if what == "gather":
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(RankError) as raised:
            stopped_while_they_gather(victim, monkeypatch)
        told(raised.value)
        return
    if what == "again":  # victim fails in the first start
        ranks = from_environment(timeout=20)
        ranks.barrier()
        if ranks.index == victim and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise SystemExit("by intention")
        told(f"rank {ranks.index} of {ranks.count} met {len(ranks.all_gather_object(0))}")
        return
    if what == "step":
        dist.init_process_group("gloo")
        told(json.dumps(step(init_device_mesh("cpu", (dist.get_world_size(),)))))
    elif what == "fail":
        ranks = from_environment()
        try:
            with ranks.error_scope():
                if ranks.index == 1:
                    raise OSError("no such slide")
                ranks.all_gather_object("going on")
        except (OSError, RankError) as error:
            told(f"{type(error).__name__}: {error}")
    else:
        ranks = from_environment(timeout=2)
        ranks.barrier()
        stop(victim)
        try:
            ranks.barrier()
        except RankError as error:
            told(error)
        return
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
