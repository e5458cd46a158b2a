"""`python -m stoker.jobs.providers.kubernetes.pod.main`: the command of a job's pods.

The program joins a start of the job together with the other pods, and runs `stoker job-task` with `TF_CONFIG`. When
the pod has to end, or the time limit is near, it lets the task save. It converts the task's exit code to a code that
the cluster's rules know:

| code | means | the cluster |
|---|---|---|
| 0 | all workers are done | nothing |
| 2 | an error that the user must fix (also 3, missing pods, too many failed starts) | ends the job |
| 75 | the task has saved, or ended because of another pod | starts the pod again, does not count it |
| 1 | the task failed | starts the pod again, counts it |

TFJob's operator starts pods again only after codes of 128 or more. So in a TFJob, 138 replaces 75 and 1.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from stoker.cluster.sizes import allowed_sizes
from stoker.core.errors import (
    EXIT_BUG,
    EXIT_CHECK,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_SUPERSEDED,
    EXIT_USER,
    ConfigError,
    UserError,
)
from stoker.core.incarnation import Incarnation
from stoker.core.signals import ASKING, ends_when_asked, heard
from stoker.core.threads import called_after
from stoker.jobs.logs import LOGS
from stoker.jobs.providers.kubernetes.pod.facts import (
    CODE_FOLDER,
    FACTS,
    FAILURES,
    FIRST,
    Facts,
    read_facts,
)
from stoker.jobs.providers.kubernetes.pod.folder import prepare_folder
from stoker.jobs.providers.kubernetes.pod.start import (
    Member,
    all_done,
    another_counts,
    exits,
    join_start,
    workers_of_start,
    write_exit,
)

INDEX, TFJOB_INDEX, POD = "JOB_COMPLETION_INDEX", "STOKER_POD_RANK", "STOKER_POD"
"""Environment variables: rank of a pod in an Indexed Job (also inside a JobSet); rank of a pod in a TFJob; UID of the
pod."""

_FINAL = {EXIT_USER, EXIT_CHECK}
"""Exit codes of a task after which the job must not start again."""

EXIT_RETRYABLE = 138
"""Exit code after which a TFJob with the restart policy `ExitCode` starts a pod again."""

SHOWN = 10
"""Maximum number of packages with another version in the image that a pod reports."""

END_S = 60.0
"""Maximum time that a pod with a finished task waits for the other pods, seconds."""

PEER_S = 30.0
"""Maximum time that a failed pod waits for a sign that another pod caused the failure, seconds. A replacement of a
killed pod comes after 10 s or more."""

WATCH_S = 1.0
"""Interval between two checks whether another pod has ended, seconds."""

MIN_START_S = 1.0
"""A task runs for at least this many seconds before it must save because of the time limit."""

CODE_VARIABLE = "STOKER_KUBERNETES_CODE"
"""Environment variable with the path of the mounted ConfigMap, for a cluster that cannot mount it at /stoker/code."""

TERMINATION_LOG = "/dev/termination-log"
"""File whose final content Kubernetes copies into the pod's state, which is kept longer than the container's log."""


def main() -> int:
    """Run this pod's task, and return the exit code for the cluster."""
    try:
        with ends_when_asked():
            facts = read_facts(os.environ)
            task = _Task(facts, os.environ)
            start = task.join()
        return task.run(start)
    except UserError as error:
        line = f"stoker: {error.line()}\n"
        sys.stderr.write(line)
        with contextlib.suppress(OSError):  # the file is missing outside of a container
            Path(TERMINATION_LOG).write_text(line, encoding="utf-8")
        return EXIT_USER


