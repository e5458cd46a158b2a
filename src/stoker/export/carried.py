"""A form that a model can be written in, and what it has no word for."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.registry.callpath import LoadedModel

Arrays = Mapping[str, NDArray[Any]]
"""Input or output -> [rows, ...] values."""

NAMES = "inputs.json"
"""The file beside each written model: input -> the name that the model has for it."""


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

    python: Path | None = None
    """The interpreter that has the packages; ours if None."""

    def require(self) -> None:
        """Refuse where a package is not installed.

        Raises:
            ConfigError: with the command that installs it; or the interpreter does not run.
        """
        if self.python is None:
            missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        else:
            missing = _missing_in(self.python, self.packages)
        if missing:
            where = "" if self.python is None else f" in {self.python}"
            command = self.pip or f"pip install {' '.join(sorted(set(self.packages.values())))}"
            raise ConfigError(
                f"{self.name} needs packages that are not installed{where}",
                got=Plain(f"no {', '.join(missing)}"),
                fix=f"Run `{command}`.",
            )


_LOOK = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
"""What another interpreter is asked: which of the packages it does not have."""


def _missing_in(python: Path, packages: Iterable[str]) -> list[str]:
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, *packages], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.strerror if isinstance(error, OSError) else f"exit code {error.returncode}"
        raise ConfigError(
            f"{python} must be a Python interpreter that runs", got=Plain(why or str(error))
        ) from None
    return done.stdout.split()


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
