"""Whether this version is slower than another checkout: the founding step, a deep one and the zoo's dozen, in turn.

    python bench/against.py --base DIR [--rounds 7] [--slide PATH --mask PATH] [--only SUBSTRING]

DIR is a checkout of the other version. For each case two processes, one with each version's source, capture and plan
once and then take one step in turn; nothing else should run. `ratio` is the median over the rounds of this version's
step over the other's, `capture_ratio` the same of the first call, which captures and plans, `peak_mib` the peak of each
process. The founding step (the paper's network on a slide of 16000 x 64000 px in 1 GiB) is left out without `--slide`
and `--mask`. The deep step is Unet(resnet34) in training mode on noise of 2048 x 2048 px in 8 GiB. Prints one JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

HERE = Path(__file__).resolve().parents[1]
FOUNDING, DEEP = "founding step", "deep step"
_SECONDS, _MOST_ROUNDS = 15.0, 40
"""Short steps are taken more often: so long with each version, but not more than so many times."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slide", type=Path)
    parser.add_argument("--mask", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--serve", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.slide, args.mask)
        return
    from bench.zoo_models import QUICK

    cases = [*([FOUNDING] if args.slide and args.mask else []), DEEP, *QUICK]
    results = {}
    for case in (name for name in cases if args.only in name):
        results[case] = compare(case, args)
        print(case, results[case], file=sys.stderr, flush=True)
    overall = geometric_mean(result["ratio"] for result in results.values())
    print(json.dumps({"rounds": args.rounds, "geometric_mean": round(overall, 4), "cases": results}))


def compare(case: str, args: argparse.Namespace) -> dict[str, Any]:
    sources = {"base": args.base / "src", "now": HERE / "src"}
    versions = {name: start(source, case, args) for name, source in sources.items()}
    firsts, seconds, last = {}, {}, {}
    for name, version in versions.items():
        firsts[name] = answer(version)
        seconds[name] = [answer(version)["seconds"]]  # the first step is another
    longest = max(seconds["base"][0], seconds["now"][0])
    for turn in range(max(args.rounds, min(_MOST_ROUNDS, int(_SECONDS / longest)))):
        for name in sorted(versions, reverse=bool(turn % 2)):
            last[name] = answer(versions[name])
            seconds[name].append(last[name]["seconds"])
    for version in versions.values():
        version.kill()
        version.wait()
    steps = {name: median(values[1:]) for name, values in seconds.items()}
    ratios = [now / base for now, base in zip(seconds["now"][1:], seconds["base"][1:], strict=True)]
    return {
        "ratio": round(median(ratios), 4),
        "seconds": {name: round(value, 4) for name, value in steps.items()},
        "capture_ratio": round(firsts["now"]["seconds"] / firsts["base"]["seconds"], 3),
        "same_plan": firsts["now"]["plan"] == firsts["base"]["plan"],
        "peak_mib": {name: step["peak_bytes"] >> 20 for name, step in last.items()},
    }


def start(source: Path, case: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--serve", case]
    for flag, path in (("--slide", args.slide), ("--mask", args.mask)):
        command += [flag, str(path)] if path else []
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def answer(version: subprocess.Popen[str]) -> dict[str, Any]:
    assert version.stdin is not None
    assert version.stdout is not None
    version.stdin.write("\n")
    version.stdin.flush()
    found: dict[str, Any] = json.loads(version.stdout.readline())
    return found


def serve(case: str, slide: Path, mask: Path) -> None:
    """Capture and plan at the first line of input, a step at each other one; answers with the seconds."""
    import torch

    import gigagrad as gg

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    image: Any
    target: Any
    if case == FOUNDING:
        model, image, target = gg.models.resolve("paper-unet"), str(slide), str(mask)
        engine = gg.compile(model, gg.losses.bce, memory="1 GiB")
    elif case == DEEP:
        import gigagrad.models.torchvision_operators

        model = gg.models.resolve("smp:Unet?encoder_name=resnet34").train()
        image, target = torch.rand(3, 2048, 2048), (torch.rand(1, 2048, 2048) > 0.5).float()
        engine = gg.compile(model, torch.nn.functional.binary_cross_entropy_with_logits, memory="8 GiB")
    else:
        model, engine, image, target = of_the_zoo(case)
    sys.stdin.readline()
    begun = time.perf_counter()
    plan = engine.plan(image, target)
    told = {"tiles": [segment.tile for segment in plan.segments], "layout": plan.memory_format, "workers": plan.workers}
    print(json.dumps({"seconds": time.perf_counter() - begun, "plan": told}, default=str), flush=True)
    while sys.stdin.readline():
        model.zero_grad()
        begun = time.perf_counter()
        engine.backward(image, target)
        took = time.perf_counter() - begun
        assert engine.last_run is not None
        print(json.dumps({"seconds": took, "peak_bytes": engine.last_run.peak_bytes}), flush=True)


def of_the_zoo(case: str) -> tuple[Any, Any, Any, Any]:
    import torch

    import gigagrad as gg
    from bench.zoo_models import subjects
    from bench.zoo_step import LARGE, build, loss, make_inputs, settle

    subject = next(s for s in subjects(case.split("/")[0]) if s.name == case)
    found = settle(subject)
    height, width = LARGE if tuple(found["size"]) == subject.sizes[0] and len(subject.sizes) > 1 else found["size"]
    model = build(subject, torch.float32, found["frozen"])
    image, target = make_inputs(subject, (height, width), torch.float32)
    return model, gg.compile(model, loss, tile=(height // 4, width // 4)), image, target


sys.path.insert(0, str(HERE))
if __name__ == "__main__":
    main()
