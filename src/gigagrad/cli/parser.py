"""From flags to a parser whose complaints are one line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from gigagrad import __version__
from gigagrad.cli import commands
from gigagrad.cli.flags import COMMANDS, EXAMPLES, FLAGS, SETTINGS
from gigagrad.errors import ConfigError, did_you_mean
from gigagrad.settings import Settings, described


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line like all others."""

    flags: frozenset[str] = frozenset()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, except that an unknown flag is answered with the nearest one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], self.flags)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
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
        parser.flags |= {*own, *derived}
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
