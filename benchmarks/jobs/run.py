"""Jobs on a real Slurm of this machine: the first step, lost answers, the list of 1,000 jobs (7 minutes).

python benchmarks/jobs/run.py [--pairs 4] [--submissions 200] [--jobs 1000] [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # `figures`
sys.path.append(str(Path(__file__).resolve().parents[2]))  # `tests`

import first_step
import many_jobs
from figures import RESULTS, write
from local_slurm import local_slurm


def main() -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4, help="of a job and a start by hand")
    parser.add_argument("--submissions", type=int, default=200, help="under lost answers")
    parser.add_argument("--jobs", type=int, default=1000, help="of the list")
    parser.add_argument("--out", type=Path, default=RESULTS / "jobs.json")
    given = parser.parse_args()
    figures = []
    with local_slurm() as (cluster, folder):
        if given.pairs:
            figures += first_step.measure(cluster, folder, pairs=given.pairs)
        if given.jobs:
            figures += many_jobs.measure(
                cluster, folder, submissions=given.submissions, jobs=given.jobs
            )
    write(given.out, figures)
    return 0 if all(each["holds"] is not False for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
