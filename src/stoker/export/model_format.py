"""A format that a model can be converted to: its converter, and the error about unsupported operations."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.registry.exported_model import LoadedModel

Arrays = Mapping[str, NDArray[Any]]
"""Name of an input or output -> [rows, ...] values."""

INPUT_NAMES_FILE = "inputs.json"
"""File next to each converted model: input name -> its name in the converted model."""


class UnsupportedOperationsError(UserError):
    """The format cannot represent some operations of the model; the error names each of them."""

    def __init__(self, format_name: str, operations: Sequence[str]) -> None:
        """Args: format_name: the target format; operations: the operations that it cannot represent."""
        self.operations = tuple(sorted(set(operations)))
        super().__init__(
            f"{format_name} does not support some operations of the model",
            got=Plain(", ".join(self.operations) or "operations that its converter does not name"),
            fix="Export with Stoker, which also writes a signature without the transform; or name a "
            "--signature without these operations.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFormat:
    """Functions that write a model in one format and run the result."""

    name: str
    """Name for people, e.g. "LiteRT in int8"."""

    tolerance: float
    """Default maximum of |difference| / (1 + |expected answer|)."""

    packages: Mapping[str, str]
    """Module -> the pip requirement that provides it."""

    write: Callable[[LoadedModel, str, Path, Arrays], None]
    """Converts a signature: (model, signature, folder to write, representative rows for that signature)."""

    run: Callable[[Path, str, Arrays], dict[str, NDArray[Any]]]
    """Runs the converted model: (folder, signature, inputs) -> outputs. Inputs and outputs have the names of the
    SavedModel's signature."""

    install_command: str = ""
    """Command that the error about missing packages suggests; by default `pip install` of `packages`."""

    python: Path | None = None
    """Interpreter that has the packages; None for the current one."""

    def require(self) -> None:
        """Raise an error if a package is missing.

        Raises:
            ConfigError: a package is missing (the error has the command that installs it), or the
                interpreter does not run.
        """
        if self.python is None:
            missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        else:
            missing = _missing_in(self.python, self.packages)
        if missing:
            where = "" if self.python is None else f" in {self.python}"
            requirements = " ".join(sorted(set(self.packages.values())))
            raise ConfigError(
                f"{self.name} needs packages that are not installed{where}",
                got=Plain(f"no {', '.join(missing)}"),
                fix=f"Run `{self.install_command or f'pip install {requirements}'}`.",
            )


_FIND_MISSING = (
    "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
)
"""Python program whose arguments are names of modules; it prints the names of modules that cannot be imported."""


def _missing_in(python: Path, packages: Iterable[str]) -> list[str]:
    try:
        done = subprocess.run(
            [python, "-c", _FIND_MISSING, *packages], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.strerror if isinstance(error, OSError) else f"exit code {error.returncode}"
        raise ConfigError(
            f"{python} must be a Python interpreter that runs", got=Plain(why or str(error))
        ) from None
    return done.stdout.split()


def graph_input_names(model: LoadedModel, signature: str) -> dict[str, str]:
    """Input name -> its name in the graph, where fewer characters are allowed."""
    inputs = model.signature_defs[signature].inputs
    return {
        name: info.name.rpartition(":")[0].removeprefix(f"{signature}_")
        for name, info in inputs.items()
    }


def converted_input_names(graph_names: Mapping[str, str], present: Sequence[str]) -> dict[str, str]:
    """Input name -> its name in the converted model; inputs that the converter dropped are left out."""
    named = {name: (name if name in present else graph) for name, graph in graph_names.items()}
    return {name: converted for name, converted in named.items() if converted in present}


def rename_inputs(arrays: Arrays, names: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Return the inputs by their names in the converted model."""
    return {converted: arrays[name] for name, converted in names.items()}


def run_converter(
    command: Sequence[str],
    output_file: Path,
    *,
    format_name: str,
    find_unsupported: Callable[[str], list[str]],
) -> None:
    """Run another project's converter in a process of its own.

    Args:
        command: The converter's argv.
        output_file: The file that the converter writes on success.
        format_name: The target format, for errors.
        find_unsupported: Text on the converter's stderr -> the operations that it reports as unsupported.

    Raises:
        UnsupportedOperationsError: the converter does not support some operations.
        UserError: the converter failed in another way; the error shows the last line of its stderr.
    """
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    unsupported = find_unsupported(done.stderr)
    if unsupported:
        raise UnsupportedOperationsError(format_name, unsupported)
    if done.returncode or not output_file.is_file():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, no output"]
        raise UserError(
            f"the converter to {format_name} failed",
            got=Plain(lines[-1].rstrip(".")),
        )
