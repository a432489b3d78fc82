"""Events as lines and as bars; the clock is the test's."""

import io

import pytest
from rich.console import Console

from gigagrad.events import (
    JobAdvanced,
    JobFinished,
    JobStarted,
    MetricsLogged,
    Notice,
    Preparing,
    StepMeasured,
    TileDone,
)
from gigagrad.terminal import Terminal


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain(clock):
    console = Console(file=io.StringIO(), width=200)
    return Terminal(console, interval_seconds=5, clock=clock)


def lines(terminal):
    return terminal.console.file.getvalue().splitlines()


def test_plain_lines_come_at_intervals(plain, clock):
    plain(JobStarted("train", 100, "paper-unet"))
    for done in range(1, 101):
        clock.now += 1
        plain(JobAdvanced("train", done, 100, f"loss {1 / done:.2f}"))
    plain(JobFinished("train", 100.0))
    written = lines(plain)
    assert written[0] == "train: 100 to do: paper-unet"
    assert written[1] == "train 1/100 (1 %), 1 min 39 s left: loss 1.00"
    assert written[2] == "train 6/100 (6 %), 1 min 34 s left: loss 0.17"
    assert written[-2] == "train 100/100 (100 %): loss 0.01"
    assert written[-1] == "train finished in 1 min 40 s"
    assert len(written) == 1 + 20 + 2


def test_time_left_that_a_job_tells_itself(plain, clock):
    plain(JobStarted("predict (share 2 of 4)", 3))
    for done, left in ((1, 0.0), (2, 40.0)):
        clock.now += 10
        plain(JobAdvanced("predict (share 2 of 4)", done, 3, "a", left))
    assert lines(plain)[1:] == [
        "predict (share 2 of 4) 1/3 (33 %): a",
        "predict (share 2 of 4) 2/3 (66 %), 40.0 s left: a",
    ]


def test_a_job_inside_another_speaks_only_if_it_is_long(plain, clock):
    plain(JobStarted("train", 2))
    for seconds in (1, 8):
        plain(JobStarted("validate", 2))
        for done in (1, 2):
            clock.now += seconds
            plain(JobAdvanced("validate", done, 2))
        plain(JobFinished("validate", 2.0 * seconds))
    plain(JobFinished("train", 18.0))
    assert lines(plain) == [
        "train: 2 to do",
        "validate 1/2 (50 %), 8.0 s left",
        "validate finished in 16.0 s",
        "train finished in 18.0 s",
    ]


def test_tiles_speak_only_in_long_steps(plain, clock):
    for done in range(1, 11):
        clock.now += 0.1
        plain(TileDone("backward", done, 10, 2.0 * (10 - done)))
    assert lines(plain) == []
    plain(StepMeasured("backward", 10, 1.0, 1, 1, 0))
    for done in range(1, 11):
        plain(TileDone("backward", done, 10, 2.0 * (10 - done)))
        clock.now += 3
    assert lines(plain)[0] == "tiles 3/10 (30 %), 14.0 s left: backward"
    assert len(lines(plain)) == 4


def test_metrics_and_notices(plain):
    plain(MetricsLogged("train", 1, 1, {"loss": 0.5}))
    plain(MetricsLogged("val", 1, 8, {"loss": 0.123456, "dice": 0.9}))
    plain(Notice("wrote [bold]out.tif[/bold]"))
    plain(Notice("no mpp", warning=True))
    plain(Notice("a " * 200))
    assert lines(plain) == [
        "val, epoch 1: loss 0.12346, dice 0.9",
        "wrote [bold]out.tif[/bold]",
        "warning: no mpp",
        f"{'a ' * 200}",  # in one line, so that a log can be searched
    ]


def test_bars_show_rate_time_left_and_memory(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with Terminal(console, clock=clock) as terminal:
        terminal(JobStarted("train [x]", 10, "start"))
        clock.now += 20
        terminal(JobAdvanced("train [x]", 4, 10, "slide [red]"))
        terminal(TileDone("backward", 3, 9, 60.0))
        terminal(StepMeasured("backward", 1_024_000_000, 31.0, 600 << 20, 700 << 20, 1 << 30))
        clock.now += 1
        terminal(Notice("written"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("train [x]", "4/10", "left", "1.02 Gpx in 31.0 s, peak 600 MiB of 1 GiB", "written"):
        assert text in shown, text


def test_patches_of_a_bag_are_counted(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with Terminal(console, clock=clock) as terminal:
        terminal(JobStarted("train", 10, "start"))
        terminal(StepMeasured("backward", 1_024_000_000, 31.0, 600 << 20, 700 << 20, 0, patches=12_345))
        clock.now += 1
        terminal(Notice("written"))
    assert "12,345 patches in 31.0 s, peak 600 MiB" in console.file.getvalue()  # type: ignore[attr-defined]


def test_preparations_are_shown_on_a_terminal_while_they_last_and_leave_nothing(clock, plain):
    events = [
        JobStarted("train", 3),
        Preparing("plan"),
        Preparing("plan", 7),
        Preparing("plan", 9, 245.0),
        Preparing("plan", 9, 245.0, over=True),
    ]
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with Terminal(console, clock=clock) as terminal:
        frames = []
        for event in events:
            clock.now += 3
            terminal(event)
            page = Console(file=io.StringIO(), width=160)
            page.print(terminal._bars.get_renderable())
            frames.append(page.file.getvalue())  # type: ignore[attr-defined]
    assert "plan" not in frames[0]
    assert "3.0 s" in frames[2]
    assert "7 tried" in frames[2]
    assert "9 tried, fastest so far 4 min 05 s a step" in frames[3]
    assert "0/" not in next(line for line in frames[3].splitlines() if "plan" in line)
    assert "plan" not in frames[4]
    assert "train" in frames[4]
    for event in events[1:]:
        plain(event)
    assert lines(plain) == []


def test_a_job_that_was_never_announced_is_shown_all_the_same(plain):
    plain(JobAdvanced("label", 1, 1))
    plain(JobFinished("other", 0.5))
    assert lines(plain) == ["label: 1 to do", "label 1/1 (100 %)", "other finished in 500 ms"]
