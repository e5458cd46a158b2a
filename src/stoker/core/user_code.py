"""Finds and calls the user's functions, and reports their failures with the user's file and line."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.source_fingerprint import module_file, names_bound


def load_function(folder: Path, reference: str, *, where: str) -> Callable[..., Any]:
    """Import and return the function `module:function` of the user's folder.

    Args:
        folder: The user's folder. It is on the import path during the import, so that its modules can import one
            another.
        reference: `module:function`.
        where: The setting that names it, for messages.

    Raises:
        ConfigError: the module or the function does not exist, or importing failed (file and line).
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
    """Check that `load_function` would find a function, as far as the source shows; no code is run.

    Raises:
        ConfigError: the module does not exist, or does not define that name.
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
    """Return module and function of `module:function`.

    Raises:
        ConfigError: the reference has another form.
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
    """Call the user's function; an exception becomes one line with the user's file and line.

    Args:
        function: The user's function.
        *args: Its positional arguments.
        what: Its name, for messages.
        options: Its keyword arguments.

    Raises:
        ConfigError: the function raised.
    """
    try:
        return function(*args, **options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise failure_of_user_code(what, error) from error


def failure_of_user_code(what: str, error: BaseException) -> ConfigError:
    """Return the one-line error for a failure that the user's code caused.

    Args:
        what: What failed: `module:function`, or a noun such as "the loss".
        error: The exception.

    Returns:
        The error, with the innermost line of the user's code, and with Keras's own explanation if there is one.
    """
    advice = advice_for(error)
    return ConfigError(
        f"{what} failed{user_place(error)}",
        got=Plain(f"{type(error).__name__}: {first_line(error)}{_kerass_sentence(error)}"),
        fix=" ".join([*([advice] if advice else []), _FOR_MORE]),
    )


_FOR_MORE = "Run it again with --debug for the whole traceback."


def _import(folder: Path, name: str, path: Path, *, where: str) -> Any:
    top = name.partition(".")[0]
    for known in [key for key in list(sys.modules) if key == top or key.startswith(f"{top}.")]:
        # Remove another experiment's module of the same name, or an earlier state of this module.
        del sys.modules[known]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise failure_of_user_code(f"{where}: importing {path.name}", error) from error
    finally:
        sys.path.remove(str(folder))


_STOKER = Path(__file__).resolve().parents[1]
_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")
)
"""Folders with the standard library and with installed packages."""

_IN_TRACEBACK = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\w+))?')


def user_place(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error passed through.

    TensorFlow puts the traceback of a generator, of a `py_function` and of a function that AutoGraph converted into
    the text of its own error. The lines in that text are used too; they are the innermost.

    Returns:
        ` (model.py, line 12, in build)`; "" if no line of the user's code was involved.
    """
    found = [place for one in _chain(error) for place in (*_in_frames(one), *_in_text(one))]
    if not found:
        return ""
    path, line, function = found[-1]
    inside = f", in {function}" if function not in ("", "<module>", "None") else ""
    return f" ({path.name}, line {line}{inside})"


def is_of_user_code(error: BaseException) -> bool:
    """Return whether the user's code caused an error, directly or in a call of Keras or TensorFlow.

    If no line of the user's code was involved, the package that raised the error decides: an error inside a call of
    Keras or TensorFlow is about the user's model; an error in Stoker, or in another library, is a bug of Stoker.
    """
    if user_place(error):
        return True
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [number for number, path in enumerate(files) if _STOKER in path.parents]
    below = files[ours[-1] + 1 :] if ours else files
    return bool(below) and bool({"keras", "tensorflow"}.intersection(below[0].parts))


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and the chain of its causes; the first cause is last."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


Place = tuple[Path, int, str]
"""File, line and function."""


def _in_frames(error: BaseException) -> list[Place]:
    frames = traceback.extract_tb(error.__traceback__)
    return _of_the_user([(frame.filename, frame.lineno or 0, frame.name) for frame in frames])


def _in_text(error: BaseException) -> list[Place]:
    places = _IN_TRACEBACK.findall(str(error))
    return _of_the_user([(file, int(line), function) for file, line, function in places])


def _of_the_user(places: list[tuple[str, int, str]]) -> list[Place]:
    libraries = (*_INSTALLED, _STOKER)
    found = [(Path(file), line, function) for file, line, function in places]
    return [
        (path, line, function)
        for path, line, function in found
        if path.is_file()
        and not path.name.startswith("__autograph_generated_file")
        and not any(path.resolve().is_relative_to(home) for home in libraries)
    ]


_CLUTTER = re.compile(r"\x1b\[[0-9;]*m|\{\{function_node [^}]*\}\}\s*")
"""Matches colors in Keras's messages, and node names in TensorFlow's."""

_KERAS_CALL = re.compile(r"Exception encountered when calling ([^\n]+?)\.?\n")


def _kerass_sentence(error: BaseException) -> str:
    found = _KERAS_CALL.search(str(error))
    return f" (Exception encountered when calling {found[1]})" if found else ""


def advice_for(error: BaseException) -> str:
    """Return advice for Python code that fails only because TensorFlow traces it; "" for other errors."""
    text = f"{type(error).__name__}: {error}"
    if "numpy() is only available" in text or re.search(r"has no attribute 'numpy'", text):
        return (
            "While a step is compiled, tensors have no values: use TensorFlow or keras.ops, or wrap "
            "the Python code in tf.py_function."
        )
    if "OperatorNotAllowedInGraphError" in text or "as a Python `bool`" in text:
        return "Python's `if` and `for` cannot read a tensor there: use tf.where, keras.ops.cond or tf.cond."
    if _OF_RAGGED.search(text):
        return (
            "In this data the lists of this column have one length, so it is a plain tensor: "
            "data.columns: {lists: [COLUMN]} reads it as lists of varying length."
        )
    if "'NoneType' object has no attribute 'replica_id_in_sync_group'" in text:
        return "While a model is built on several devices, tf.distribute.get_replica_context() is None."
    if "SymbolicTensor" in text or "KerasTensor" in text:
        return "While a step is compiled, tensors have no values: use TensorFlow or keras.ops."
    return ""


_OF_RAGGED = re.compile(
    r"has no attribute '(to_tensor|row_lengths|row_splits|flat_values|with_flat_values)'"
)
"""Matches an error about an attribute that only a `tf.RaggedTensor` has."""


_HEADINGS = (
    *("Graph execution error:", "Detected at node", "<stack traces unavailable>"),
    *("File ", "Exception encountered when"),
)
"""Beginnings of the lines that do not say what is wrong, in errors of TensorFlow and Keras."""


_CAUSE = "Error encountered:"
"""End of the line before the cause, if Keras could not infer a layer's shape."""


def first_line(error: BaseException) -> str:
    """Return the line of an error that gives the cause, without TensorFlow's heading and traceback."""
    text = _CLUTTER.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0] == "in user code:":
        # AutoGraph prints the call stack first, then the error's type and text in the last line.
        return lines[-1].partition(": ")[2].rstrip(".") or lines[-1]
    causes = [number for number, line in enumerate(lines) if line.endswith(_CAUSE)]
    lines = lines[causes[-1] + 1 :] if causes else lines
    said = [line for line in lines if not line.startswith(_HEADINGS)]
    return (said or lines or ["no message"])[0]
