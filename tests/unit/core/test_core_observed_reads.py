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

from stoker.core import folder_files
from stoker.core.folder_files import MAX_OWN, Ignored, Listings, walk
from stoker.core.folder_files import folder_files as files_of
from stoker.core.reads import reads as reads_module
from stoker.core.reads.observer import Observer
from stoker.core.reads.reads import Reads, mark_of, snapshot

OBSERVED = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from stoker.core.reads import hooks
folder, before = Path(sys.argv[1]), json.loads(sys.argv[2])
sys.path.insert(0, str(folder))
from stoker.core.reads.hooks import observing
from stoker.core.reads.observer import Observer
from stoker.core.reads.reads import Reads, snapshot
outputs = (folder / "runs" / "mine", folder / "models" / "mine")
observer = Observer(
    folder,
    at_begin=before["at_begin"] or snapshot(folder, outputs=outputs),
    before=Reads(**before["reads"]),
    outputs=outputs,
    followed=(folder / "users_code.py",),
    write=lambda reads: None,
)
if not before["watched"]:
    def out_of_watches(*args, **kwargs):
        raise OSError(28, "No space left on device")
    hooks.FolderWatch = out_of_watches
with observing(observer):
    import users_code
    kept = users_code.read(folder)
print(json.dumps(asdict(observer.reads)))
"""


def observed(
    folder: Path, code: str, *, before: dict[str, Any] | None = None, watched: bool = True
) -> Reads:
    """What is observed while `read(folder)`, with this body, runs in a process of its own."""
    body = "".join(f"    {line}\n" for line in code.splitlines())
    (folder / "users_code.py").write_text(
        f"import os, glob, mmap, sys\n\ndef read(folder):\n{body}"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-c", OBSERVED, str(folder)),
            json.dumps({"at_begin": {}, "reads": {}, "watched": watched} | (before or {})),
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


def test_a_listed_folder_counts_with_the_names_in_it_whichever_function_lists_it(
    folder: Path,
) -> None:
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


WRITES = """
for name in glob.glob(str(folder) + '/*/*.csv'): open(name).read()
for name in ('data', 'out'): os.listdir(folder / name)
def by_another(name):
    os.posix_spawn('/bin/cp', ['cp', str(folder / 'data/a.csv'), str(folder / name)], {}), os.wait()
by_another('data/b.csv'), by_another('out/b.csv'), by_another('out/c.csv')
open(folder / 'data/b.csv').read()
os.mkdir(folder / 'data/made'), os.makedirs(folder / 'data/more/x')
for name in ('data/opened', 'data/x.part'): open(folder / name, 'w').close()
os.rename(folder / 'data/x.part', folder / 'data/renamed')
at = os.open(folder / 'data', os.O_RDONLY)
os.rename('renamed', 'again', src_dir_fd=at, dst_dir_fd=at)
os.symlink('a.csv', folder / 'data/link'), os.link(folder / 'data/opened', folder / 'data/hard')
import ctypes, time
held = ctypes.CDLL(None).open(bytes(folder / 'data/in_c'), os.O_CREAT | os.O_RDWR, 0o600)
time.sleep(0.2)"""


@pytest.mark.parametrize("watched", [True, False])
def test_a_name_counts_as_the_runs_own_where_it_reads_data_only_if_it_has_created_it(
    folder: Path, watched: bool
) -> None:
    """What another process adds to the data during the run is found; nothing else is."""
    for name in ("data/a.csv", "out/x"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("1")
    code = WRITES if watched else WRITES.partition("import ctypes")[0]

    reads = observed(folder, code, watched=watched)

    # Without inotify every file counts as read, and it is unknown who created one.
    assert changed(reads, folder) == ({"data"} if watched else {"data", "out"})
    for path in folder.glob("*/[bc].csv"):
        path.unlink(missing_ok=not watched or path.parent.name == "data")
    assert changed(reads, folder) == set()
    (folder / "out" / "late.csv").touch()
    assert changed(reads, folder) == {"out"}


def test_another_stage_knows_the_names_and_its_own_reads_decide(folder: Path) -> None:
    wrote = Reads(own=["images/a/mine"], appeared=["images/a/3.png", "images/b/x"])
    reads = observed(folder, "open(folder / 'images/a/1.png').read(), list(os.walk(folder))")

    both = reads.besides(wrote)

    assert both.not_listed() >= {"images/a/mine", "images/b/x"}
    assert "images/a/3.png" not in both.not_listed()


def test_a_link_that_gets_another_target_counts_whichever_function_reads_through_it(
    folder: Path,
) -> None:
    for name in ("v1/a.csv", "v2/a.csv", "../out1/a.csv", "../out2/a.csv"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("the same")
    links = {
        "file.csv": "v1/a.csv",
        "in_c.csv": "v1/a.csv",
        "chain.csv": "file.csv",
        "folder": "v1",
        "outside": "../out1",
        "unused": "images/b",
        "written": "notes.txt",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    reads = observed(
        folder,
        """
