"""The addresses at which runs serve their metrics, as Prometheus's file_sd reads them.

`runs/.targets/RUN.json` is there while the run's process is. A process that was killed leaves its file;
the next one that looks removes it.
Source: prometheus.io, `<file_sd_config>`: labels that begin with `__meta_` are for relabeling only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.telemetry.processes import ProcessId, this_process

FOLDER = ".targets"
"""Folder of the files, in `runs`."""

JOB = "stoker-train"
"""Prometheus's label `job` of every run."""

_META = "__meta_stoker_"


@contextlib.contextmanager
def published(runs: Path, run: str, address: str) -> Iterator[None]:
    """Announce the address of a run's metrics inside the `with` block.

    Args:
        runs: The folder `runs`.
        run: ID of the run.
        address: HOST:PORT.

    Raises:
        OSError: The file cannot be written.
    """
    folder = runs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    live_targets(runs)
    path = folder / f"{run}.json"
    owner = {f"{_META}{key}": str(value) for key, value in asdict(this_process()).items()}
    group = {"targets": [address], "labels": {"job": JOB} | owner}
    made = folder / f".{run}.tmp"
    made.write_text(json.dumps([group], indent=1) + "\n")
    os.replace(made, path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def live_targets(runs: Path) -> list[dict[str, Any]]:
    """Return the target groups of all runs whose process is alive; remove the files of the others.

    Args:
        runs: The folder `runs`.

    Returns:
        As `/sd` answers (http_sd): targets and labels. Left out are files that cannot be read, and
        loopback addresses of other machines that share the folder.
    """
    found: list[dict[str, Any]] = []
    for path in sorted((runs / FOLDER).glob("*.json")):
        try:
            groups = json.loads(text := path.read_text())
            owners = [_owner(group["labels"]) for group in groups]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if any(owner.is_gone() for owner in owners):
            with contextlib.suppress(OSError):
                if path.read_text() == text:  # else the run has just been continued
                    path.unlink()
        elif all(_is_reachable(group, owner) for group, owner in zip(groups, owners, strict=True)):
            found += groups
    return found


def _is_reachable(group: dict[str, Any], owner: ProcessId) -> bool:
    """Return whether this machine may reach the targets: not the loopback address of another one."""
    own = owner.host == socket.gethostname()
    return own or not any(address.startswith("127.") for address in group["targets"])


def _owner(labels: dict[str, str]) -> ProcessId:
    return ProcessId(
        host=labels[f"{_META}host"],
        boot=labels[f"{_META}boot"],
        pid=int(labels[f"{_META}pid"]),
        started=labels[f"{_META}started"],
    )
