# SPDX-License-Identifier: Apache-2.0
"""The list of backends stands in several places; they must agree."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

from torchrelay.storage import Backend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
POINTS = PROJECT["project"]["entry-points"]["torchrelay.backends"]
FOLDERS = sorted(path.parent.name for path in (ROOT / "backends").glob("*/__init__.py"))


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, inside functions and for type checking too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_the_wheel_holds_every_backend():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == sorted(["src/torchrelay", *(f"backends/{name}" for name in FOLDERS)])


def test_every_backend_has_an_entry_point_and_every_entry_point_a_backend():
    assert sorted({value.partition(":")[0] for value in POINTS.values()}) == FOLDERS


@pytest.mark.parametrize("scheme", sorted(POINTS))
def test_entry_points_name_backends(scheme):
    module, _, name = POINTS[scheme].partition(":")
    assert issubclass(getattr(import_module(module), name), Backend)


@pytest.mark.parametrize("folder", FOLDERS)
def test_backends_have_one_shape(folder):
    assert {"__init__.py", "backend.py", "config.py"} <= {
        p.name for p in (ROOT / "backends" / folder).iterdir()
    }


@pytest.mark.parametrize("path", modules("backends"), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_backends_use_public_names_only_and_not_each_other(path):
    own = path.relative_to(ROOT / "backends").parts[0]
    for name in imported(path):
        if name.split(".")[0] == "torchrelay":
            assert name in {"torchrelay.storage", "torchrelay.errors", "torchrelay.limits"}
        elif name.startswith("torchrelay_"):
            assert name.split(".")[0] == own


def test_nothing_but_tests_imports_the_testing_package():
    checked = [path for path in modules("src", "backends") if "testing" not in path.parts]
    assert {"relay.py", "backend.py"} <= {path.name for path in checked}
    for path in checked:
        assert not {
            n for n in imported(path) if n.startswith(("torchrelay.testing", "pytest", "hypothesis"))
        }, path
