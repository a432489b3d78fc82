import copy

import pytest
import torch

import gigagrad as gg
from gigagrad.execution.model_state import coming_state_bytes, tensors_in, usual_state_bytes
from gigagrad.training.apollo import Apollo

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "apollo": Apollo,
    "needing values": lambda p: Odd(p, 3),
}


class Odd(torch.optim.Optimizer):
    """Needs values, settings of its own, random numbers, and an object for each parameter."""

    def __init__(self, params, copies):
        super().__init__(params, {})
        self.copies = copies
        self.steps = [0]

    def step(self, closure=None):
        self.steps[0] += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.grad.abs().sum().item() and not self.state[p]:
                self.state[p] = {"kept": [Kept(torch.rand_like(p)) for _ in range(self.copies)], "copies": self.copies}


class Kept:
    def __init__(self, tensor):
        self.tensor = tensor


def parameters():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 20, 5), torch.nn.Linear(30, 40))
    model[1].bias.requires_grad_(False)
    return list(model.parameters())


def step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()


def held(optimizer):
    kept = [v for s in optimizer.state.values() for v in s.values()]
    each = [v.tensor if isinstance(v, Kept) else v for one in kept for v in (one if isinstance(one, list) else [one])]
    return sum(v.nbytes for v in each if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_first_step_makes_what_was_foretold_and_the_second_nothing(make):
    given = parameters()
    before = [p.detach().clone() for p in given]
    optimizer = make(given)
    coming, there = coming_state_bytes(optimizer), held(optimizer)
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(given, before, strict=True))
    assert held(optimizer) == there
    step(optimizer)
    assert held(optimizer) - there == coming
    assert not optimizer.state.get(given[0]) or coming_state_bytes(optimizer) == 0


def test_parameters_that_join_later_are_still_to_come():
    first, *others = [p for p in parameters() if p.requires_grad]
    optimizer = torch.optim.Adam([first])
    step(optimizer)
    optimizer.add_param_group({"params": others})
    there = held(optimizer)
    coming = coming_state_bytes(optimizer)
    step(optimizer)
    assert held(optimizer) - there == coming > 0


def test_a_rehearsal_leaves_no_trace():
    given = parameters()
    optimizer, state = Odd(given, 2), torch.get_rng_state()
    assert coming_state_bytes(optimizer) == usual_state_bytes(given)
    assert torch.equal(torch.get_rng_state(), state)
    assert optimizer.steps == [0]


@pytest.mark.parametrize("name", ["lion", "adan", "prodigy", "soap", "lamb", "shampoo"])
def test_optimizers_of_the_library(name):
    library = pytest.importorskip("pytorch_optimizer", reason="the optimizers extra brings it")
    optimizer = library.load_optimizer(name)(parameters(), lr=1e-3)
    coming = coming_state_bytes(optimizer)
    step(optimizer)
    assert sum({id(t): t.nbytes for s in optimizer.state.values() for t in tensors_in(s)}.values()) == coming > 0


def test_an_optimizer_that_cannot_be_rehearsed_is_taken_for_adam():
    given = parameters()
    assert coming_state_bytes(torch.optim.LBFGS(given)) == usual_state_bytes(given)


def test_its_hooks_are_not_run():
    optimizer = torch.optim.Adam(parameters())
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    assert coming_state_bytes(optimizer) > 0


class Remembering(torch.nn.Module):
    """Keeps what a buffer held before."""

    def __init__(self, of):
        super().__init__()
        self.convolution, self.of = torch.nn.Conv2d(1, 1, 3), of
        self.now = torch.nn.Buffer(torch.tensor([1.0, 2.0, 4.0]))
        self.before = torch.nn.Buffer(of(torch.zeros(3)).clone())

    def forward(self, x):
        self.before.copy_(self.of(self.now))
        self.now.mul_(3)
        return self.convolution(x) * self.before.sum()


OF = {
    "itself": lambda now: now,
    "a copy": torch.clone,
    "a part": lambda now: now[1:2],
    "dropout that drops nothing": lambda now: torch.nn.functional.dropout(now, 0.0),
}


@pytest.mark.parametrize("name", OF)
@pytest.mark.parametrize("in_tiles", [False, True])
def test_a_buffer_takes_what_another_one_held_before_the_step(name, in_tiles):
    model = Remembering(OF[name])
    plain, image, target = copy.deepcopy(model), torch.rand(1, 1, 9, 9), torch.rand(1, 1, 7, 7)
    engine = gg.compile(model, torch.nn.functional.mse_loss)
    engine.in_tiles = in_tiles
    for _ in range(2):
        torch.nn.functional.mse_loss(plain(image), target).backward()
        engine.backward(image, target)
        for (path, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs), path
    torch.testing.assert_close(model.convolution.weight.grad, plain.convolution.weight.grad)
