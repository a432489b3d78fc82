"""A step that was cut off goes on behind its finished chunks, and ends with the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import gigagrad as gg
from gigagrad.errors import ConfigError, GigagradError, RankError, WriteError
from gigagrad.events import Notice
from gigagrad.execution.tile_program import TileProgram
from gigagrad.ranks import Ranks, SingleRank, run_threaded
from tests.exactness.generated import make_case
from tests.exactness.normed import Net, dice
from tests.execution.by_ranks import RankRun, outcome, prepared_for


class Cut(GigagradError):
    """A process is killed."""


class Counted:
    """Counts the tiles that are computed; after so many there is an end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tiles, self.most = 0, 10**9
        whole = TileProgram.run

        def run(program, *arguments, **keywords):
            self.tiles += 1
            if self.tiles > self.most:
                raise Cut("killed")
            return whole(program, *arguments, **keywords)

        patch.setattr(TileProgram, "run", run)


@pytest.fixture
def counted():
    with pytest.MonkeyPatch.context() as patch:
        yield Counted(patch)


def again(run: RankRun, counted: Counted, folder, ranks: int, tiles: int | None) -> list[str]:
    """The outcome by so many ranks, cut off behind so many tiles; empty if it was."""
    counted.tiles, counted.most = 0, 10**9 if tiles is None else tiles

    def work(one: Ranks) -> str:
        with one.error_scope():
            return outcome(run, one, folder)[0]

    try:
        return run_threaded(ranks, work, timeout=120)
    except (Cut, RankError):
        return []


def undisturbed(run: RankRun, counted: Counted) -> tuple[str, int]:
    """The outcome, and the tiles that are computed for it."""
    counted.tiles, counted.most = 0, 10**9
    return outcome(run, SingleRank())[0], counted.tiles


@pytest.mark.parametrize("net_seed", range(2))
def test_cut_off_anywhere_by_any_number_of_ranks(net_seed, counted, tmp_path):
    case = make_case(net_seed)
    run = prepared_for(case.model, case.loss, case.image, case.target, tile=case.tile, journal=tmp_path)
    expected, total = undisturbed(run, counted)
    draw = torch.Generator().manual_seed(net_seed)
    for count in (1, 2, 5):
        begun, computed = [], 0
        for _ in range(3):
            cut = int(torch.randint(1, max(2, total // 2), (), generator=draw))
            begun = again(run, counted, tmp_path, count, cut)
            computed += counted.tiles
            if begun:
                break
        found = begun or again(run, counted, tmp_path, 3, None)
        assert found == [expected] * len(found)
        assert not [*tmp_path.iterdir()], "it goes when the step is over"
        if not begun:
            assert counted.tiles < total, "nothing was taken from the journal"


def test_what_was_finished_is_not_computed_again(counted, tmp_path):
    image, target = torch.rand(3, 128, 48), (torch.rand(1, 128, 48) > 0.5).float()
    run = prepared_for(Net(), dice, image, target, tile=(8, 48), journal=tmp_path)
    expected, total = undisturbed(run, counted)
    for cut in range(1, total, 29):
        assert again(run, counted, tmp_path, 1, cut) == []
        assert again(run, counted, tmp_path, 1, None) == [expected]
        assert counted.tiles == total - cut, "a chunk is one tile here"


def test_other_images_are_not_taken(counted, tmp_path):
    torch.manual_seed(0)
    net, image, target = Net(), torch.rand(3, 64, 48), (torch.rand(1, 64, 48) > 0.5).float()
    run = prepared_for(net, dice, image, target, tile=(16, 48), journal=tmp_path)
    assert again(run, counted, tmp_path, 1, 15) == []  # in its fourth pass
    (folder,) = tmp_path.iterdir()
    assert len([*folder.iterdir()]) >= 12
    other = dataclasses.replace(run, image=image.flip(1).contiguous())
    expected, _ = undisturbed(other, counted)
    for cut in (2, 4, 15):
        assert again(other, counted, tmp_path, 1, cut) == []  # writes over those of the first image

    assert again(other, counted, tmp_path, 1, None) == [expected]


def test_damaged_files_other_weights_and_other_draws_are_not_taken(counted, tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(Net(), torch.nn.Dropout(0.5))
    image, target = torch.rand(3, 64, 48), (torch.rand(1, 64, 48) > 0.5).float()
    run = prepared_for(net, dice, image, target, tile=(16, 48), journal=tmp_path)
    torch.manual_seed(1)
    expected, total = undisturbed(run, counted)
    torch.manual_seed(1)
    assert again(run, counted, tmp_path, 1, 15) == []
    (folder,) = tmp_path.iterdir()
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[-9] ^= 64  # in what a chunk gave, not in what it read
        path.write_bytes(data)
    torch.manual_seed(1)
    assert again(run, counted, tmp_path, 1, None) == [expected]
    assert counted.tiles == total

    torch.manual_seed(1)
    assert again(run, counted, tmp_path, 1, 15) == []
    torch.manual_seed(2)
    expected, _ = undisturbed(run, counted)
    torch.manual_seed(2)
    assert again(run, counted, tmp_path, 1, None) == [expected]
    assert counted.tiles == total

    torch.manual_seed(1)
    assert again(run, counted, tmp_path / "weights", 1, 15) == []
    with torch.no_grad():
        next(net.parameters()).mul_(2)
    torch.manual_seed(1)
    expected, _ = undisturbed(run, counted)
    torch.manual_seed(1)
    assert again(run, counted, tmp_path / "weights", 1, None) == [expected]
    assert counted.tiles == total


def test_an_engine_says_that_it_went_on(counted, tmp_path):
    torch.manual_seed(0)
    net, image, target = Net().double(), torch.rand(3, 64, 48).double(), (torch.rand(1, 64, 48) > 0.5).double()
    told = []
    engine = gg.compile(net, dice, tile=(16, 48), journal=tmp_path)
    engine.events.subscribe(lambda event: told.append(event.text) if isinstance(event, Notice) else None)
    engine.plan(image, target)
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    counted.most = counted.tiles + 15
    with pytest.raises(Cut):
        engine.backward(image, target)
    counted.most = 10**9
    assert not told
    value = engine.backward(image, target)
    assert any("chunks that were finished before" in text for text in told)
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    for name, buffer in net.named_buffers():
        buffer.copy_(buffers[name])
    expected = dice(net(image[None]), target[None])
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    for gradient, parameter in zip(found, net.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert (gradient - parameter.grad).abs().max() <= 1e-11


@settings(max_examples=8, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 10_000))
def test_with_a_journal_nothing_else_changes(tmp_path_factory, seed):
    case, folder = make_case(seed), tmp_path_factory.mktemp("journal")
    run = prepared_for(case.model, case.loss, case.image, case.target, tile=case.tile)
    assert outcome(run, SingleRank(), folder)[0] == outcome(run, SingleRank())[0]


def test_a_folder_that_cannot_be_made_and_what_no_journal_holds(tmp_path):
    (tmp_path / "file").write_text("")
    engine = gg.compile(Net(), dice, journal=tmp_path / "file")
    with pytest.raises(WriteError, match="cannot write"):
        engine.backward(torch.rand(3, 20, 20), torch.rand(1, 20, 20))
    with pytest.raises(ConfigError, match=r"a journal holds no steps with storage='error 0.01'"):
        gg.compile(Net(), dice, journal=tmp_path, scratch=tmp_path, storage="error 0.01")
