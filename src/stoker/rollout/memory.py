"""Checks whether several versions of a model fit in a server's memory together."""

from __future__ import annotations

from pathlib import Path

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.limits import usable_memory
from stoker.core.errors import Plain, UserError

_GRAPHS = ("saved_model.pb", "saved_model.pbtxt", "model.tflite")


def version_bytes(folder: Path) -> int:
    """Return the minimum memory of a loaded version, bytes: variables, and the graph with its constants."""
    graphs = [folder / name for name in _GRAPHS]
    files = [*(folder / "variables").glob("*.data-*"), *graphs]
    return sum(path.stat().st_size for path in files if path.is_file())


def check_fits(*folders: Path, server_bytes: int | None = None) -> None:
    """Refuse a rollout if its versions do not fit in memory together.

    Args:
        folders: Folders of the versions.
        server_bytes: Memory of a server, bytes; None: the memory of this machine or container, and of its smallest GPU.

    Raises:
        UserError: the versions do not fit.
    """
    need = sum(map(version_bytes, folders))
    *others, last = (each.name for each in folders)
    limits = {"a server": server_bytes} if server_bytes else _limits()
    for where, limit in limits.items():
        if need > limit:
            raise UserError(
                f"Versions {', '.join(others)} and {last} must fit in the memory of {where} together",
                got=Plain(f"{_gib(need)} of variables and graphs, {_gib(limit)} of memory"),
                fix="Use a server with more memory (if it is another machine, set --server-memory), "
                "replace the version without a rollout (`stoker serve --unload-first`), or test fewer arms.",
            )


def _limits() -> dict[str, int]:
    gpus = [state.memory_bytes for state in read_gpus().states]
    limits = {"this machine": usable_memory()}
    return {**limits, "its GPU": min(gpus)} if gpus else limits


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
