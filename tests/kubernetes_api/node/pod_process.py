"""`python -I -S pod_process.py SPEC`: runs the command of a container in namespaces of its own.

It has its own mounts, process numbers, host name and System V memory, and this machine's network. The root is a
small file system in memory: directories of this machine as the image (read-only), `/etc/hosts` and the volumes of
the pod, a fresh `/proc` and `/dev/shm`. As in a container, the command is process 1: a signal that it does not
handle is ignored, and when it ends, all of its processes end.
"""

# Importing pathlib takes as long as all the rest of a pod's start.
# ruff: noqa: PTH103, PTH110, PTH112, PTH114, PTH115, PTH102, PTH120, PTH123, PTH211

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from types import FrameType
from typing import Any

BIND, REC, PRIVATE, READ_ONLY, REMOUNT = 0x1000, 0x4000, 1 << 18, 0x1, 0x20
NO_SUID, NO_DEV = 0x2, 0x4
NEW_NS, NEW_UTS, NEW_IPC, NEW_PID = 0x20000, 0x4000000, 0x8000000, 0x20000000
NEW_USER = 0x10000000
DETACH = 0x2
PIVOT_ROOT = {"aarch64": 41}.get(os.uname().machine, 155)
DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38

NOT_STARTED = 128
"""Exit code of a command that could not be started, as container runtimes report it."""

LIBC = ctypes.CDLL(None, use_errno=True)


def check(code: int, what: str) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = [os.fsencode(each) for each in (source, target, kind)]
    check(LIBC.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(data)), target)


def bind(source: str, target: str, *, read_only: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, "", BIND | REC)
    if read_only:
        mount("", target, "", BIND | REMOUNT | READ_ONLY)


def bind_image(root: str, paths: list[tuple[str, str]]) -> None:
    for source, path in paths:
        if os.path.islink(source) and source.count("/") == 1:
            os.symlink(os.readlink(source), root + path)
        else:
            bind(source, root + path, read_only=True)


def make_root(spec: dict[str, Any]) -> None:
    """Build the container's files below `spec["root"]`, and make that the root."""
    root = spec["root"]
    mount("", "/", "", REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NO_SUID, "mode=0755")
    bind_image(root, spec["image"])
    for name in ("proc", "dev", "sys", "tmp", "run"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    mount("proc", f"{root}/proc", "proc", NO_SUID)
    mount("tmpfs", f"{root}/dev", "tmpfs", NO_SUID, "mode=0755")
    for name in ("null", "zero", "full", "random", "urandom"):
        bind(f"/dev/{name}", f"{root}/dev/{name}", read_only=False)
    os.mkdir(f"{root}/dev/shm")
    mount("shm", f"{root}/dev/shm", "tmpfs", NO_SUID | NO_DEV, "mode=1777,size=64m")
    bind(spec["hosts"], f"{root}/etc/hosts", read_only=False)
    bind(spec["termination_log"], f"{root}/dev/termination-log", read_only=False)
    for volume in spec["mounts"]:
        bind(volume["source"], root + volume["path"], read_only=volume["read_only"])
    bind_image(root, spec["hidden"])
    if spec["read_only_root"]:
        mount("", root, "", REMOUNT | READ_ONLY)
    # Not chroot: the kernel refuses a process in one a user namespace.
    os.chdir(root)
    check(LIBC.syscall(PIVOT_ROOT, b".", b"."), "change of the root")
    check(LIBC.umount2(b".", DETACH), "the old root")
    os.chdir("/")


def become(user: int, group: int) -> None:
    """Be another user for the container, who owns what this user owns outside: the volumes are of who submits."""
    if (user, group) == (0, 0):
        return
    own, own_group = os.getuid(), os.getgid()
    check(LIBC.unshare(NEW_USER), "unshare of the user")
    for name, text in (
        ("uid_map", f"{user} {own} 1"),
        ("setgroups", "deny"),
        ("gid_map", f"{group} {own_group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:
            stream.write(text)


def run(spec: dict[str, Any]) -> None:
    """Become the command."""
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL)
    try:
        make_root(spec)
        name = spec["hostname"].encode()
        check(LIBC.sethostname(name, len(name)), "host name")
        become(spec["user"], spec["group"])
        # Changing the user takes it back.
        LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL)
        if not spec["may_gain"]:
            LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if spec["directory"]:
            os.chdir(spec["directory"])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(spec["command"][0], spec["command"], spec["environment"])
    except OSError as error:
        print(f"exec: {spec['command'][0]!r}: {error}", flush=True)
        os._exit(NOT_STARTED)


def main(path: str) -> int:
    """Start the command, pass signals on, and return its exit code as a shell gives it."""
    with open(path, encoding="utf-8") as stream:
        spec = json.load(stream)
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL)
    check(LIBC.unshare(NEW_NS | NEW_UTS | NEW_IPC | NEW_PID), "unshare")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        run(spec)

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
