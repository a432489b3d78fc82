"""A long step is seen at a terminal, and nowhere else; nothing of it stays."""

import io
import sys
import threading
from contextlib import nullcontext

import pytest

import gigagrad as gg
from gigagrad import terminal
from gigagrad.execution.tile_program import TileProgram


class Screen(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def shown(monkeypatch, engine, pair, *, is_terminal=True, long_seconds=0.0, raised=None):
    """What standard error shows of a step."""
    screen = Screen(is_terminal)
    monkeypatch.setattr(terminal, "_LONG_SECONDS", long_seconds)
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as patch, pytest.raises(raised) if raised else nullcontext():
        patch.setattr(sys, "stderr", screen)
        engine.backward(pair.image, pair.target)
    for thread in [thread for thread in threading.enumerate() if "Refresh" in type(thread).__name__]:
        thread.join(10)  # rich tells it to end, and does not wait
        assert not thread.is_alive()
    return screen.getvalue()


def test_a_long_step_shows_its_tiles_on_a_terminal(monkeypatch, engine, pair):
    text = shown(monkeypatch, engine, pair)
    assert "backward" in text
    assert f"/{engine.plan(pair.image, pair.target).tile_count}" in text
    assert text.endswith("\x1b[2K"), "the last lines are cleared"


def test_a_short_step_shows_nothing(monkeypatch, engine, pair):
    assert shown(monkeypatch, engine, pair, long_seconds=60) == ""


def test_nothing_is_shown_where_nobody_looks(monkeypatch, engine, pair):
    assert shown(monkeypatch, engine, pair, is_terminal=False) == ""


def test_it_can_be_switched_off(monkeypatch, net, bce, pair):
    assert shown(monkeypatch, gg.compile(net, bce, tile=(5, 8), progress=False), pair) == ""


def test_whoever_listens_shows_it_by_themselves(monkeypatch, engine, pair):
    engine.events.subscribe(lambda event: None)
    assert shown(monkeypatch, engine, pair) == ""


def test_it_ends_with_a_step_that_fails(monkeypatch, engine, pair):
    engine.plan(pair.image, pair.target)
    tiles = []

    def fail(*_, run=TileProgram.run, **named):
        tiles.append(1)
        if len(tiles) > 4:
            raise MemoryError
        return run(*_, **named)

    monkeypatch.setattr(TileProgram, "run", fail)
    text = shown(monkeypatch, engine, pair, raised=MemoryError)
    assert "backward" in text
    assert text.endswith("\x1b[2K")
    assert not engine.events.has_listeners
