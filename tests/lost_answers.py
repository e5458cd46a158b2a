"""An sbatch whose answer gets lost now and then, before or after Slurm has the job."""

from __future__ import annotations

from pathlib import Path


def write_losing_sbatch(folder: Path, real: str, *, every: int) -> Path:
    """Write an sbatch that is killed in each so manieth submission: in turn after and before Slurm has the job.

    Args:
        folder: Made for it; it comes first on the PATH.
        real: Path of Slurm's own.
        every: One submission of so many is lost. Checks (`--test-only`) are neither lost nor counted.
    """
    (folder / "calls").mkdir(parents=True)
    program = folder / "sbatch"
    program.write_text(
        f"""#!/bin/bash
case " $* " in *' --test-only '*) exec {real} "$@" ;; esac
n=$(ls {folder}/calls | wc -l)
touch {folder}/calls/$n
if [ $((n % {2 * every})) = {every} ]; then touch {folder}/lost-$n; kill -9 $$; fi
{real} "$@" > {folder}/answer
code=$?
if [ $((n % {every})) = 0 ]; then touch {folder}/lost-$n; kill -9 $$; fi
cat {folder}/answer
exit $code
"""
    )
    program.chmod(0o755)
    return folder
