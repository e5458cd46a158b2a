"""Finds the user's own modules that an experiment imports from outside its folder, without importing them."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

_INSTALLED_PARTS = frozenset(("site-packages", "dist-packages"))


def local_packages(folder: Path, sources: Iterable[Path]) -> dict[str, Path]:
    """Return name -> file or folder of each package that is neither in the folder nor installed.

    A package is searched where Python searches it (`PYTHONPATH`, `pip install -e`), and then next to the experiment's
    folder. Packages that a found package imports are searched, too.

    Args:
        folder: The experiment's folder.
        sources: The experiment's Python files.
    """
    found: dict[str, Path] = {}
    known = set(sys.stdlib_module_names) | {"stoker"}
    ahead = list(sources)
    while ahead:
        for name in sorted(_imported(ahead.pop()) - known):
            known.add(name)
            place = None if _is_module(folder, name) else _local_place(folder, name)
            if place is not None:
                found[name] = place
                ahead += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return found


def _imported(path: Path) -> set[str]:
    """Return the first part of each name that a file imports; empty if it is not valid Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _is_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def _local_place(folder: Path, name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is not None:
        places = [place for place in _places(spec) if _is_local(place)]
        return places[0] if places else None
    for place in (folder.parent / name, folder.parent / f"{name}.py"):
        if place.is_file() or (place.is_dir() and any(place.glob("*.py"))):
            return place
    return None


def _places(spec: ModuleSpec) -> list[Path]:
    if spec.submodule_search_locations is not None:
        return [Path(place).resolve() for place in spec.submodule_search_locations]
    return [Path(spec.origin).resolve()] if spec.has_location and spec.origin else []


def _is_local(place: Path) -> bool:
    installed = (
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    inside = any(place.is_relative_to(Path(home).resolve()) for home in installed)
    return place.exists() and not inside and not _INSTALLED_PARTS.intersection(place.parts)
