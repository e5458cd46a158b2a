"""Runs programs on a login node through the user's own ssh, without prompts, over a shared connection.

A call is sent as a script on the standard input of `bash -l`. So the command line that ssh passes to the login's shell
is always the same, whatever shell that is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.jobs.archive import CODE
from stoker.jobs.job import Job
from stoker.jobs.provider import Array
from stoker.jobs.providers.slurm.machine import (
    LOGIN,
    TIMES,
    Answer,
    Call,
    no_answer,
    on_cluster,
)
from stoker.jobs.providers.slurm.problems import AnswerLost
from stoker.jobs.providers.slurm.remote.mirror import FETCH, apply, known_logs
from stoker.jobs.providers.slurm.remote.problems import ssh_problem
from stoker.jobs.providers.slurm.remote.transfer import (
    SEND,
    files_of_array,
    files_of_job,
    packed,
    twin,
)

SSH_FAILED = 255
"""Exit code of ssh if ssh itself fails."""

FILES_S = 600.0
"""Maximum wait for the transfer of files, seconds: an archive of 64 MiB over a slow connection."""

SOCKET_FOLDER_CHARS = 45
"""Maximum length of the path of the socket's folder: the path of a socket has at most 104 characters, and ssh adds
59."""

_SETTINGS = ("SBATCH_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")
_UNSET = "".join(f"unset ${{!{prefix}@}}\n" for prefix in _SETTINGS)
_OF_JOB = (
    'kept=(); for name in {names}; do if [ -n "${{!name+x}}" ]; then kept+=("$name=${{!name}}"); fi; done\n'
    'exec env -i "${{kept[@]}}" bash --norc -s\n'
)
"""Beginning of a script: a second bash, which has only these variables, reads the rest. Secrets are in the rest, so
they do not appear in a command line."""


class Ssh:
    """The machine of `via: ssh:LOGIN`."""

    def __init__(self, login: str, folder: Path) -> None:
        """Store the destination; no connection is opened.

        Args:
            login: The destination of ssh: a host, `user@host`, or a name in the user's configuration.
            folder: Folder of all experiments on the cluster.
        """
        self.login, self.folder = login, folder

    def run(self, call: Call) -> Answer:
        """Run a program on the login node; raises the errors of `Machine.run`."""
        script = os.fsencode(_program(call) + (call.text or ""))
        code, out, errors = self._connect(call, script)
        return Answer(code=code, out=out.decode(errors="replace"), errors=errors)

    def user(self) -> str:
        """Return the user ID (UID) on the login node."""
        return _user(self)

    def on_cluster(self, job: Job) -> Job:
        """Return the job with its paths on the cluster."""
        return twin(job, self.folder)

    def send(self, job: Job, names: Sequence[str], *, without: Sequence[str]) -> None:
        """Write files of a job, its code and its description into its folder on the cluster."""
        there = self.on_cluster(job)
        files = files_of_job(job, there, (*names, CODE))
        self._files(SEND, [str(there.place.parent), *without], packed(files))

    def send_array(
        self, array: Array, names: Sequence[str], *, of_all: Sequence[str], without: Sequence[str]
    ) -> None:
        """Write files of an array and of its jobs, including code and descriptions, to the cluster.

        The files are written to the folders of the array and of the jobs.
        """
        there = on_cluster(array, self)
        files = files_of_array(array, there, names, of_all=of_all)
        self._files(SEND, [str(there.place.parent), *without], packed(files))

    def fetch(self, job: Job, place: Path) -> None:
        """Copy the logs of a job, and the facts of its starts, to this machine."""
        known = known_logs(place)
        answer = self._files(FETCH, [str(self.on_cluster(job).place), *known], b"")
        apply(answer, place)

    def mark(self, job: Job, place: Path, name: str) -> None:
        """Create an empty file in the job's folder on the cluster, and in its folder on this machine."""
        self._files('touch "$1"\n', [str(self.on_cluster(job).place / name)], b"")
        (place / name).touch()

    def connect(self, host: str, port: int) -> socket.socket:
        """Connect to a port of a machine that the login node can reach, through the shared connection.

        If that fails, ssh prints the error on stderr and ends, which closes the returned socket.
        """
        near, far = socket.socketpair()
        words = ["ssh", *_options(self.login), "-W", f"{host}:{port}", "--", self.login]
        process = subprocess.Popen(words, stdin=far.fileno(), stdout=far.fileno())
        far.close()
        threading.Thread(target=process.wait, daemon=True).start()
        return near

    def _files(self, script: str, words: Sequence[str], content: bytes) -> bytes:
        call = Call(argv=("bash",), answer_s=FILES_S)
        text = f"set -- {shlex.join(words)}\n{script}"
        code, out, errors = self._connect(call, text.encode() + content)
        if code:
            lines = errors.strip().splitlines() or [f"exit code {code}"]
            raise UserError(
                f"{self.folder} of {self.login} must be a folder that can be written",
                got=Plain(lines[-1]),
                fix="Set `remote_folder` of the target.",
            )
        return out

    def _connect(self, call: Call, script: bytes) -> tuple[int, bytes, str]:
        """Run a script on the login node; return its exit code, output and errors, without output of the profile."""
        mark = f"stoker-{secrets.token_hex(8)}\n".encode()
        head = b"printf '%s\\n' " + mark
        # Do not use a pipe for stderr: the process that keeps the shared connection would hold the pipe open.
        with tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(
                    ["ssh", *_options(self.login), "--", self.login, "bash -l -s"],
                    check=False,
                    input=head + script,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    timeout=call.answer_s,
                )
            except FileNotFoundError:
                raise UserError(
                    "ssh must be on the PATH", fix="Install OpenSSH's client (openssh-client)."
                ) from None
            except subprocess.TimeoutExpired:
                raise no_answer(call) from None
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        before, found, out = done.stdout.partition(mark)
        if done.returncode == SSH_FAILED and not found:
            raise ssh_problem(self.login, said)
        if done.returncode == SSH_FAILED or done.returncode < 0:
            raise AnswerLost(
                f"the connection to {self.login} must last until {call.argv[0]} has answered",
                got=Plain((said.strip().splitlines() or ["it was cut"])[-1]),
                fix="Run the same command again: a job that was submitted is found, and not submitted twice.",
            )
        if not found:
            raise UserError(
                f"{self.login} must run bash",
                got=Plain((said or before.decode(errors="replace")).strip() or "no answer"),
                fix=f"Try it: ssh {self.login} bash -l -c true.",
            )
        return done.returncode, out, said


