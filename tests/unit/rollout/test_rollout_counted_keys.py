"""A user counts once in all worker processes of a server."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.small_disk import mounted

from stoker.rollout.counts import counted_keys
from stoker.rollout.counts.counted_keys import Once, StageKeys

USERS = 5_000

COUNT = f"""
import random, sys
from pathlib import Path
from stoker.rollout.counts.counted_keys import Once, StageKeys
keys, users = StageKeys(Path(sys.argv[1])), [*range({USERS})]
random.shuffle(users)
print("ready", flush=True)
sys.stdin.readline()
print(sum(keys.is_first(user, Once.BAD) for user in users))
"""


def test_a_key_counts_once_for_each_gate_and_requests_without_one_each_time() -> None:
    keys = StageKeys()
    assert [keys.is_first(7, once) for once in (*Once, *Once)] == [True] * 4 + [False] * 4
    assert keys.is_first(None, Once.BAD)
    assert keys.is_first(None, Once.BAD)
    assert keys.has(7, Once.SLOW)
    assert not keys.has(8, Once.SLOW)


def test_a_key_counts_once_in_processes_that_count_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "1-0"
    command = [sys.executable, "-c", COUNT, str(path)]
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for each in workers:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    counted = [int(each.communicate("go\n", timeout=60)[0]) for each in workers]

    # Without a lock, both count a key if they write its place at the same moment.
    assert USERS <= sum(counted) <= USERS * 1.01
    later = StageKeys(path)
    assert not any(later.is_first(user, Once.BAD) for user in range(USERS))
    assert later.is_first(0, Once.SLOW)


def test_the_file_of_the_stage_before_is_removed_and_a_process_that_has_it_open_goes_on(
    tmp_path: Path,
) -> None:
    before, after = StageKeys(tmp_path / "keys" / "1-0"), StageKeys(tmp_path / "keys" / "1-1")
    assert before.is_first(7, Once.BAD)
    assert after.is_first(7, Once.BAD)
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["1-1"]
    assert not before.is_first(7, Once.BAD)


def test_a_table_that_is_full_counts_no_further_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_keys, "SLOTS", 8)
    monkeypatch.setattr(counted_keys, "PROBES", 8)
    keys = StageKeys()
    drawn = random.Random(1).sample(range(1 << 40), 20)
    assert [keys.is_first(key, Once.BAD) for key in drawn] == [True] * 8 + [False] * 12
    assert keys.has(drawn[-1], Once.BAD)


def test_on_a_full_disk_a_process_counts_in_its_own_memory(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    with mounted(folder, size="1m") as why_not:
        if why_not:
            pytest.skip(why_not)  # mounts need root
        keys = StageKeys(folder / "keys" / "1-0")
        counted = [keys.is_first(key, Once.BAD) for key in [*range(3_000), *range(3_000)]]
        assert counted == [True] * 3_000 + [False] * 3_000
