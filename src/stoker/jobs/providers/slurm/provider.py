"""Runs jobs on a Slurm cluster, from one of its login nodes or through ssh."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stoker.core.files import write_atomic
from stoker.jobs.job import Job
from stoker.jobs.logs import LOGS
from stoker.jobs.places import (
    Submitted,
    find_place,
    note_submission,
    open_job,
    places,
    read_submitted,
)
from stoker.jobs.provider import Array, JobState, Wire
from stoker.jobs.providers.slurm.array import array_of, live_tasks
from stoker.jobs.providers.slurm.capacity import require_capacity
from stoker.jobs.providers.slurm.client import Slurm
from stoker.jobs.providers.slurm.dependencies import dependency_options, with_predecessors
from stoker.jobs.providers.slurm.environment.maker import (
    environment_files,
    interpreter,
    make_environment,
    require_maker,
)
from stoker.jobs.providers.slurm.machine import Here, Machine, on_cluster, require_secrets
from stoker.jobs.providers.slurm.port_forward import address_of, connect
from stoker.jobs.providers.slurm.problems import AnswerLost
from stoker.jobs.providers.slurm.remote.ssh import Ssh
from stoker.jobs.providers.slurm.script import SCRIPT, job_id_of, render, slurm_name
from stoker.jobs.providers.slurm.settings import VIA_SSH, SlurmTarget
from stoker.jobs.providers.slurm.state import (
    is_live,
    is_of,
    is_over,
    known_state,
    outcome,
)
from stoker.jobs.providers.slurm.stopping import end, queue_of, unless_noted_cancelled
from stoker.jobs.recent import RecentStates

STOP = "stop"
"""File in the job's folder whose existence means that a user has stopped the job."""

LEFT_BY_LAST = (STOP, "outcome", "failures")
"""Files that an earlier submission of the same job has left in its folder; they are removed before the next
submission."""

STOP_MARGIN_S = 90.0
"""`stop` waits for the workers' grace period plus this time, seconds; Slurm's KillWait is 30 s by default."""

_recent = RecentStates()


