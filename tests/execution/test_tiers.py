"""Where kept fields live changes no bit of the result, and leaves nothing behind."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.errors import BudgetError, ConfigError, StoreError
from gigagrad.execution.run import Run
from gigagrad.plans import estimate
from gigagrad.stores import DiskStore, Scratch
from tests.devices.fake import FakeCpu
from tests.exactness.normed import Net, dice

MIB = 2**20


@pytest.fixture
def pair():
    torch.manual_seed(1)
    return torch.rand(3, 70, 86), (torch.rand(1, 70, 86) > 0.5).float()


def held_in(plan):
    return plan.most(estimate.FIELDS)


def step(pair, tiers, network=Net, loss=dice, **arguments):
    """The loss, the gradients and the plan of one step, the kept fields in these tiers in turn."""
    torch.manual_seed(0)
    model = network()
    torch.set_num_threads(threads := torch.get_num_threads())
    engine = gg.compile(model, loss, tile=(24, 20), **arguments)
    engine.plan(*pair)
    state = engine.state_dict()
    for choice in state["choices"].values():
        choice["memory_format"] = "channels_last"  # which one is faster is a matter of time
        choice["kept"] = [[node, tiers[i % len(tiers)]] for i, (node, _) in enumerate(choice["kept"])]
    engine.load_state_dict(state)
    value = engine.backward(*pair)
    assert torch.get_num_threads() == threads
    return value, [p.grad for p in model.parameters()], engine.plan(*pair)


@pytest.mark.parametrize("tiers", [["disk"], ["disk", "memory"]])
def test_fields_in_files_change_no_bit(pair, tmp_path, tiers):
    value, gradients, plan = step(pair, ["memory"])
    assert held_in(plan)
    assert not plan.bytes_in("disk")
    found, others, placed = step(pair, tiers, scratch=tmp_path)
    assert {field.tier for field in placed.kept} == set(tiers)
    assert placed.bytes_in("disk")
    assert (held_in(placed) == 0) == (tiers == ["disk"])
    assert torch.equal(found, value)
    for ours, theirs in zip(others, gradients, strict=True):
        assert torch.equal(ours, theirs)
    assert not list(tmp_path.iterdir())


class AcrossRows(nn.Module):
    """What a whole-field operator reads, and its cotangent, which comes whole."""

    def __init__(self):
        super().__init__()
        self.conv, self.rows, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(86, 86), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.head(self.rows(self.conv(x)))


def test_what_whole_field_operators_read_may_lie_in_files(pair, tmp_path, monkeypatch):
    """No plan puts it there, a choice that is loaded may. Its cotangent is read right after it was added."""
    behind = Scratch.behind

    def slowly(self, work):
        def late():
            time.sleep(0.05)
            work()

        return behind(self, late)

    monkeypatch.setattr(Scratch, "behind", slowly)
    value, gradients, plan = step(pair, ["memory"], AcrossRows, F.mse_loss)
    assert plan.whole_field
    assert plan.kept
    found, others, placed = step(pair, ["disk"], AcrossRows, F.mse_loss, scratch=tmp_path)
    assert {field.tier for field in placed.kept} == {"disk"}
    assert torch.equal(found, value)
    for ours, theirs in zip(others, gradients, strict=True):
        assert torch.equal(ours, theirs)


def test_a_full_scratch_folder_is_what_the_refusal_tells_of(pair, tmp_path):
    told = r"keeps in scratch files take .*, there is room for 10 B; make room in"
    with pytest.raises(BudgetError, match=told) as no:
        step(pair, ["disk"], scratch=tmp_path, scratch_bytes=10)
    assert "the budget is" not in str(no.value)
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_no_files_and_no_gradients(pair, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise StoreError("the disk failed")

    monkeypatch.setattr(DiskStore, "add", fail)
    with pytest.raises(StoreError, match="the disk failed"):
        step(pair, ["disk"], scratch=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_damaged_while_tiles_run_is_an_error(pair, tmp_path, monkeypatch):
    cotangents = Run._cotangents

    def damage(self, segment):
        for path in tmp_path.glob("gigagrad-*/field-*"):
            content = bytearray(path.read_bytes())
            content[:64] = bytes(64)
            path.write_bytes(content)
        return cotangents(self, segment)

    monkeypatch.setattr(Run, "_cotangents", damage)
    with pytest.raises(StoreError, match="does not hold what was written"):
        step(pair, ["disk"], scratch=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_killed_run_is_cleaned_up_by_the_next(pair, tmp_path):
    program = (
        "import os, sys, torch; sys.path.insert(0, sys.argv[2]); from tests.execution import test_tiers as t; "
        "from gigagrad.execution.run import Run; Run._cotangents = lambda *_: os.kill(os.getpid(), 9); "
        "t.step((torch.rand(3, 70, 86), torch.ones(1, 70, 86)), ['disk'], scratch=sys.argv[1])"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), root], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.glob("gigagrad-*/field-*"))
    step(pair, ["disk"], scratch=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_and_a_budget_without_one_are_refused(pair, tmp_path):
    with pytest.raises(StoreError, match="cannot use scratch folder"):
        gg.compile(Net(), dice, memory="4 GiB", scratch=tmp_path / "nowhere").plan(*pair)
    with pytest.raises(ConfigError, match="name one with scratch="):
        gg.compile(Net(), dice, scratch_bytes="1 GiB")


def chain(norms):
    return nn.Sequential(
        *(layer for _ in range(norms) for layer in (nn.LazyConv2d(64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU())),
        nn.LazyConv2d(1, 1),
    )


def planned(memory, **arguments):
    model = chain(6)
    model(torch.zeros(1, 3, 8, 8))
    image = torch.zeros(1).expand(3, 1024, 1024)
    device = FakeCpu(400 * MIB)
    engine = gg.compile(model, F.mse_loss, memory=memory * MIB, device=device, **arguments)
    engine.in_tiles = True
    return engine.plan(image, image[:1])


def test_what_does_not_fit_in_memory_goes_to_files_within_their_budget(tmp_path):
    roomy = planned(20_000, scratch=tmp_path)
    assert {field.tier for field in roomy.kept} == {"memory"}
    tight = (roomy.predicted_peak_bytes - held_in(roomy) // 2) // MIB
    without = planned(tight)
    assert held_in(without) < held_in(roomy)
    placed = planned(tight, scratch=tmp_path)
    assert placed.bytes_in("disk") > 0
    assert placed.predicted_peak_bytes <= tight * MIB
    assert len(placed.kept) > len(without.kept)
    some = planned(tight, scratch=tmp_path, scratch_bytes=placed.bytes_in("disk") // 2)
    assert some.bytes_in("disk") <= placed.bytes_in("disk") // 2
    assert some.predicted_peak_bytes <= tight * MIB


def test_a_budget_too_small_names_one_that_works_with_files_too(tmp_path):
    with pytest.raises(BudgetError) as refused:
        planned(450, scratch=tmp_path)
    smallest = refused.value.smallest_bytes
    assert planned(smallest // MIB, scratch=tmp_path).predicted_peak_bytes <= smallest
