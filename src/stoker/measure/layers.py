"""Finds the layer that a TensorFlow operation belongs to, by the operation's name."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"_\d+$")
_AROUND = re.compile(
    r"^(gradient_tape|gradients|while|body|cond|then|else|branch|(Stateful)?PartitionedCall"
    r"|replica_\d+|_\d+|cond_\d+|while_\d+|jit\(.*\)|XLA_.*)$"
)
"""Parts of a name that say how the operation is run, not where it belongs, unless they name a layer."""

UNKNOWN_PARTS = 2
"""Parts of a name that are shown if the layers are unknown: the model and its outer layer."""


class LayerNames:
    """The layers of a model, used to find the layer of an operation.

    Keras names an operation after the layers around it: `sequential/norm_a/moments/mean`. If a
    model is called more than once, TensorFlow appends a number to each layer's name.
    """

    def __init__(self, paths: Iterable[str], scopes: Iterable[str] = ()) -> None:
        """Index the layers.

        Args:
            paths: Layer paths such as `block1/attention`; empty if unknown.
            scopes: Names of all operations.
        """
        self._paths: dict[str, list[str]] = {}
        for path in paths:
            self._paths.setdefault(path.rpartition("/")[2], []).append(path)
        self._numbered = any(
            part not in self._paths and _NUMBERED.sub("", part) in self._paths
            for scope in set(scopes)
            for part in scope.split("/")
        )

    def layer_of(self, scope: str) -> str:
        """The path of the innermost layer; if no layer is known, the outer parts of the name."""
        parts = [
            part
            for part in scope.split("/")
            if part and (part in self._paths or not _AROUND.match(part))
        ]
        names = [self._name(part) for part in parts]
        for at in range(len(names) - 1, -1, -1):
            paths = self._paths.get(names[at])
            if paths:
                around = set(names[:at])
                return max(paths, key=lambda path: len(around & set(path.split("/")[:-1])))
        return "" if self._paths else "/".join(parts[:-1][:UNKNOWN_PARTS])

    def _name(self, part: str) -> str:
        plain = _NUMBERED.sub("", part)
        if self._numbered and plain in self._paths:
            return plain
        return part if part in self._paths else plain
