"""What Python would see, gigagrad sees: whatever changes between two calls counts in the next one."""

from __future__ import annotations

import pytest
import torch

import gigagrad as gg
from gigagrad.errors import CaptureError
from tests.exactness.changes import REFUSED, WAYS, by_pytorch, difference, told
from tests.exactness.settings import REFUSED_SETTINGS, SETTINGS

KEYED = {name: make for name, make in SETTINGS.items() if name.startswith("keyed by") and name not in REFUSED_SETTINGS}


@pytest.mark.parametrize("name", [*WAYS, *KEYED])
def test_a_change_counts(name):
    torch.manual_seed(2)
    image, target = torch.rand(1, 11, 13).double(), torch.rand(1, 11, 13).double()

    def ours(way):
        engine = gg.compile(way.model, way.loss, tile=(6, 7))
        return lambda: engine.backward(image, target)

    if name in REFUSED:
        with pytest.raises(CaptureError, match=REFUSED[name]):
            next(told(WAYS[name], ours, 1))
        return
    found, expected = (list(told({**WAYS, **KEYED}[name], call, 3)) for call in (ours, by_pytorch(image, target)))
    assert [difference(*pair) for pair in zip(found, expected, strict=True)] == [None] * 3
