"""Builds `stoker_client` from `src/stoker/client` and the modules of `core` that it imports."""

from __future__ import annotations

import ast
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).resolve().parents[2] / "src" / "stoker"
NAMES = (
    (re.compile(r"\bstoker\.client\b"), "stoker_client"),
    (re.compile(r"\bstoker\.core\b"), "stoker_client.core"),
)
"""Dotted names of the source -> of the package."""


class ClientBuildHook(BuildHookInterface):
    """Adds the renamed files to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files to a temporary folder and tell hatchling about each."""
        self._folder = tempfile.TemporaryDirectory()
        for source in client_files():
            relative = source.relative_to(SOURCE)
            inside = relative.relative_to("client") if relative.parts[0] == "client" else relative
            renamed = Path(self._folder.name) / inside
            renamed.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8")
            for name, replacement in NAMES:
                text = name.sub(replacement, text)
            renamed.write_text(text, encoding="utf-8")
            build_data["force_include"][str(renamed)] = f"stoker_client/{inside.as_posix()}"
        for name, path in (("py.typed", SOURCE), ("LICENSE", SOURCE.parents[1])):
            build_data["force_include"][str(path / name)] = f"stoker_client/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the temporary folder."""
        self._folder.cleanup()


def client_files() -> list[Path]:
    """Every file of the client, and of the modules that they import, directly or not.

    Raises:
        ValueError: a file imports a module of Stoker outside of `client` and `core`.
    """
    todo = [*(SOURCE / "client").rglob("*.py"), SOURCE / "core" / "__init__.py"]
    found: list[Path] = []
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.append(path)
        for module in _imports(path):
            parts = module.split(".")[1:]
            if parts[0] not in ("client", "core"):
                raise ValueError(f"{path} imports {module}; the client may import core only")
            todo.append(_file(parts))
    return sorted(found)


def _imports(path: Path) -> list[str]:
    """The modules of Stoker that a file imports."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return [module for module in modules if module.startswith("stoker.")]


def _file(parts: list[str]) -> Path:
    path = SOURCE.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
