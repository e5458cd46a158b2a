"""The hooks that report events to the observer: inotify, Python's audit events, and `os.environ`."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.core.reads.inotify import FolderWatch
from stoker.core.reads.observer import (
    STOKER,
    Observer,
    is_not_observed,
    is_of_the_system,
    is_within,
)

_LOG = logging.getLogger(__name__)

_ACTIVE: Observer | None = None


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Observe reads while the body runs.

    If inotify has no watches left, every file in the folder is recorded as read.
    """
    global _ACTIVE
    _install_audit_hook()
    before, _ACTIVE = _ACTIVE, observer
    getitem = _observe_environment()
    watch = _watch(observer)
    try:
        yield
    finally:
        if watch is not None:
            watch.close()
        os._Environ.__getitem__ = getitem  # type: ignore[method-assign]  # noqa: SLF001 - as below
        _ACTIVE = before
        observer.look_at_maps(now=True)
        observer.flush()


def _watch(observer: Observer) -> FolderWatch | None:
    try:
        return FolderWatch(
            observer.places,
            on_read=observer.file,
            on_list=functools.partial(observer.listed, by_user=False),
            on_create=observer.appeared,
            on_overflow=observer.everything,
            on_pause=observer.write,
        )
    except OSError as error:
        _LOG.warning(
            "reads in %s cannot be observed (%s): all files there are recorded as read",
            observer.folder,
            error,
        )
    observer.everything()
    return None


_HOOKED = False


def _install_audit_hook() -> None:
    """Install the audit hook, once per process: Python cannot remove a hook."""
    global _HOOKED
    if not _HOOKED:
        _HOOKED = True
        sys.addaudithook(_audit)
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """Stop observing in a forked child: its observer thread is missing, and its lock may never be freed."""
    global _ACTIVE
    _ACTIVE = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    observer = _ACTIVE
    # At the end of the process Python sets all names of this module to None.
    if observer is None or event not in _EVENTS or is_not_observed():
        return
    path, flags = arguments[0], arguments[-1]
    if event in _CREATING:
        _makes(observer, *arguments[_CREATING[event]])
    elif event != "open":
        if path is None or isinstance(path, str | bytes | os.PathLike):
            _listed(observer, os.path.realpath(os.fsdecode(path or ".")))
    elif isinstance(path, str | bytes | os.PathLike):
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_APPEND)
        _opened(observer, os.path.realpath(os.fsdecode(path)), writes=bool(writes))


_CREATING = {
    # Event -> positions, in the event's arguments, of the new name and of the descriptor of its folder, if there is
    # one.
    "os.mkdir": slice(0, 3, 2),
    "os.rename": slice(1, 4, 2),
    "os.link": slice(1, 4, 2),
    "os.symlink": slice(1, 3),
}
"""Python's audit events that create a name in a folder. `open` may create one, too; `_audit` handles it separately."""

_EVENTS = frozenset(("open", "os.listdir", "os.scandir", *_CREATING))
"""Python's audit events that read a file, list a folder, or create a name in a folder."""


def _makes(observer: Observer, path: Any, folder: int) -> None:
    text = os.fsdecode(path)
    if folder >= 0:
        text = os.path.join(f"/proc/self/fd/{folder}", text)  # noqa: PTH118 - may be absolute
    parent, name = os.path.split(os.path.abspath(text))  # noqa: PTH100 - links stay
    full = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118 - the same
    if is_within(full, (str(observer.folder),)):
        observer.made(Path(full))


def _listed(observer: Observer, full: str) -> None:
    if not is_within(full, (str(observer.folder),)):
        return
    if _IMPORTLIB in sys._getframe(2).f_code.co_filename:  # noqa: SLF001 - documented, and quick
        observer.imports_from(Path(full))
    elif _called_by_the_user(observer, ends=_IMPORTLIB):
        observer.listed(Path(full), by_user=True)


_IMPORTLIB = "importlib"
"""Text that the file names of Python's own import system contain."""


def _opened(observer: Observer, full: str, *, writes: bool) -> None:
    if writes and is_within(full, (str(observer.folder),)):
        # A file that the run writes is never an input, even if a library opened it (a callback's log).
        observer.written(Path(full))
    elif not is_of_the_system(full) and _called_by_the_user(observer):
        (observer.written if writes else observer.file)(Path(full))


def _called_by_the_user(observer: Observer, *, ends: str = "") -> bool:
    """Whether the user's code has caused an event.

    Args:
        observer: Knows the user's folder.
        ends: Part of a file name. If such a file is on the stack before the user's code, the event is not the user's.
    """
    frame = sys._getframe(3)  # noqa: SLF001 - documented, and the only quick way
    while frame is not None and not (ends and ends in frame.f_code.co_filename):
        if observer.is_of_the_user(frame.f_code.co_filename):
            return True
        if is_within(frame.f_code.co_filename, (str(STOKER),)):
            # Stoker's own code caused the event, even if the user's script called Stoker.
            return False
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return False


_BETWEEN = frozenset((os.__file__, "<frozen os>", "<frozen _collections_abc>"))
"""Files of the standard library that may be on the stack between the user's line and `os.environ`."""


def _observe_environment() -> Any:
    """Replace the method by which `os.environ` reads variables, to observe reads; return the original method."""
    before = os._Environ.__getitem__  # noqa: SLF001 - no other place sees a read

    def getitem(self: Any, key: str) -> str:
        observer = _ACTIVE
        if observer is not None and self is os.environ and isinstance(key, str):
            frame = sys._getframe(1)  # noqa: SLF001 - as above
            while frame.f_back is not None and _is_between(frame.f_code.co_filename):
                frame = frame.f_back
            if observer.is_of_the_user(frame.f_code.co_filename):
                observer.variable(key, (frame.f_code.co_filename, frame.f_lineno))
        return before(self, key)

    os._Environ.__getitem__ = getitem  # type: ignore[assignment,method-assign]  # noqa: SLF001 - the type of os.environ
    return before


def _is_between(file: str) -> bool:
    return file in _BETWEEN or file.endswith("_collections_abc.py")
