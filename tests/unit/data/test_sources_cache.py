"""The local copies of a store's objects: bounded, checked, shared by threads and processes."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import BusyError, UserError
from stoker.data.sources.stores import cache as cache_module
from stoker.data.sources.stores.cache import Cache, Fetch, Wanted, sha256_in

LONG_AGO_NS = time.time_ns() - 3600 * 10**9
LIMIT = 10_000


def wanted(name: str, size: int = 1000, mtime_ns: int = LONG_AGO_NS) -> Wanted:
    return Wanted(endpoint="", location=f"s3://b/{name}", size_bytes=size, mtime_ns=mtime_ns)


def content(what: Wanted) -> bytes:
    return (what.location.encode() * (what.size_bytes + 1))[: what.size_bytes]


class Counting:
    """Gives every object's content, in two pieces, and counts how often."""

    def __init__(self) -> None:
        self.requested: list[str] = []

    def __call__(self, what: Wanted) -> Iterator[bytes]:
        self.requested.append(what.location)
        whole = content(what)
        yield whole[: len(whole) // 2]
        yield whole[len(whole) // 2 :]


def held_bytes(folder: Path) -> int:
    """Of complete objects and parts; files that vanish meanwhile do not count."""
    total = 0
    for path in [*folder.glob("objects/*/*"), *folder.glob("parts/*")]:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def objects(folder: Path) -> list[Path]:
    return list(folder.glob("objects/*/*"))


def read(cache: Cache, what: Wanted, fetch: Fetch) -> bytes:
    with cache.pinned(what, fetch) as path:
        return path.read_bytes()


def test_an_object_is_fetched_once_and_read_again_by_another_process(tmp_path: Path) -> None:
    fetch = Counting()
    first, later = (Cache(tmp_path, limit_bytes=LIMIT) for _ in range(2))

    assert read(first, wanted("a"), fetch) == content(wanted("a"))
    assert read(first, wanted("a"), fetch) == read(later, wanted("a"), fetch)
    assert len(fetch.requested) == 1


def test_the_name_of_a_pinned_file_tells_its_hash(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=LIMIT)
    with cache.pinned(wanted("a"), Counting()) as path:
        expected = hashlib.sha256(content(wanted("a"))).hexdigest()
        assert sha256_in(path) == expected
        assert cache.known_sha256(wanted("a")) == expected


@settings(max_examples=40)
@given(bit=st.integers(0, 8 * 1000 - 1))
def test_every_flipped_bit_is_found_and_the_object_fetched_again(
    bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, fetch = tmp_path_factory.mktemp("cache"), Counting()
    read(Cache(folder, limit_bytes=LIMIT), wanted("a"), fetch)
    (path,) = objects(folder)
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)

    assert read(Cache(folder, limit_bytes=LIMIT), wanted("a"), fetch) == content(wanted("a"))
    assert len(fetch.requested) == 2
    assert len(objects(folder)) == 1


def test_a_file_that_was_changed_after_its_check_is_checked_again(tmp_path: Path) -> None:
    cache, fetch = Cache(tmp_path, limit_bytes=LIMIT), Counting()
    read(cache, wanted("a"), fetch)
    (path,) = objects(tmp_path)
    path.write_bytes(b"x" * 1000)

    assert read(cache, wanted("a"), fetch) == content(wanted("a"))


def test_a_changed_object_is_another_entry(tmp_path: Path) -> None:
    cache, fetch = Cache(tmp_path, limit_bytes=LIMIT), Counting()
    for size, mtime_ns in ((10, LONG_AGO_NS), (11, LONG_AGO_NS), (10, LONG_AGO_NS + 1)):
        read(cache, wanted("a", size, mtime_ns), fetch)

    assert len(fetch.requested) == 3


def test_what_was_fetched_within_a_second_of_its_writing_is_not_trusted_later(
    tmp_path: Path,
) -> None:
    fetch, young = Counting(), wanted("a", mtime_ns=time.time_ns())
    first = Cache(tmp_path, limit_bytes=LIMIT)
    read(first, young, fetch)
    read(first, young, fetch)
    assert len(fetch.requested) == 1
    read(Cache(tmp_path, limit_bytes=LIMIT), young, fetch)
    assert len(fetch.requested) == 2


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, LIMIT), min_size=1, max_size=30), repeat=st.booleans())
def test_the_bound_is_held_whatever_is_read(
    sizes: list[int], repeat: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = Cache(folder, limit_bytes=LIMIT)

    def fetch(what: Wanted) -> Iterator[bytes]:
        assert held_bytes(folder) <= LIMIT
        yield content(what)

    for number, size in enumerate(sizes * (1 + repeat)):
        what = wanted(str(number % len(sizes)), size)
        assert read(cache, what, fetch) == content(what)
        assert held_bytes(folder) <= LIMIT
    assert int((folder / "used").read_text()) == held_bytes(folder)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache, fetch = Cache(tmp_path, limit_bytes=LIMIT), Counting()
    for name in "abc":
        read(cache, wanted(name, 3000), fetch)
    read(cache, wanted("a", 3000), fetch)
    read(cache, wanted("d", 3000), fetch)
    fetch.requested.clear()

    for name in "acd":
        read(cache, wanted(name, 3000), fetch)
    assert fetch.requested == []


def test_what_is_read_is_not_evicted(tmp_path: Path) -> None:
    cache, fetch = Cache(tmp_path, limit_bytes=LIMIT), Counting()
    with cache.pinned(wanted("a", 6000), fetch) as path:
        for name in "bcd":
            read(cache, wanted(name, 4000), fetch)
        assert path.read_bytes() == content(wanted("a", 6000))


def test_readers_that_hold_all_the_room_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, fetch = Cache(tmp_path, limit_bytes=LIMIT), Counting()
    held = ExitStack()
    held.enter_context(cache.pinned(wanted("a", 6000), fetch))
    threading.Timer(0.3, held.close).start()
    assert read(cache, wanted("b", 6000), fetch) == content(wanted("b", 6000))

    monkeypatch.setattr(cache_module, "WAIT_S", 0.1)
    with (
        cache.pinned(wanted("a", 6000), fetch),
        pytest.raises(BusyError, match=r"6,000 bytes in use, and 5,000 bytes needed"),
    ):
        read(cache, wanted("c", 5000), fetch)


def test_an_object_beyond_the_bound_is_refused_with_both_figures(tmp_path: Path) -> None:
    cache, fetch = Cache(tmp_path, limit_bytes=LIMIT), Counting()
    with pytest.raises(UserError, match=r"s3://b/a.*10,000.*10,001 bytes"):
        read(cache, wanted("a", LIMIT + 1), fetch)
    assert fetch.requested == []


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=LIMIT)

    def fails(what: Wanted) -> Iterator[bytes]:
        yield b"half"
        raise UserError("the store must answer")

    with pytest.raises(UserError, match="the store must answer"):
        read(cache, wanted("a"), fails)
    assert held_bytes(tmp_path) == 0
    assert (tmp_path / "used").read_text() == "0"
    assert read(cache, wanted("a"), Counting()) == content(wanted("a"))


