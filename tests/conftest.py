"""What all tests share: the tally of the operator strategies that were checked."""

from __future__ import annotations

from typing import Any

import pytest

from golden_support import add_update_option
from harness import TALLY


def pytest_addoption(parser: pytest.Parser) -> None:
    add_update_option(parser)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TALLY.pairs:
        terminalreporter.write_line(
            f"checked {TALLY.pairs} strategies of {len(TALLY.operators)} operators"
        )
