"""Sets TensorFlow's flags for the folder of compiled XLA programs, before TensorFlow is imported.

TensorFlow ends the process at an unknown flag, even on a machine without a GPU. The flags here were tested with the
versions in `TRIED`.
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
"""Prefix of the TensorFlow versions with which the flags were tested; other versions may not know the flags."""

FOLDER = "STOKER_CACHE"
"""Environment variable with the folder for caches; `off`: use no cache."""

_OURS = "STOKER_XLA_FLAGS"
"""Environment variable with the flags that were added to the user's own, so that child processes can remove them."""

_FLAGS = {
    "TF_XLA_FLAGS": (PROGRAMS, "--tf_xla_persistent_cache_directory"),
    "XLA_FLAGS": (TUNING, "--xla_gpu_per_fusion_autotune_cache_dir"),
}
"""Environment variable of flags -> kind of files, and the flag that sets their folder."""

_PLAIN = re.compile(r"[\w./+@:=-]+", re.ASCII)
"""Matches paths that a flag can contain without quotes."""


def cache_root(environment: Mapping[str, str]) -> Path | None:
    """Return the folder that contains a folder for each key; None if the user turned the cache off.

    Args:
        environment: Environment of this process. The base folder is `STOKER_CACHE`, else `XDG_CACHE_HOME`, else
            `~/.cache`.
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
    """Return facts on which a compiled program depends, and which TensorFlow's own key does not contain.

    Args:
        environment: Environment with only the user's own flags.
    """
    gpus = read_gpus()
    return {
        "gpus": sorted({f"{each.name} {each.compute_capability}" for each in gpus.states}),
        "driver": gpus.driver,
        "cpu": cpu_name(),
        "cpu_features": _cpu_features(),
        "tensorflow": _tensorflow_version(),
        "flags": {name: environment.get(name, "") for name in sorted(_FLAGS)},
        # These variables change what is compiled for a GPU.
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
    """Let TensorFlow cache the programs that XLA compiles; must be called before TensorFlow is imported.

    If caching is not possible, a log line says why, and XLA compiles in every process. The user's own flags are kept.
    If they name a cache folder, that folder is used.

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
    """Whether a flag can be added.

    It can if the user has not set it, and the variable contains flags or nothing, not the name of a file with flags.
    """
    return flag not in value and (not value.strip() or value.strip().startswith("-"))


def _without_ours(environment: MutableMapping[str, str]) -> None:
    """Remove the flags that a parent process has added: they name the parent's folder."""
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
    """If an error says that a compiled program could not be written, stop caching programs on disk.

    Args:
        error: Raised by a call that XLA compiles.

    Returns:
        Whether the error says that; if so, the failed call can be repeated.
    """
    if _active is None or str(_active.folder(PROGRAMS)) not in str(error):
        return False
    try:
        _active.go_on_in_memory()
    except OSError:
        return False
    _LOG.warning(
        "XLA's cache cannot be written: compiled programs are not cached (set %s to a folder with free space)",
        FOLDER,
    )
    return True


def used() -> Used | None:
    """Return how this process has used the cache; None if it has no cache."""
    return None if _active is None else _active.used
