"""What all tests share: the tally of the operator strategies and plans that were checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from golden_support import add_update_option
from harness import TALLY
from random_plans import VERIFIED


def pytest_addoption(parser: pytest.Parser) -> None:
    add_update_option(parser)
    parser.addoption(
        "--thorough",
        action="store_true",
        help="more of what is drawn: the whole model zoo, on 3 ranks too; more random plans of "
        "every model; more of PyTorch's samples",
    )


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether to check all that is drawn, which takes hours, or a part of it."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread, as the ranks of a lockstep do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of a parallel run (pytest-xdist) hands its counts to the main process."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["strategies"] = (TALLY.pairs, TALLY.calls, sorted(TALLY.operators))
        output["plans"] = dict(VERIFIED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})  # a worker that crashed has none
    pairs, calls, operators = output.get("strategies", (0, 0, ()))
    TALLY.pairs += pairs
    TALLY.calls += calls
    TALLY.operators.update(operators)
    VERIFIED.update(output.get("plans", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TALLY.pairs:
        terminalreporter.write_line(
            f"checked {TALLY.pairs} strategies of {TALLY.calls} calls of "
            f"{len(TALLY.operators)} operators"
        )
    if VERIFIED:
        each = ", ".join(f"{count} of {name}" for name, count in VERIFIED.items())
        terminalreporter.write_line(f"verified {sum(VERIFIED.values())} random plans: {each}")
