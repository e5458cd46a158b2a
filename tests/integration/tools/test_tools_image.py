"""The Dockerfile for our server, built on a bare Debian and run as the manifests run it.

Needs root, and of Debian's packages `buildah` and `debootstrap`; takes 2 to 3 minutes on two cores,
most of them pip's and the image's 2 GB: `make soak` runs it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.tools.conftest import half

from stoker.cli.main import invoke
from stoker.registry.repository import Repository

ROOT = Path(__file__).parents[3]
SUITES = {"3.11": "bookworm", "3.13": "trixie"}
"""Python -> the Debian that has it: the image gets the versions that are installed here."""

PYTHON = ".".join(platform.python_version_tuple()[:2])
TOOLS = ("buildah", "debootstrap", "unshare", "nsenter", "ip")
IN_MEMORY_BYTES = 6 << 30
"""Free memory from which on the image lies there: it is written three times over."""

LIMIT_S = 900
START_S = 180.0

CONTAINER = """
set -e
mount --bind "$1" "$2"
mount -o remount,bind,ro "$2"
mount -t tmpfs -o size=256m,mode=1777 tmpfs "$2/tmp"
mount -t proc proc "$2/proc"
mount --bind /dev "$2/dev"
ip link set lo up
root=$2
shift 2
exec chroot "$root" setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs \
  --bounding-set -all --inh-caps -all env -i "$@"
"""
"""As Compose and Kubernetes run it: a root that is only read, a /tmp of 256 MiB, no privileges, and a
network of its own, so that the address and the ports can be those of the image."""


def need() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} (apt-get install buildah debootstrap iproute2)")
    if os.geteuid() or subprocess.run(["unshare", "--mount", "--net", "true"]).returncode:
        pytest.skip("not root with the right to mount: an image is built and run in its own root")
    if PYTHON not in SUITES:
        pytest.skip(f"no Debian whose Python is {PYTHON}")


@contextmanager
def storage(tmp_path: Path) -> Iterator[list[str]]:
    """Buildah's images, apart from the machine's own; its flags for them."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > IN_MEMORY_BYTES
    folder = Path(tempfile.mkdtemp(prefix="stoker-image-", dir=memory if roomy else tmp_path))
    flags = ["--root", str(folder / "root"), "--runroot", str(folder / "run")]
    try:
        yield flags
    finally:
        subprocess.run(["buildah", *flags, "rm", "--all"], capture_output=True)
        subprocess.run(["umount", "--recursive", folder / "root/overlay"], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def buildah(flags: list[str], *arguments: object) -> str:
    command = ["buildah", *flags, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout.strip()


def make_base(flags: list[str], folder: Path, name: str) -> None:
    """What `python:3.11-slim` is: Debian, and a Python called `python`."""
    packages = "python3,python3-venv,python-is-python3"
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITES[PYTHON]]
    made = subprocess.run([*command, folder], capture_output=True, text=True, timeout=LIMIT_S)
    assert made.returncode == 0, made.stdout[-3000:]
    container = buildah(flags, "from", "scratch")
    buildah(flags, "copy", "--quiet", container, folder, "/")
    buildah(
        flags, "config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container
    )
    buildah(flags, "commit", "--quiet", "--rm", container, name)
    shutil.rmtree(folder)


def build(flags: list[str], context: Path, name: str) -> Any:
    """Build the folder's Dockerfile; its configuration."""
    # Where packages come from, and whose certificates count, is this machine's matter.
    given = [path for path in ("/etc/pip.conf", "/etc/ssl/certs") if Path(path).exists()]
    volumes = [f"--volume={path}:{path}:ro" for path in given]
    buildah(
        flags, "bud", "--isolation", "chroot", "--network", "host", *volumes, "--pull-never",
        "--tag", name, context,
    )  # fmt: skip
    return json.loads(buildah(flags, "inspect", "--type", "image", name))["OCIv1"]["config"]


@contextmanager
def container(
    flags: list[str], name: str, config: Any, tmp_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    mounted = buildah(flags, "mount", buildah(flags, "from", "--pull-never", name))
    root = tmp_path / "root"
    root.mkdir()
    own = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    command = [*own, "bash", "-c", CONTAINER, "-", mounted, str(root), *config["Env"]]
    command += [*config["Entrypoint"], *config["Cmd"]]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def server_of(process: subprocess.Popen[bytes]) -> int:
    """The process that is the first of the container."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        found = children.read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.05)  # it has not been forked yet
    raise AssertionError(f"the container ended with {process.returncode}")


def inside(process: subprocess.Popen[bytes], *command: str) -> subprocess.CompletedProcess[str]:
    """A command of this machine in the container's network."""
    enter = ["nsenter", f"--net=/proc/{server_of(process)}/ns/net"]
    return subprocess.run([*enter, *command], capture_output=True, text=True, timeout=120)


@pytest.mark.soak
@pytest.mark.timeout(4 * LIMIT_S)
def test_the_image_builds_and_serves_with_the_rights_that_the_manifests_give(
    tmp_path: Path,
) -> None:
    need()
    repository = Repository(tmp_path / "models")
    repository.push(half(tmp_path / "half", addend=2.0), "half_plus")
    out, base = tmp_path / "out", f"localhost/debian-python:{PYTHON}"
    flags = ["--target", "compose", "--out", str(out), "--base-image", base]
    assert invoke(["deploy", str(repository.base("half_plus")), *flags], debug=False) == 0
    wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out / "wheels")]
    subprocess.run(wheel, cwd=ROOT, check=True, capture_output=True)
    service = yaml.safe_load((out / "compose.yaml").read_text())["services"]["server"]

    with storage(tmp_path) as flags:
        make_base(flags, tmp_path / "debian", base)
        config = build(flags, out, "half-plus:1")
        assert config["User"] == service["user"] == "10001:10001"
        assert config["Cmd"] == service["command"]
        with container(flags, "half-plus:1", config, tmp_path) as process:
            check = [sys.executable, *service["healthcheck"]["test"][2:]]
            give_up_s = time.monotonic() + START_S
            while inside(process, *check).returncode:
                assert time.monotonic() < give_up_s, (tmp_path / "log").read_text()
                time.sleep(0.5)
            rows = tmp_path / "rows.json"
            rows.write_text("[1.0, 2.0, 5.0]")
            call = [sys.executable, "-m", "stoker", "call", "half_plus", "--data", str(rows)]
            for protocol in ([], ["--grpc"]):
                answered = inside(process, *call, "--json", *protocol)
                assert answered.returncode == 0, answered.stderr
                assert json.loads(answered.stdout)["predictions"] == [2.5, 3.0, 4.5]
            status = Path(f"/proc/{server_of(process)}/status").read_text()
            assert "Uid:\t10001\t10001\t10001\t10001" in status
            assert "CapEff:\t0000000000000000" in status
            os.kill(server_of(process), signal.SIGTERM)
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
