"""A real sshd of Debian on 127.0.0.1 with keys of its own, and an `ssh` that knows only those."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.slurm_cluster import wait_until

from stoker.cluster.processes import Child, ProcessOptions

SSHD = "/usr/sbin/sshd"
PRIVILEGES = Path("/run/sshd")
"""Folder that sshd needs, empty."""

SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv HOME={folder}/home {environ}
"""
CLIENT = """
Host login
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


@dataclass
class SshServer:
    """A login node: its home is `folder/home`, and `folder/client` has the `ssh` that reaches it as `login`."""

    folder: Path
    """Of its files, and `XDG_RUNTIME_DIR` of the client."""

    port: int
    children: list[Child]

    @property
    def home(self) -> Path:
        """Home of the user there."""
        return self.folder / "home"

    def start(self) -> None:
        """Start it, again if it has ended."""
        options = ProcessOptions(output=self.folder / "sshd.log", ends_group=False)
        argv = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self.children.append(Child("sshd", argv, options))
        wait_until(self._answers, f"sshd: {self.folder / 'sshd.log'}")

    def close(self) -> None:
        """End it and the connection that the client keeps."""
        for socket_path in self.folder.glob("stoker-ssh-*/*"):
            client = str(self.folder / "client" / "ssh")
            words = [client, f"-oControlPath={socket_path}", "-O", "exit", "login"]
            subprocess.run(words, check=False, capture_output=True)
        for child in self.children:
            child.send(signal.SIGTERM)
        for child in self.children:
            child.end(5.0)

    def known_key(self, name: str) -> None:
        """Let the client expect a host key."""
        kind, key = (self.folder / f"{name}.pub").read_text().split()[:2]
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def ssh_server(folder: Path, environ: str) -> Iterator[SshServer]:
    """Run it until the end of the context.

    Args:
        folder: Of its files.
        environ: Variables of its users, `NAME=VALUE ...`.
    """
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("no sshd: apt-get install openssh-server")
    PRIVILEGES.mkdir(exist_ok=True)
    for name in ("host", "user", "other"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    values = {"folder": folder, "port": port, "environ": environ}
    (folder / "sshd_config").write_text(SERVER.format(**values))
    (folder / "ssh_config").write_text(CLIENT.format(**values))
    for name in ("home", "client"):
        (folder / name).mkdir()
    client = folder / "client" / "ssh"
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    client.chmod(0o755)
    server = SshServer(folder, port, [])
    server.known_key("host")
    try:
        server.start()
        yield server
    finally:
        server.close()
