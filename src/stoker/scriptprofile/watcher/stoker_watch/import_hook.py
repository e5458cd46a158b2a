"""Waits until the script imports TensorFlow or Keras, and then starts the watcher."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .watch import FACTS

_WATCHED = ("tensorflow", "keras")


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and starts the watcher when TensorFlow or Keras was imported."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname not in _WATCHED or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            _look_after(spec.loader, fullname)
        return spec


def _look_after(loader: Any, name: str) -> None:
    """Make the loader of a module start the watcher when it has imported the module."""
    run: Callable[[ModuleType], None] = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # Imported here: in a program without TensorFlow, this import would cost time for nothing.
        from .wall import WALL

        with WALL.part("imports"):
            run(module)
        with FACTS.guarded():
            _begin(name, module)

    loader.exec_module = exec_module


def _begin(name: str, module: ModuleType) -> None:
    # Imported here, because it needs TensorFlow or Keras, which exist only now.
    FACTS.begin()
    from . import hooks

    install = hooks.install_tensorflow if name == "tensorflow" else hooks.install_keras
    install(module)


def wait_for_tensorflow(folder: str) -> None:
    """Start the watcher when this process imports TensorFlow or Keras; until then, it does nothing.

    Args:
        folder: Folder for the files with the facts, one file per process.
    """
    FACTS.folder = folder
    sys.meta_path.insert(0, _Finder())
