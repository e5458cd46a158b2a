"""The tasks of a job exchange their addresses through files in a shared folder.

Each task reserves a free port, and writes `ADDRESS:PORT` and the name of its machine into a file. The launcher does
not choose one port for all tasks, because that port may be in use on one of the machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.cluster.place import Place
from stoker.cluster.resolver import LOOPBACK, ClusterSpec
from stoker.core.errors import EXIT_BUG, ConfigError, Plain, UserError
from stoker.core.files import writable

INTERFACE = "STOKER_NETWORK_INTERFACE"
"""Environment variable: the network interface whose address the other tasks use, e.g. `ib0`."""

LONGEST_S = 600.0
"""Maximum time that a task waits for the other tasks, seconds."""

POLL_S = 0.2
"""Poll interval in seconds: a shared file system sends no notification of a remote change."""

TRIED = 3
"""Maximum number of the job's machines that are looked up in order to find this machine's own address: a name server
may take seconds for each."""

SHOWN = 10
"""Maximum number of ranks that an error names."""

_SIOCGIFADDR = 0x8915
"""Number of the ioctl request that returns the IPv4 address of an interface. Source: netdevice(7)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """What one task announces to the others."""

    address: str
    """IPv4 address of the task."""

    port: int
    """Port that the task has reserved."""

    machine: str
    """Identifies the machine or the pod: processes reach each other at 127.0.0.1 only if their values are equal."""


class TasksMissing(UserError):
    """Other tasks of the job did not start in time; another start of all tasks may succeed."""

    exit_code = EXIT_BUG


def own_address(place: Place, environ: Mapping[str, str]) -> str:
    """Return the address at which other machines reach this one; 127.0.0.1 if it has none.

    If `STOKER_NETWORK_INTERFACE` is set, return the address of that interface. Otherwise return the address from which
    this machine would connect to another machine of the job, or else the address of this machine's name.

    Raises:
        ConfigError: the interface does not exist, or has no address.
    """
    if name := environ.get(INTERFACE, ""):
        return _address_of(name)
    for host in place.others[:TRIED]:
        if (found := _address_towards(host)) and not found.startswith("127."):
            return found
    for host in filter(None, (place.node, socket.gethostname())):
        with contextlib.suppress(OSError):
            found = socket.gethostbyname(host)
            if not found.startswith("127."):
                return found
    return LOOPBACK


def machine_name() -> str:
    """Return an identifier of this machine: its host name, and the boot ID of its kernel."""
    # Pods on the same machine share the kernel, but have different names.
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()}/{started}"


def announce(folder: Path, place: Place, own: Announcement) -> None:
    """Write the address of this task into a file that other tasks read.

    Raises:
        ConfigError: another process has announced the same rank in the same start of the job.
        UserError: the folder cannot be written, or the job's folder is gone.
    """
    fix = "Check that the job's folder is still there, and its file system and rights."
    with writable(folder, what="the folder of this start's addresses", fix=fix):
        folder.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{place.rank}.", suffix=".tmp", dir=folder)
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(f"{own.address}:{own.port}\n{own.machine}\n")
                stream.flush()
                os.fsync(stream.fileno())
            # Create a link, not a rename: a link fails if the name exists, also on NFS.
            os.link(name, folder / str(place.rank))
        except FileExistsError:
            raise ConfigError(
                f"task {place.rank} must be started once in each start of the job",
                got=Plain(f"it has been started already, see {folder / str(place.rank)}"),
                fix="Take a new number with `stoker job-start JOB_FOLDER`, and start all tasks with it.",
            ) from None
        finally:
            Path(name).unlink(missing_ok=True)


def gather(
    folder: Path,
    place: Place,
    *,
    check: Callable[[], None],
    longest_s: float = LONGEST_S,
) -> tuple[Announcement, ...]:
    """Wait until all tasks have announced themselves; return their announcements by rank.

    Args:
        folder: The folder into which `announce` writes.
        place: The place of this process.
        check: Called at each poll; may raise an error to end the wait.
        longest_s: Maximum wait, seconds.

    Raises:
        TasksMissing: some tasks did not start in time.
    """
    found: dict[int, Announcement] = {}
    until_s = time.monotonic() + longest_s
    while True:
        for rank in set(range(place.tasks)) - found.keys():
            if (announced := _read(folder, rank)) is not None:
                found[rank] = announced
        if len(found) == place.tasks:
            return tuple(found[rank] for rank in range(place.tasks))
        if time.monotonic() > until_s:
            raise _missing(sorted(set(range(place.tasks)) - found.keys()), place, longest_s)
        check()
        time.sleep(POLL_S)  # no notification of remote writes


def agreed_cluster(
    place: Place, announced: tuple[Announcement, ...], *, keeps: bool = False
) -> ClusterSpec:
    """Return the cluster of all tasks; if all run on the same machine, their addresses become 127.0.0.1.

    Args:
        place: The place of this process.
        announced: Announcements by rank.
        keeps: Keep the announced addresses even if all tasks run on the same machine: the user has chosen the network.

    Raises:
        ConfigError: the tasks are on several machines, and one of these has only the address 127.0.0.1.
    """
    together = len({each.machine for each in announced}) == 1
    by_loopback = together and not keeps
    lonely = [rank for rank, each in enumerate(announced) if each.address.startswith("127.")]
    if lonely and not together:
        raise ConfigError(
            "tasks on several machines must have addresses that other machines can reach",
            got=Plain(f"{LOOPBACK} of task {_ranks(lonely)}"),
            fix=f"Choose the network with network_interface ({INTERFACE}), e.g. eth0.",
        )
    workers = [f"{LOOPBACK if by_loopback else each.address}:{each.port}" for each in announced]
    return ClusterSpec(workers=tuple(workers), index=place.rank)


def _missing(ranks: list[int], place: Place, longest_s: float) -> TasksMissing:
    return TasksMissing(
        f"all {place.tasks} tasks must start within {longest_s:g} s of each other",
        got=Plain(f"nothing from task {_ranks(ranks)}"),
        fix="Read the logs of these tasks, and check whether their machines see the job's folder.",
    )


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(map(str, ranks[:SHOWN])) + more


def _read(folder: Path, rank: int) -> Announcement | None:
    try:
        lines = (folder / str(rank)).read_text().splitlines()
    except OSError:
        return None
    if len(lines) < 2:  # NFS may show a file before its content
        return None
    address, _, port = lines[0].rpartition(":")
    return Announcement(address=address, port=int(port), machine=lines[1])


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(asks.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"{INTERFACE} must name a network interface with an IPv4 address",
                got=Plain(f"{interface!r}: {error.strerror}"),
                fix=f"This machine has {names}.",
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str | None:
    """Return the address from which this machine would connect to another machine; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            asks.connect((host, 9))
        except OSError:
            return None
        return str(asks.getsockname()[0])
