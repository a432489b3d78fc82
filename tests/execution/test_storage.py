"""Lossy storage: what ran is the network with rounded fields, and its gradient is exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, StoreError
from gigagrad.execution.seeds import ROUNDINGS, seed_of
from gigagrad.plans import estimate
from gigagrad.stores import Blosc, DiskStore, parse_storage
from tests.exactness.normed import Net, dice

AXES = (-2, -1)
MIB = 2**20


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, rounding):
        return rounding.round(values, Box.whole(*values.shape[-2:]), AXES)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent, None


@pytest.fixture
def pair():
    torch.manual_seed(1)
    return torch.rand(3, 70, 86, dtype=torch.float64), (torch.rand(1, 70, 86) > 0.5).double()


def net():
    torch.manual_seed(0)
    return Net().double().train()


def reference(model, pair, roundings):
    """Loss and gradients of plain PyTorch, the outputs of these modules rounded."""
    for name, rounding in roundings.items():
        model.get_submodule(name).register_forward_hook(
            lambda m, i, out, rounding=rounding: Rounded.apply(out, rounding)
        )
    value = dice(model(pair[0][None]), pair[1][None])
    return value.detach(), torch.autograd.grad(value, list(model.parameters()))


def in_files(engine, pair):
    """The same engine with every field in a file."""
    engine.plan(*pair)
    state = engine.state_dict()
    for choice in state["choices"].values():
        choice["kept"] = [[node, "disk"] for node, _ in choice["kept"]]
    engine.load_state_dict(state)
    return engine


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("storage", ["float16", "bfloat16", "error 0.05"])
def test_the_gradient_is_that_of_the_network_that_ran(pair, tmp_path, storage, tier):
    model = net()
    engine = gg.compile(model, dice, tile=(24, 20), storage=storage, scratch=tmp_path)
    if tier == "disk":
        in_files(engine, pair)
    fields = engine.plan(*pair).kept
    assert {field.tier for field in fields} == {tier}
    torch.manual_seed(7)
    value = engine.backward(*pair)
    torch.manual_seed(7)
    first = seed_of(int(torch.randint(2**62, ())), ROUNDINGS) % 2**40
    packed = [field for field in fields if field.storage == storage]
    assert len(packed) == (0 if (tier, storage) == ("memory", "error 0.05") else 3)
    roundings = {field.module: parse_storage(storage).keyed(first + field.node) for field in packed}
    expected, gradients = reference(net(), pair, roundings)
    exact, _ = reference(net(), pair, {})
    assert abs(value - expected) <= 1e-12 * abs(expected)
    assert bool(packed) == (abs(value - exact) > 1e-9)
    for ours, theirs in zip([p.grad for p in model.parameters()], gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-11 * theirs.norm() + 1e-15
    assert not list(tmp_path.iterdir())


def test_only_codes_go_through_the_codec(pair, tmp_path, monkeypatch):
    """What is exact in files, the cotangents above all, shrinks by a tenth and would only be delayed."""
    model, made = net(), {}
    original = DiskStore.__init__

    def noting(self, field, scratch, codec):
        made[field.name] = codec
        original(self, field, scratch, codec)

    monkeypatch.setattr(DiskStore, "__init__", noting)
    engine = in_files(gg.compile(model, dice, tile=(24, 20), storage="error 0.05", scratch=tmp_path), pair)
    engine.backward(*pair)
    assert {name.partition("-")[0]: codec for name, codec in made.items()} == {"field": Blosc(), "cotangent": None}


def test_half_the_bytes_are_planned_for_and_named(pair, tmp_path):
    float32 = tuple(value.float() for value in pair)
    plain = gg.compile(net().float(), dice)
    plain.in_tiles = True
    exact = plain.plan(*float32)
    engine = gg.compile(net().float(), dice, storage="bfloat16", scratch=tmp_path)
    packed = engine.plan(*float32)
    assert sum(field.size_bytes for field in packed.kept) * 2 == sum(field.size_bytes for field in exact.kept)
    held = [plan.most(estimate.FIELDS) for plan in (packed, exact)]
    assert held[0] < held[1]
    assert "memory  bfloat16" in str(packed)
    assert "bfloat16" not in str(exact)
    placed = in_files(engine, float32)
    assert "disk   bfloat16" in str(placed.plan(*float32))


def test_every_run_draws_other_errors_and_a_seed_repeats_them(pair, tmp_path):
    def values(seed):
        model = net()
        engine = in_files(gg.compile(model, dice, storage="error 0.05", scratch=tmp_path, seed=seed), pair)
        return [engine.backward(*pair).item() for _ in range(2)]

    first = values(3)
    assert first[0] != first[1]
    assert first == values(3)
    assert first != values(4)


def test_values_beyond_float16_are_an_error_and_leave_no_gradients(pair):
    model = net()
    with torch.no_grad():
        model.stem.weight.mul_(1e7)
    with pytest.raises(StoreError, match="use storage='bfloat16'"):
        gg.compile(model, dice, storage="float16").backward(*pair)
    assert all(p.grad is None for p in model.parameters())


def test_what_whole_field_operators_read_is_never_rounded():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, x):
            return self.conv(x).flatten(2).sort(-1).values[..., -3:].mean()

    torch.manual_seed(0)
    model, image = Sorted().double(), torch.rand(1, 20, 20, dtype=torch.float64)
    engine = gg.compile(model, lambda output, target: (output * target).sum(), storage="float16")
    (field,) = engine.plan(image, torch.ones(1, dtype=torch.float64)).kept
    assert field.storage == "exact"
    assert engine.backward(image, torch.ones(1, dtype=torch.float64)) == model(image[None]).detach()


def test_an_unknown_storage_is_refused():
    with pytest.raises(ConfigError, match="expected 'exact', 'float16'"):
        gg.compile(net(), F.mse_loss, storage="int8")


def test_quantised_files_need_a_folder():
    with pytest.raises(ConfigError, match="name a folder for them with scratch="):
        gg.compile(net(), F.mse_loss, storage="error 0.01")
