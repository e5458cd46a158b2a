"""`python -m stoker.jobs.providers.kubernetes.pod.main`: the command of a job's pods.

It joins a start of the job together with the other pods, runs `stoker job-task` in it with `TF_CONFIG`, lets it save
when the pod has to end or the time limit is near, and turns its exit code into one that the cluster's rules know:

| code | means | the cluster |
|---|---|---|
| 0 | all workers are done | nothing |
| 2 | an error that the user must fix (also 3, missing pods, too many failed starts) | ends the job |
| 75 | it has saved, or it ended because of another pod | starts again, not counted |
| 1 | it failed | starts again, counted |

TFJob's operator starts pods again after codes from 128 on only, so there 138 stands for 75 and 1.
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
"""Variables with a pod's rank: of an Indexed Job (also inside a JobSet), of a TFJob; and its UID."""

_FINAL = {EXIT_USER, EXIT_CHECK}
"""Exit codes of a task after which the job must not start again."""

EXIT_RETRYABLE = 138
"""TFJob's restart policy `ExitCode`: 138 is the code of programs that want a restart."""

SHOWN = 10
"""Most packages that a pod reports as different."""

END_S = 60.0
"""How long a pod that is done waits for the others, seconds."""

PEER_S = 30.0
"""How long a failed pod looks for another one that explains the failure, seconds: a replacement comes after 10 s or more."""

WATCH_S = 1.0
"""Interval of checks whether another pod has ended, seconds."""

MIN_START_S = 1.0
"""Shortest start under a time limit, seconds."""

CODE_VARIABLE = "STOKER_KUBERNETES_CODE"
"""Environment variable: where the ConfigMap is mounted, on a cluster whose pods cannot have it at /stoker/code."""

TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes copies the final content of this file into the pod's state, which outlives the container's log."""


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
        with contextlib.suppress(OSError):  # outside of a container
            Path(TERMINATION_LOG).write_text(line, encoding="utf-8")
        return EXIT_USER


class _Task:
    """One pod."""

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
        """Return the start, once all pods have joined."""
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
            self._log("this pod is not needed: the workers share the work evenly, not more")
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
            # Repeated requests are one: a task that saves must not look like one that hangs.
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
        if requests and code == -signal.SIGUSR1:  # it could not listen yet: nothing is lost
            return EXIT_PREEMPTED
        return code

    def _wait(
        self, process: subprocess.Popen[bytes], number: int, ask: Callable[[object], None]
    ) -> int:
        """Wait for the end of the task; request it when another pod of the start has failed or saved."""
        until_s = math.inf
        while True:
            try:
                return process.wait(timeout=WATCH_S)
            except subprocess.TimeoutExpired:
                if until_s is math.inf and self._ended_early(number):
                    self._log("another worker has ended: this one saves, too")
                    ask("another worker has ended")
                    until_s = time.monotonic() + self._facts.grace_s
                if time.monotonic() > until_s:
                    process.kill()

    def _ended_early(self, number: int) -> set[int]:
        """Return the exit codes of the other ended pods of the start, except those that are done."""
        codes = exits(self._member, number)
        codes.pop(self._member.rank, None)
        return set(codes.values()) - {EXIT_DONE}

    @contextmanager
    def _time_limit(self, ask: Callable[[], None]) -> Iterator[None]:
        """Make the task save before the time limit of a start."""
        limit_s = self._facts.time_limit_s
        if limit_s is None:
            yield
            return
        with called_after(max(MIN_START_S, limit_s - self._facts.grace_s), ask):
            yield

    def _own_environment(self) -> dict[str, str]:
        """Return the environment of the task, with its place in the cluster."""
        hidden = (FACTS, INDEX, TFJOB_INDEX, CODE_VARIABLE, "TF_CONFIG")
        own = {name: value for name, value in self._environ.items() if name not in hidden}
        workers, rank = self._facts.workers[: self._member.pods], self._member.rank
        if len(workers) == 1:
            return own | {"STOKER_RANK": "0", "STOKER_TASKS": "1"}
        task = {"type": "worker", "index": rank}
        return own | {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}

    def _known(self, code: int, number: int, before: set[int]) -> int:
        """Convert the exit code of the task to one that the rules of the manifests know.

        Args:
            code: Of the task.
            number: Of the start.
            before: Exit codes of other pods that ended before this one, except those that are done.
        """
        if code == EXIT_DONE and all_done(self._member, number, longest_s=END_S):
            return EXIT_DONE
        if code in _FINAL or self._ended_early(number) & _FINAL:
            # No pod asks for a restart that another one has ruled out: a TFJob's operator takes either.
            return EXIT_DONE if code == EXIT_DONE else EXIT_USER
        if code == EXIT_DONE:
            self._log("another worker is not done: starts again with it")
            return EXIT_PREEMPTED
        if code in (EXIT_PREEMPTED, EXIT_SUPERSEDED):
            return self._of_saved(number)
        if self._facts.kind == "job" and self._member.pods > 1:
            return self._of_indexed_job(number, before)
        return EXIT_BUG

    def _of_saved(self, number: int) -> int:
        """A JobSet acts on the first pod that it sees: a pod that has saved must not hide one that failed."""
        others = self._ended_early(number) - {EXIT_PREEMPTED, EXIT_SUPERSEDED}
        return EXIT_BUG if self._facts.kind == "jobset" and others else EXIT_PREEMPTED

    def _of_indexed_job(self, number: int, before: set[int]) -> int:
        """Of several pods that fail together, only one counts."""
        if EXIT_PREEMPTED in before or another_counts(self._member, number, longest_s=PEER_S):
            self._log("another worker ended first: starts again with it")
            return EXIT_PREEMPTED
        return EXIT_BUG

    def _counted(self, number: int) -> int:
        """Count a failed start; a Job counts pods, a TFJob nothing, only a JobSet counts starts."""
        folder = self._member.place / FAILURES
        folder.mkdir(exist_ok=True)
        (folder / str(number)).touch()
        failed, limit = sum(1 for _ in folder.iterdir()), self._facts.max_restarts
        if failed <= limit:
            return EXIT_BUG
        self._log(f"stoker: {failed} starts failed, and max_restarts is {limit}")
        return EXIT_USER

    def _log(self, line: str) -> None:
        """Print a line, and write it to the job's folder."""
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
    """Return a line for each package whose version in the image differs, at most `SHOWN`.

    A lock file names packages of other platforms and groups, too: missing packages are reported only if they are among the first.
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
