"""One image over several processes: the time of machines of their own, and what the simulator says of them.

    python bench/scale.py [--model smp:Unet?encoder_name=resnet34] [--side 8192] [--ranks 8 4 2] [--memory 2GiB]
        [--scratch DIR] [--link 10Gbit/s,50us | --wall] [--in-turn] [--steps 2] [--plot FILE]

A step in float32 on random bytes, norms in training mode, by so many gloo processes of one thread, and by one process
with the plan of the first ones. Each rank has a virtual clock (bench/simulated_ranks.py) that goes with its
processor time, and messages take what they would on `--link`; ranks compute one at a time, as each would have its
caches and memory to itself. So it does not matter how many cores are here, but leave the machine alone meanwhile.

Where fields go to files, such ranks still share a disk and the memory that keeps its files. With `--in-turn` each rank
does its whole work before the next one starts, on zeros in place of what others would send, and the clocks are put
together afterwards (bench/scale_turns.py). With `--wall` it is real time instead, for as many ranks as there are idle
cores: the link is what messages between these processes were measured to take, and the simulator goes by processes
that compute the whole image beside each other, as cores that are all busy are slower.

The simulator gets what each pass of one process took. The last of the `--steps` counts: kernels are compiled in the
first. `--memory` is of each of the first ranks; others have as much as they want. Prints one JSON line last; `--plot`
draws it (bench/scale_plot.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from bench.deep_step import FromBytes, loss
from bench.scale_turns import InTurn, clocks
from bench.simulated_ranks import SimulatedRanks
from gigagrad.events import Event, TileDone
from gigagrad.plans import Plan
from gigagrad.ranks import Ranks
from gigagrad.ranks.process_group import ProcessGroup
from gigagrad.scaling import Link, parse_link, tile_step
from tests.ranks.started import started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smp:Unet?encoder_name=resnet34")
    parser.add_argument("--side", type=int, default=8192, help="of the image, in pixels")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--link", default="10Gbit/s,50us")
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--in-turn", action="store_true", help="one rank after the other")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="draw times faster, predicted and measured: .svg or .png")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, nargs=2, help=argparse.SUPPRESS)  # of so many, in turn
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(1)
        work = in_turn if args.rank else together if "RANK" in os.environ else alone
        print(json.dumps(work(args, args.worker)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {count: (run_in_turn if args.in_turn else run)(folder, count) for count in args.ranks}
        (one,) = run(folder, None)
        beside = {count: run(folder, None, copies=count) if args.wall else [one] for count in args.ranks}
    line = {
        "network": args.model,
        "side": args.side,
        "clock": "wall" if args.wall else "virtual, in turn" if args.in_turn else "virtual",
        "link": one["link"],
        "one_rank_seconds": round(one["seconds"], 2),
        "runs": {count: compared(ranks, one, beside[count]) for count, ranks in found.items()},
        "predicted_times_faster": {
            count: round(one["seconds"] / step["seconds"], 2) for count, step in one["predicted"].items()
        },
        "plan": one["plan"],
    }
    if args.plot is not None:
        from bench.scale_plot import draw

        draw(line, args.plot)
    print(json.dumps(line))


def compared(ranks: list[dict[str, Any]], one: dict[str, Any], beside: list[dict[str, Any]]) -> dict[str, Any]:
    """What ranks took beside what was predicted of them, by processes that ran beside each other as they did."""
    seconds, count = max(rank["seconds"] for rank in ranks), str(len(ranks))
    predicted = max((copy["predicted"][count] for copy in beside), key=lambda step: step["seconds"])
    found = {
        "seconds": round(seconds, 2),
        "times_faster": round(one["seconds"] / seconds, 2),
        "processor_seconds": round(sum(rank["processor_seconds"] for rank in ranks) / one["processor_seconds"], 3),
        "predicted_seconds": round(predicted["seconds"], 2),
        "predicted_error": round(predicted["seconds"] / seconds - 1, 3),
        "most_sent_bytes": max(rank["sent_bytes"] for rank in ranks),
        "predicted_most_sent_bytes": predicted["sent_bytes"],
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "lost_seconds": {cause: round(lost, 3) for cause, lost in predicted["lost"].items()},
        "kept_plan": all(rank["kept_plan"] for rank in ranks),
    }
    losses = {rank["loss"] for rank in ranks if "loss" in rank}
    return found | ({"same_loss": losses == {one["loss"]}} if losses else {})


def run(folder: str, count: int | None, copies: int = 1) -> list[dict[str, Any]]:
    """What every rank found; None: one process by itself, or copies of it, with the plan that ranks left."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", folder]
    if count is None:
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(copies)]
    else:
        workers = started(command, count)
    printed = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("a rank failed")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def run_in_turn(folder: str, count: int) -> list[dict[str, Any]]:
    """As `run`."""
    found = []
    for index in range(count):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", folder, "--rank", str(index), str(count)]
        found.append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
    link = Link(**json.loads(Path(folder, "plan.json").read_text())["link"])
    ends = clocks(found, link.seconds)
    return [one | {"seconds": seconds} for one, seconds in zip(found, ends, strict=True)]


