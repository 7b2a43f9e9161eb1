"""Imports go one way, and files stay small."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("ir", "passes", "runtime", "autopar")
MAX_LINES = 500

#: Folder -> the prefixes of our own modules that its files may import. The first that fits speaks.
ALLOWED = {
    "ir": ("autopar.ir",),
    "passes/solver": ("autopar.passes.solver",),
    "passes": ("autopar.ir", "autopar.passes"),
    "runtime": ("autopar.ir", "autopar.runtime"),
    "autopar": ("autopar",),
}

#: What the solver, which knows nothing of tensors, may import besides the standard library.
SOLVER_LIBRARIES = {"numpy", "scipy", "networkx", "ortools"}


def files() -> list[Path]:
    return [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> list[tuple[int, str]]:
    """Every module a file imports, with the line; relative imports are spelled out."""
    found = []
    here = path.relative_to(ROOT)
    package = list(here.parts[:-1])
    if package[0] != "autopar":
        package.insert(0, "autopar")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            # `from autopar import ir` imports autopar.ir: each name may be a module.
            found.extend((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
    return found


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def test_the_folders_are_found() -> None:
    found = {p.relative_to(ROOT).parts[0] for p in files()}
    assert found == set(FOLDERS)
    assert any("autopar.ir.errors" in module for _, module in imports(ROOT / "ir/mesh.py"))


def test_our_modules_are_imported_one_way() -> None:
    wrong = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        allowed = next(may for folder, may in ALLOWED.items() if name.startswith(folder + "/"))
        for line, module in imports(path):
            if within(module, ("autopar",)) and not within(module, allowed):
                wrong.append(f"{name}:{line} imports {module}, it may import {allowed}")
            if module.split(".")[0] in ("ir", "passes", "runtime", "tests"):
                wrong.append(f"{name}:{line} imports {module}, which only exists in the checkout")
    assert not wrong, "\n".join(wrong)


def test_the_solver_knows_nothing_of_tensors() -> None:
    wrong = []
    for path in sorted((ROOT / "passes/solver").rglob("*.py")):
        for line, module in imports(path):
            top = module.split(".")[0]
            if top not in {*sys.stdlib_module_names, *SOLVER_LIBRARIES, "autopar"}:
                wrong.append(f"{path.name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long() -> None:
    folders = (*FOLDERS, "tests", "examples", "benchmarks")
    counted = {
        p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines())
        for folder in folders
        for p in (ROOT / folder).rglob("*.py")
    }
    long = {name: count for name, count in counted.items() if count > MAX_LINES}
    assert not long, f"files over {MAX_LINES} lines: {long}"
