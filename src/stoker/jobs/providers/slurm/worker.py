"""`python -m stoker.jobs.providers.slurm.worker EXITS COMMAND...`: runs a worker's command and records its exit code.

srun ends all workers as soon as a worker exits with a code other than 0. So a worker that has saved would end workers
that are still saving. Therefore this program exits with 0 instead of 75, and writes the original code into the file
EXITS/RANK. The job's script (`job.sh`) reads these files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from stoker.core.errors import EXIT_DONE, EXIT_PREEMPTED

RANK = "SLURM_PROCID"
"""Environment variable in which srun sets the rank of a task."""

REQUESTS = (signal.SIGUSR1, signal.SIGTERM)
"""Signals that request a worker to save and end."""

EXIT_NOT_FOUND = 127
"""Exit code if the command cannot be started, as in a shell."""


def main(arguments: list[str]) -> int:
    """Run the command, forward requests to end, and return the exit code for srun.

    Args:
        arguments: Folder for exit codes, then the command.
    """
    folder, *command = arguments
    requests: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    # Depending on the cluster's ProctrackType, a signal reaches only this process, or also its child. So the child may
    # get the same request several times.
    def pass_on(number: int, _: FrameType | None) -> None:
        is_first = not requests
        requests.append(number)
        for process in running if is_first else ():
            process.send_signal(signal.SIGUSR1)

    for number in REQUESTS:
        signal.signal(number, pass_on)
    code = _run(command, running, requests)
    kept = Path(folder) / os.environ[RANK]
    try:
        kept.write_text(f"{code}\n")
    except OSError as error:
        print(f"{kept} cannot be written: {error.strerror}", file=sys.stderr)
    return EXIT_DONE if code == EXIT_PREEMPTED else code


def _run(command: list[str], running: list[subprocess.Popen[bytes]], requests: list[int]) -> int:
    if requests:
        return EXIT_PREEMPTED
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        print(f"{command[0]!r} cannot be started: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_FOUND
    running.append(process)
    if requests:
        process.send_signal(signal.SIGUSR1)
    code = process.wait()
    # The signal came before the command had set its handler, or once more after the command had saved.
    if requests and -code in REQUESTS:
        return EXIT_PREEMPTED
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
