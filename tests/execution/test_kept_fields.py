"""Which fields a run keeps, and that its gradients do not depend on them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import gigagrad as gg
from gigagrad.plans.cuts import Cuts, Selection
from tests.exactness.comparison import compare
from tests.exactness.normed import Residual

TILE = 20, 17


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return torch.randn(3, 45, 53, dtype=torch.float64), (torch.rand(1, 45, 53) > 0.5).double()


def planned(model, pair):
    loss = F.binary_cross_entropy_with_logits
    return gg.compile(model.double().train(), loss, tile=TILE).plan(*pair)


def test_some_sums_of_a_residual_chain_are_kept(pair):
    kept = [field.operator for field in planned(Residual(6), pair).kept]
    assert any(operator in ("aten.relu.default", "aten.add.Tensor") for operator in kept)
    assert "aten.conv2d.default" in kept


def test_giving_up_kept_fields_changes_nothing(pair, monkeypatch):
    """Every subset of kept fields gives the same gradients: fewer of them are computed again, segment by segment."""
    model = Residual(2).double().train()
    for share in (0.0, 0.3, 0.6):

        def some(chain, share=share):
            kept = [field for rank, field in enumerate(chain.candidates) if (rank * 7919 % 100) / 100 < share]
            return [Selection(frozenset(kept), 0, 0.0)]

        monkeypatch.setattr(Cuts, "selections", some)
        result = compare(model, F.binary_cross_entropy_with_logits, *pair, tile=TILE)
        assert max(result.loss_error, result.gradient_error) <= 1e-9, share


def test_frozen_parts_need_no_backward_pass(pair):
    model = Residual(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    plan = planned(model, pair)
    assert len([step for step in plan.passes if step.phase != "forward"]) == 1
    assert all("conv2d" not in field.operator or field.size_bytes for field in plan.kept)
