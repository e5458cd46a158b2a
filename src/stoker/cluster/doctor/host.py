"""Reads facts about a machine, except its GPUs: cores, memory, limits, container, disk."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from stoker.cluster.limits import memory_limit

DISK_BYTES = 128 << 20
"""Number of bytes that are written and read to measure a disk: more than the disk's cache holds, but few enough to
take less than a second."""

NVIDIA_VENDOR = "0x10de"
"""NVIDIA's vendor ID on the PCI bus."""

CAP_IPC_LOCK = 14
"""Number of the Linux capability to lock memory (linux/capability.h)."""

DISPLAY_CLASS = "0x03"
"""First digits of the PCI class of GPUs, including GPUs without a display output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The disk on which a folder is."""

    folder: str
    free_bytes: int
    write_bytes_per_s: float | None = None
    """Speed of sequential writes, up to the disk itself (fsync); None: it was not measured."""

    read_bytes_per_s: float | None = None
    """Speed of sequential reads, without the page cache if the file system allows it; None: it was not measured."""

    error: str = ""
    """Why the speed was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The resources of this machine that a process can use."""

    cores: int
    """Number of cores that this process may use."""

    memory_bytes: int
    """Physical memory of the machine."""

    available_bytes: int
    """Free memory, including what the kernel can free immediately."""

    limit_bytes: int | None
    """Memory limit of the control group; None: no limit."""

    shm_bytes: int | None
    """Size of /dev/shm."""

    shm_free_bytes: int | None
    open_files: int
    """Soft limit of open files; -1: no limit."""

    open_files_most: int
    """Hard limit of open files; -1: no limit."""

    processes: int
    """Limit of the user's processes and threads together; -1: no limit, as for root."""

    address_space_bytes: int
    """Limit of a process's address space; -1: no limit."""

    locked_bytes: int
    """Limit of the memory that a process may lock; -1: no limit, as with CAP_IPC_LOCK."""

    infiniband: tuple[str, ...]
    """Names of the adapters for remote direct memory access, e.g. mlx5_0."""

    container: str | None
    """Name of the container runtime: docker, podman, kubernetes or another; None outside a container."""

    numa_nodes: int
    nvidia_on_bus: int
    """Number of NVIDIA GPUs that the kernel sees on the PCI bus, with or without a driver."""

    nvidia_module: str | None
    """Version of NVIDIA's kernel module; None if it is not loaded."""

    nvidia_nodes: tuple[str, ...]
    """NVIDIA's device files under /dev."""

    disk: Disk


def read_host(folder: Path, *, measure_disk: bool, root: Path = Path("/")) -> Host:
    """Read the facts about this machine.

    Args:
        folder: The folder of the runs.
        measure_disk: Whether to measure the disk, by writing and reading a file in the folder.
        root: Root of the file system to read; tests use another folder.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = _memory(root / "proc/meminfo")
    shm = _space(root / "dev/shm")
    return Host(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        limit_bytes=memory_limit(root / "sys/fs/cgroup"),
        shm_bytes=shm and shm[0],
        shm_free_bytes=shm and shm[1],
        open_files=soft,
        open_files_most=hard,
        processes=-1 if os.geteuid() == 0 else resource.getrlimit(resource.RLIMIT_NPROC)[0],
        address_space_bytes=resource.getrlimit(resource.RLIMIT_AS)[0],
        locked_bytes=-1 if _may_lock(root) else resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=tuple(sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))),
        container=_container(root),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))),
        nvidia_on_bus=_nvidia_on_bus(root / "sys/bus/pci/devices"),
        nvidia_module=_line(root / "sys/module/nvidia/version"),
        nvidia_nodes=tuple(sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))),
        disk=_disk(folder, measure=measure_disk),
    )


def _memory(meminfo: Path) -> dict[str, int]:
    found = {}
    for line in (_text(meminfo) or "").splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields[1:] == ["kB"]:
            found[name] = int(fields[0]) * 1024
    return found


def _may_lock(root: Path) -> bool:
    """Return whether the limit of locked memory does not apply, e.g. for root outside a container."""
    for line in (_text(root / "proc/self/status") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "CapEff":
            return bool(int(rest, 16) >> CAP_IPC_LOCK & 1)
    return False


def _space(folder: Path) -> tuple[int, int] | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _container(root: Path) -> str | None:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    return os.environ.get("container")  # noqa: SIM112 - systemd's name


def _nvidia_on_bus(devices: Path) -> int:
    return sum(
        _line(device / "vendor") == NVIDIA_VENDOR
        and (_line(device / "class") or "").startswith(DISPLAY_CLASS)
        for device in devices.glob("*")
    )


def _disk(folder: Path, *, measure: bool) -> Disk:
    there = next(place for place in (folder, *folder.parents) if place.is_dir())
    status = os.statvfs(there)
    free = status.f_bavail * status.f_frsize
    if not measure:
        return Disk(folder=str(there), free_bytes=free)
    if free < 4 * DISK_BYTES:
        return Disk(folder=str(there), free_bytes=free, error="too little free space to measure")
    try:
        wrote, read = _speed(there)
    except OSError as error:
        return Disk(folder=str(there), free_bytes=free, error=str(error))
    return Disk(folder=str(there), free_bytes=free, write_bytes_per_s=wrote, read_bytes_per_s=read)


def _speed(folder: Path) -> tuple[float, float]:
    # The buffer is aligned to a page, which reads without the page cache require.
    block = mmap.mmap(-1, 4 << 20)
    block.write(os.urandom(1 << 20) * 4)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".stoker-disk-") as file:
        begun_s = time.monotonic()
        for _ in range(DISK_BYTES // len(block)):
            os.write(file.fileno(), block)
        os.fsync(file.fileno())
        wrote_s = time.monotonic() - begun_s
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            reader = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            # File systems in memory or on the network do not support reads without the page cache.
            reader = os.open(file.name, os.O_RDONLY)
        try:
            begun_s = time.monotonic()
            while os.readv(reader, [block]):
                continue
            read_s = time.monotonic() - begun_s
        finally:
            os.close(reader)
    return DISK_BYTES / wrote_s, DISK_BYTES / read_s


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _line(path: Path) -> str | None:
    text = _text(path)
    return None if text is None else text.strip()