def together(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One of several ranks."""
    dist.init_process_group("gloo")
    ranks: Ranks = ProcessGroup()
    link = measured(ranks) if args.wall else parse_link(args.link)
    turn = Turn(folder / "turn")
    clocked = SimulatedRanks(ranks, link.seconds, turn=turn)
    clock = time.perf_counter if args.wall else lambda: clocked.clock
    engine, image, target, leave_plan = planned(args, folder, ranks if args.wall else clocked)
    for _ in range(args.steps):
        before, start, processor = engine.ranks.sent_bytes, clock(), time.process_time()
        value = engine.backward(image, target)
        seconds, processor = clock() - start, time.process_time() - processor
    assert engine.last_run is not None
    found = {
        "seconds": seconds,
        "processor_seconds": processor,
        "kept_plan": leave_plan(link),
        "loss": value.item(),
        "sent_bytes": engine.ranks.sent_bytes - before,
        "peak_bytes": engine.last_run.peak_bytes,
    }
    turn.release()
    dist.destroy_process_group()
    return found


def in_turn(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One of several ranks, while the others are not there."""
    index, count = args.rank
    ranks = InTurn(index, count, folder)
    engine, image, target, leave_plan = planned(args, folder, ranks)
    for _ in range(args.steps):
        before, start = ranks.sent_bytes, time.process_time()
        ranks.begin()
        engine.backward(image, target)
        rest, processor = ranks.since_meeting(), time.process_time() - start
    assert engine.last_run is not None
    ranks.leave_words()
    return {
        "met": ranks.met,
        "rest": rest,
        "processor_seconds": processor,
        "kept_plan": leave_plan(parse_link(args.link)),
        "sent_bytes": ranks.sent_bytes - before,
        "peak_bytes": engine.last_run.peak_bytes,
    }


def planned(
    args: argparse.Namespace, folder: Path, ranks: Ranks
) -> tuple[gg.Engine, torch.Tensor, torch.Tensor, Callable[[Link], bool]]:
    """An engine with the plan in the folder, but for the first ranks; its image and target, and what leaves the plan
    there that it has then, and says whether it is the same still.
    """
    path = folder / "plan.json"
    first = ranks.count == args.ranks[0]
    engine, image, target = prepared(args, memory=args.memory if first else None, mesh=ranks)
    if not first:
        engine.load_state_dict(json.loads(path.read_text()))
    engine.plan(image, target)
    before = engine.state_dict()

    def leave(link: Link) -> bool:
        state = engine.state_dict()
        if first and ranks.index == 0:
            path.write_text(json.dumps({"link": dataclasses.asdict(link), **state}))
        return state == before

    return engine, image, target, leave


class Turn:
    """A file that one process at a time has to itself."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def acquire(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def alone(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One process, what its passes take, and what the simulator makes of that."""
    state = json.loads((folder / "plan.json").read_text())
    link = Link(**state.pop("link"))
    engine, image, target = prepared(args)
    engine.load_state_dict(state)
    plan = engine.plan(image, target)
    clock = time.perf_counter if args.wall else time.process_time
    for _ in range(args.steps):
        processor = time.process_time()
        ticks: list[float] = []

        def tick(event: Event, ticks: list[float] = ticks) -> None:
            if isinstance(event, TileDone):
                ticks.append(clock())

        with engine.events.listening(tick):
            start = clock()
            value = engine.backward(image, target)
            end, processor = clock(), time.process_time() - processor
    problem, seconds = engine.problem(image, target), by_pass(plan, [start, *ticks, end])
    counts = sorted({*args.ranks, *(1 << power for power in range(7))})
    steps = {count: tile_step(problem, plan, count, link, seconds) for count in counts}
    return {
        "seconds": end - start,
        "processor_seconds": processor,
        "loss": value.item(),
        "link": dataclasses.asdict(link),
        "predicted": {count: dataclasses.asdict(step) for count, step in steps.items()},
        "plan": {
            "tiles": [segment.tiles for segment in plan.segments],
            "chunks": [segment.chunks for segment in plan.segments],
            "kept": [(field.tier, field.size_bytes) for field in plan.kept],
        },
    }


def by_pass(plan: Plan, ticks: list[float]) -> list[float]:
    """Seconds of each pass, from those of the start, of every tile and of the end; the last one has what follows."""
    ends, done = [ticks[0]], 0
    for step in plan.passes:
        done += plan.segments[step.segment].tile_count
        ends.append(ticks[done])
    ends[-1] = ticks[-1]
    return [end - start for start, end in pairwise(ends)]


def prepared(args: argparse.Namespace, **options: Any) -> tuple[gg.Engine, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = gg.models.resolve(args.model).train()
    if args.model.startswith("smp:"):
        model = FromBytes(model)
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (3, args.side, args.side), dtype=torch.uint8, generator=generator)
    target = torch.randint(0, 2, (1, args.side, args.side), dtype=torch.uint8, generator=generator)
    return gg.compile(model, loss, scratch=args.scratch, progress=False, **options), image, target


def measured(ranks: Ranks, rounds: int = 20, nbytes: int = 1 << 25) -> Link:
    """What messages take between these processes, all of which send at once: the first one's word counts."""
    message = torch.zeros(nbytes, dtype=torch.uint8)
    right, left = (ranks.index + 1) % ranks.count, (ranks.index - 1) % ranks.count

    def seconds(work: Callable[[], object]) -> float:
        work()
        start = time.perf_counter()
        for _ in range(rounds):
            work()
        return (time.perf_counter() - start) / rounds

    word = seconds(ranks.barrier)
    swap = seconds(lambda: ranks.exchange({right: message}, {left: nbytes}))
    latency, rate = ranks.all_gather_object([word / (ranks.count - 1), nbytes / max(swap - 2 * word, 1e-9)])[0]
    return Link(rate, latency)


if __name__ == "__main__":
    main()