class _Task:
    """The task of this pod."""

    def __init__(self, facts: Facts, environ: Mapping[str, str]) -> None:
        self._facts, self._environ = facts, environ
        place = Path(facts.place)
        mounted = Path(environ.get(CODE_VARIABLE) or CODE_FOLDER)
        prepare_folder(place, mounted=mounted, code_from=facts.code_from)
        self._member = Member(
            place=place,
            rank=_rank(environ, len(facts.workers)),
            pod=environ.get(POD) or environ.get("HOSTNAME", ""),
            pods=len(facts.workers),
            sizes=allowed_sizes(fewest=facts.min_workers, most=len(facts.workers))
            if facts.min_workers
            else (),
            log=self._log,
        )

    def join(self) -> Incarnation:
        """Join a start of the job, wait until all pods have joined, and return the start."""
        for line in differing_versions(self._facts):
            self._log(line)
        start = join_start(self._member, save_s=self._facts.grace_s, start_s=self._facts.start_s)
        workers = workers_of_start(self._member, start.number)
        fewer = f"; {workers} of {self._member.pods} workers" if workers < self._member.pods else ""
        self._log(f"start {start.number} as worker {self._member.rank}{fewer}")
        self._member = replace(self._member, pods=workers)
        return start

    def run(self, start: Incarnation) -> int:
        """Run the task, and return the exit code for the cluster."""
        if self._member.rank >= self._member.pods:
            self._log("this pod is not needed: the work cannot be shared evenly among more workers")
            return EXIT_DONE
        code = self._run(start)
        before = self._ended_early(start.number)
        write_exit(self._member, start.number, code)
        known = self._known(code, start.number, before)
        if known == EXIT_BUG and self._facts.kind != "jobset":
            known = self._counted(start.number)
        if known in (EXIT_BUG, EXIT_PREEMPTED) and self._facts.kind == "tfjob":
            return EXIT_RETRYABLE
        return known

    def _run(self, start: Incarnation) -> int:
        argv = [self._facts.python, "-P", "-m", "stoker", "job-task", str(start.job)]
        argv += ["--incarnation", str(start.number)]
        running: list[subprocess.Popen[bytes]] = []
        requests: list[object] = []

        def ask(why: object = None) -> None:
            # Pass on only the first request: the task would treat a second one as a sign that its save hangs.
            is_first = not requests
            requests.append(why)
            for process in running if is_first else ():
                process.send_signal(signal.SIGUSR1)

        with heard([*ASKING, signal.SIGINT], ask), self._time_limit(ask):
            process = subprocess.Popen(argv, env=self._own_environment())
            running.append(process)
            if requests:
                process.send_signal(signal.SIGUSR1)
            code = self._wait(process, start.number, ask)
        # The task had no handler yet, so there was nothing to save.
        if requests and code == -signal.SIGUSR1:
            return EXIT_PREEMPTED
        return code

    def _wait(
        self, process: subprocess.Popen[bytes], number: int, ask: Callable[[object], None]
    ) -> int:
        """Wait for the end of the task; make the task save and end if another pod of the start has ended early."""
        until_s = math.inf
        while True:
            try:
                return process.wait(timeout=WATCH_S)
            except subprocess.TimeoutExpired:
                if until_s is math.inf and self._ended_early(number):
                    self._log("another worker has ended: this worker saves and ends, too")
                    ask("another worker has ended")
                    until_s = time.monotonic() + self._facts.grace_s
                if time.monotonic() > until_s:
                    process.kill()

    def _ended_early(self, number: int) -> set[int]:
        """Return the exit codes of other pods of the start that ended before their work was done."""
        codes = exits(self._member, number)
        codes.pop(self._member.rank, None)
        return set(codes.values()) - {EXIT_DONE}

    @contextmanager
    def _time_limit(self, ask: Callable[[], None]) -> Iterator[None]:
        """Make the task save and end before the time limit of the job."""
        limit_s = self._facts.time_limit_s
        if limit_s is None:
            yield
            return
        with called_after(max(MIN_START_S, limit_s - self._facts.grace_s), ask):
            yield

    def _own_environment(self) -> dict[str, str]:
        """Return the environment of the task, with its rank and the addresses of the workers."""
        hidden = (FACTS, INDEX, TFJOB_INDEX, CODE_VARIABLE, "TF_CONFIG")
        own = {name: value for name, value in self._environ.items() if name not in hidden}
        workers, rank = self._facts.workers[: self._member.pods], self._member.rank
        if len(workers) == 1:
            return own | {"STOKER_RANK": "0", "STOKER_TASKS": "1"}
        task = {"type": "worker", "index": rank}
        return own | {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}

    def _known(self, code: int, number: int, before: set[int]) -> int:
        """Convert the exit code of the task to a code that the rules in the manifests know.

        Args:
            code: Exit code of the task.
            number: Number of the start.
            before: Exit codes of other pods that ended before this pod, and before their work was done.
        """
        if code == EXIT_DONE and all_done(self._member, number, longest_s=END_S):
            return EXIT_DONE
        if code in _FINAL or self._ended_early(number) & _FINAL:
            # This pod or another one has ended the job for good. Do not request a restart: a TFJob's operator may act
            # on the exit code of any pod.
            return EXIT_DONE if code == EXIT_DONE else EXIT_USER
        if code == EXIT_DONE:
            self._log("another worker is not done: this worker starts again with it")
            return EXIT_PREEMPTED
        if code in (EXIT_PREEMPTED, EXIT_SUPERSEDED):
            return self._of_saved(number)
        if self._facts.kind == "job" and self._member.pods > 1:
            return self._of_indexed_job(number, before)
        return EXIT_BUG

    def _of_saved(self, number: int) -> int:
        """Return the code of a pod that has saved. In a JobSet it is that of a failure if another pod has failed."""
        others = self._ended_early(number) - {EXIT_PREEMPTED, EXIT_SUPERSEDED}
        return EXIT_BUG if self._facts.kind == "jobset" and others else EXIT_PREEMPTED

    def _of_indexed_job(self, number: int, before: set[int]) -> int:
        """Return the exit code of a failed pod of an Indexed Job; of pods that fail together, the Job counts one."""
        if EXIT_PREEMPTED in before or another_counts(self._member, number, longest_s=PEER_S):
            self._log("another worker ended first: this worker starts again with it")
            return EXIT_PREEMPTED
        return EXIT_BUG

    def _counted(self, number: int) -> int:
        """Count a failed start, which only a JobSet does itself; return the exit code, which is final at the limit."""
        folder = self._member.place / FAILURES
        folder.mkdir(exist_ok=True)
        (folder / str(number)).touch()
        failed, limit = sum(1 for _ in folder.iterdir()), self._facts.max_restarts
        if failed <= limit:
            return EXIT_BUG
        self._log(f"stoker: {failed} starts failed, and max_restarts is {limit}")
        return EXIT_USER

    def _log(self, line: str) -> None:
        """Print a line, and append it to the pod's log in the job's folder."""
        print(line, flush=True)
        folder = Path(self._facts.place) / LOGS
        try:
            folder.mkdir(exist_ok=True)
            rank = _rank(self._environ, len(self._facts.workers))
            with (folder / f"pod-{rank}.log").open("a", encoding="utf-8") as stream:
                stream.write(f"{line}\n")
        except OSError as error:
            print(f"the log cannot be written: {error.strerror}", file=sys.stderr)