def _program(call: Call) -> str:
    """Return the script that runs a program in the same way as `Here`."""
    words = f"exec {shlex.join(call.argv)}\n"
    if call.for_job:
        known = {name: os.environ[name] for name in call.secrets if name in os.environ}
        exports = [f"export {name}={shlex.quote(value)}\n" for name, value in known.items()]
        return _OF_JOB.format(names=" ".join(LOGIN)) + "".join(exports) + words
    name, value = TIMES
    return f"{_UNSET}export {name}={value}\n{words}"


@cache
def _user(machine: Ssh) -> str:
    return machine.run(Call(argv=("id", "-u"), answer_s=60.0)).out.strip()


@cache
def _options(login: str) -> list[str]:
    """Return options for a shared connection: the user's own, if configured, or one that stays open for a minute."""
    alive = ["-oConnectTimeout=15", "-oServerAliveInterval=10", "-oServerAliveCountMax=3"]
    options = ["-T", "-oBatchMode=yes", *alive]
    own = subprocess.run(
        ["ssh", "-G", "--", login], check=False, capture_output=True, text=True
    ).stdout
    if any(
        line.startswith("controlpath ") and line != "controlpath none" for line in own.splitlines()
    ):
        return options
    folder = _socket_folder()
    if folder is None:
        return options
    return [*options, "-oControlMaster=auto", "-oControlPersist=60", f"-oControlPath={folder}/%C"]


def _socket_folder() -> Path | None:
    """Return a folder for the socket of the shared connection; None: each call opens a new connection."""
    for parent in filter(None, (os.environ.get("XDG_RUNTIME_DIR"), "/tmp")):  # noqa: S108 - its owner is checked
        folder = Path(parent) / f"stoker-ssh-{os.getuid()}"
        if len(str(folder)) > SOCKET_FOLDER_CHARS:
            continue
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid == os.getuid():
                return folder
    return None
