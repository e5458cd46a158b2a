"""Stoker: the whole chain from data to served model for TensorFlow and Keras.

The Python API has the same settings as stoker.yaml: `stoker.run(stoker.Experiment(...))`. Large libraries are imported
only when one of the names in `__all__` is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.core.version import __version__

if TYPE_CHECKING:
    from stoker.app.api import (
        Data,
        Evaluate,
        Experiment,
        OwnDataset,
        Resume,
        Train,
        load,
        run,
    )

__all__ = [
    "Data",
    "Evaluate",
    "Experiment",
    "OwnDataset",
    "Resume",
    "Train",
    "__version__",
    "load",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from stoker.app import api

        return getattr(api, name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
