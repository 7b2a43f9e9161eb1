"""What all tests share: the tally of the operator strategies and plans that were checked."""

from __future__ import annotations

from typing import Any

import pytest

from golden_support import add_update_option
from harness import TALLY
from random_plans import VERIFIED


def pytest_addoption(parser: pytest.Parser) -> None:
    add_update_option(parser)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TALLY.pairs:
        terminalreporter.write_line(
            f"checked {TALLY.pairs} strategies of {len(TALLY.operators)} operators"
        )
    if VERIFIED:
        each = ", ".join(f"{count} of {name}" for name, count in VERIFIED.items())
        terminalreporter.write_line(f"verified {sum(VERIFIED.values())} random plans: {each}")
