"""The command line: ``python -m autopar show PLAN.json``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autopar.ir.errors import AutoparError
from autopar.plans import Plan

#: Exit code of a command that could not be carried out, as argparse has it for a wrong call.
FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. `argv` defaults to that of the process."""
    parser = argparse.ArgumentParser(prog="autopar", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print a plan as a table")
    show.add_argument("plan", metavar="PLAN.json", help="a file written by Plan.save")
    arguments = parser.parse_args(argv)
    try:
        print(Plan.load(arguments.plan))
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