class SlurmProvider:
    """The cluster whose programs (`sbatch`, `squeue`) are on the PATH here, or on the login node of `via`."""

    def __init__(self, name: str, settings: SlurmTarget) -> None:
        """Create the provider; no program is run.

        Args:
            name: Name of the target.
            settings: Settings of the target.
        """
        self.name = name
        self.settings = settings
        self._machine = machine_of(settings)
        self._slurm = Slurm(self._machine)

    def validate(self, job: Job) -> None:
        """Refuse a job that no machine of the partition can run, or that sbatch would refuse."""
        there = self._machine.on_cluster(job)
        script = render(there, self.settings, job.folder)
        if not self.settings.setup:  # a line of `setup` may set the secrets
            names = [each for each in job.secrets if each not in self.settings.environment]
            require_secrets(names, self._machine)
        require_capacity(job, self.settings, self._slurm.node_groups())
        self._slurm.check(script)
        python = interpreter(there, self.settings, job.folder)
        require_maker(python, self.settings, self._machine)

    def describe(self, job: Job, code: bytes) -> str:  # noqa: ARG002 - it is in the job's folder
        """Return the script for sbatch."""
        return render(self._machine.on_cluster(job), self.settings, job.folder)

    def submit(self, job: Job) -> str:
        """Submit a job, or find its earlier submission in Slurm's queue by name and comment."""
        found, number = self._submitted(job), None
        if found is None:
            found = number = self._submit(job)
        with unless_noted_cancelled(self._slurm, number):
            note_submission(job.place, target=self.name, scheduler_id=found)
        _recent.forget(job.id)
        return found

    def validate_array(self, array: Array) -> None:
        """Refuse what `validate` refuses, and what sbatch would not accept as an array."""
        self.validate(array.jobs[0])
        self._slurm.check(self._script_of(array))

    def submit_array(self, array: Array) -> Mapping[int, str]:
        """Submit jobs as a job array, except those that an earlier submission has put into Slurm's queue."""
        found = self._live_tasks(array)
        missing = {each: job for each, job in array.jobs.items() if each not in found}
        number = None
        if missing:
            made = self._submit_array(replace(array, jobs=missing))
            found |= made
            number = array_of(next(iter(made.values())))
        with unless_noted_cancelled(self._slurm, number):
            for each, task in found.items():
                note_submission(array.jobs[each].place, target=self.name, scheduler_id=task)
        for job in array.jobs.values():
            _recent.forget(job.id)
        return found

    def state(self, job_id: str) -> JobState:
        """Return the state that Slurm reports, or the state in the job's folder if Slurm has forgotten the job."""
        return _recent.state(job_id, self._state)

    def _state(self, job_id: str) -> JobState:
        place = find_place(job_id)
        submitted = read_submitted(place)
        if submitted is None:
            return known_state(job_id, place, None, queued=None, starts=[])
        ids = [submitted.scheduler_id]
        name = self._id_there(job_id, place)
        queued = [each for each in self._slurm.queue(ids=ids) if is_of(each, name)]
        self._machine.fetch(open_job(place), place)
        known = known_state(
            job_id,
            place,
            submitted,
            queued=next(iter(queued), None),
            starts=self._slurm.accounting(ids),
        )
        return with_predecessors(known, place, self.state)

    def fetch(self, job_id: str) -> None:
        """Copy the logs of a job into its folder on this machine, if the cluster does not share this folder."""
        place = find_place(job_id)
        self._machine.fetch(open_job(place), place)

    def where_is(self, job_id: str, worker: int) -> str:
        """Return the address of a worker's node."""
        job = open_job(find_place(job_id))
        state = self.state(job_id)
        return address_of(job, worker, state, target=self.settings, machine=self._machine)

    def connect(self, where: str, port: int) -> Wire:
        """Connect to a port of a node."""
        return connect(self._machine, where, port)

    def jobs(self) -> Sequence[JobState]:
        """Return the jobs that were submitted to this target, newest first."""
        found: dict[str, tuple[Path, Submitted]] = {}
        for job_id, place in places().items():
            submitted = read_submitted(place)
            if submitted is not None and submitted.target == self.name:
                found[job_id] = place, submitted
        if not found:
            return []
        in_queue = {each.id: each for each in self._slurm.queue()}
        queued = {
            submitted.scheduler_id: in_queue[submitted.scheduler_id]
            for job_id, (place, submitted) in found.items()
            if submitted.scheduler_id in in_queue
            and is_of(in_queue[submitted.scheduler_id], self._id_there(job_id, place))
        }
        gone = [each.scheduler_id for _, each in found.values() if each.scheduler_id not in queued]
        starts = self._slurm.accounting(gone) if gone else []
        for place, submitted in found.values() if self.settings.via is not None else ():
            job = queued.get(submitted.scheduler_id)
            if (job is None or is_over(job.state)) and outcome(place) is None:
                self._machine.fetch(open_job(place), place)
        states = {
            job_id: known_state(
                job_id,
                place,
                submitted,
                queued=queued.get(submitted.scheduler_id),
                starts=[each for each in starts if each.id == submitted.scheduler_id],
            )
            for job_id, (place, submitted) in found.items()
        }

        @functools.cache
        def state(job_id: str) -> JobState:
            if job_id not in states:
                return self.state(job_id)
            return with_predecessors(states[job_id], found[job_id][0], state)

        return sorted(map(state, states), key=lambda each: each.submitted_s or 0.0, reverse=True)

    def stop(self, job_id: str) -> None:
        """Let the workers of a job save, and wait for its end; remove a waiting job from the queue."""
        self._stop([job_id], are_whole=False)

    def stop_all(self, job_ids: Sequence[str]) -> None:
        """Stop all jobs of a sweep at the same time; a single call removes all waiting jobs from the queue."""
        self._stop(job_ids, are_whole=True)

    def _stop(self, job_ids: Sequence[str], *, are_whole: bool) -> None:
        live = self._live(job_ids)
        for job_id in live.values():
            place = find_place(job_id)
            self._machine.mark(open_job(place), place, STOP)
        try:
            if live:
                most_s = self.settings.grace_s + STOP_MARGIN_S
                end(self._slurm, list(live), are_whole=are_whole, most_s=most_s)
        finally:
            for job_id in live.values():
                _recent.forget(job_id)

    def _live(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Return the waiting and running ones of these jobs: number in Slurm -> ID."""
        found: dict[str, tuple[str, str]] = {}
        for job_id in job_ids:
            place = find_place(job_id)
            submitted = read_submitted(place)
            if submitted is not None:
                found[submitted.scheduler_id] = job_id, self._id_there(job_id, place)
        return {
            each.id: found[each.id][0]
            for each in queue_of(self._slurm, found)
            if each.id in found and is_live(each.state) and is_of(each, found[each.id][1])
        }

    def _id_there(self, job_id: str, place: Path) -> str:
        """Return a job's ID on the cluster, which differs if the job's folder has another path there."""
        if self.settings.via is None:
            return job_id
        return self._machine.on_cluster(open_job(place)).id

    def _submitted(self, job: Job) -> str | None:
        """Return the number of an earlier submission that is live, or that is done but was not recorded."""
        # If a submission that is over was recorded, the user wants a new start. If it was not recorded, its answer was
        # lost or its folder was deleted; then a completed job is the one that was submitted.
        is_lost = read_submitted(job.place) is None and (
            self.settings.via is not None or outcome(job.place) is not None
        )
        there = self._machine.on_cluster(job)
        named = self._slurm.queue(name=slurm_name(there.id))
        mine = [each for each in named if is_of(each, there.id)]
        for each in sorted(mine, key=lambda each: int(each.id), reverse=True):
            if is_live(each.state) or (is_lost and each.state == "COMPLETED"):
                return each.id
        return None

    def _live_tasks(self, array: Array) -> dict[int, str]:
        queued = self._slurm.queue(name=slurm_name(array.id))
        mine = [each for each in queued if job_id_of(each.comment) == array.id]
        return {number: task for number, task in live_tasks(mine).items() if number in array.jobs}

    def _submit_array(self, array: Array) -> dict[int, str]:
        names: list[str] = []
        for job in array.jobs.values():
            names = self._make_ready(job)
        write_atomic(array.place / SCRIPT, self._script_of(array))
        self._machine.send_array(array, names, of_all=[SCRIPT], without=LEFT_BY_LAST)
        script = on_cluster(array, self._machine).place / SCRIPT
        try:
            number = self._sbatch(next(iter(array.jobs.values())), script)
        except AnswerLost:
            found = self._live_tasks(array)
            if found.keys() < array.jobs.keys():
                raise
            return found
        return {each: f"{number}_{each}" for each in array.jobs}

    def _submit(self, job: Job) -> str:
        there = self._machine.on_cluster(job)
        names = self._make_ready(job)
        write_atomic(job.place / SCRIPT, render(there, self.settings, job.folder))
        self._machine.send(job, [*names, SCRIPT], without=LEFT_BY_LAST)
        try:
            return self._sbatch(job, there.place / SCRIPT)
        except AnswerLost:
            found = self._submitted(job)
            if found is None:
                raise
            return found

    def _script_of(self, array: Array) -> str:
        source = next(iter(array.jobs.values())).folder
        there = on_cluster(array, self._machine)
        return render(next(iter(there.jobs.values())), self.settings, source, there)

    def _make_ready(self, job: Job) -> list[str]:
        """Remove files of an earlier submission, and write those for the environment; return their names."""
        for name in LEFT_BY_LAST:
            (job.place / name).unlink(missing_ok=True)
        (job.place / LOGS).mkdir(parents=True, exist_ok=True)
        files = environment_files(job.folder, self.settings)
        for name, content in files.items():
            write_atomic(job.place / name, content)
        return list(files)

    def _sbatch(self, job: Job, script: Path) -> str:
        """Submit a job or an array by its script, which is already on the cluster; return its Slurm job ID."""
        there = self._machine.on_cluster(job)
        python = interpreter(there, self.settings, job.folder)
        make_environment(there.place, python, self.settings, self._machine)
        options = dependency_options(job, self.state)
        return self._slurm.submit(script, secrets=job.secrets, options=options)


def machine_of(settings: SlurmTarget) -> Machine:
    """Return the machine on which a target's Slurm programs run."""
    if settings.via is None or settings.remote_folder is None:
        return Here()
    return Ssh(settings.via.removeprefix(VIA_SSH), Path(settings.remote_folder))
