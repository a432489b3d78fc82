"""APOLLO is AdamW where nothing is projected, the paper's formula where something is, and keeps next to nothing."""

import pytest
import torch
from torch import nn

from gigagrad.errors import ConfigError
from gigagrad.execution.model_state import coming_state_bytes
from gigagrad.training import FitConfig
from gigagrad.training.apollo import Apollo
from gigagrad.training.learner import make_optimizer


def gradients(shape, steps, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(steps)]


def stepped(make, shape, steps=5):
    parameter = nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(shape))
    optimizer = make([parameter])
    for gradient in gradients(shape, steps):
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach(), optimizer


@pytest.mark.parametrize("shape", [(24,), (1, 24, 1), (2, 12), (12, 2), (2, 3, 2, 2)])
def test_what_is_not_projected_is_stepped_as_by_adamw(shape):
    found, _ = stepped(lambda p: Apollo(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.03, rank=2), shape)
    expected, _ = stepped(lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.03), shape)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (6, 2, 2)])
def test_matrices_are_stepped_by_the_paper_s_formula(shape, rank):
    """Written down anew, with gap 3, without the views and in the paper's order."""
    found, optimizer = stepped(lambda p: Apollo(p, lr=0.1, rank=rank, gap=3), shape)
    w = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(shape).reshape(shape[0], -1)
    w = w if w.shape[0] <= w.shape[1] else w.T
    m = v = norm = None
    for t, gradient in enumerate(gradients(shape, 5)):
        g = gradient.reshape(shape[0], -1)
        g = g if g.shape[0] <= g.shape[1] else g.T
        p = torch.randn(rank, g.shape[0], generator=torch.Generator().manual_seed(t // 3)).double() / rank**0.5
        r = p @ g
        m = 0.1 * r + 0.9 * (0 if m is None else m)
        v = 0.001 * r * r + 0.999 * (0 if v is None else v)
        root = (1 - 0.999 ** (t + 1)) ** 0.5
        a = m / (v.sqrt() + 1e-8 * root)
        s = a.norm() / r.norm() if rank == 1 else a.norm(dim=0) / r.norm(dim=0)
        step = g * s
        if norm is not None and step.norm() > 1.01 * norm:
            step = step * (1.01 * norm / step.norm())
        norm = step.norm()
        w = w - 0.1 * root / (1 - 0.9 ** (t + 1)) * (128**0.5 if rank == 1 else 1.0) * step
    wide = found.reshape(shape[0], -1)
    torch.testing.assert_close(wide if wide.shape[0] <= wide.shape[1] else wide.T, w)
    (state,) = optimizer.state.values()
    assert state["exp_avg"].shape == (rank, max(g.shape))


def test_mini_keeps_a_fiftieth_of_adamw_s_state_and_the_plan_counts_it():
    """The headline at small size: a block of ViT-S, its embedding of patches and its positions."""
    tensors = [(384, 3, 16, 16), (1, 197, 384), (1152, 384), (384, 384), (1536, 384), (384, 1536), (384,), (1536,)]
    made = [nn.Parameter(torch.zeros(shape)) for shape in tensors]
    adamw, apollo = coming_state_bytes(torch.optim.AdamW(made)), coming_state_bytes(Apollo(made))
    assert 0 < apollo <= 0.02 * adamw


def test_a_step_needs_no_other_parameter_and_goes_on_from_a_file_of_tensors(tmp_path):
    """So that ranks may share parameters, and a run that was stopped has the same bits."""
    both = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    alone = nn.Parameter(torch.ones(4, 6))
    together, single = Apollo(both, gap=2), Apollo([alone], gap=2)
    for step, gradient in enumerate(gradients((4, 6), 6)):
        both[0].grad, both[1].grad, alone.grad = -gradient.float(), gradient.float(), gradient.float()
        together.step()
        single.step()
        if step == 2:
            torch.save(single.state_dict(), tmp_path / "state.pt")
            single = Apollo([alone], gap=2)
            single.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(both[1], alone)


def test_its_name_and_its_settings():
    config = FitConfig(slides="c.csv", out="run", optimizer="apollo?rank=4&gap=50", weight_decay=0.1)
    made = make_optimizer(config, nn.Linear(8, 8))
    assert isinstance(made, Apollo)
    assert {name: made.defaults[name] for name in ("rank", "gap", "scale", "weight_decay")} == {
        "rank": 4, "gap": 50, "scale": 1.0, "weight_decay": 0.1,
    }  # fmt: skip
    for optimizer, said in (("apollo?rnk=1", "takes no rnk, did you mean 'rank'"), ("apollo?rank=0", "1 or more")):
        with pytest.raises(ConfigError, match=said):
            make_optimizer(FitConfig(slides="c.csv", out="run", optimizer=optimizer), nn.Linear(2, 2))


def test_names_of_the_library():
    library = pytest.importorskip("pytorch_optimizer", reason="the optimizers extra brings it")
    config = FitConfig(slides="c.csv", out="run", optimizer="Lion?weight_decay=0.1")
    assert type(make_optimizer(config, nn.Linear(2, 2))) is library.Lion
