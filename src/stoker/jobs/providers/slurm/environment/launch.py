"""Lines of the job's script that start Python: in an environment from a lock file, or in a container."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import stoker
from stoker.jobs.job import Job
from stoker.jobs.providers.slurm.environment.maker import COPIER, COPY, MAKER, base_python
from stoker.jobs.providers.slurm.settings import SlurmTarget

ONE_TASK = ("srun", "--ntasks=1", "--nodes=1", "--input=none", "--mpi=none")
"""Command that starts a job in a container of pyxis: only srun can create such a container."""

_NO_PYXIS = "srun must know --container-image: the cluster has no pyxis; set container.runtime of the target"
_NO_APPTAINER = (
    "apptainer must be on the PATH of the machines; name its module in `modules` of the target"
)


def launch_lines(job: Job, target: SlurmTarget, python: str) -> list[str]:
    """Return the commands before Python: `starter` at the start of the job, `launcher` in each task of srun.

    Args:
        job: The job.
        target: The settings of the target.
        python: The job's `interpreter`.

    Raises:
        ConfigError: a folder's name cannot be mounted.
    """
    starter, launcher = _launch(job, target, python)
    return [f"starter=({_words(starter)})", f"launcher=({_words(launcher)})"]


def require_lines(target: SlurmTarget) -> list[str]:
    """Return shell lines that end the job with a one-line error if the environment or the container is missing."""
    if target.container is not None:
        if target.container.runtime == "pyxis":
            look, why = "srun --help 2>&1 | grep -q -e --container-image", _NO_PYXIS
        else:
            look, why = "command -v apptainer > /dev/null", _NO_APPTAINER
        return [f"{look} || end 2 {shlex.quote(why)}"]
    if target.environment_from == "lock":
        words = [base_python(target), stoker.__version__, COPY]
        make = f'bash {MAKER.name} "${{python%/bin/python}}" {_words(words)}'
        return [
            "# Made at the submission; again only if it is gone.",
            f'why=$({make}) || end 2 "$why"',
        ]
    return []


def _launch(job: Job, target: SlurmTarget, python: str) -> tuple[list[str], list[str]]:
    if target.container is not None:
        folders = (job.folder, job.runs)
        words = target.container.options(folders, gpus=job.resources.gpus > 0)
        if target.container.runtime == "pyxis":
            return [*ONE_TASK, *words], []
        return words, words
    if target.environment_on_local_disk:
        folder = python.removesuffix("/bin/python")
        return [], ["bash", str(job.place / COPIER.name), folder]
    return [], []


def _words(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
