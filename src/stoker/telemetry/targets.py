"""Publishes the addresses on which runs serve their metrics, in files for Prometheus's file_sd.

`runs/.targets/RUN.json` exists while the run's process is alive. If the process is killed, its file remains, and the
next reader removes it.
Source: prometheus.io, `<file_sd_config>`: labels that begin with `__meta_` are only for relabeling.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.core.incarnation import is_newest
from stoker.telemetry.processes import ProcessId, this_process

FOLDER = ".targets"
"""Folder with the files, inside the folder `runs`."""

JOB = "stoker-train"
"""Value of Prometheus's label `job` for every run."""

_META = "__meta_stoker_"

_MAX_BYTES = 1 << 20
"""Maximum size of a file that is read, bytes."""

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

Target = dict[str, Any]
"""A target group of Prometheus: `targets` (a list of HOST:PORT) and their `labels`."""


@contextlib.contextmanager
def published(runs: Path, run: str, address: str) -> Iterator[None]:
    """Publish the address of a run's metrics inside the `with` block, unless a later start of the job has begun.

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
    if is_newest():
        made = folder / f".{run}.tmp"
        made.write_text(json.dumps([group], indent=1) + "\n")
        os.replace(made, path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if is_newest():
                path.unlink()


def published_port(runs: Path, run: str) -> int | None:
    """Return the port of a run's metrics; None if the run has not published an address.

    Args:
        runs: The folder `runs`.
        run: ID of the run.
    """
    try:
        groups = [_group(each) for each in _entries(runs / FOLDER / f"{run}.json")]
    except (OSError, ValueError, RecursionError):
        return None
    ports = [address.rpartition(":")[2] for each in groups for address in each["targets"]]
    return next((int(port) for port in ports if port.isdecimal()), None)


def reachable_address(address: str) -> str:
    """Return the HOST:PORT at which clients can reach a server that listens on HOST:PORT.

    0.0.0.0 is not a destination. It is replaced by the machine's name if the name has an address, so that other
    machines can connect too; otherwise by 127.0.0.1.
    """
    host, _, port = address.rpartition(":")
    if not ipaddress.IPv4Address(host).is_unspecified:
        return address
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        name = "127.0.0.1"
    return f"{name}:{port}"


def _ignored(path: Path, error: Exception) -> None:
    """Ignore a file that cannot be read."""


def live_targets(runs: Path, on_bad: Callable[[Path, Exception], None] = _ignored) -> list[Target]:
    """Return the target groups of all runs whose process is alive; remove the files of all other runs.

    Args:
        runs: The folder `runs`.
        on_bad: Called with each file that cannot be read and the error; the file is skipped.

    Returns:
        Targets and labels, in the form in which `/sd` answers (http_sd). Loopback addresses of other machines that
        share the folder are left out. Files without a process describe other scrape targets, and are included.
    """
    found: list[Target] = []
    for path in sorted((runs / FOLDER).glob("*.json")):
        try:
            groups = [_group(each) for each in _entries(path)]
        except FileNotFoundError:
            continue  # the run has ended since the files were listed
        except (OSError, ValueError, RecursionError) as error:
            on_bad(path, error)
            continue
        owners = [_owner(group["labels"]) for group in groups]
        if any(owner is not None and owner.is_gone() for owner in owners):
            with contextlib.suppress(OSError, ValueError):
                # if it differs, a new process has just continued the run
                if _entries(path) == groups:
                    path.unlink()
        elif all(_is_reachable(group, owner) for group, owner in zip(groups, owners, strict=True)):
            found += groups
    return found


def _entries(path: Path) -> list[Any]:
    """Return the list in a JSON file; raise ValueError if the file does not contain a list."""
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES} bytes")
    groups = json.loads(text)
    if not isinstance(groups, list):
        raise ValueError("not a list")
    return groups


def _group(value: Any) -> Target:
    if not isinstance(value, dict):
        raise ValueError("an entry is not an object")
    targets, labels = value.get("targets"), value.get("labels", {})
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ValueError("targets is not a list of HOST:PORT")
    if not isinstance(labels, dict) or not all(
        _LABEL.fullmatch(name) and isinstance(text, str) for name, text in labels.items()
    ):
        raise ValueError("labels is not an object of label names and strings")
    return {"targets": targets, "labels": labels}


def _is_reachable(group: Target, owner: ProcessId | None) -> bool:
    """Return whether this machine may reach the targets; False for a loopback address of another machine."""
    own = owner is None or owner.host == socket.gethostname()
    return own or not any(address.startswith("127.") for address in group["targets"])


def _owner(labels: dict[str, str]) -> ProcessId | None:
    """Return the process that published a target; None if the target's labels do not identify a process."""
    try:
        return ProcessId(
            host=labels[f"{_META}host"],
            boot=labels[f"{_META}boot"],
            pid=int(labels[f"{_META}pid"]),
            started=labels[f"{_META}started"],
        )
    except (KeyError, ValueError):
        return None
