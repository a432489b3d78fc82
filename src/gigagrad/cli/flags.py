"""The command line as data: commands, flags, their defaults and the help that teaches them; and the parser made of it,
whose complaints are one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Final, NoReturn, get_args, get_origin, get_type_hints

from gigagrad import __version__
from gigagrad.cli import commands
from gigagrad.config import Settings, described
from gigagrad.errors import ConfigError, did_you_mean
from gigagrad.units import parse_bytes, parse_size

EXAMPLES = """\
A first look, from nothing to a report (about ten minutes):

    gigagrad demo

Your own slides, step by step:

    gigagrad label slides/*.svs --out masks
    gigagrad plan --model paper-unet --size 16000x64000 --memory 1GiB
    gigagrad init --slides cohort.csv                                  # a settings file to edit, or at once:
    gigagrad fit --slides cohort.csv --model paper-unet --memory 1GiB --out runs/first
    gigagrad predict --run runs/first --slides slides --out predictions
    gigagrad evaluate --run runs/first --slides cohort.csv
    gigagrad report --run runs/first --predictions predictions --out report.html

cohort.csv has one line per slide, for example (an empty mask: the tissue recipe makes the label):

    slide,mask,split
    slides/a.svs,masks/a.tif,train
    slides/b.svs,masks/b.tif,val
    slides/c.svs,annotations/c.geojson,test

Masks are images of class ids, QuPath's GeoJSON or ASAP's XML.
MODEL is paper-unet, timm:NAME, smp:NAME?key=value, monai:NAME?key=value or package.module:callable; of all patches of
a slide (fit --patch-size 224), with one label for each slide, mil:encoder=timm:NAME&head=abmil&classes=2.
Exit codes: 0 done, 2 something you can mend (one line says what), 130 interrupted (the same command continues).
"""

_MODEL = "paper-unet, timm:NAME, smp:NAME?key=value, monai:NAME?key=value or package.module:callable"


def _memory(text: str) -> str:
    """Check an amount of memory and return it as it was written, which is what configs and messages show."""
    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _size(text: str) -> tuple[int, int]:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _import_path(text: str) -> str:
    if not re.fullmatch(r"[\w.]+:[\w.]+", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected package.module:class")
    return text


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more")
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    """Read `8`, `1,2,4`, or `1..64`: powers of two between both, and both."""
    first, dots, last = text.partition("..")
    numbers = (first, last) if dots else text.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers) or (dots and int(last) < int(first)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers of ranks like 8, 1,2,4 or 1..64")
    found = {int(number) for number in numbers}
    between = range(max(found).bit_length()) if dots else ()
    return tuple(sorted(found | {1 << power for power in between if min(found) <= 1 << power <= max(found)}))


def _band(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _flag(help: str | None = None, **words: Any) -> dict[str, Any]:
    """Return what argparse is told of a flag."""
    return words if help is None else {"help": help, **words}


FLAGS: Final[dict[str, dict[str, Any]]] = {
    "--bands": _flag(
        "channels of slides to read, in this order, by name or counted from 1 (default: all)",
        nargs="+",
        type=_band,
        metavar="BAND",
    ),
    "--classes": _flag(
        "class ids by name, or by value in mask files: tumour=1 stroma=2 artefact=ignore unlabelled=0, or "
        "255=1; names alone count from 1, and whole=1+2 core=2 are regions that overlap",
        nargs="+",
        default=(),
        metavar="NAME=ID",
    ),
    "--device": _flag("where tiles are computed (default: cpu)", choices=("cpu", "cuda"), default="cpu"),
    "--grey": _flag(
        "read slides in grey, one channel: JPEG decodes in half the time", action=argparse.BooleanOptionalAction
    ),
    "--json": {"action": "store_true"},
    "--memory": _flag(
        "peak memory of the whole process (on a GPU: device memory), e.g. 1GiB; default: no bound", type=_memory
    ),
    "--mpp": _flag("micrometres per pixel of level 0 of every slide, over what the files say", type=float),
    "--out": _flag(type=Path, metavar="DIR", required=True),
    "--overwrite": {"action": "store_true"},
    "--predictions": _flag("folder that 'predict' wrote", type=Path, metavar="DIR"),
    "--run": _flag("run folder or model", type=Path, metavar="DIR", required=True),
    "--scratch": _flag(
        "folder on a fast disk for activations that do not fit in --memory; default: they are computed again",
        type=Path,
        metavar="DIR",
    ),
    "--share": _flag(
        "only the I-th of N shares, I from 1 to N, which any machines do side by side into one --out; "
        "default: by Slurm's array or torchrun, else 1/1, every slide",
        metavar="I/N",
    ),
    "--slides": _flag(type=Path, required=True),
    "--split": _flag("only these rows of a CSV", choices=("train", "val", "test")),
    "--storage": _flag(
        "store saved activations in fewer bits: float16, bfloat16, or 'error E' in --scratch; default: exact",
        metavar="HOW",
    ),
    "--trust": _flag(
        "code that the model file may import, package.module:class; without it none but gigagrad's and the "
        "libraries' (may be repeated)",
        type=_import_path,
        action="append",
        default=[],
        metavar="MODULE:CLASS",
    ),
}
"""The flags of more than one command: the same words mean the same everywhere."""

COMMANDS: Final[dict[str, tuple[str, str, Mapping[str, str | dict[str, Any]]]]] = {
    "demo": (
        "everything once, on slides made up for it, ending in a report",
        "Makes a small cohort, labels it, trains paper-unet, tests and predicts, takes one full training step on a "
        "16000 x 64000 slide, and prints the path of the report. Started again, it continues where it stopped.",
        {
            "--slides": _flag("test on the real slides in this folder as well", required=False, metavar="DIR"),
            "--out": _flag(
                "folder for everything (default: gigagrad-demo)", required=False, default=Path("gigagrad-demo")
            ),
            "--memory": _flag("budget of training and of the large step (default: 1GiB)", default="1GiB"),
            "--quick": _flag("a minute's version: fewer, smaller slides and a poor network", action="store_true"),
        },
    ),
    "label": (
        "make tissue masks of slides",
        "Follows the recipe of the founding experiment (Remedios et al., MIDL 2023): dark enough at one eighth of the "
        "size, smoothed, holes filled. Writes DIR/STEM.tif per slide, 1 tissue and 0 background, at full size. A slide "
        "that cannot be read does not stop the others.",
        {
            "slides": _flag("files, folders, or CSVs", nargs="+", type=Path, metavar="SLIDE"),
            "--out": "folder for the masks",
            "--mpp": {},
            "--bands": _flag("channels to look at, one or three of bytes: by name or number", default=()),
            "--share": {},
            "--overwrite": "make masks again that exist; otherwise they are kept",
        },
    ),
    "plan": (
        "show what a training step would cost, without a slide",
        "Captures the model at the true size, chooses tiles within the budget, and prints its segments, where each "
        "activation is stored, where memory and time go, the smallest budget that works, and what more memory or "
        "scratch would buy. For another machine name its --memory, --scratch-bytes, --rates and --threads, or "
        "--device cuda, the memory of a GPU, which need not be here, and its --rates or --card; for many of them "
        "--ranks, and for a cohort --cohort, --machines and --deadline instead of --size.",
        {
            "--model": _flag(_MODEL, required=True),
            "--size": _flag("in pixels, e.g. 16000x64000", type=_size, metavar="HEIGHTxWIDTH"),
            "--channels": _flag("of the slide (default: 3)", type=_positive, default=3),
            "--patches": _flag("in a bag, of --size each, with one label (default: an image)", type=_positive),
            "--memory": {},
            "--scratch": {},
            "--scratch-bytes": _flag(
                "room for files in --scratch, e.g. 200GiB; without --scratch, on a disk that need not be here",
                type=_memory,
                metavar="SIZE",
            ),
            "--rates": _flag(
                "plan by the rates, and for the threads, of the machine on which 'calibrate' saved this file; with "
                "--device cuda those of its GPU, by 'calibrate --device cuda'",
                type=Path,
                metavar="FILE",
            ),
            "--card": _flag(
                "with --device cuda, plan by typical rates of this GPU, e.g. 'RTX 4090' or H100", metavar="NAME"
            ),
            "--threads": _flag(
                "plan for so many threads that compute tiles (default: those of --rates, else of this machine)",
                type=_positive,
                metavar="N",
            ),
            "--storage": {},
            "--loss": _flag(
                "bce, bce_dice, ce, dice, focal, mse, tversky or package.module:callable (default: bce)", default="bce"
            ),
            "--predict": _flag("plan a prediction instead of a training step", action="store_true"),
            "--device": {},
            "--ranks": _flag(
                "say what so many machines like this one would gain: 8, 1,2,4 or 1..64", type=_ranks, metavar="N"
            ),
            "--link": _flag(
                "with --ranks: what each has to the others (default: 10Gbit/s,50us)", metavar="RATE[,LATENCY]"
            ),
            "--slides-per-step": _flag(
                "with --ranks: which way of sharing so many slides is fastest (default: 1)", type=_positive, metavar="S"
            ),
            "--cohort": _flag(
                "instead of --size: find the cheapest --machines that go once through these slides by the --deadline",
                type=Path,
                metavar="CSV",
            ),
            "--split": {},
            "--machines": _flag(
                "with --cohort: a list of kinds of machines, each with name, price of an hour, memory, device, cores, "
                "rates or card, and most: how many there are",
                type=Path,
                metavar="YAML",
            ),
            "--deadline": _flag("with --cohort: time for all slides, e.g. 24h or 90min", metavar="TIME"),
            "--json": "print the plan, the advice, and what --ranks gain, as JSON",
            "--picture": _flag(
                "draw memory against time, and memory over the passes: .svg or .png", type=Path, metavar="FILE"
            ),
        },
    ),
    "init": (
        "write a settings file for fit, with every setting explained",
        "Looks at the cohort's columns, its classes and a few slides, and proposes a model and a loss, and a scale for "
        "slides of 16 bits or floats; everything else stands there as a comment, with its default. Then: gigagrad fit "
        "--config FILE.",
        {
            "--slides": _flag("cohort: a CSV or a folder, as fit takes it", required=False, metavar="CSV"),
            "--out": _flag(
                "settings file to write (default: run.yaml)", required=False, default=Path("run.yaml"), metavar="FILE"
            ),
            "--schema": _flag("print the JSON schema of settings files instead", action="store_true"),
            "--overwrite": "replace the file if it exists",
        },
    ),
    "fit": (
        "train a network on whole slides",
        "One step per slide, or per several, with exact gradients, of whole slides or, with --patch-size, of all their "
        "patches; keeps the weights of the lowest validation loss and tests them. Interrupted and started again, it "
        "continues bit for bit. Processes that torchrun starts train one network, each within --memory (see "
        "docs/training-over-ranks.md).",
        {
            "--slides": _flag(
                "cohort: slide,mask,split per line (or label for mask), or a folder: images/ and masks/, or nnU-Net's "
                "(required)",
                required=False,
                metavar="CSV",
            ),
            "--out": _flag("run folder (required)", required=False),
            "--config": _flag("settings from a file; flags win over it", type=Path, default=None, metavar="YAML"),
            "--folds": _flag(
                "a run for each fold, in OUT/fold-N, and how each does on its fold", action="store_true", default=False
            ),
            "--trust": _flag(
                "code that --config may import as model or loss, package.module:callable (repeatable)", default=[]
            ),
            "--overwrite": _flag("start anew in a folder that holds a run", default=False),
        },
    ),
    "predict": (
        "write a mask, QuPath outlines and a picture of every slide",
        "Whole slides, without borders of patches: DIR/masks/STEM.tif, DIR/geojson/STEM.geojson and "
        "DIR/overlays/STEM.png, or other --outputs. A model that scores whole slides, or all their patches, gives "
        "DIR/slides.csv. Slides that are finished are left alone, and one that fails does not stop the others.",
        {
            "--run": {},
            "--slides": _flag("files, folders, or CSVs with a 'slide'", metavar="SLIDE", nargs="+"),
            "--out": "folder for the predictions",
            "--classes": "names of the classes from 1 on, or NAME=ID; default: those of the training run",
            "--grey": "read slides in grey, one channel; default: as the training run did",
            "--bands": "channels of slides to read, by name or number; default: those of the training run",
        },
    ),
    "export": (
        "write a trained network as ONNX, of 8 bits where asked, and as torch.export saves it",
        "DIR/model.onnx and DIR/config.json: what 'predict --run DIR' takes, tile by tile, without PyTorch's own "
        "networks; DIR/model.pt2 of a network in float32. Networks that read the whole slide at once are refused.",
        {
            "--run": {},
            "--out": "folder for the files",
            "--int8": _flag(
                "cohort: weights and activations of 8 bits, calibrated on its training slides", type=Path, metavar="CSV"
            ),
            "--trust": {},
            "--overwrite": "replace a folder that is there",
        },
    ),
    "embed": (
        "write the features of all patches of every slide, as TRIDENT does",
        "Patches on tissue go through a frozen encoder: DIR/20x_224px_0px_overlap/features_NAME/SLIDE.h5 has features "
        "(N, D) and coords (N, 2). Slides that are finished are left alone, and one that fails does not stop the "
        "others.",
        {
            "--slides": _flag("files, folders, or CSVs with a 'slide'", metavar="SLIDE", nargs="+"),
            "--encoder": _flag(
                "what makes a vector of each patch, as timm:resnet18?pretrained=true; without its classifier",
                required=True,
                metavar="MODEL",
            ),
            "--out": "folder for the features",
        },
    ),
    "evaluate": (
        "score a network, or what it predicted, against true masks or labels",
        "Prints Dice and IoU per slide with their mean and standard deviation; of a cohort with labels accuracy, AUC, "
        "calibration, errors or the C-index, with 95 % intervals. Nothing is written without --out.",
        {
            "--run": _flag("run folder or model to score", required=False),
            "--predictions": {},
            "--slides": _flag("cohort with true masks or labels", metavar="CSV"),
            "--split": _flag(
                "which rows (default: test; all where no row has a split)", choices=("train", "val", "test", "all")
            ),
            "--classes": "names of the classes from 1 on, or NAME=ID; default: those of the run or predictions",
            "--coords": _flag(
                "folder with the corners of the patches of each slide; default: those of the run",
                type=Path,
                metavar="DIR",
            ),
            "--memory": {},
            "--scratch": {},
            "--device": {},
            "--trust": {},
            "--out": _flag(
                "folder for evaluation.json and the scores of each slide, which are not computed again", required=False
            ),
            "--share": {},
            "--json": "print the scores as JSON",
        },
    ),
    "attribute": (
        "show which places of a slide its score comes from",
        "Of a model that scores whole slides: DIR/NAME.tif, the exact gradient of the score for the pixels (saliency) "
        "as a pyramid, and DIR/NAME.png, it over the slide. Maps that are finished are left alone, and a slide that "
        "fails does not stop the others.",
        {
            "--run": {},
            "--slides": _flag("files, folders, or CSVs with a 'slide'", metavar="SLIDE", nargs="+"),
            "--out": "folder for the maps",
            "--of": _flag("whose score; default: that of the predicted class", metavar="CLASS"),
            "--module": _flag(
                "instead, the output of this module of the model, as network.attention: a map of its own",
                metavar="NAME",
            ),
            "--block": _flag(
                "side of the blocks over which gradients are added up (default: 8)",
                type=_positive,
                default=8,
                metavar="PX",
            ),
            "--memory": {},
            "--scratch": {},
            "--classes": "names of the classes, or NAME=ID; default: those of the training run",
            "--split": {},
            "--device": {},
            "--trust": {},
            "--share": {},
            "--overwrite": "make maps again that are there",
        },
    ),
    "report": (
        "write a run as one HTML file",
        "Loss curves, Dice, slides and what lies over them, the plan, and predicted beside measured memory. The file "
        "needs no network.",
        {
            "--run": "run folder",
            "--predictions": "folder that 'predict' wrote, for pictures",
            "--out": _flag("file to write", metavar="HTML"),
        },
    ),
    "view": (
        "look at slides, masks, predictions and runs in a web page",
        "Deep zoom over every format that is read, with what lies over it, and the curves of a run while it goes on. "
        "What several runs or folders of predictions say of a slide is shown side by side, in step. "
        "Prints the page's address, which holds a secret token and answers this machine alone, until Ctrl-C.",
        {
            "sources": _flag(
                "slides, folders of them, CSVs, folders that 'fit' or 'predict' wrote, or a folder of such folders",
                nargs="+",
                type=Path,
                metavar="SOURCE",
            ),
            "--mask": _flag(
                "masks or annotations of the slide; of several slides folders with a file for each",
                nargs="+",
                type=Path,
                default=[],
                metavar="PATH",
            ),
            "--predictions": "folder that 'predict' wrote, or a mask or probabilities of the one slide",
            "--model": _flag("run or saved model that predicts what is in view", type=Path, metavar="RUN"),
            "--classes": {},
            "--memory": {},
            "--device": {},
            "--trust": {},
            "--port": _flag("where the page is served (default: one that is free)", type=int, default=0, metavar="N"),
            "--host": _flag(
                "address to listen at (default: 127.0.0.1, which only this machine reaches)", default="127.0.0.1"
            ),
            "--no-browser": _flag("print the address only", action="store_false", dest="browser", default=True),
        },
    ),
    "calibrate": (
        "measure this machine's speed once, so that plans predict times better",
        "Times operators, threads, copies in memory and the disk, and saves the rates in the user's cache folder; with "
        "--device cuda those of the GPU, of what the processor does for it, and of copies between both, saved for this "
        "card. Takes less than a minute; let nothing else run meanwhile.",
        {
            "--device": "what is measured (default: cpu)",
            "--scratch": _flag("folder whose disk is measured (default: this one)", default=Path()),
        },
    ),
    "doctor": (
        "check this machine and installation",
        "Python, PyTorch, memory, disk, CUDA, codecs, readers, the page of view and extras, each with what to do.",
        {
            "--rates": _flag(
                "instead, this machine's rates beside what it could do, and what bounds a step of paper-unet",
                action="store_true",
            )
        },
    ),
}
"""Each command's summary, further text and flags: a flag's help, or all that is said of it beside `FLAGS`. It is run
by the function in `commands` of the same name.
"""

SETTINGS: Final = {
    "fit": "gigagrad.config.fit:FitConfig",
    "predict": "gigagrad.config.predict:PredictConfig",
    "embed": "gigagrad.config.predict:EmbedConfig",
}
"""Commands that also have a flag for each field of a class of settings (`_flags_of`)."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line like all others."""

    flags: Mapping[str, Collection[str]] = MappingProxyType({})
    """The flags of each command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, except that an unknown flag is answered with the nearest one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = found.command.__name__
            hint = did_you_mean(unknown[0].partition("=")[0], self.flags[name])
            text = f"'{name}' does not take {' '.join(unknown)}{hint}"
            raise ConfigError(f"{text}; see '{self.prog} {name} --help'")
        return found


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser of a command line. `parse_args` raises `ConfigError`; its `command` takes what that returned.

    Commands of `SETTINGS` get all their flags where `argv` names them: their classes take long to import.
    """
    parser = _Parser(
        prog="gigagrad",
        description="Train networks on whole gigapixel slides, exactly, in the memory you name.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gigagrad {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from, for bug reports")
    found = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = sys.argv[1:] if argv is None else argv
    for name, (summary, details, own) in COMMANDS.items():
        has_settings = name in SETTINGS
        command = found.add_parser(
            name,
            # Their settings classes have the defaults: what is not given must not hide a setting of a file.
            argument_default=argparse.SUPPRESS if has_settings else None,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}",
            allow_abbrev=False,
        )
        command.set_defaults(command=getattr(commands, name))
        source = command.add_mutually_exclusive_group(required=True) if name == "evaluate" else command
        derived = _flags_of(resolve_name(SETTINGS[name])) if has_settings and name in named else {}
        for flag in {**own, **derived}:
            words, given = derived.get(flag, {}), own.get(flag, {})
            if flag in FLAGS:
                shared = {
                    word: value for word, value in FLAGS[flag].items() if not (has_settings and word == "default")
                }
                words = {"help": words.get("help")} | shared
            words |= {"help": given} if isinstance(given, str) else given
            (source if flag in ("--run", "--predictions") else command).add_argument(flag, **words)
        parser.flags = {**parser.flags, name: {*own, *derived}}
    return parser


def _flags_of(settings: type[Settings]) -> dict[str, dict[str, Any]]:
    """Make a flag of each field of a class of settings, by its type, its default and its meaning."""
    hints, meanings = get_type_hints(settings), described(settings)
    flags: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        kinds = {*(get_args(hint) or (hint,))}
        shown = _shown(field.default)
        meaning = meanings[field.name].rstrip(".").replace("`", "")
        words: dict[str, Any] = {"help": f"{meaning} (default: {shown})" if shown else meaning}
        if bool in kinds:
            words["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            kind = Path if field.name in settings.PATHS else next((one for one in (float, int) if one in kinds), str)
            words |= {"type": kind, "metavar": {int: "N", float: "X"}.get(kind)}
            if get_origin(hint) is tuple:
                words |= {"nargs": "+", "metavar": field.name.upper().removesuffix("S")}
            elif field.name in settings.CHOICES:
                words["choices"] = [str(choice) for choice in settings.CHOICES[field.name] if choice is not None]
        flags[f"--{field.name.replace('_', '-')}"] = words
    return flags


def _shown(default: Any) -> str:
    """Write the default of a setting, "" for one that says nothing."""
    if default in (dataclasses.MISSING, None) or isinstance(default, bool):
        return "yes" if default is True else ""
    if isinstance(default, float):
        return f"{default:g}"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
