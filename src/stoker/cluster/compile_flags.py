"""Sets TensorFlow's flags for the folder of compiled XLA programs, before TensorFlow is imported.

An unknown flag ends the process, on a CPU too. These were tested with the versions in `TRIED`.
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
from stoker.cluster.doctor.gpus import read_gpus
from stoker.core.errors import UserError

_LOG = logging.getLogger("stoker")

TRIED = "2.21."
"""The TensorFlow versions that know these flags: an unknown flag ends the process."""

FOLDER = "STOKER_CACHE"
"""Environment variable: the folder for caches; `off` for none."""

_OURS = "STOKER_XLA_FLAGS"
"""Environment variable: additions to the user's flags, so that child processes can remove them."""

_FLAGS = {
    "TF_XLA_FLAGS": (PROGRAMS, "--tf_xla_persistent_cache_directory"),
    "XLA_FLAGS": (TUNING, "--xla_gpu_per_fusion_autotune_cache_dir"),
}
"""Variable -> its folder, and the flag that names the folder."""

_PLAIN = re.compile(r"[\w./+@:=-]+", re.ASCII)
"""Paths that a flag can contain without quoting."""


def cache_root(environment: Mapping[str, str]) -> Path | None:
    """The folder of all keys; None if the user turned the cache off.

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
    """What decides whether a compiled program can be used here but is not in TensorFlow's own key.

    Args:
        environment: With the user's own flags only.
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
    """Let TensorFlow keep programs that XLA compiles; call it before TensorFlow is imported.

    If that is impossible, only the log says so, and XLA compiles in every process. The user's own
    flags are kept, and if the user has named a cache folder, that one is used.

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
    """False if the user has named a folder, or a file with the flags in it."""
    return flag not in value and (not value.strip() or value.strip().startswith("-"))


def _without_ours(environment: MutableMapping[str, str]) -> None:
    """Remove what a parent process has added: its folder belongs to it."""
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
    """Publish what this process has compiled so far, if it has a cache."""
    if _active is not None:
        _active.publish()


def give_way(error: Exception) -> bool:
    """Stop keeping compiled programs if the error says that one could not be written.

    Args:
        error: Raised by a call that XLA compiles.

    Returns:
        Whether it was that error; if so, repeating the call succeeds.
    """
    if _active is None or str(_active.folder(PROGRAMS)) not in str(error):
        return False
    try:
        _active.go_on_in_memory()
    except OSError:
        return False
    _LOG.warning(
        "the disk with XLA's cache cannot be written: compiled programs are not kept (set %s to a "
        "folder with room)",
        FOLDER,
    )
    return True


def used() -> Used | None:
    """How this process used the cache; None if it has none."""
    return None if _active is None else _active.used
