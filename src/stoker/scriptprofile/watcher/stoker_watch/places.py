"""Finds the line of the user's files that made a call."""

from __future__ import annotations

import inspect
import os
import sysconfig
from functools import lru_cache
from types import FrameType

Place = tuple[str, int]
"""File and line."""

NOWHERE: Place = ("", 0)
"""The place if no line of the user's code is known."""

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - text, as in frames
_STDLIB = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}  # noqa: PTH120 - as above
)
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras", "numpy")


@lru_cache(maxsize=4096)
def owner(file: str) -> str:
    """The owner of a file: `user`, `us` (the watcher), `python`, or the name of an installed package."""
    if file.startswith(_HERE) or "__autograph_generated_file" in file:
        return "us"
    for packages in ("site-packages", "dist-packages"):
        _, found, rest = file.partition(os.sep + packages + os.sep)
        if found:
            return rest.partition(os.sep)[0].removesuffix(".py")
    if file.startswith(("<frozen", "<__", *_STDLIB)):
        return "python"
    return "user"


def who_called() -> tuple[Place, str]:
    """Return the nearest line in the user's files, and the owner of the code that made the call itself.

    If no file of the user is on the stack, because the program is an installed package, the nearest line outside the
    frameworks is returned.
    """
    frame: FrameType | None = inspect.currentframe()
    maker, installed = "", NOWHERE
    while frame is not None:
        file = frame.f_code.co_filename
        name = owner(file)
        if not maker and name not in ("us", "python", "tensorflow"):
            maker = name
        if name == "user":
            return (_absolute(file), frame.f_lineno), maker
        if installed == NOWHERE and name not in ("us", "python", *_FRAMEWORKS):
            installed = (file, frame.f_lineno)
        frame = frame.f_back
    return installed, maker


def user_calls() -> list[tuple[str, int, int]]:
    """Return file, current line and first line of each running function of the user, innermost first."""
    found = []
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if owner(code.co_filename) == "user":
            found.append((_absolute(code.co_filename), frame.f_lineno, code.co_firstlineno))
        frame = frame.f_back
    return found[:MAX_CALLS]


MAX_CALLS = 8
"""Maximum number of functions that are returned: a step is not nested more deeply."""


def place() -> Place:
    """The nearest line in the user's files."""
    return who_called()[0]


def user_caller() -> Place | None:
    """The user's line that made this call, directly or through NumPy; None if a framework made it."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = owner(frame.f_code.co_filename)
        if name == "user":
            return _absolute(frame.f_code.co_filename), frame.f_lineno
        if name not in ("us", "python", "numpy"):
            return None
        frame = frame.f_back
    return None


def of_code(code: object) -> Place:
    """The first line of a function, from its code object; `NOWHERE` if the function is not the user's."""
    file = getattr(code, "co_filename", "")
    if not file or owner(file) != "user":
        return NOWHERE
    return _absolute(file), int(getattr(code, "co_firstlineno", 0))


def _absolute(file: str) -> str:
    return file if file.startswith("<") else os.path.abspath(file)  # noqa: PTH100 - as above
