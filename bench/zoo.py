"""Does every published architecture train exactly? One model of each family, in training mode, against plain autograd.

    python bench/zoo.py --out zoo.jsonl [--suite timm] [--only SUBSTRING] [--quick] [--exact-only] [--jobs 2] [--again]
    python bench/zoo.py --out zoo.jsonl --table docs/zoo.md

Every model runs in processes of its own, under a time and a memory limit, so that a crash costs one entry. The first
compares one step with whole-image autograd on a deep copy: the loss, the gradient of every parameter and every buffer
that the step changes (running statistics). Two more measure seconds and memory of one step in float32 on a larger
image, with and without gigagrad (left out by `--exact-only`). One JSON line per model is appended to `--out`; models
that are in it already are skipped unless `--again`. Prints one JSON line last; exits with 1 if any model failed.

How errors are measured. For each tensor: the largest absolute difference, divided by the largest absolute value of
plain autograd's tensor or by 1e-4 of the largest value among all tensors compared, whichever is more: a gradient that
is zero but for rounding has no relative error of its own. The comparison is in float64; models whose code insists on
float32 are compared in that. `rounding` is the same measure between plain autograd and plain autograd after the last
bit of the image and of every parameter has been changed: what no implementation can be expected to better. A model is
exact when its error is at most 1e-9 (1e-4 where it computes in float32) or at most ten times `rounding`.

The same step is then taken in float32, which runs on other kernels and in another memory layout. There a ReLU whose
input is zero but for rounding may switch and change single gradients by tens of percent, in plain autograd as well;
`float32_error` is therefore the error against float64 of the loss or of the median gradient. It counts as a failure
above 5 % and ten times plain autograd's own.

What is changed before the comparison, alike for both sides: dropout and stochastic depth are switched off (p = 0);
parameters that are constant, such as a zero-initialised scale, get noise, so that no branch is invisible; a BatchNorm
that would see a single value, which PyTorch refuses in training mode, is put into evaluation mode (`frozen`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from typing import Any

from bench.zoo_models import QUICK, SUITES, subjects


def run_child(task: str, name: str, args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    script = Path(__file__).with_name("zoo_step.py")
    command = [sys.executable, str(script), task, name, "--given", json.dumps(given), "--memory", str(args.memory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    fate, start = "", time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, env=environment)
        output = done.stdout
        if done.returncode:
            tail = (done.stderr.strip().splitlines() or [""])[-1]
            fate = f"ended with {done.returncode}: {tail[:300]}"
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        fate = f"no result within {args.limit} s"
    lines = [line for line in output.splitlines() if line.startswith('{"model"')]
    record = json.loads(lines[-1]) if lines else {"model": name, "phase": "start", "captured": False, "exact": False}
    if fate:
        record["error"] = {"phase": record["phase"], "class": "Killed", "line": fate}
    record["seconds"] = round(time.perf_counter() - start, 1)
    return record


def try_model(name: str, args: argparse.Namespace) -> dict[str, Any]:
    record = run_child("compare", name, args, {})
    if args.exact_only or not record["captured"] or "error" in record:
        return record
    sides = {task: run_child(task, name, args, record) for task in ("plain", "engine")}
    for task, side in sides.items():
        record[task] = side.get("measured") or side["error"]
    return record


def summary(records: list[dict[str, Any]], absent: list[str]) -> dict[str, Any]:
    reasons = Counter(failure(record) for record in records)
    reasons.pop("", None)
    exact = [record for record in records if record["exact"]]
    return {
        "tried": len(records),
        "captured": sum(record["captured"] for record in records),
        "exact": len(exact),
        "streamed_fully": sum(not record["whole_field"] for record in exact),
        "whole_field": sum(bool(record["whole_field"]) for record in exact),
        "failed": dict(reasons.most_common()),
        "not_installed": absent,
    }


def failure(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"{record['error']['phase']}: {record['error']['class']}"
    if not record["exact"]:
        return "inexact"
    if record.get("float32_error", 0.0) > max(0.05, 10 * record.get("plain_float32_error", 0.0)):
        return "inexact in float32"
    broken = [task for task in ("plain", "engine") if "class" in record.get(task, {})]
    return f"measuring {broken[0]}: {record[broken[0]]['class']}" if broken else ""


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, one section per suite."""
    lines = ["# The zoo", "", "What `bench/zoo.py` measured; its text says how.", ""]
    lines += [f"`{json.dumps(summary(records, []))}`", ""]
    for suite in SUITES:
        chosen = [record for record in records if record["model"].startswith(f"{suite}/")]
        if not chosen:
            continue
        lines += [f"## {suite}", "", "| model | image | result | worst error | whole-field operators | kept B/px | "
                  "time | peak |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
        lines += [row(record) for record in sorted(chosen, key=lambda record: record["model"])] + [""]
    return "\n".join(lines)


def row(record: dict[str, Any]) -> str:
    name, size = record["model"].split("/", 1)[1], " x ".join(map(str, record.get("size", ())))
    if "error" in record:
        line = record["error"]["line"][:120].replace("|", r"\|")
        return f"| {name} | {size} | {failure(record)} | | {line} | | | |"
    worst = max(record[f"{kind}_error"] for kind in ("loss", "gradient", "buffer"))
    whole = Counter(record["whole_field"])
    most = ", ".join(operator.removeprefix("aten.").split(".")[0] for operator, _ in whole.most_common(4))
    operators = f"{whole.total()}: {most}{', ...' if len(whole) > 4 else ''}" if whole else "none"
    plain, engine = record.get("plain", {}), record.get("engine", {})
    ratios = ["", ""]
    if "seconds" in plain and "seconds" in engine:
        ratios = [f"{engine[key] / max(plain[key], 1e-9):.2f}x" for key in ("seconds", "peak_bytes")]
    return (
        f"| {name} | {size} | {failure(record) or 'exact'} | {worst:.0e} ({record['computes_in']}) | {operators} | "
        f"{record['kept_bytes_per_px']:g} | {' | '.join(ratios)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"), help="JSON lines, appended to")
    parser.add_argument("--suite", choices=SUITES)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--quick", action="store_true", help="a dozen models")
    parser.add_argument("--again", action="store_true", help="also models that are in --out already")
    parser.add_argument("--exact-only", action="store_true", help="no measurements of time and memory")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=600, help="seconds for each process")
    parser.add_argument("--memory", type=int, default=10 * 2**30, help="bytes for each process")
    parser.add_argument("--table", type=Path, help="render --out as Markdown and run nothing")
    args = parser.parse_args()
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    records = {record["model"]: record for record in known}  # the last line of a model counts
    if args.table:
        args.table.write_text(table(list(records.values())))
        return
    found = {suite: subjects(suite) for suite in ([args.suite] if args.suite else SUITES)}
    names = [s.name for suite in found.values() for s in suite if args.only in s.name]
    names = [name for name in names if name in QUICK or not args.quick]
    due = [name for name in names if args.again or name not in records]
    with ThreadPoolExecutor(args.jobs) as pool, args.out.open("a") as out:
        for done in as_completed([pool.submit(try_model, name, args) for name in due]):
            record = done.result()
            records[record["model"]] = record
            print(json.dumps(record), file=out, flush=True)
            print(f"{record['model']}: {failure(record) or 'exact'} ({record['seconds']} s)", flush=True)
    chosen = [records[name] for name in names]
    print(json.dumps(summary(chosen, [s for s, models in found.items() if not models])))
    sys.exit(any(failure(record) for record in chosen))


if __name__ == "__main__":
    main()
