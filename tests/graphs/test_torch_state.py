"""PyTorch's own state after a capture that did not come to its end."""

from __future__ import annotations

import pytest
import torch
from torch import nn, overrides
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch as dispatch

from gigagrad.graphs import InputSpec, capture

IMAGE = InputSpec((1, 1, 8, 8), torch.float32, field=True)


def stacks():
    return dispatch._get_current_dispatch_mode_stack(), overrides._get_current_function_mode_stack()


def keys():
    return repr(torch._C._dispatch_tls_local_include_set()), repr(torch._C._dispatch_tls_local_exclude_set())


def test_an_interrupt_leaves_the_modes_as_they_were_and_comes_out_as_one(monkeypatch):
    """Some of PyTorch's context managers fail on their way out where a mode is not what they left."""
    model = nn.Conv2d(1, 1, 3)

    def interrupted(*_, **__):
        dispatch._push_mode(FakeTensorMode())
        torch.device("meta").__enter__()
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("there was no mode to unset")

    before = stacks(), keys()
    with monkeypatch.context() as patch:
        patch.setattr(torch.export, "export", interrupted)
        with pytest.raises(KeyboardInterrupt):
            capture(model, None, IMAGE, None)
    assert (stacks(), keys()) == before
    assert not torch.empty(1).is_meta
    assert capture(model, None, IMAGE, None).nodes
