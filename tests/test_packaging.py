"""What installs: the packages on disk, under the one top-level name `autopar`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
FOLDERS = {"autopar": "autopar", "autopar.ir": "ir", "autopar.passes": "passes"}
FOLDERS |= {"autopar.runtime": "runtime"}
BUILD_SECONDS = 240


def on_disk() -> dict[str, str]:
    """Every package on disk by its import name, with its folder."""
    found = {}
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            path = init.parent.relative_to(ROOT)
            inner = path.relative_to(folder).parts
            found[".".join([package, *inner])] = path.as_posix()
    return found


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_pyproject_lists_exactly_the_packages_on_disk() -> None:
    tool = project()["tool"]["setuptools"]
    assert sorted(tool["packages"]) == sorted(on_disk())
    assert tool["package-dir"] == on_disk()


def test_every_folder_of_code_is_a_package() -> None:
    folders = {p.parent for folder in FOLDERS.values() for p in (ROOT / folder).rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders), folders


@pytest.mark.slow
def test_the_wheel_holds_autopar_and_nothing_else(tmp_path: Path) -> None:
    # Built from a copy, so that setuptools leaves nothing in the checkout.
    copy = tmp_path / "copy"
    copy.mkdir()
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "-w", str(tmp_path), str(copy)],
        check=True,
        timeout=BUILD_SECONDS,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not re.fullmatch(r"autopar-.*\.dist-info", t)} == {"autopar"}
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in on_disk().items()
        for path in (ROOT / folder).glob("*.py")
    }
    assert expected | {"autopar/py.typed"} == {n for n in names if n.startswith("autopar/")}
