"""The cache of compiled programs: nothing damaged, unlisted or of another user reaches TensorFlow."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.cluster import compile_cache, compile_flags
from stoker.cluster.compile_cache import PROGRAMS, CompileCache
from stoker.core.files import sha256_file

KEY = {"cpu": "one"}


_OPENED: list[CompileCache] = []


def opened(root: Path, key: dict[str, str]) -> CompileCache:
    """A process's cache, which is closed at the end of the test."""
    cache = CompileCache(root, key)
    _OPENED.append(cache)
    return cache


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "xla"


def compiled(cache: CompileCache, **programs: str) -> None:
    """What TensorFlow would have written."""
    for name, content in programs.items():
        (cache.folder(PROGRAMS) / name).write_text(content)


def held(cache: CompileCache) -> dict[str, str]:
    """What TensorFlow would find."""
    return {path.name: path.read_text() for path in cache.folder(PROGRAMS).iterdir()}


def filled(root: Path, **programs: str) -> Path:
    """A store with these programs; its folder."""
    cache = opened(root, KEY)
    compiled(cache, **programs)
    cache.close()
    (home,) = (path for path in root.iterdir() if path.is_dir())
    return home / "store" / PROGRAMS


def test_the_next_process_finds_what_this_one_compiled_and_no_other_key_does(root: Path) -> None:
    filled(root, a="one", b="two")

    again, other = opened(root, KEY), opened(root, {"cpu": "two"})

    assert held(again) == {"a": "one", "b": "two"}
    assert held(other) == {}
    assert (again.used.found, again.used.written) == (2, 0)
    assert oct(root.stat().st_mode)[-3:] == "700"


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "cut", "flipped", "a link", "a folder"],
)
def test_what_is_damaged_is_removed_before_tensorflow_sees_it(
    root: Path, damage: Callable[[Path], Any]
) -> None:
    store = filled(root, a="one", b="two")
    damage(store / "a")

    assert held(opened(root, KEY)) == {"b": "two"}
    assert not os.path.lexists(store / "a")


def test_what_no_manifest_lists_is_removed(root: Path) -> None:
    store = filled(root, a="one")
    (store / "b").write_text("from somewhere")

    assert held(opened(root, KEY)) == {"a": "one"}
    assert not (store / "b").exists()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"programs/a": 1}', '{"../a": {"sha256": "", "bytes": 3, "used": 0}}'],
)
def test_a_damaged_manifest_lists_nothing(root: Path, content: str) -> None:
    store = filled(root, a="one")
    (store.parent.parent / "manifest.json").write_text(content)

    assert held(opened(root, KEY)) == {}
    assert list(store.iterdir()) == []


KILLED = """\
import os, signal, sys
from pathlib import Path
from stoker.cluster.compile_cache import PROGRAMS, CompileCache
from stoker.core.files import sha256_file

cache = CompileCache(Path(sys.argv[1]), {"cpu": "one"})
(cache.folder(PROGRAMS) / "published").write_text("one")
cache.publish()
(cache.folder(PROGRAMS) / "lost").write_text("half a pro")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_of_a_killed_process_only_what_it_had_published_is_kept(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(root)], check=False)
    assert done.returncode == -signal.SIGKILL
    (home,) = (path for path in root.iterdir() if path.is_dir())
    assert len(list(home.glob("work-*"))) == 1, "it is still there"

    opened(root, {"cpu": "two"})
    assert list(home.glob("work-*")) == [], "whatever the key of the next process"
    cache = opened(root, KEY)

    assert held(cache) == {"published": "one"}
    assert len(list(home.glob("work-*"))) == 1, "this process's own"
    cache.close()
    assert list(home.glob("work-*")) == []


def test_two_processes_at_once_do_not_see_each_others_unfinished_files(root: Path) -> None:
    one, two = opened(root, KEY), opened(root, KEY)
    compiled(one, same="one", only_one="1")
    compiled(two, same="two", only_two="2")

    assert held(two) == {"same": "two", "only_two": "2"}
    one.close()
    two.close()

    # Of the program that both compiled, the first one's is kept, with its hash.
    assert held(opened(root, KEY)) == {"same": "one", "only_one": "1", "only_two": "2"}


def test_each_process_counts_what_it_has_read_itself(root: Path) -> None:
    filled(root, a="one", b="two")
    one, two = opened(root, KEY), opened(root, KEY)
    assert (one.folder(PROGRAMS) / "a").read_text() == "one"
    if not one.used.read:
        pytest.skip("this file system does not keep the time of access")

    three = opened(root, KEY)

    assert [each.used.read for each in (one, two, three)] == [1, 0, 0]


def test_processes_that_start_or_publish_together_do_not_wait_for_each_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one checks or hashes files, another starts, without waiting for the lock."""
    filled(root, a="one")
    monkeypatch.setattr(compile_cache, "LOCK_S", 0.0)
    others: list[CompileCache] = []

    def hashed(path: Path) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(compile_cache, "sha256_file", sha256_file)
            others.append(opened(root, KEY))
        return sha256_file(path)

    monkeypatch.setattr(compile_cache, "sha256_file", hashed)
    cache = opened(root, KEY)
    compiled(cache, b="two")
    cache.publish()
    monkeypatch.undo()

    assert [held(each) for each in others] == [{"a": "one"}, {"a": "one"}]
    assert held(cache) == held(opened(root, KEY)) == {"a": "one", "b": "two"}


