"""Compiles Stoker's C code to a library, once for each combination of machine, compiler and headers."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from stoker.core.errors import DataError, UserError
from stoker.core.files import (
    alone,
    hash_folder,
    publish_folder,
    read_json,
    remove,
    scratch_folder,
    write_json,
)
from stoker.core.fingerprint import fingerprint

_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-Wall")
"""Compiler options. Without fused multiply-add, sums are rounded as in TensorFlow."""

_TIMEOUT_S = 120.0
"""Time limit of the compiler, seconds; it usually takes 2 s."""

_FILE = "compiled.so"
_HASHES = "files.json"


class NotBuilt(Exception):
    """The C code cannot be compiled or loaded on this machine; the text says why."""


def load_compiled(source: Path, *libraries: str) -> ctypes.CDLL:
    """Compile a C file, if that was not done before, and return the loaded library.

    Args:
        source: The file.
        libraries: Linker options, e.g. `-lm`.

    Raises:
        NotBuilt: the compiler, a header or a library is missing, or the result cannot be
            stored.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NotBuilt("no C compiler (cc) is on the PATH")
    cache = _cache()
    folder = cache / _key(compiler, source)
    try:
        with alone(cache / "lock"):
            if not _is_whole(folder):
                _compile([compiler, *_FLAGS, str(source)], libraries, folder)
        return ctypes.CDLL(str(folder / _FILE))
    except (OSError, UserError) as error:
        raise NotBuilt(str(error)) from error


def _cache() -> Path:
    """Return a folder that only this user can write, because its content is executed."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "stoker" / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError) as error:
        raise NotBuilt(f"the cache folder cannot be used ({error}); set XDG_CACHE_HOME") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotBuilt(f"{folder} can be written by others")
    return folder


def _key(compiler: str, source: Path) -> str:
    """Return a key that depends on the preprocessed source (with its headers), the compiler and the machine."""
    text = _run([compiler, *_FLAGS, "-E", "-P", str(source)])
    return fingerprint(
        [text, _run([compiler, "--version"]), _FLAGS, platform.machine(), _features()]
    )


def _features() -> str:
    """Return the processor's features, because `-march=native` compiles for all of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compile(command: list[str], libraries: tuple[str, ...], folder: Path) -> None:
    remove(folder)
    with scratch_folder(folder) as scratch:
        made = scratch / "made"
        made.mkdir()
        _run([*command, "-o", str(made / _FILE), *libraries])
        write_json(made / _HASHES, hash_folder(made))
        publish_folder(made, folder)


def _is_whole(folder: Path) -> bool:
    try:
        hashes = read_json(folder / _HASHES)
    except DataError:
        return False
    found = hash_folder(folder)
    return bool(hashes == {_FILE: found.get(_FILE)})


def _run(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            cwd=tempfile.gettempdir(),
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [str(error)]
        raise NotBuilt(f"it does not compile: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"the compiler does not run: {error}") from error
    return done.stdout
