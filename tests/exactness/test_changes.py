"""What Python would see, gigagrad sees: whatever changes between two calls counts in the next one."""

from __future__ import annotations

import pytest
import torch

import gigagrad as gg
from gigagrad.errors import CaptureError
from gigagrad.events import Notice
from tests.exactness.changes import REFUSED, WAYS, by_pytorch, difference, told
from tests.exactness.settings import REFUSED_SETTINGS, SETTINGS, UNFOLLOWED

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
    found, expected = (list(told({**WAYS, **KEYED}[name], call, 2)) for call in (ours, by_pytorch(image, target)))
    assert [difference(*pair) for pair in zip(found, expected, strict=True)] == [None] * 2


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_what_nobody_can_compare_counts_and_is_said_once(name):
    way, notices = SETTINGS[f"{name} in an attribute"](), []
    engine = gg.compile(way.model, way.loss, tile=(6, 7))
    engine.events.subscribe(lambda event: notices.append(event.text) if isinstance(event, Notice) else None)
    image, target = torch.rand(1, 11, 13).double(), torch.rand(1, 11, 13).double()
    for step in range(2):
        expected = way.loss(way.model(image[None]), target[None])
        assert engine.backward(image, target).item() == pytest.approx(expected.item(), rel=1e-12)
        way.change(step)
    assert len([text for text in notices if "traced anew in every call" in text]) == 1