def test_a_program_that_is_removed_from_the_store_stays_for_those_that_hold_it(root: Path) -> None:
    store = filled(root, a="one")
    cache = opened(root, KEY)
    (store / "a").unlink()

    assert held(cache) == {"a": "one"}


IN_MEMORY = """\
import os, signal, sys
from pathlib import Path
from stoker.cluster import compile_cache

compile_cache._MEMORY = Path(sys.argv[2])
cache = compile_cache.CompileCache(Path(sys.argv[1]), {"cpu": "one"})
cache.go_on_in_memory()
(cache.folder("programs") / "large").write_text("x" * 1000)
print("ready", flush=True)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def test_what_a_killed_process_left_in_memory_goes_and_that_of_a_living_one_stays(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(compile_cache, "_MEMORY", memory)
    (memory / "stoker-programs-notes.txt").write_text("no folder of ours")
    (memory / "elsewhere").mkdir()
    (memory / "stoker-programs-link").symlink_to(memory / "elsewhere")
    argv = [sys.executable, "-c", IN_MEMORY, str(root), str(memory)]
    with subprocess.Popen([*argv, "lives"], stdin=-1, stdout=-1) as living:
        assert living.stdout is not None
        assert living.stdout.readline() == b"ready\n"
        kept = set(memory.iterdir())
        assert subprocess.run([*argv, "killed"], stdout=-1, check=False).returncode == -9
        assert len(set(memory.iterdir()) - kept) == 1

        # Of another root: the folders in memory are not told apart by it.
        opened(tmp_path / "other" / "xla", KEY)

        assert set(memory.iterdir()) == kept
        assert living.stdin is not None
        living.stdin.close()
        assert living.wait(60) == 0
    opened(root, KEY)

    assert sorted(path.name for path in memory.iterdir()) == [
        "elsewhere",
        "stoker-programs-link",
        "stoker-programs-notes.txt",
    ]


def test_what_is_written_under_another_name_first_is_not_kept(root: Path) -> None:
    cache = opened(root, KEY)
    compiled(cache, **{"a.pb.tmp12345": "half", "empty": ""})
    (cache.folder(PROGRAMS) / "tmp").mkdir()

    cache.publish()

    assert held(opened(root, KEY)) == {}


def test_the_programs_that_were_not_used_for_longest_are_removed_first(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(root, old="x" * 40, used="y" * 40)
    manifest = store.parent.parent / "manifest.json"
    listed = json.loads(manifest.read_text())
    for record in listed.values():
        record["used"] = 1
    manifest.write_text(json.dumps(listed))
    cache = opened(root, KEY)
    assert (cache.folder(PROGRAMS) / "used").read_text(), "as TensorFlow reads it"
    if not cache.used.read:
        pytest.skip("this file system does not keep the time of access")
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 100)
    compiled(cache, new="z" * 40)

    cache.publish()

    assert sorted(path.name for path in store.iterdir()) == ["new", "used"]


def test_a_disk_that_fills_loses_the_program_and_fails_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "MIN_FREE_BYTES", 0)
    cache = CompileCache(small_disk / "xla", KEY)
    compiled(cache, a="one")
    with (small_disk / "rest").open("wb", buffering=0) as rest, suppress(OSError):
        while rest.write(bytes(4096)):
            pass

    cache.publish()

    (small_disk / "rest").unlink()
    again = CompileCache(small_disk / "xla", KEY)
    # Its file was there before the disk was full, but not its hash: it is not trusted.
    assert held(again) == {}
    again.close()
    cache.close()


def test_where_little_is_free_there_is_no_cache(small_disk: Path) -> None:
    with pytest.raises(OSError, match="little space"):
        opened(small_disk / "xla", KEY)


@pytest.fixture
def another_user(root: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("giving a folder away needs root")
    root.mkdir(parents=True, mode=0o700)
    os.chown(root, 12345, 12345)
    yield root
    os.chown(root, 0, 0)


def test_the_folder_of_another_user_is_refused(another_user: Path) -> None:
    with pytest.raises(PermissionError, match="can be written by another user"):
        opened(another_user, KEY)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused(root: Path, mode: int) -> None:
    root.mkdir(parents=True)
    root.chmod(mode)

    with pytest.raises(PermissionError, match="can be written by another user"):
        opened(root, KEY)


def test_a_folder_whose_parent_others_can_write_is_refused(root: Path) -> None:
    root.parent.mkdir(parents=True)
    root.parent.chmod(0o777)

    with pytest.raises(PermissionError, match="can be written by another user"):
        opened(root, KEY)


def test_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    root.parent.mkdir()
    root.symlink_to(elsewhere)

    with pytest.raises(NotADirectoryError, match="is a link"):
        opened(root, KEY)
    assert list(elsewhere.iterdir()) == []


def test_a_process_does_not_wait_for_ever_for_another(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(root, a="one")
    monkeypatch.setattr(compile_cache, "LOCK_S", 0.1)

    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="held by another process"):
            opened(root, KEY)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has no cache yet."""
    monkeypatch.setattr(compile_flags, "_active", None)
    monkeypatch.setattr("atexit.register", lambda _: None)
    yield
    if compile_flags._active is not None:
        compile_flags._active.close()


