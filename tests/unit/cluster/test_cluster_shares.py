"""Several processes on one machine share its cores, threads, GPUs and limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cluster.doctor.visible import share_gpus
from stoker.cluster.limits import Refusals, kernel_refusals, share_cores, share_threads
from stoker.core.errors import ConfigError


@given(st.sets(st.integers(0, 255), min_size=1, max_size=64), st.integers(1, 64))
def test_every_process_gets_as_many_cores_and_no_core_has_two(
    cores: set[int], processes: int
) -> None:
    if len(cores) < processes:
        with pytest.raises(ConfigError, match="--pin needs a core for each process"):
            share_cores(sorted(cores), processes)
        return
    shares = share_cores(sorted(cores), processes)

    given_out = [core for share in shares for core in share]
    assert len(shares) == processes
    assert len(set(given_out)) == len(given_out)
    assert set(given_out) <= cores
    assert {len(share) for share in shares} == {len(cores) // processes}


def test_threads_are_shared_out_and_what_the_user_has_set_is_let_be() -> None:
    assert share_threads({"OMP_NUM_THREADS": "7"}, cores=8, processes=3) == {
        "TF_NUM_INTRAOP_THREADS": "2"
    }
    assert share_threads({}, cores=2, processes=5) == {
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
    }


@pytest.mark.parametrize(
    ("names", "shares"),
    [
        ([], [{}, {}]),
        (
            ["0", "1", "2", "3"],
            [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}],
        ),
        (["3", "GPU-b"], [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}]),
    ],
)
def test_each_process_sees_its_own_gpus(names: list[str], shares: list[dict[str, str]]) -> None:
    assert share_gpus(names, processes=2) == shares


def test_fewer_gpus_than_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most the number of GPUs.*2 workers, 1 GPUs"):
        share_gpus(["0"], processes=2)


def test_the_kernels_counts_are_found_under_both_versions_of_control_groups(
    tmp_path: Path,
) -> None:
    membership = tmp_path / "cgroup"
    assert kernel_refusals(membership=membership, root=tmp_path) == Refusals()

    membership.write_text("4:memory:/job\n8:pids:/host/only\n0::/\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids" / "pids.events").write_text("max 5\n")
    found = kernel_refusals(membership=membership, root=tmp_path)
    assert found == Refusals(out_of_memory=2, too_many_processes=5)

    membership.write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert kernel_refusals(membership=membership, root=tmp_path) == Refusals(out_of_memory=3)
