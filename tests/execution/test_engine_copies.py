"""An engine that was copied or came out of a pickle does what the first one does, on a model of its own."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import gigagrad as gg
from gigagrad.events import Event


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))], ids=["copy", "pickle"]
)
def test_a_copy_trains_a_model_of_its_own(net, pair, copied, assert_exact, whole):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = gg.compile(net, F.binary_cross_entropy_with_logits, memory="16 GiB", optimizer=optimizer, seed=3)
    told: list[Event] = []
    engine.events.subscribe(told.append)
    value, expected = whole(net, engine.loss, pair.image, pair.target[None])
    engine.backward(pair.image, pair.target)
    net.zero_grad()
    before = len(told)
    made = copied(engine)
    assert made.model is not net
    assert made.state_dict() == engine.state_dict()
    assert made.state_dict()["choices"]
    assert repr(made) == repr(engine).partition(", last run")[0] + ">"
    assert float(made.backward(pair.image, pair.target)) == pytest.approx(float(value))
    assert_exact(made.model, expected)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert len(told) == before
