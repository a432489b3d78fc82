"""The commands: what each calls and prints. Packages that take long to load are imported where they are needed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from gigagrad.errors import ConfigError

if TYPE_CHECKING:
    from gigagrad.events import Listener
    from gigagrad.scaling import Link


def demo(args: argparse.Namespace) -> None:
    from gigagrad.demo.run import FULL, QUICK, run_demo

    with _progress() as listener:
        result = run_demo(
            args.out, QUICK if args.quick else FULL, slides=args.slides, memory=args.memory, listeners=(listener,)
        )
    print(result)


def label(args: argparse.Namespace) -> None:
    from gigagrad.cohorts import find_slides
    from gigagrad.cohorts.slides import label_slides

    slides = [row.slide for row in find_slides(args.slides)]
    with _progress() as listener:
        masks = label_slides(
            slides,
            args.out,
            mpp=args.mpp,
            bands=args.bands,
            share=_share(args, listener),
            overwrite=args.overwrite,
            listeners=(listener,),
        )
    for mask in masks:
        print(mask)


def plan(args: argparse.Namespace) -> None:
    import numpy as np

    from gigagrad.config.machines import planned_for
    from gigagrad.devices.machine import Gpu
    from gigagrad.execution import compile
    from gigagrad.losses import named_loss
    from gigagrad.models import resolve
    from gigagrad.models.bag_names import is_bag_name
    from gigagrad.reports.charts import check_picture, draw_plan
    from gigagrad.reports.plan_study import make_study, plan_page, scale_rows, scale_tables
    from gigagrad.scaling import Scaling
    from gigagrad.stores import PlannedDiskTier
    from gigagrad.training.targets import planned_target
    from gigagrad.units import parse_bytes

    if is_bag_name(args.model) and args.patches is None:
        of = "one bag" if args.cohort is None else "one bag, without --cohort"
        raise ConfigError(f"{args.model} takes patches, not slides; plan {of}: --patches N, each of --size")
    if args.machines is not None or args.cohort is not None:
        _plan_cohort(args)
        return
    if args.size is None or args.deadline is not None:
        raise ConfigError("give --size HEIGHTxWIDTH, or --cohort with --machines and --deadline")
    if args.picture is not None:
        check_picture(args.picture)
    link = _link(args)
    device, machine = planned_for(args.device, args.card, args.rates, args.threads, args.memory)
    scratch = args.scratch
    if scratch is None and args.scratch_bytes is not None:
        scratch = PlannedDiskTier(parse_bytes(args.scratch_bytes))
    model, loss = resolve(args.model, published=False), None if args.predict else named_loss(args.loss)
    engine = compile(
        model.train(not args.predict),
        None if loss is None else loss.function,
        memory=args.memory,
        scratch=scratch,
        scratch_bytes=args.scratch_bytes,
        storage=args.storage,
        device=device,
    )
    # One pixel, seen everywhere: a plan asks for the shape and the dtype of images, not for their memory.
    bag = () if args.patches is None else (args.patches,)
    slide = np.broadcast_to(np.uint8(255), (*bag, args.channels, *args.size))
    target = None if loss is None else planned_target(model, loss, slide.shape)
    rates = "" if args.rates is None else f"by the rates in {args.rates.name}"
    if args.rates is not None and isinstance(machine, Gpu):
        rates += f", measured on {machine.card}"
    with _progress(quiet=args.json) as listener:
        engine.events.subscribe(listener)
        made = engine.plan(slide, target, machine=machine)
        problem = engine.problem(slide, target, machine=machine)
        study = make_study(args.model, problem, made, rates=rates, listeners=(listener,))
    if args.picture is not None:
        draw_plan(study, args.picture)
    scaling = Scaling(problem, made, link, args.slides_per_step or 1)
    if args.json:
        told = {"advice": list(map(dataclasses.asdict, study.advice))}
        if args.ranks is not None:
            told["scaling"] = scale_rows(scaling, args.ranks)
        print(json.dumps(made.to_dict() | told, indent=2))
        return
    _show(plan_page(study, () if args.ranks is None else scale_tables(scaling, args.ranks)))
    if args.picture is not None:
        print(args.picture)


_OF_ONE_IMAGE = (
    "size",
    "patches",
    "memory",
    "scratch",
    "scratch_bytes",
    "rates",
    "card",
    "threads",
    "ranks",
    "picture",
)


def _plan_cohort(args: argparse.Namespace) -> None:
    """Plan every size of slide of a cohort on every kind of machine, and show the cheapest mix of these."""
    from gigagrad.cohorts import find_slides
    from gigagrad.config.machines import read_kinds
    from gigagrad.reports.mix_study import mix_tables, plan_cohort
    from gigagrad.reports.tables import Shown
    from gigagrad.units import parse_seconds

    if None in (args.cohort, args.machines, args.deadline):
        raise ConfigError("a cohort is planned for with --cohort, --machines and --deadline; give all three")
    if beside := [name for name in _OF_ONE_IMAGE if getattr(args, name)]:
        raise ConfigError(f"--{beside[0].replace('_', '-')} is of one image; leave it out, or --cohort and --machines")
    try:
        deadline = parse_seconds(args.deadline)
    except ValueError as error:
        raise ConfigError(f"--deadline: {error}") from error
    kinds, slides = read_kinds(args.machines), find_slides([args.cohort], args.split)
    loss = None if args.predict else args.loss
    with _progress(quiet=args.json) as listener:
        study = plan_cohort(args.model, loss, slides, kinds, deadline, storage=args.storage, listeners=(listener,))
    if args.json:
        print(json.dumps(study.to_dict(), indent=2))
        return
    note = "" if args.predict else " Steps are counted as if no machine waited for another."
    _show(*map(Shown, mix_tables(study, note)))


def _link(args: argparse.Namespace) -> Link:
    """Read the link between --ranks. Raises `ConfigError` for a text that is none, and for what needs --ranks."""
    from gigagrad.scaling import parse_link

    if args.ranks is None and (args.link or args.slides_per_step):
        raise ConfigError("--link and --slides-per-step are of several ranks; say how many with --ranks 1..64")
    if args.ranks is not None and args.predict:
        raise ConfigError("--ranks share training steps; for predictions give each machine slides of its own")
    return parse_link(args.link or "10Gbit/s,50us")


def init(args: argparse.Namespace) -> None:
    from gigagrad.config import schema
    from gigagrad.config.fit import write_template
    from gigagrad.training import FitConfig

    if args.schema:
        print(json.dumps(schema(FitConfig), indent=2))
    elif args.slides is None:
        raise ConfigError("name the cohort with --slides, or ask for the --schema of a settings file")
    else:
        print(write_template(args.out, args.slides, overwrite=args.overwrite))


def fit(args: argparse.Namespace) -> None:
    from gigagrad.ranks import TIMEOUT_SECONDS, from_environment

    ranks = from_environment(getattr(args, "rank_timeout", TIMEOUT_SECONDS))
    with ranks.job_error_scope():
        _fit(args, quiet=ranks.index > 0)


def _fit(args: argparse.Namespace, *, quiet: bool) -> None:
    from gigagrad import training
    from gigagrad.prediction.scores import spread

    settings = _given(args, without=("config", "trust", "overwrite", "folds"))
    if args.config is None:
        config = training.FitConfig.from_dict(settings)
    else:
        for name in training.FitConfig.PATHS:  # relative to where they were typed, not to the file
            if name in settings:
                settings[name] = settings[name].absolute()
        config = training.FitConfig.from_yaml(args.config, settings, args.trust)
    if args.folds:
        from gigagrad.reports.tables import Shown, folds_table

        with _progress(quiet=quiet) as listener:
            folds = training.cross_validate(config, (listener,), overwrite=args.overwrite, trust=args.trust)
        if not quiet:
            _show(Shown(folds_table(folds)))
        return
    with _progress(quiet=quiet) as listener:
        result = training.fit(config, (listener,), overwrite=args.overwrite)
    if quiet:
        return
    if result.scores:
        name = "Dice" if result.metric == "dice" else result.metric
        told = {"accuracy": result.accuracy, "C-index": result.c_index}
        more = "".join(f", {what} {value:.4f}" for what, value in told.items() if value is not None)
        plural = "s" if len(result.scores) > 1 else ""
        print(f"test {name} {spread(result.scores.values())} over {len(result.scores)} slide{plural}{more}")
    plural, out = "s" if result.steps != 1 else "", getattr(args, "out", result.out)
    print(f"{result.steps} step{plural}, best epoch {result.best_epoch} of {result.epochs}; the run is in {out}")


def predict(args: argparse.Namespace) -> None:
    from gigagrad import prediction

    with _progress() as listener:
        config = prediction.PredictConfig.from_dict({**_given(args), "share": _share(args, listener)})
        results = prediction.predict(config, (listener,))
    failed = [result for result in results if result.failed]
    print(f"{len(results) - len(failed)} of {len(results)} slides are in {args.out}")
    if failed:
        more = f" ({len(failed)} of {len(results)} slides failed)" if len(results) > 1 else ""
        raise ConfigError(f"{failed[0].name}: {failed[0].error}{more}")


def export(args: argparse.Namespace) -> None:
    from gigagrad.prediction.export import export as write_network
    from gigagrad.units import format_bytes

    with _progress() as listener:
        settings = {"int8": args.int8, "trust": args.trust, "overwrite": args.overwrite}
        written = write_network(args.run, args.out, **settings, listeners=(listener,))
    before = "" if args.int8 is None else f", {format_bytes(written.float_bytes)} in float32"
    print(f"{written.folder} holds the network, {format_bytes(written.written_bytes)} as ONNX{before}")


def embed(args: argparse.Namespace) -> None:
    from gigagrad import prediction

    with _progress() as listener:
        config = prediction.EmbedConfig.from_dict({**_given(args), "share": _share(args, listener)})
        results = prediction.embed(config, (listener,))
    print(f"{len(results)} of {len(results)} slides are in {config.folder}")


def evaluate(args: argparse.Namespace) -> None:
    from gigagrad.prediction.cohort_scores import evaluate_masks, evaluate_model
    from gigagrad.reports.tables import Shown, evaluation_tables

    with _progress(quiet=args.json) as listener:
        settings: dict[str, Any] = {
            "split": _split(args),
            "classes": args.classes,
            "out": args.out,
            # Without a folder there is nowhere to meet: only who asks for a share is told so.
            "share": _share(args, listener) if args.out is not None else args.share or "1/1",
            "listeners": (listener,),
        }
        if args.predictions is not None:
            evaluation = evaluate_masks(args.predictions, args.slides, **settings)
        else:
            settings |= {name: getattr(args, name) for name in ("memory", "scratch", "device", "trust", "coords")}
            evaluation = evaluate_model(args.run, args.slides, **settings)
    if evaluation is None:  # which was told
        return
    if args.json:
        print(json.dumps(evaluation.to_dict(), indent=2))
    else:
        _show(*map(Shown, evaluation_tables(evaluation)))


def _split(args: argparse.Namespace) -> str | None:
    """Return the split of the rows that are scored, None for all; by default test slides, where there is any split."""
    from gigagrad.cohorts import find_slides, folds_of, is_table, read_rows

    if args.split is None:
        parted = any(row.split is not None for row in find_slides([args.slides]))
        if not parted and is_table(args.slides):
            parted = bool(folds_of(args.slides, *read_rows(args.slides)))
        return "test" if parted else None
    return None if args.split == "all" else args.split


def attribute(args: argparse.Namespace) -> None:
    from gigagrad.prediction.attribution import attribute as write_maps

    with _progress() as listener:
        settings = {**_given(args, without=("run", "slides", "out")), "share": _share(args, listener)}
        pictures = write_maps(args.run, args.slides, args.out, **settings, listeners=(listener,))
    for picture in pictures:
        print(picture)


def report(args: argparse.Namespace) -> None:
    from gigagrad.reports.report import write_report

    print(write_report(args.run, args.out, predictions_dir=args.predictions))


def view(args: argparse.Namespace) -> None:
    from gigagrad.view import view as show

    show(
        args.sources,
        masks=args.mask,
        predictions=args.predictions,
        model=args.model,
        classes=args.classes,
        trust=args.trust,
        memory=args.memory,
        device=args.device,
        host=args.host,
        port=args.port,
        browser=args.browser,
        tell=lambda line: print(line, flush=True),
    )


def calibrate(args: argparse.Namespace) -> None:
    from gigagrad.execution.calibration import calibrate as measure
    from gigagrad.reports.tables import Shown, rates_table

    with _progress() as listener:
        calibration = measure(device=args.device, scratch=args.scratch, listeners=(listener,))
    _show(Shown(rates_table(calibration)))
    print(f"saved in {calibration.path}")


def doctor(args: argparse.Namespace) -> None:
    from gigagrad.reports.doctor import diagnose, doctor_table

    if args.rates:
        from gigagrad.devices import device_for
        from gigagrad.reports.rates import rates_tables
        from gigagrad.reports.tables import Shown

        _show(*map(Shown, rates_tables(device_for("cpu").machine())))
        return
    checks = diagnose()
    _show(doctor_table(checks))
    failed = [check for check in checks if check.status == "failed"]
    if failed:
        raise ConfigError(f"{failed[0].name}: {failed[0].detail}; {failed[0].remedy}")


def _given(args: argparse.Namespace, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that were typed, of a command whose flags are a class's fields and have no defaults."""
    return {name: value for name, value in vars(args).items() if name not in {"command", "traceback", *without}}


def _share(args: argparse.Namespace, listener: Listener) -> str:
    """Return the share that `--share` names, or else the environment, which is told."""
    from gigagrad.events import Notice
    from gigagrad.shares import share_from

    typed: str | None = getattr(args, "share", None)
    if typed is not None:
        return typed
    share, said_by = share_from(os.environ)
    if share != "1/1":
        listener(Notice(f"share {share} by {said_by}; --share 1/1 takes every slide"))
    return share


def _progress(*, quiet: bool = False) -> AbstractContextManager[Listener]:
    """Make a listener that shows the work on standard output, or nothing at all."""
    if quiet:
        return nullcontext(lambda event: None)
    from rich.console import Console

    from gigagrad.terminal import Terminal

    return Terminal(Console())


def _show(*parts: Any) -> None:
    """Print parts of a page, an empty line between them."""
    from rich.console import Console

    # Into a file or a pipe as wide as most windows are; rich would assume 80.
    console = Console(width=None if sys.stdout.isatty() else 100)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(part)
