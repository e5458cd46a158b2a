"""The observer of reads: its own process has no TensorFlow and no pytest."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.core import folder_files, observed_reads
from stoker.core.folder_files import Ignored, walk
from stoker.core.folder_files import folder_files as files_of
from stoker.core.listings import MOST_OWN, Listings
from stoker.core.observed_reads import Reads, mark_of, snapshot

OBSERVED = """
import json, sys
from dataclasses import asdict
from pathlib import Path
folder, before = Path(sys.argv[1]), json.loads(sys.argv[2])
sys.path.insert(0, str(folder))
from stoker.core.observed_reads import Observer, Reads, observing, snapshot
outputs = (folder / "runs" / "mine", folder / "models" / "mine")
observer = Observer(
    folder,
    at_begin=before["at_begin"] or snapshot(folder, outputs=outputs),
    before=Reads(**before["reads"]),
    outputs=outputs,
    followed=(folder / "users_code.py",),
    write=lambda reads: None,
)
with observing(observer):
    import users_code
    kept = users_code.read(folder)
print(json.dumps(asdict(observer.reads)))
"""


def observed(folder: Path, code: str, *, before: dict[str, Any] | None = None) -> Reads:
    """What is observed while `read(folder)`, with this body, runs in a process of its own."""
    body = "".join(f"    {line}\n" for line in code.splitlines())
    (folder / "users_code.py").write_text(
        f"import os, glob, mmap, sys\n\ndef read(folder):\n{body}"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-c", OBSERVED, str(folder)),
            json.dumps({"at_begin": {}, "reads": {}} | (before or {})),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Reads(**json.loads(done.stdout.splitlines()[-1]))


def changed(reads: Reads, folder: Path) -> set[str]:
    """Files and folders that are not what they were."""
    before, now = reads.as_identity(), reads.now(folder).as_identity()
    return {
        name
        for part in before
        for name in {*before[part], *now[part]}
        if before[part].get(name) != now[part].get(name)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in two classes, notes next to the code, and what earlier runs have left."""
    for name in ("images/a/1.png", "images/a/2.png", "images/b/1.png", "notes.txt"):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "mine"


LISTINGS = {
    "listdir": "os.listdir(FOLDER)",
    "scandir": "list(os.scandir(FOLDER))",
    "glob": "glob.glob(str(FOLDER) + '/*.png')",
    "pathlib": "list(FOLDER.glob('*'))",
    # A library that lists in C: a child process stands for it here.
    "in_c": "os.posix_spawn('/bin/ls', ['ls', FOLDER], {}); os.wait(); open(FOLDER / '1.png').read()",
}


