"""From the words of the command line to a parser whose complaints are one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from gigagrad import __version__
from gigagrad.cli import commands
from gigagrad.cli.words import COMMANDS, EXAMPLES, FLAGS
from gigagrad.errors import ConfigError, did_you_mean


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it, except that an unknown flag is answered with the nearest one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], _every_flag())
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found


def _every_flag() -> set[str]:
    return {flag for _, _, flags in COMMANDS.values() for flag in flags if flag.startswith("--")}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. `parse_args` raises `ConfigError`; its `command` takes what it returned."""
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
    for name, (summary, details, flags) in COMMANDS.items():
        command = found.add_parser(
            name,
            # Their settings classes have the defaults: what is not given must not hide a setting of a file.
            argument_default=argparse.SUPPRESS if name in ("fit", "predict") else None,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}",
            allow_abbrev=False,
        )
        command.set_defaults(command=getattr(commands, name))
        source = command.add_mutually_exclusive_group(required=True) if name == "evaluate" else command
        for flag, own in flags.items():
            words = {"help": own} if isinstance(own, str) else own
            shared = FLAGS.get(flag, {})
            if command.argument_default == argparse.SUPPRESS:
                shared = {word: value for word, value in shared.items() if word != "default"}
            (source if flag in ("--run", "--predictions") else command).add_argument(flag, **shared | words)
    return parser
