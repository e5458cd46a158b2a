"""A form that a model can be written in, and what it has no word for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.export.callpath import LoadedModel

Arrays = Mapping[str, NDArray[Any]]
"""Input or output -> [rows, ...] values."""


class NotCarriedError(UserError):
    """The form has no word for some operations of the model, each of them named."""

    def __init__(self, form: str, operations: Sequence[str]) -> None:
        """Args: form: what it was to be; operations: what that cannot carry."""
        self.operations = tuple(sorted(set(operations)))
        super().__init__(
            f"{form} must be able to carry every operation of the model",
            got=Plain(", ".join(self.operations) or "operations that its converter does not name"),
            fix="Export with Stoker, which also writes the model behind its transform; or name a "
            "--signature without them.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """How a model is written in a form, and asked in it."""

    name: str
    """As people call it."""

    tolerance: float
    """Most that an answer may be off by default, absolute plus relative."""

    packages: Mapping[str, str]
    """Module -> what pip installs for it."""

    write: Callable[[LoadedModel, str, Path, Arrays], None]
    """(model, signature, folder, representative rows as the signature takes them)."""

    ask: Callable[[Path, str, Arrays], dict[str, NDArray[Any]]]
    """(folder, signature, inputs) -> outputs, by the names of the SavedModel's signature."""

    pip: str = ""
    """The command where it is not `pip install` and the packages."""

    def require(self) -> None:
        """Refuse where a package is not installed.

        Raises:
            ConfigError: with the command that installs it.
        """
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            command = self.pip or f"pip install {' '.join(sorted(set(self.packages.values())))}"
            raise ConfigError(
                f"{self.name} needs packages that are not installed",
                got=Plain(f"no {', '.join(missing)}"),
                fix=f"Run `{command}`.",
            )


def argument_of(model: LoadedModel, signature: str) -> dict[str, str]:
    """Input -> what the graph calls it: an input's name may be none that a graph can have."""
    inputs = model.signature_defs[signature].inputs
    return {
        name: info.name.rpartition(":")[0].removeprefix(f"{signature}_")
        for name, info in inputs.items()
    }


def names_in_file(arguments: Mapping[str, str], taken: Sequence[str]) -> dict[str, str]:
    """Input -> the name that a written model has for it; those that it has dropped are left out."""
    named = {name: (name if name in taken else argument) for name, argument in arguments.items()}
    return {name: there for name, there in named.items() if there in taken}


def by_names_in_file(arrays: Arrays, names: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Inputs as a written model takes them."""
    return {there: arrays[name] for name, there in names.items()}
