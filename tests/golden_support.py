"""Golden text tests: cases in a file, each with its input and the output it must give.

A file is a header and cases::

    mesh dp=2 tp=4                         header: `name words…`, one a line
    # a comment, kept as it is
    case a_long_telling_name
    input line                             any lines that are not indented
      expected line                        indented by two blanks

`pytest --update` writes what the code gives now into the files instead of comparing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def add_update_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update", action="store_true", help="rewrite golden files with what the code gives now"
    )


@dataclass(frozen=True)
class GoldenCase:
    """One case of a golden file.

    header:
        the file's settings, name -> words
    inputs, expected:
        the lines of the case, without the indentation
    """

    path: Path
    name: str
    header: dict[str, list[str]]
    inputs: tuple[str, ...]
    expected: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path.stem}:{self.name}"


def golden_cases(directory: str) -> list[GoldenCase]:
    """Every case of every file in ``tests/golden/<directory>``."""
    files = sorted((GOLDEN / directory).glob("*.txt"))
    return [case for path in files for case in _parse(path)]


def check(case: GoldenCase, actual: list[str], *, update: bool) -> None:
    """Compare the lines a case gives with the expected ones, or write them."""
    if update:
        _write(case, actual)
    else:
        assert actual == list(case.expected), f"{case.path.name}: case {case.name}"


def _parse(path: Path) -> Iterator[GoldenCase]:
    header: dict[str, list[str]] = {}
    blocks: list[tuple[str, list[str]]] = []
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, *rest = line.split()
        if word == "case":
            blocks.append((rest[0], []))
        elif blocks:
            blocks[-1][1].append(line)
        else:
            header[word] = rest
    for name, lines in blocks:
        inputs = tuple(line for line in lines if not line.startswith("  "))
        expected = tuple(line[2:] for line in lines if line.startswith("  "))
        yield GoldenCase(path, name, header, inputs, expected)


def _write(case: GoldenCase, actual: list[str]) -> None:
    """Replace the expected lines of one case, leaving everything else as it is."""
    lines = case.path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["case", case.name])
    end = start + 1
    while end < len(lines) and lines[end].strip() and not lines[end].startswith("#"):
        end += 1
    kept = [line for line in lines[start:end] if not line.startswith("  ")]
    new = [*lines[:start], *kept, *(f"  {line}" for line in actual), *lines[end:]]
    case.path.write_text("\n".join(new) + "\n")
