"""The command line as data: commands, flags, their defaults and the help that teaches them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

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
MODEL is paper-unet, timm:NAME, smp:NAME?key=value, monai:NAME?key=value or package.module:callable.
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


FLAGS: Final[dict[str, dict[str, Any]]] = {
    "--bands": {
        "nargs": "+",
        "type": _band,
        "metavar": "BAND",
        "help": "channels of slides to read, in this order, by name or counted from 1 (default: all)",
    },
    "--classes": {
        "nargs": "+",
        "default": (),
        "metavar": "NAME=ID",
        "help": "class ids by name, or by value in mask files: tumour=1 stroma=2 artefact=ignore unlabelled=0, or "
        "255=1; names alone count from 1, and whole=1+2 core=2 are regions that overlap",
    },
    "--device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "where tiles are computed (default: cpu)"},
    "--grey": {
        "action": argparse.BooleanOptionalAction,
        "help": "read slides in grey, one channel: JPEG decodes in half the time",
    },
    "--json": {"action": "store_true"},
    "--memory": {
        "type": _memory,
        "help": "peak memory of the whole process (on a GPU: device memory), e.g. 1GiB; default: no bound",
    },
    "--mpp": {"type": float, "help": "micrometres per pixel of level 0 of every slide, over what the files say"},
    "--out": {"type": Path, "metavar": "DIR", "required": True},
    "--overwrite": {"action": "store_true"},
    "--predictions": {"type": Path, "metavar": "DIR", "help": "folder that 'predict' wrote"},
    "--run": {"type": Path, "metavar": "DIR", "required": True, "help": "run folder or model"},
    "--scratch": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder on a fast disk for what does not fit in --memory; default: such fields are computed again",
    },
    "--share": {
        "metavar": "I/N",
        "help": "only the I-th of N shares, I from 1 to N, which any machines do side by side into one --out; "
        "default: by Slurm's array or torchrun, else 1/1, every slide",
    },
    "--slides": {"type": Path, "required": True},
    "--split": {"choices": ("train", "val", "test"), "help": "only these rows of a CSV"},
    "--storage": {
        "metavar": "HOW",
        "help": "store kept fields in fewer bits: float16, bfloat16, or 'error E' in --scratch; default: exact",
    },
    "--trust": {
        "type": _import_path,
        "action": "append",
        "default": [],
        "metavar": "MODULE:CLASS",
        "help": "code that the model file may import, package.module:class; without it none but gigagrad's and the "
        "libraries' (may be repeated)",
    },
}
"""The flags of more than one command: the same words mean the same everywhere."""

COMMANDS: Final[dict[str, tuple[str, str, Mapping[str, str | dict[str, Any]]]]] = {
    "demo": (
        "everything once, on slides made up for it, ending in a report",
        "Makes a small cohort, labels it, trains paper-unet, tests and predicts, takes one full training step on a "
        "16000 x 64000 slide, and prints the path of the report. Started again, it continues where it stopped.",
        {
            "--slides": {"required": False, "metavar": "DIR", "help": "test on the real slides in this folder as well"},
            "--out": {
                "required": False,
                "default": Path("gigagrad-demo"),
                "help": "folder for everything (default: gigagrad-demo)",
            },
            "--memory": {"default": "1GiB", "help": "budget of training and of the large step (default: 1GiB)"},
            "--quick": {"action": "store_true", "help": "a minute's version: fewer, smaller slides and a poor network"},
        },
    ),
    "label": (
        "make tissue masks of slides",
        "Follows the recipe of the founding experiment (Remedios et al., MIDL 2023): dark enough at one eighth of the "
        "size, smoothed, holes filled. Writes DIR/STEM.tif per slide, 1 tissue and 0 background, at full size. A slide "
        "that cannot be read does not stop the others.",
        {
            "slides": {"nargs": "+", "type": Path, "metavar": "SLIDE", "help": "files, folders, or CSVs"},
            "--out": "folder for the masks",
            "--mpp": {},
            "--bands": {"default": (), "help": "channels to look at, one or three of bytes: by name or number"},
            "--share": {},
            "--overwrite": "make masks again that exist; otherwise they are kept",
        },
    ),
    "plan": (
        "show what a training step would cost, without a slide",
        "Captures the model at the true size, chooses tiles within the budget, and prints its stages, the fate of each "
        "field, where memory and time go, the smallest budget that works, and what more memory or scratch would buy. "
        "For another machine name its --memory, --scratch-bytes, --rates and --threads, or --device cuda and "
        "the memory of a GPU, which need not be here; for many of them --ranks.",
        {
            "--model": {"required": True, "help": _MODEL},
            "--size": {
                "type": _size,
                "metavar": "HEIGHTxWIDTH",
                "required": True,
                "help": "in pixels, e.g. 16000x64000",
            },
            "--channels": {"type": _positive, "default": 3, "help": "of the slide (default: 3)"},
            "--memory": {},
            "--scratch": {},
            "--scratch-bytes": {
                "type": _memory,
                "metavar": "SIZE",
                "help": "room for files in --scratch, e.g. 200GiB; without --scratch, on a disk that need not be here",
            },
            "--rates": {
                "type": Path,
                "metavar": "FILE",
                "help": "plan by the rates, and for the threads, of the machine on which 'calibrate' saved this file",
            },
            "--threads": {
                "type": _positive,
                "metavar": "N",
                "help": "plan for so many threads that compute tiles (default: those of --rates, else of this machine)",
            },
            "--storage": {},
            "--loss": {
                "default": "bce",
                "help": "bce, bce_dice, ce, dice, focal, mse, tversky or package.module:callable (default: bce)",
            },
            "--predict": {"action": "store_true", "help": "plan a prediction instead of a training step"},
            "--device": {},
            "--ranks": {
                "type": _ranks,
                "metavar": "N",
                "help": "say what so many machines like this one would gain: 8, 1,2,4 or 1..64",
            },
            "--link": {
                "metavar": "RATE[,LATENCY]",
                "help": "with --ranks: what each has to the others (default: 10Gbit/s,50us)",
            },
            "--slides-per-step": {
                "type": _positive,
                "metavar": "S",
                "help": "with --ranks: which way of sharing so many slides is fastest (default: 1)",
            },
            "--json": "print the plan, the advice, and what --ranks gain, as JSON",
            "--picture": {
                "type": Path,
                "metavar": "FILE",
                "help": "draw memory against time, and memory over the passes: .svg or .png",
            },
        },
    ),
    "init": (
        "write a settings file for fit, with every setting explained",
        "Looks at the cohort's columns, its classes and a few slides, and proposes a model and a loss, and a scale for "
        "slides of 16 bits or floats; everything else stands there as a comment, with its default. Then: gigagrad fit "
        "--config FILE.",
        {
            "--slides": {"required": False, "metavar": "CSV", "help": "cohort: a CSV or a folder, as fit takes it"},
            "--out": {
                "required": False,
                "default": Path("run.yaml"),
                "metavar": "FILE",
                "help": "settings file to write (default: run.yaml)",
            },
            "--schema": {"action": "store_true", "help": "print the JSON schema of settings files instead"},
            "--overwrite": "replace the file if it exists",
        },
    ),
    "fit": (
        "train a network on whole slides",
        "One step per slide, or per several, with exact gradients; keeps the weights of the lowest validation loss and "
        "tests them. Interrupted and started again, it continues bit for bit. Processes that torchrun starts train one "
        "network, each within --memory (see docs/training-over-ranks.md).",
        {
            "--slides": {
                "required": False,
                "metavar": "CSV",
                "help": "cohort: slide,mask,split per line, or a folder: images/ and masks/, or nnU-Net's (required)",
            },
            "--out": {"required": False, "help": "run folder (required)"},
            "--config": {
                "type": Path,
                "default": None,
                "metavar": "YAML",
                "help": "settings from a file; flags win over it",
            },
            "--folds": {
                "action": "store_true",
                "default": False,
                "help": "a run for each fold, in OUT/fold-N, and how each does on its fold",
            },
            "--trust": {
                "default": [],
                "help": "code that --config may import as model or loss, package.module:callable (repeatable)",
            },
            "--overwrite": {"default": False, "help": "start anew in a folder that holds a run"},
        },
    ),
    "predict": (
        "write a mask, QuPath outlines and a picture of every slide",
        "Whole slides without seams: DIR/masks/STEM.tif, DIR/geojson/STEM.geojson and DIR/overlays/STEM.png, or other "
        "--outputs. A model that scores whole slides gives DIR/slides.csv. Slides that are finished are left alone, "
        "and one that fails does not stop the others.",
        {
            "--run": {},
            "--slides": {"metavar": "SLIDE", "nargs": "+", "help": "files, folders, or CSVs with a 'slide'"},
            "--out": "folder for the predictions",
            "--classes": {"help": "names of the classes from 1 on, or NAME=ID; default: those of the training run"},
            "--grey": {"help": "read slides in grey, one channel; default: as the training run did"},
            "--bands": {"help": "channels of slides to read, by name or number; default: those of the training run"},
        },
    ),
    "evaluate": (
        "score a network, or what it predicted, against true masks or labels",
        "Prints Dice and IoU per slide with their mean and standard deviation; of a cohort with labels accuracy, AUC, "
        "calibration, errors or the C-index, with 95 % intervals. Nothing is written without --out.",
        {
            "--run": {"required": False, "help": "run folder or model to score"},
            "--predictions": {},
            "--slides": {"metavar": "CSV", "help": "cohort with true masks or labels"},
            "--split": {
                "choices": ("train", "val", "test", "all"),
                "help": "which rows (default: test; all where no row has a split)",
            },
            "--classes": {
                "help": "names of the classes from 1 on, or NAME=ID; default: those of the run or predictions"
            },
            "--memory": {},
            "--scratch": {},
            "--device": {},
            "--trust": {},
            "--out": {
                "required": False,
                "help": "folder for evaluation.json and the scores of each slide, which are not computed again",
            },
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
            "--slides": {"metavar": "SLIDE", "nargs": "+", "help": "files, folders, or CSVs with a 'slide'"},
            "--out": "folder for the maps",
            "--of": {"metavar": "CLASS", "help": "whose score; default: that of the predicted class"},
            "--module": {
                "metavar": "NAME",
                "help": "instead, the output of this module of the model, as network.attention: a map of its own",
            },
            "--block": {
                "type": _positive,
                "default": 8,
                "metavar": "PX",
                "help": "side of the blocks over which gradients are added up (default: 8)",
            },
            "--memory": {},
            "--scratch": {},
            "--classes": {"help": "names of the classes, or NAME=ID; default: those of the training run"},
            "--split": {},
            "--device": {},
            "--trust": {},
            "--share": {},
            "--overwrite": "make maps again that are there",
        },
    ),
    "report": (
        "write a run as one HTML file",
        "Loss curves, Dice, overlays, the plan, and predicted beside measured memory; the file needs no network.",
        {
            "--run": "run folder",
            "--predictions": "folder that 'predict' wrote, for pictures",
            "--out": {"metavar": "HTML", "help": "file to write"},
        },
    ),
    "calibrate": (
        "measure this machine's rates once, so that plans foretell seconds better",
        "Times operators, threads, copies in memory and the disk, and saves the rates in the user's cache folder. "
        "Takes less than a minute; let nothing else run meanwhile.",
        {"--scratch": {"default": Path(), "help": "folder whose disk is measured (default: this one)"}},
    ),
    "doctor": (
        "check this machine and installation",
        "Python, PyTorch, memory, disk, codecs, slide readers, optional packages and CUDA, each with what to do.",
        {},
    ),
}
"""Each command's summary, further text and flags: a flag's help, or all that is said of it beside `FLAGS`. It is run
by the function in `commands` of the same name.
"""

SETTINGS: Final = {"fit": "gigagrad.training:FitConfig", "predict": "gigagrad.prediction:PredictConfig"}
"""Commands that also have a flag for each field of a class of settings (`parser.flags_of`)."""