for name in ("chain.csv", "folder/a.csv", "outside/a.csv"): open(folder / name).read()
os.posix_spawn("/bin/grep", ["grep", "-q", "x", str(folder / "in_c.csv")], {}), os.wait()
os.listdir(folder), open(folder / "written").read()
os.symlink("images/a/1.png", folder / "link.part"), os.replace(folder / "link.part", folder / "written")
""",
    )
    assert changed(reads, folder) == set()

    for name, target in links.items():
        (folder / name).unlink()
        (folder / name).symlink_to(target.replace("1", "2"))
    (folder / "chain.csv").unlink()
    assert changed(reads, folder) == {"file.csv", "in_c.csv", "folder", "outside", "chain.csv", "."}
    (folder / "chain.csv").symlink_to("file.csv")
    (folder / "unused").unlink()

    # The name of a link to a folder counts in a listing.
    assert changed(reads, folder) == {"file.csv", "in_c.csv", "folder", "outside", "."}


def test_the_name_of_a_version_counts_in_a_listing_and_its_content_does_not(folder: Path) -> None:
    def add(version: str) -> None:
        (folder / "t" / version).mkdir(parents=True)
        (folder / "t" / version / "stoker.manifest.json").touch()

    add("1")
    reads = observed(folder, "max(os.listdir(folder / 't')), os.listdir(folder / 't' / '1')")
    assert set(reads.listings) == {"t"}
    for name in ("t/1/more", "models/mine/3/stoker.manifest.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert changed(reads, folder) == set()

    add("2")

    assert changed(reads, folder) == {"t"}


def test_runs_and_models_of_other_experiments_do_not_count_in_a_tree_that_is_walked(
    folder: Path,
) -> None:
    def add(*names: str) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()

    def run(*names: str) -> None:
        for name in names:
            add(f"{name}/run.json", f"{name}/lock", f"{name}/data/manifest.json")

    def push(*names: str) -> None:
        add(*(f"{name}/stoker.manifest.json" for name in names))

    run("runs/other/1", "runs/mine/1", "sub/runs/nested/1", "notes/1")
    push("models/other/1", "models/mine/1", "teachers/bert/1")
    add("models/nets.py", "data/a.csv", "notes/read_me.txt")
    reads = observed(folder, "list(os.walk(folder)), open(folder / 'notes/read_me.txt').read()")
    listed = {"runs", "models", "teachers/bert", "sub/runs", "data", "notes"}
    assert listed <= set(reads.listings)
    assert set(reads.files) == {"notes/read_me.txt"}

    run("runs/other/2", "runs/third/1", "sub/runs/nested/2", "sub/runs/new/1")
    push("models/other/2", "models/third/1")
    add("models/other/aliases.json", "models/.push.lock", "data/.b.csv.lock", "runs/third/.lock")
    add("runs/.tune/third/trial.json", "runs/.cluster-0123.json")
    assert changed(reads, folder) == set()

    push("teachers/bert/2", "teachers/gpt/1")
    add("models/new.py", "runs/plan.csv", "data/b.csv")
    assert changed(reads, folder) == {"teachers", "teachers/bert", "models", "runs", "data"}


def test_a_data_file_named_core_counts_and_a_dump_does_not(tmp_path: Path) -> None:
    is_ignored = Ignored(tmp_path)

    assert [is_ignored.file(name) for name in ("core.json", "core.csv", "core.py")] == [False] * 3
    assert [is_ignored.file(name) for name in ("core.1", "core.12345", "a/core.7")] == [True] * 3


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
    # Of folders of ours the names count in a listing of what is around them.
    names = {Path(name).parent.as_posix() for name in (ours[0], ours[2], ours[7])}
    assert set(files_of(folder, outputs)) == {each for each in found if each[-1] != "/"} - names
    assert names <= set(found)
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
    assert said.startswith("changes of files in images/a/ are not noticed: ")
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
    assert set(listings.marks(own=())) == {"images"}
    other = Listings(["images/", "images/1.png"], own=(), counted=())
    other.read("images/1.png")

    assert [other.seen("images"), other.seen("images")] == [True, False]


def test_a_folder_in_which_the_run_creates_very_many_names_does_not_count() -> None:
    listings = Listings(["./", "out/", "out/first"], own=(), counted=())
    listings.listed("out")
    assert set(listings.marks(own=())) == {"out"}

    created = [listings.created(f"out/{number}", by_run=True) for number in range(MAX_OWN + 2)]

    assert (created.count(True), listings.marks(own=())) == (MAX_OWN + 1, {})


def test_a_file_is_hashed_once_in_a_process_unless_it_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    of_content = reads_module._content_mark

    def counted(path: Path) -> str:
        hashed.append(path)
        return of_content(path)

    monkeypatch.setattr(reads_module, "_content_mark", counted)
    monkeypatch.setattr(reads_module, "_SETTLED_S", -1e9)
    path = folder / "notes.txt"
    marks = [mark_of(path) for _ in range(3)]
    changes: list[Callable[[], object]] = [
        lambda: path.write_text("notes.ttt"),
        lambda: os.utime(path, ns=(0, 0)),
        lambda: path.replace(path.with_name("kept")) and path.write_text("notes.txt"),
    ]
    for change in changes:
        time.sleep(0.02)  # longer than the resolution of a file's times
        change()
        marks.append(mark_of(path))

    assert len(hashed) == 4
    assert len(set(marks)) == 2
    assert marks[0] == marks[-1]
    # Of a file that has just been written, the clock cannot tell a second write.
    monkeypatch.setattr(reads_module, "_SETTLED_S", 1e9)
    (folder / "images" / "a" / "2.png").write_text("now")
    assert mark_of(folder / "images" / "a" / "2.png") == mark_of(folder / "images" / "a" / "2.png")
    assert len(hashed) == 6


def test_a_file_that_is_written_while_its_mark_is_made_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras's CSVLogger reads the log, and at once appends to it; the observer has its own thread."""
    observer = Observer(
        folder,
        at_begin=snapshot(folder),
        before=Reads(),
        outputs=(),
        followed=(),
        write=lambda reads: None,
    )
    of_content = reads_module._content_mark

    def written_meanwhile(path: Path) -> str:
        mark = of_content(path)
        observer.written(path)
        return mark

    monkeypatch.setattr(reads_module, "_content_mark", written_meanwhile)
    observer.file(folder / "notes.txt")
    assert observer.reads.files == {}

    monkeypatch.setattr(reads_module, "_content_mark", of_content)
    observer.file(folder / "images/a/1.png")
    assert set(observer.reads.files) == {"images/a/1.png"}


FORKING = """
import os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from stoker.core.reads.hooks import observing
from stoker.core.reads.observer import Observer
from stoker.core.reads.reads import Reads, snapshot
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