def flag_of(environment: dict[str, str]) -> str:
    return environment["TF_XLA_FLAGS"].rpartition("--tf_xla_persistent_cache_directory=")[2]


@pytest.mark.usefixtures("fresh")
def test_the_users_flags_are_kept_and_ours_are_added(root: Path) -> None:
    environment = {"STOKER_CACHE": str(root.parent), "TF_XLA_FLAGS": "--tf_xla_max_cluster_size=9"}

    compile_flags.prepare(environment)

    assert environment["TF_XLA_FLAGS"].startswith("--tf_xla_max_cluster_size=9 --tf_xla_persist")
    assert Path(flag_of(environment)).is_dir()
    assert "XLA_FLAGS" not in environment, "XLA tunes nothing without a GPU"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "users", ["--tf_xla_persistent_cache_directory=/mine", "/etc/flags.txt"], ids=["folder", "file"]
)
def test_the_users_own_cache_folder_or_file_of_flags_wins(root: Path, users: str) -> None:
    environment = {"STOKER_CACHE": str(root.parent), "TF_XLA_FLAGS": users}

    compile_flags.prepare(environment)

    assert environment["TF_XLA_FLAGS"] == users
    assert not root.exists()


@pytest.mark.usefixtures("fresh")
def test_a_child_process_has_a_folder_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"STOKER_CACHE": str(root.parent), "TF_XLA_FLAGS": "--tf_xla_max_cluster_size=9"}
    folders = []
    for _ in range(2):
        monkeypatch.setattr(compile_flags, "_active", None)
        compile_flags.prepare(environment)
        assert compile_flags._active is not None
        _OPENED.append(compile_flags._active)
        folders.append(flag_of(environment))

    assert folders[0] != folders[1]
    assert environment["TF_XLA_FLAGS"].count("--tf_xla_persistent_cache_directory") == 1
    assert environment["TF_XLA_FLAGS"].startswith("--tf_xla_max_cluster_size=9 ")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", ["a b", "a'b", "a,b", "ä"])
def test_a_folder_whose_name_no_flag_can_hold_is_not_used(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"STOKER_CACHE": str(tmp_path / name)}

    compile_flags.prepare(environment)

    assert "TF_XLA_FLAGS" not in environment
    assert "has a character that a flag cannot hold" in caplog.text
    assert not (tmp_path / name).exists()


@pytest.mark.usefixtures("fresh")
def test_a_home_that_cannot_be_written_is_not_a_reason_to_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    environment = {"STOKER_CACHE": str(tmp_path / "home")}

    with caplog.at_level(logging.INFO, "stoker"):
        compile_flags.prepare(environment)

    assert "TF_XLA_FLAGS" not in environment
    assert "XLA has no cache" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_read_only_file_system_is_not_a_reason_to_fail(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    environment = {"STOKER_CACHE": str(small_disk)}

    with caplog.at_level(logging.INFO, "stoker"):
        compile_flags.prepare(environment)

    assert "TF_XLA_FLAGS" not in environment
    assert "Read-only file system" in caplog.text


def test_off_means_off() -> None:
    assert compile_flags.cache_root({"STOKER_CACHE": "off"}) is None
    assert compile_flags.cache_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/stoker/xla")
