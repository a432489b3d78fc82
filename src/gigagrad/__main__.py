"""Run `python -m gigagrad COMMAND ...` as `gigagrad COMMAND ...`, for where only the interpreter is at hand."""

import sys

from gigagrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
