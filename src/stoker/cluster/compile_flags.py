"""TensorFlow told where to keep what XLA compiles: its flags, before it is imported.

An unknown flag ends the process, on a CPU too: these were tried with the versions in `TRIED`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import re
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stoker.cluster.compile_cache import PROGRAMS, TUNING, CompileCache, Used
from stoker.cluster.devices import cpu_name
from stoker.cluster.machine.gpus import read_gpus
from stoker.core.errors import UserError

_LOG = logging.getLogger("stoker")

TRIED = "2.21."
"""The TensorFlow whose flags these are: an unknown flag ends the process."""

FOLDER = "STOKER_CACHE"
"""Environment variable: the folder for caches; `off` for none."""

_OURS = "STOKER_XLA_FLAGS"
"""Environment variable: what was added to the user's flags, for child processes to take away."""

_FLAGS = {
    "TF_XLA_FLAGS": (PROGRAMS, "--tf_xla_persistent_cache_directory"),
    "XLA_FLAGS": (TUNING, "--xla_gpu_per_fusion_autotune_cache_dir"),
}
"""Variable -> the folder of it, and the flag that names it."""

_PLAIN = re.compile(r"[\w./+@:=-]+", re.ASCII)
"""Paths that a flag can hold as they are."""


def cache_root(environment: Mapping[str, str]) -> Path | None:
    """The folder of all keys; None where the user wants none.

    Args:
        environment: `STOKER_CACHE`, else `XDG_CACHE_HOME`, else the home folder's `.cache`.
    """
    named = environment.get(FOLDER)
    if named == "off":
        return None
    if named:
        return Path(named).absolute() / "xla"
    base = environment.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # a user without a home folder
        return None
    return folder / "stoker" / "xla"


def cache_key(environment: Mapping[str, str]) -> dict[str, Any]:
    """What decides whether a compiled program can be used here, and is not in TensorFlow's own key.

    Args:
        environment: With the user's flags only.
    """
    gpus = read_gpus()
    return {
        "gpus": sorted({f"{each.name} {each.compute_capability}" for each in gpus.states}),
        "driver": gpus.driver,
        "cpu": cpu_name(),
        "cpu_features": _cpu_features(),
        "tensorflow": _tensorflow_version(),
        "flags": {name: environment.get(name, "") for name in sorted(_FLAGS)},
        # They change what is compiled for a GPU.
        "switches": {
            name: value
            for name, value in sorted(environment.items())
            if name.startswith(("TF_CUDNN_", "TF_USE_CU", "NVIDIA_TF32", "TF_DETERMINISTIC"))
        },
    }


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("flags")), "")


def _tensorflow_version() -> str:
    try:
        return version("tensorflow")
    except PackageNotFoundError:
        return ""


_active: CompileCache | None = None


def prepare(environment: MutableMapping[str, str]) -> None:
    """Let TensorFlow keep what XLA compiles; call it before TensorFlow is imported.

    Where that cannot be, nothing is said but in the log, and XLA compiles in every process. The
    user's own flags are kept, and the user's own cache folder is used where one is named.

    Args:
        environment: `os.environ`; the flags are added to it.
    """
    global _active
    if _active is not None:
        return
    _without_ours(environment)
    root = cache_root(environment)
    if root is None or not _tensorflow_version().startswith(TRIED):
        return
    key = cache_key(environment)
    wanted = ["TF_XLA_FLAGS", *(["XLA_FLAGS"] if key["gpus"] else [])]
    wanted = [name for name in wanted if _can_be_added(environment.get(name, ""), *_FLAGS[name])]
    if not wanted:
        return
    try:
        if not _PLAIN.fullmatch(str(root)):
            raise OSError(errno.EINVAL, f"{root} has a character that a flag cannot hold")
        _active = CompileCache(root, key)
    except (OSError, UserError) as error:
        refused = isinstance(error, OSError) and error.errno in (
            *(errno.EPERM, errno.ENOTDIR, errno.EINVAL),
        )
        _LOG.log(logging.WARNING if refused else logging.INFO, "XLA has no cache: %s", error)
        return
    atexit.register(_active.close)
    added = {}
    for name in wanted:
        kind, flag = _FLAGS[name]
        added[name] = f"{flag}={_active.folder(kind)}"
        environment[name] = f"{environment.get(name, '')} {added[name]}".strip()
    environment[_OURS] = json.dumps(added)


def _can_be_added(value: str, _: str, flag: str) -> bool:
    """Not where the user has named a folder, or a file with the flags in it."""
    return flag not in value and (not value.strip() or value.strip().startswith("-"))


def _without_ours(environment: MutableMapping[str, str]) -> None:
    """Take away what a parent process has added: its folder is its own."""
    added: dict[str, str] = {}
    with contextlib.suppress(ValueError):
        added = json.loads(environment.pop(_OURS, "{}"))
    for name, text in added.items():
        kept = environment.get(name, "").replace(text, "").strip()
        if kept:
            environment[name] = kept
        else:
            environment.pop(name, None)


def publish() -> None:
    """Keep what this process has compiled by now, where it has a cache."""
    if _active is not None:
        _active.publish()


def give_way(error: Exception) -> bool:
    """After an error that says that a compiled program could not be written: keep none any more.

    Args:
        error: Of a call that XLA compiles.

    Returns:
        Whether it was that error; the same call succeeds now.
    """
    if _active is None or str(_active.folder(PROGRAMS)) not in str(error):
        return False
    _LOG.warning(
        "the disk with XLA's cache cannot be written: compiled programs are not kept (set %s to a "
        "folder with room)",
        FOLDER,
    )
    _active.go_on_in_memory()
    return True


def used() -> Used | None:
    """What this process had of the cache; None where it has none."""
    return None if _active is None else _active.used
