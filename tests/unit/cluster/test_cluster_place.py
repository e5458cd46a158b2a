"""A task finds its place and the others from what its launcher sets."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from stoker.cluster.addresses import (
    Announcement,
    TasksMissing,
    agreed_cluster,
    announce,
    gather,
    own_address,
)
from stoker.cluster.nodelist import expand_nodelist
from stoker.cluster.place import Place, find_place
from stoker.core.errors import ConfigError, UserError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[01-03,7],m1", "n01 n02 n03 n7 m1"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("rack[1-2]n[0-1].site", "rack1n0.site rack1n1.site rack2n0.site rack2n1.site"),
        ("a-b.c,d_e", "a-b.c d_e"),
    ],
)
def test_a_list_of_nodes_is_expanded_in_its_order(text: str, names: str) -> None:
    assert expand_nodelist(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[", "n]", "n[]", "n[a]", "n[3-1]", "n[1-]", "n[0-99999999]", "n[[1]]"]
)
def test_what_is_not_a_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must have the form n"):
        expand_nodelist(text)


def slurm(rank: int, **others: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "4",
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
        **others,
    }


def test_slurm_tells_rank_tasks_and_machines() -> None:
    place = find_place(slurm(3), workers=4)

    assert (place.rank, place.tasks, place.node) == (3, 4, "n2")
    assert place.others == ("10.0.0.9", "n1")
    assert find_place(slurm(1, SLURM_STEP_NUM_TASKS="2"), workers=2).tasks == 2


def test_an_indexed_job_tells_the_rank_and_the_job_the_tasks() -> None:
    assert find_place({"JOB_COMPLETION_INDEX": "1"}, workers=2) == Place(rank=1, tasks=2)


def test_the_local_target_comes_before_a_scheduler_around_it() -> None:
    local = {"STOKER_RANK": "1", "STOKER_TASKS": "2"}

    assert find_place(slurm(0) | local, workers=2) == Place(rank=1, tasks=2)


def test_a_cluster_that_another_launcher_has_set_stays_as_it_is() -> None:
    cluster = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})

    place = find_place({"TF_CONFIG": config}, workers=2)

    assert (place.rank, place.tasks) == (1, 2)
    assert place.cluster is not None
    assert place.cluster.workers == tuple(cluster["worker"])


@pytest.mark.parametrize(("started", "size"), [(8, 8), (7, 4), (5, 4), (4, 4), (3, 2), (2, 2)])
def test_an_elastic_job_uses_as_many_tasks_as_can_share_its_work_evenly(
    started: int, size: int
) -> None:
    places = [
        find_place(slurm(rank, SLURM_NTASKS=str(started)), workers=8, min_workers=2)
        for rank in range(started)
    ]

    assert {place.tasks for place in places} == {size}
    assert [place.is_spare for place in places] == [rank >= size for rank in range(started)]


@pytest.mark.parametrize("started", [1, 9])
def test_an_elastic_job_of_too_few_or_too_many_tasks_names_the_allowed_numbers(
    started: int,
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_place(slurm(0, SLURM_NTASKS=str(started)), workers=8, min_workers=2)

    assert "a job of 8 workers must be started as 2 or 4 or 8 tasks" in caught.value.line()


def test_tasks_that_another_launcher_has_given_addresses_are_all_needed() -> None:
    cluster = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})

    with pytest.raises(ConfigError, match="must be started as 2 or 4 tasks"):
        find_place({"TF_CONFIG": config}, workers=4, min_workers=2)


@pytest.mark.parametrize(
    ("environ", "rule"),
    [
        (slurm(4), "SLURM_PROCID must be from 0 to 3"),
        (slurm(0, SLURM_PROCID="x"), "SLURM_PROCID must be a whole number"),
        (slurm(0, SLURM_STEP_NODELIST="n["), "must have the form n"),
        (slurm(0, SLURM_NTASKS="3"), "a job of 4 workers must be started as 4 tasks"),
        ({}, "a job of 4 workers must be started as 4 tasks. Received: 1 tasks"),
    ],
)
def test_an_environment_that_contradicts_itself_or_the_job_is_one_line(
    environ: dict[str, str], rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_place(environ, workers=4)

    assert rule in caught.value.line()


def test_the_interface_that_the_user_names_gives_the_address() -> None:
    place = Place(rank=0, tasks=2)

    assert own_address(place, {"STOKER_NETWORK_INTERFACE": "lo"}) == "127.0.0.1"
    with pytest.raises(ConfigError) as caught:
        own_address(place, {"STOKER_NETWORK_INTERFACE": "nowhere0"})
    assert "must name a network interface" in caught.value.line()
    assert "This machine has " in caught.value.line()


def announcement(address: str, machine: str, port: int = 1) -> Announcement:
    return Announcement(address=address, port=port, machine=machine)


def test_tasks_find_each_other_by_files_whichever_comes_first(tmp_path: Path) -> None:
    folder, found = tmp_path / "1.tasks", {}

    def come(rank: int) -> None:
        place = Place(rank=rank, tasks=3)
        announce(folder, place, announcement(f"10.0.0.{rank}", f"m{rank}", 100 + rank))
        found[rank] = agreed_cluster(place, gather(folder, place, check=lambda: None))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for rank in range(3):
        assert found[rank].workers == ("10.0.0.0:100", "10.0.0.1:101", "10.0.0.2:102")
        assert found[rank].rank == rank
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"]


def test_tasks_that_do_not_come_are_named_and_all_may_start_again(tmp_path: Path) -> None:
    place = Place(rank=1, tasks=4)
    announce(tmp_path, place, announcement("10.0.0.1", "m1"))

    with pytest.raises(TasksMissing) as caught:
        gather(tmp_path, place, check=lambda: None, longest_s=0.1)

    assert caught.value.exit_code == 1
    assert "Received: nothing from task 0, 2, 3." in caught.value.line()


def test_a_rank_that_is_started_twice_is_refused(tmp_path: Path) -> None:
    place = Place(rank=1, tasks=2)
    announce(tmp_path, place, announcement("10.0.0.1", "m1"))

    with pytest.raises(ConfigError, match="task 1 must be started once in each start"):
        announce(tmp_path, place, announcement("10.0.0.2", "m2"))

    assert (tmp_path / "1").read_text() == "10.0.0.1:1\nm1\n"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        announce(
            tmp_path / "gone" / "1.tasks", Place(rank=0, tasks=2), announcement("10.0.0.1", "m1")
        )

    assert "must be a folder that can be written" in caught.value.line()
    assert not (tmp_path / "gone").exists()


def test_tasks_of_one_machine_use_its_loopback_unless_the_user_chose_the_network() -> None:
    place, tasks = (
        Place(rank=0, tasks=2),
        (announcement("10.0.0.1", "m", 1), announcement("10.0.0.1", "m", 2)),
    )

    assert agreed_cluster(place, tasks).workers == ("127.0.0.1:1", "127.0.0.1:2")
    assert agreed_cluster(place, tasks, keeps=True).workers == ("10.0.0.1:1", "10.0.0.1:2")


def test_a_machine_that_others_cannot_reach_is_named() -> None:
    tasks = (announcement("10.0.0.1", "m1"), announcement("127.0.0.1", "m2"))

    with pytest.raises(ConfigError) as caught:
        agreed_cluster(Place(rank=0, tasks=2), tasks)

    assert "Received: 127.0.0.1 of task 1." in caught.value.line()
    assert "STOKER_NETWORK_INTERFACE" in caught.value.line()
