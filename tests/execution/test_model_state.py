import pytest
import torch

from gigagrad.execution.model_state import coming_state_bytes, usual_state_bytes

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


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
    return sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))


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


def test_an_optimizer_that_needs_values_is_taken_for_adam():
    given = parameters()
    assert coming_state_bytes(torch.optim.Adafactor(given)) == usual_state_bytes(given)
    assert coming_state_bytes(torch.optim.LBFGS(given)) == usual_state_bytes(given)


def test_its_hooks_are_not_run():
    optimizer = torch.optim.Adam(parameters())
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    assert coming_state_bytes(optimizer) > 0