def test_threads_fetch_an_object_once(tmp_path: Path) -> None:
    cache, fetch = Cache(tmp_path, limit_bytes=LIMIT), Counting()
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: read(cache, wanted("a"), fetch), range(64)))
    assert set(found) == {content(wanted("a"))}
    assert len(fetch.requested) == 1


def test_many_objects_by_many_threads_stay_within_the_bound(tmp_path: Path) -> None:
    cache, fetch = Cache(tmp_path, limit_bytes=LIMIT), Counting()
    names = [str(number % 40) for number in range(400)]

    def one(name: str) -> bool:
        cache.prefetch(wanted(name, 700), fetch)
        found = read(cache, wanted(name, 700), fetch) == content(wanted(name, 700))
        return found and held_bytes(tmp_path) <= LIMIT

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, names))
    assert int((tmp_path / "used").read_text()) == held_bytes(tmp_path)


def _read_all(folder: str, names: list[str], answer: multiprocessing.SimpleQueue[object]) -> None:
    fetch = Counting()
    cache = Cache(Path(folder), limit_bytes=LIMIT)
    good = all(read(cache, wanted(n, 900), fetch) == content(wanted(n, 900)) for n in names)
    answer.put((good, len(fetch.requested)))


def _stop_half_way(folder: str, ready: multiprocessing.SimpleQueue[object]) -> None:
    def fetch(what: Wanted) -> Iterator[bytes]:
        yield b"half"
        ready.put(True)
        time.sleep(60)  # until the test kills this process

    read(Cache(Path(folder), limit_bytes=LIMIT), wanted("a", 6000), fetch)


def started(
    target: Callable[..., None], *args: object
) -> tuple[multiprocessing.process.BaseProcess, multiprocessing.SimpleQueue[object]]:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
    process = context.Process(target=target, args=(*args, queue))
    process.start()
    return process, queue


def test_two_processes_share_the_folder_and_its_bound(tmp_path: Path) -> None:
    names = [str(number % 20) for number in range(60)]
    both = [started(_read_all, str(tmp_path), names) for _ in range(2)]
    while any(process.is_alive() for process, _ in both):
        assert held_bytes(tmp_path) <= LIMIT
    assert all(queue.get()[0] for _, queue in both)  # type: ignore[index]  # a pair
    assert held_bytes(tmp_path) <= LIMIT


def test_kill_9_while_fetching_leaves_no_object_and_no_lost_room(tmp_path: Path) -> None:
    process, ready = started(_stop_half_way, str(tmp_path))
    assert ready.get()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert objects(tmp_path) == []
    assert held_bytes(tmp_path) == 6000  # the half, at its full length

    fetch = Counting()
    cache = Cache(tmp_path, limit_bytes=LIMIT)
    assert read(cache, wanted("b", 9000), fetch) == content(wanted("b", 9000))
    assert read(cache, wanted("a", 6000), fetch) == content(wanted("a", 6000))
    assert held_bytes(tmp_path) <= LIMIT


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir .*file/cache must be a folder"):
        read(Cache(tmp_path / "file" / "cache", limit_bytes=LIMIT), wanted("a"), Counting())
    with pytest.raises(UserError, match=r"data\.cache_dir .*file must be a folder"):
        read(Cache(tmp_path / "file", limit_bytes=LIMIT), wanted("a"), Counting())
