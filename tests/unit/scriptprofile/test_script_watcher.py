"""What runs inside of other people's processes, in processes that have nothing to do with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stoker.scriptprofile.script import FOLDER_VARIABLE, WATCHER
from stoker.scriptprofile.watcher.stoker_watch.places import owner, who_called
from stoker.scriptprofile.watcher.stoker_watch.wall import Load, Moment, now
from stoker.scriptprofile.watcher.stoker_watch.watch import Facts


def run(code: str, *, path: list[Path], folder: Path | None) -> subprocess.CompletedProcess[str]:
    """A fresh Python that finds these folders first."""
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    environment.pop(FOLDER_VARIABLE, None)
    if folder is not None:
        environment[FOLDER_VARIABLE] = str(folder)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


SHOW = "import json, sys; print(json.dumps([sys.path, sorted(sys.modules)]))"


def test_a_python_without_tensorflow_sees_and_says_nothing(tmp_path: Path) -> None:
    plain = run(SHOW, path=[tmp_path], folder=None)
    watched = run(SHOW, path=[WATCHER, tmp_path], folder=tmp_path)

    plain_path, plain_modules = json.loads(plain.stdout)
    path, modules = json.loads(watched.stdout)
    assert path == plain_path
    assert watched.stderr == plain.stderr
    assert {"stoker_watch", "stoker_watch.import_hook"} <= set(modules) - set(plain_modules)
    assert not {name for name in modules if name.split(".")[0] in ("tensorflow", "keras", "stoker")}
    assert list(tmp_path.glob("facts-*")) == []


def test_a_sitecustomize_that_is_hidden_runs_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = __file__\n")

    ran = run(
        "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)",
        path=[WATCHER, tmp_path],
        folder=tmp_path,
    )

    theirs = str(tmp_path / "sitecustomize.py")
    assert ran.stdout.split() == [theirs, theirs], ran.stderr


def test_an_error_of_the_users_sitecustomize_is_reported_as_without_the_watcher(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')\n")

    plain = run("print(1)", path=[tmp_path], folder=None)
    watched = run("print(1)", path=[WATCHER, tmp_path], folder=tmp_path)

    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout)
    assert "ValueError: theirs" in watched.stderr


def test_a_watcher_that_cannot_start_stops_nothing(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (inside / "stoker_watch").mkdir(parents=True)
    (inside / "sitecustomize.py").write_text((WATCHER / "sitecustomize.py").read_text())
    (inside / "stoker_watch" / "__init__.py").write_text("")
    (inside / "stoker_watch" / "import_hook.py").write_text("raise RuntimeError('broken')\n")

    ran = run("print('runs')", path=[inside], folder=tmp_path)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "runs\n", "")
    assert (tmp_path / "failed").read_text() == "RuntimeError: broken\n"


def test_the_users_own_modules_are_found_as_before(tmp_path: Path) -> None:
    for name in ("hook", "facts", "look"):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")

    ran = run(
        "import hook, facts, look; print(hook.OWN, facts.OWN, look.OWN)",
        path=[WATCHER, tmp_path],
        folder=tmp_path,
    )

    assert ran.stdout == "True True True\n", ran.stderr


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        ("/home/me/train.py", "user"),
        ("<string>", "user"),
        ("<stdin>", "user"),
        ("<frozen runpy>", "python"),
        (sysconfig.get_path("stdlib") + "/runpy.py", "python"),
        ("/v/lib/python3.11/site-packages/keras/src/models/model.py", "keras"),
        ("/v/lib/python3/dist-packages/six.py", "six"),
        (str(WATCHER / "stoker_watch" / "loops.py"), "us"),
        ("/tmp/__autograph_generated_filexyz.py", "us"),
    ],
)
def test_whose_a_file_is(file: str, whose: str) -> None:
    assert owner(file) == whose


def test_the_place_is_the_line_of_the_call() -> None:
    (file, line), maker = who_called()

    assert Path(file) == Path(__file__)
    assert "who_called()" in Path(file).read_text().splitlines()[line - 1]
    assert maker == "user"


def test_facts_are_json_whatever_they_hold_and_a_broken_part_costs_only_itself(
    tmp_path: Path,
) -> None:
    def broken() -> object:
        raise KeyError("gone")

    facts = Facts()
    facts.folder = str(tmp_path)
    facts.on, facts._pid = True, os.getpid()
    facts.parts = {"odd": lambda: {1: float("nan"), "path": tmp_path, "t": (1, 2)}, "no": broken}

    facts.write()

    [path] = tmp_path.glob("facts-*.json")
    found = json.loads(path.read_text())
    assert found["odd"] == {"1": None, "path": str(tmp_path), "t": [1, 2]}
    assert "no" not in found
    assert found["failures"][0].startswith("KeyError: 'gone' (test_script_watcher.py:")


def test_a_forked_child_does_not_write_its_parents_facts(tmp_path: Path) -> None:
    facts = Facts()
    facts.folder = str(tmp_path)
    facts.on, facts._pid = True, os.getpid() + 1

    facts.write()

    assert list(tmp_path.iterdir()) == []


WAITING = """
import json, os, subprocess, sys, time
from stoker.scriptprofile.watcher.stoker_watch.wall import Load, now

load = Load()
load.begin()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = [sys.executable, "-c", "print(flush=True)\\nwhile True: pass"]
with subprocess.Popen(busy, stdout=subprocess.PIPE, start_new_session=True) as other:
    other.stdout.readline()
    begun, until_s = now(), time.thread_time() + 0.3
    while time.thread_time() < until_s:
        pass
    span, found = load.between(begun, now()), load.as_json()
    other.kill()
print(json.dumps({**span._asdict(), "waited_s": found["waited_s"]}))
"""


def test_a_wait_for_a_core_that_another_program_has_is_counted() -> None:
    # In a session of its own: the other workers of pytest do not belong to it.
    done = subprocess.run(
        [sys.executable, "-c", WAITING],
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout)

    # Two programs on a core take turns: of the time that one runs it waits about as long.
    assert 0.3 <= found["run_s"] < found["wall_s"]
    assert found["wait_s"] > 0.1
    assert found["wait_s"] <= found["away_s"] <= found["wall_s"] - found["run_s"]
    assert found["waited_s"] >= found["wait_s"] * 0.5


def test_what_others_took_of_a_time_is_by_threads_that_it_waits_for_too() -> None:
    begun = Moment(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    # Of 1 s this thread ran 0.2 s, waited 0.3 s, and was blocked by threads that mostly waited.
    ended = Moment(1.0, 0.2, 0.3, 0.1, 0.4, 2.0, 0.0)

    alone = Load().between(begun, ended)

    assert alone.wait_s == pytest.approx(0.3)
    assert alone.away_s == pytest.approx(0.3 + 0.5 * 0.4 / 0.5)
    # The cores were busy with nothing but this process: it waited for itself.
    assert Load().between(begun, ended._replace(own_s=2.0)).away() == 0.0
    half = Load().between(begun, ended._replace(own_s=1.0))
    assert half.wait_s == pytest.approx(0.15)
    assert half.wait_s < half.away_s < alone.away_s


def test_where_linux_does_not_say_nothing_is_taken_off() -> None:
    assert Load().between(None, now()).away() == 0.0
    assert Load().as_json() == {}