def differing_versions(facts: Facts) -> list[str]:
    """Return a line for each package that has another version in the image, at most `SHOWN` lines.

    A lock file also lists packages for other platforms and groups, so a missing package is reported only if it is in
    `FIRST`.
    """
    differing = []
    for name in sorted(facts.versions, key=lambda each: (_weight(each), each)):
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name not in FIRST:
                continue
            here = "not there"
        if here != facts.versions[name]:
            differing.append((name, here, facts.versions[name]))
    source = facts.versions_from
    lines = [f"{name} in the image is {here}; {source} has {it}" for name, here, it in differing]
    more = len(lines) - SHOWN
    return (
        lines if more <= 0 else [*lines[:SHOWN], f"and {more} more packages differ from {source}"]
    )


def _weight(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _rank(environ: Mapping[str, str], pods: int) -> int:
    for name in (INDEX, TFJOB_INDEX):
        text = environ.get(name, "")
        if text.isdecimal() and int(text) < pods:
            return int(text)
    raise ConfigError(
        f"{INDEX} must be the number of this pod, from 0 to {pods - 1}",
        got=environ.get(INDEX, ""),
        fix="Submit the job again: the cluster sets it in pods of an Indexed Job.",
    )


if __name__ == "__main__":
    sys.exit(main())