def test_a_listed_folder_counts_with_the_names_in_it_whoever_lists_it(folder: Path) -> None:
    for name in LISTINGS:
        (folder / name).mkdir()
        (folder / name / "1.png").touch()
    code = "\n".join(
        code.replace("FOLDER", f"(folder / {name!r})") for name, code in LISTINGS.items()
    )
    reads = observed(folder, code)
    for name in ("listdir/1.png.tmp", "images/b/2.png", "notes-2.txt", "glob/__pycache__/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("ignored, or in a folder that was not listed")
    assert not changed(reads, folder)

    for name in LISTINGS:
        (folder / name / "2.png").write_text("new")

    assert changed(reads, folder) == set(LISTINGS)


def test_of_a_tree_that_is_walked_each_folder_counts_and_what_is_gone_or_new_is_named(
    folder: Path,
) -> None:
    reads = observed(folder, "list(os.walk(folder))")
    assert set(reads.listings) == {".", "images", "images/a", "images/b"}

    (folder / "images" / "c").mkdir()
    (folder / "images" / "b" / "1.png").unlink()

    assert changed(reads, folder) == {"images", "images/b"}


def test_names_that_the_run_creates_do_not_count_in_the_next_process_either(folder: Path) -> None:
    """A callback's files lie where the code lists; Stoker's outputs appear there too."""
    write = """
os.listdir(folder)
for name in ("best.keras", "models/mine/1/saved_model.pb", "runs/mine/1/run.json", "new/x"):
    os.makedirs((folder / name).parent, exist_ok=True)
    os.close(os.open(folder / name, os.O_CREAT | os.O_WRONLY))
"""
    (folder / "users_code.py").touch()
    at_begin = snapshot(folder)
    first = observed(folder, write, before={"at_begin": at_begin})
    assert "best.keras" in first.own
    assert not changed(first, folder)

    kept = {"listings": first.listings, "own": first.own}
    again = observed(folder, "os.listdir(folder)", before={"at_begin": at_begin, "reads": kept})

    assert again.listings == first.listings
    assert not changed(again, folder)
    (folder / "more.csv").write_text("by a person")
    assert changed(again, folder) == {"."}


OTHERS = """
import helpers, importlib.metadata
list(importlib.metadata.distributions())
sys.path_importer_cache.clear()
import more_helpers
open(folder / "notes.txt").read()
os.posix_spawn("/bin/ls", ["ls", "-R", str(folder)], {}), os.wait()"""


def test_what_imports_and_other_programs_list_does_not_count(folder: Path) -> None:
    """Also where a file is read that lies next to the code."""
    for name in ("helpers.py", "more_helpers.py"):
        (folder / name).write_text("x = 1\n")

    reads = observed(folder, OTHERS)

    assert (set(reads.listings), "notes.txt" in reads.files) == (set(), True)


def test_a_file_that_stays_mapped_into_memory_counts(folder: Path) -> None:
    """No read and no end of it is an event."""
    code = """
handle = os.open(folder / "images/a/1.png", os.O_RDONLY)
kept = mmap.mmap(handle, 0, prot=mmap.PROT_READ)
also = os.open(folder / "images/a/2.png", os.O_RDWR)
written = mmap.mmap(also, 0)
return handle, kept, also, written"""

    assert set(observed(folder, code).files) == {"images/a/1.png"}


def test_files_of_packages_named_models_and_runs_count_and_stokers_own_do_not(folder: Path) -> None:
    theirs = ["models/resnet.py", "models/config.json", "src/models/nets.py", "runs/plan.csv"]
    ours = [
        *("models/taxi/3/stoker.manifest.json", "models/taxi/3/saved_model.pb"),
        *("runs/other/20260101T000000Z-aaaa/run.json", "runs/other/20260101T000000Z-aaaa/lock"),
        *("runs/other/20260101T000000Z-aaaa/train/model.py", "runs/mine/1/x", "models/mine/1/x"),
        "sub/runs/b/20260101T000000Z-bbbb/run.json",
        "sub/runs/b/20260101T000000Z-bbbb/lock",
    ]
    for name in (*theirs, *ours):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n")
    outputs = (folder / "runs" / "mine", folder / "models" / "mine")

    found = snapshot(folder, outputs=outputs)

    assert not set(ours) & set(found)
    assert set(theirs) <= set(found)
    assert set(files_of(folder, outputs)) == {name for name in found if not name.endswith("/")}
    reads = observed(folder, f"for name in {theirs + ours}: open(folder / name).read()")
    assert set(reads.files) == set(theirs)
    is_ignored = Ignored(folder)
    assert [is_ignored.file(name) for name in (*theirs, *ours[:5])] == [False] * 4 + [True] * 5


def test_a_folder_of_very_many_files_is_left_out_and_named_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_files.walk, "__kwdefaults__", {"outputs": (), "most": 40})
    for number in range(30):
        (folder / "images" / "a" / f"{number}.jpg").touch()
    for name in ("images/a/below/x", "zoo/late.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()

    with caplog.at_level(logging.WARNING):
        found = snapshot(folder)
        snapshot(folder)

    # Neither its files nor what is below it; but a small folder that comes later.
    assert {name for name in found if name.startswith("images/a")} == {"images/a/"}
    assert "zoo/late.py" in found
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("a change of the files in images/a/ is not seen: ")
    listings = Listings([name for name in found if found[name][0] >= 0], own=(), counted=())
    assert not listings.listed("images/a")
    assert listings.listed("images/b")
    places = [place.name for place in walk(folder, is_ignored=Ignored(folder)) if place.left_out]
    assert places == ["images/a"]


def test_a_folder_that_somebody_lists_is_news_once_and_only_where_a_file_was_read() -> None:
    listings = Listings(["./", "x", "images/", "images/1.png"], own=(), counted=())
    # Python's imports list the user's folder.
    assert [listings.seen("."), listings.seen("images")] == [False, False]

    listings.read("images/1.png")
    assert set(listings.marks()) == {"images"}
    other = Listings(["images/", "images/1.png"], own=(), counted=())
    other.read("images/1.png")

    assert [other.seen("images"), other.seen("images")] == [True, False]


def test_a_folder_in_which_the_run_creates_very_many_names_does_not_count() -> None:
    listings = Listings(["./", "out/", "out/first"], own=(), counted=())
    listings.listed("out")
    assert set(listings.marks()) == {"out"}

    created = [listings.created(f"out/{number}") for number in range(MOST_OWN + 2)]

    assert (created.count(True), listings.marks()) == (MOST_OWN + 1, {})


def test_a_file_is_hashed_once_in_a_process_unless_it_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    of_content = observed_reads._content_mark

    def counted(path: Path) -> str:
        hashed.append(path)
        return of_content(path)

    monkeypatch.setattr(observed_reads, "_content_mark", counted)
    monkeypatch.setattr(observed_reads, "_SETTLED_S", -1e9)
    path = folder / "notes.txt"
    marks = [mark_of(path) for _ in range(3)]
    changes: list[Callable[[], object]] = [
        lambda: path.write_text("notes.ttt"),
        lambda: os.utime(path, ns=(0, 0)),
        lambda: path.replace(path.with_name("kept")) and path.write_text("notes.txt"),
    ]
    for change in changes:
        time.sleep(0.02)
        change()
        marks.append(mark_of(path))

    assert len(hashed) == 4
    assert len(set(marks)) == 2
    assert marks[0] == marks[-1]
    # Of a file that has just been written, the clock cannot tell a second write.
    monkeypatch.setattr(observed_reads, "_SETTLED_S", 1e9)
    (folder / "images" / "a" / "2.png").write_text("now")
    assert mark_of(folder / "images" / "a" / "2.png") == mark_of(folder / "images" / "a" / "2.png")
    assert len(hashed) == 6


FORKING = """
import os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from stoker.core.observed_reads import Observer, Reads, observing, snapshot
folder = Path({folder!r})
observer = Observer(
    folder, at_begin=snapshot(folder), before=Reads(), outputs=(), followed=(), write=lambda reads: None
)
with observing(observer):
    from users_code import read
    over = threading.Event()
    def busy():
        # The lock is held most of the time while this process forks.
        while not over.is_set():
            with observer._lock:
                time.sleep(0.002)
    thread = threading.Thread(target=busy)
    thread.start()
    for _ in range(40):
        child = os.fork()
        if child == 0:
            read(folder / "list.csv")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    over.set()
    thread.join()
    read(folder / "list.csv")
print(sorted(observer.reads.files))
"""

USERS_CODE = """
import os
def read(path):
    os.environ.get("PATH")
    os.listdir(os.path.dirname(path))
    with open(path) as file:
        return file.read()
"""


def test_forked_children_do_not_wait_for_a_lock_of_the_observer(tmp_path: Path) -> None:
    (tmp_path / "users_code.py").write_text(USERS_CODE)
    (tmp_path / "list.csv").write_text("a,b\n")

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING.format(folder=str(tmp_path))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "list.csv" in done.stdout
