"""Finding and calling what the user wrote, so that its faults are told as the user's own."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from stoker.core.code import module_file, names_bound
from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain, UserError


def load_function(folder: Path, reference: str, *, where: str) -> Callable[..., Any]:
    """The function that `module:function` names in the user's folder.

    Args:
        folder: The user's folder; its modules may import one another while this runs.
        reference: `module:function`.
        where: The setting that held it, for the message.

    Raises:
        ConfigError: no such module or function, or importing the module failed (file and line).
    """
    path, function_name = _find(folder, reference, where=where)
    module_name, _ = split_reference(reference, where=where)
    module = _import(folder, module_name, path, where=where)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise _no_function(path, function_name, names, where=where)
    return function


def require_function(folder: Path, reference: str, *, where: str) -> None:
    """Refuse what `load_function` would not find, as far as the source tells without a run of it.

    Raises:
        ConfigError: no such module, or the module binds no such name.
    """
    path, function_name = _find(folder, reference, where=where)
    names = names_bound(path)
    if names is not None and function_name not in names:
        raise _no_function(path, function_name, sorted(names), where=where)


def _find(folder: Path, reference: str, *, where: str) -> tuple[Path, str]:
    module_name, function_name = split_reference(reference, where=where)
    path = module_file(folder, module_name)
    if path is None:
        raise ConfigError(
            f"{where} names a module of {folder}",
            got=reference,
            fix=f"Write {module_name.replace('.', '/')}.py there, or change {where}.",
        )
    return path, function_name


def _no_function(path: Path, name: str, names: list[str], *, where: str) -> ConfigError:
    return ConfigError(
        f"{where} names a function of {path.name}", got=name, fix=nearest(name, names)
    )


def split_reference(reference: str, *, where: str) -> tuple[str, str]:
    """Module and function of `module:function`.

    Raises:
        ConfigError: it has another form.
    """
    module, colon, function = reference.partition(":")
    parts = [*module.split("."), function]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where} must be MODULE:FUNCTION", got=reference, fix="E.g. model:build")
    return module, function


def call(
    function: Callable[..., Any],
    *args: Any,
    what: str,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Call the user's function; what it raises becomes one line with the user's file and line.

    Args:
        function: The user's.
        *args: Its positional arguments.
        what: Its name, for the message.
        options: Its keyword arguments.

    Raises:
        ConfigError: the function raised.
    """
    try:
        return function(*args, **options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _told(what, error, _home(function)) from error


def _told(what: str, error: BaseException, folder: Path | None) -> ConfigError:
    return ConfigError(
        f"{what} must not fail{_place(error.__traceback__, folder)}",
        got=Plain(f"{type(error).__name__}: {first_line(error)}"),
        fix="Run it again with --debug for the whole traceback.",
    )


def _import(folder: Path, name: str, path: Path, *, where: str) -> Any:
    top = name.partition(".")[0]
    for known in [key for key in list(sys.modules) if key == top or key.startswith(f"{top}.")]:
        # Another experiment's module of the same name, or this one before it was edited.
        del sys.modules[known]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _told(f"{where}: importing {path.name}", error, folder) from error
    finally:
        sys.path.remove(str(folder))


def _home(function: Callable[..., Any]) -> Path | None:
    try:
        return Path(inspect.getfile(inspect.unwrap(function))).resolve().parent
    except TypeError:
        return None


def _place(trace: TracebackType | None, folder: Path | None) -> str:
    frames = traceback.extract_tb(trace)
    own = [f for f in frames if folder and folder.resolve() in Path(f.filename).resolve().parents]
    if not own:
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})"


_IN_TRACEBACK = re.compile(r'File "([^"]+)", line (\d+)')


def place_told(error: BaseException) -> str:
    """` (model.py, line 12)`, of Python code that failed inside TensorFlow; "" of none.

    TensorFlow puts the traceback of a generator or a `py_function` into its own error's text. What
    is installed is not the user's.
    """
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    own = Path(__file__).parents[1]
    places = [
        (Path(file), line)
        for file, line in _IN_TRACEBACK.findall(str(error))
        if not file.startswith((*installed, "<")) and own not in Path(file).parents
    ]
    return f" ({places[-1][0].name}, line {places[-1][1]})" if places else ""


_HEADINGS = (
    *("Graph execution error:", "Detected at node", "<stack traces unavailable>"),
    *("File ", "Exception encountered when"),
)
"""Beginnings of lines of TensorFlow's and Keras's errors that do not say what is wrong."""


def first_line(error: BaseException) -> str:
    """The line of an error that says why, without TensorFlow's heading and traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0] == "in user code:":
        # AutoGraph tells the way there first, then the error with its type.
        return lines[-1].partition(": ")[2].rstrip(".") or lines[-1]
    said = [line for line in lines if not line.startswith(_HEADINGS)]
    return (said or lines or ["no message"])[0]
