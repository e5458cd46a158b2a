"""The model repository: versions that are complete or absent."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import ConfigError, DataError, UserError
from stoker.core.files import hash_folder, publish_folder
from stoker.registry.repository import (
    MANIFEST,
    MAX_VERSION,
    Pushed,
    Repository,
    checked_name,
    verify,
    version_folders,
)


def saved_model(folder: Path, *, content: str = "a", files: int = 3) -> Path:
    """A folder that looks like a SavedModel from outside; the repository never looks inside."""
    (folder / "variables").mkdir(parents=True)
    (folder / "assets").mkdir()
    (folder / "saved_model.pb").write_text(content)
    for number in range(files):
        (folder / "variables" / f"{number}").write_text(f"{content}{number}" * 2000)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "models")


def test_a_push_copies_all_files_and_names_the_version(
    repository: Repository, tmp_path: Path
) -> None:
    source = saved_model(tmp_path / "m")

    pushed = repository.push(source, "taxi", lineage={"run": "r1"})

    assert pushed == Pushed(version=1, path=repository.root / "taxi" / "1", already=False)
    copied = {n: h for n, h in hash_folder(pushed.path).items() if n != MANIFEST}
    assert copied == hash_folder(source)
    assert (pushed.path / "assets").is_dir()
    assert verify(pushed.path)
    assert json.loads((pushed.path / MANIFEST).read_text())["lineage"] == {"run": "r1"}
    assert repository.aliases("taxi") == {"champion": 1}
    assert repository.models() == ["taxi"]


def test_new_content_gets_the_next_number_and_the_alias(
    repository: Repository, tmp_path: Path
) -> None:
    repository.push(saved_model(tmp_path / "a"), "taxi")

    pushed = repository.push(saved_model(tmp_path / "b", content="b"), "taxi", alias="challenger")

    assert (pushed.version, pushed.already) == (2, False)
    assert repository.versions("taxi") == [1, 2]
    assert repository.newest("taxi") == 2
    assert repository.aliases("taxi") == {"champion": 1, "challenger": 2}


def test_pushing_the_same_content_again_changes_nothing(
    repository: Repository, tmp_path: Path
) -> None:
    source = saved_model(tmp_path / "m")
    first = repository.push(source, "taxi")
    before = hash_folder(repository.root)

    again = repository.push(source, "taxi", lineage={"another": "run"})

    assert again == Pushed(version=1, path=first.path, already=True)
    assert hash_folder(repository.root) == before


def test_content_that_was_damaged_in_the_repository_is_pushed_again(
    repository: Repository, tmp_path: Path
) -> None:
    source = saved_model(tmp_path / "m")
    first = repository.push(source, "taxi")
    (first.path / "saved_model.pb").write_text("x")

    assert repository.push(source, "taxi").version == 2


def test_an_older_content_is_a_new_version(repository: Repository, tmp_path: Path) -> None:
    old = saved_model(tmp_path / "a")
    repository.push(old, "taxi")
    repository.push(saved_model(tmp_path / "b", content="b"), "taxi")

    assert repository.push(old, "taxi").version == 3
    assert repository.content_hash("taxi", 3) == repository.content_hash("taxi", 1)
    assert repository.content_hash("taxi", 2) != repository.content_hash("taxi", 1)


def test_numbers_may_have_leading_zeros_and_all_else_is_ignored(
    repository: Repository, tmp_path: Path
) -> None:
    base = repository.root / "taxi"
    for name in ("00000007", "3", ".9.tmp", "x", "-1", "1.5", "٣", str(MAX_VERSION + 1)):
        (base / name).mkdir(parents=True)
    (base / "11").write_text("a file")

    assert repository.versions("taxi") == [3, 7]
    assert repository.path("taxi", 7).name == "00000007"
    assert repository.push(saved_model(tmp_path / "m"), "taxi").version == 12


def test_an_alias_can_be_moved_to_a_version_that_exists(
    repository: Repository, tmp_path: Path
) -> None:
    repository.push(saved_model(tmp_path / "a"), "taxi")
    repository.push(saved_model(tmp_path / "b", content="b"), "taxi")

    repository.set_alias("taxi", "champion", version=1)

    assert repository.aliases("taxi") == {"champion": 1}
    with pytest.raises(UserError, match="must have a version 5"):
        repository.set_alias("taxi", "champion", version=5)


def test_a_missing_model_is_empty_or_an_error(repository: Repository) -> None:
    assert repository.models() == []
    assert repository.versions("taxi") == []
    assert repository.newest("taxi") is None
    assert repository.aliases("taxi") == {}
    assert version_folders(repository.root / "nope") == {}
    with pytest.raises(UserError, match="must have a version 1"):
        repository.path("taxi", 1)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b", ".hidden", "a\nb", "a:b"),
        *("x" * 129, " ", "\ud800", "é" * 65),
    ],
)
def test_a_name_that_could_lead_elsewhere_is_refused(
    repository: Repository, tmp_path: Path, name: str
) -> None:
    source = saved_model(tmp_path / "m")
    with pytest.raises(ConfigError):
        repository.push(source, name)
    with pytest.raises(ConfigError):
        repository.push(source, "taxi", alias=name)
    assert not repository.root.exists()


@given(st.text(max_size=40))
def test_an_accepted_name_is_one_folder_below_the_root(name: str) -> None:
    try:
        checked_name(name)
    except ConfigError:
        return
    path = os.path.normpath(os.path.join("/root/models", name))  # noqa: PTH118 - as the kernel sees it
    assert os.path.dirname(path) == "/root/models"  # noqa: PTH120 - as above
    assert os.path.basename(path) == name  # noqa: PTH119 - as above


def test_a_folder_that_is_not_a_savedmodel_is_refused(
    repository: Repository, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="must be a SavedModel"):
        repository.push(tmp_path, "taxi")
    assert not repository.root.exists()


def test_a_link_in_the_savedmodel_is_refused(repository: Repository, tmp_path: Path) -> None:
    source = saved_model(tmp_path / "m")
    (source / "assets" / "vocabulary").symlink_to("/etc/passwd")

    with pytest.raises(DataError, match="vocabulary must be a plain file"):
        repository.push(source, "taxi")
    assert not repository.root.exists()


@pytest.mark.parametrize("damage", ["flip", "missing", "extra", "link", "manifest", "cut manifest"])
def test_verify_names_the_damaged_file(repository: Repository, tmp_path: Path, damage: str) -> None:
    path = repository.push(saved_model(tmp_path / "m"), "taxi").path
    victim = path / "variables" / "1"
    if damage == "flip":
        raw = bytearray(victim.read_bytes())
        raw[7] ^= 1
        victim.write_bytes(raw)
    elif damage == "missing":
        victim.unlink()
    elif damage == "extra":
        victim = path / "variables" / "9"
        victim.write_text("")
    elif damage == "link":
        content = victim.rename(tmp_path / "elsewhere")
        victim.symlink_to(content)
    else:
        victim = path / MANIFEST
        text = victim.read_text()
        changed = text.replace('"format": 1', '"format": 2')
        victim.write_text(text[:40] if damage == "cut manifest" else changed)

    with pytest.raises(DataError) as caught:
        verify(path)

    assert str(victim) in caught.value.line()


def test_without_a_manifest_nothing_is_known(tmp_path: Path) -> None:
    assert not verify(saved_model(tmp_path / "m"))


def test_a_damaged_alias_file_is_named(repository: Repository, tmp_path: Path) -> None:
    repository.push(saved_model(tmp_path / "m"), "taxi")
    (repository.root / "taxi" / "aliases.json").write_text('{"champion": "1"}')

    with pytest.raises(DataError, match=r"aliases\.json"):
        repository.aliases("taxi")


def push_one(root: Path, source: Path, alias: str) -> None:
    Repository(root).push(source, "taxi", alias=alias)


def test_pushes_at_the_same_time_are_all_whole_and_lose_no_alias(
    repository: Repository, tmp_path: Path
) -> None:
    sources = [saved_model(tmp_path / f"m{n}", content=f"c{n}") for n in range(6)]
    context = multiprocessing.get_context("fork")
    pushes = [
        context.Process(target=push_one, args=(repository.root, source, f"alias{n}"))
        for n, source in enumerate(sources)
    ]
    for push in pushes:
        push.start()
    for push in pushes:
        push.join(timeout=300)

    assert [push.exitcode for push in pushes] == [0] * 6
    assert repository.versions("taxi") == [1, 2, 3, 4, 5, 6]
    assert all(verify(repository.path("taxi", version)) for version in range(1, 7))
    aliases = repository.aliases("taxi")
    assert sorted(aliases) == [f"alias{n}" for n in range(6)]
    for number in range(6):
        path = repository.path("taxi", aliases[f"alias{number}"])
        assert (path / "saved_model.pb").read_text() == f"c{number}"


def test_a_number_that_a_stranger_takes_meanwhile_is_left_to_him(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_a_stranger(made: Path, final: Path) -> None:
        if final.name == "1":
            saved_model(final, content="stranger")
        publish_folder(made, final)

    monkeypatch.setattr("stoker.registry.repository.publish_folder", after_a_stranger)

    pushed = repository.push(saved_model(tmp_path / "m"), "taxi")

    assert pushed.version == 2
    assert (repository.root / "taxi" / "1" / "saved_model.pb").read_text() == "stranger"


PUSH_FOR_EVER = """
import itertools, sys
from pathlib import Path
from stoker.registry.repository import Repository
sources = [Path(name) for name in sys.argv[2:]]
print("started", flush=True)
for source in itertools.cycle(sources):
    Repository(Path(sys.argv[1])).push(source, "taxi")
    print("pushed", flush=True)
"""


def test_what_a_killed_push_left_is_gone_after_the_next(
    repository: Repository, tmp_path: Path
) -> None:
    source = saved_model(tmp_path / "m", content="c", files=1)
    base = repository.push(source, "taxi").path.parent
    (base / ".aliases.json.killed.tmp").write_text("{")
    (base / ".version.killed.tmp").mkdir()

    repository.push(source, "taxi")

    assert [path.name for path in base.iterdir() if path.suffix == ".tmp"] == []


def test_a_push_killed_at_any_moment_leaves_the_old_or_the_new_and_never_half(
    repository: Repository, tmp_path: Path
) -> None:
    sources = [saved_model(tmp_path / f"m{n}", content=f"c{n}", files=8) for n in range(2)]
    whole = [hash_folder(source) for source in sources]
    chance = random.Random(5)
    for turn in range(12):
        command = [sys.executable, "-c", PUSH_FOR_EVER, str(repository.root), *map(str, sources)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            if turn % 3 == 0:
                # However slow the machine is, some are killed in a push that follows another.
                process.stdout.readline()
            time.sleep(chance.random() * 0.06)  # a random instant of a push
            process.send_signal(signal.SIGKILL)
        for version in repository.versions("taxi"):
            path = repository.path("taxi", version)
            assert verify(path)
            assert {n: h for n, h in hash_folder(path).items() if n != MANIFEST} in whole
        aliases = repository.aliases("taxi")
        assert set(aliases.values()) <= set(repository.versions("taxi"))

    assert repository.versions("taxi")
    repository.push(sources[0], "taxi")
    repository.push(sources[1], "taxi")
    left = [path.name for path in (repository.root / "taxi").iterdir() if path.suffix == ".tmp"]
    assert left == []
    assert repository.aliases("taxi") == {"champion": repository.newest("taxi")}


FULL_DISK = """
set -e
mount -t tmpfs -o size=256k none "$1"
exec "$2" -c "
import sys
from pathlib import Path
from stoker.core.errors import UserError
from stoker.registry.repository import Repository, verify
repository = Repository(Path(sys.argv[1]))
first = repository.push(Path(sys.argv[2]), 'taxi')
try:
    repository.push(Path(sys.argv[3]), 'taxi')
except UserError as error:
    print(error.line())
assert verify(first.path)
assert repository.versions('taxi') == [1]
assert repository.aliases('taxi') == {'champion': 1}
assert [p.name for p in (repository.root / 'taxi').iterdir() if p.suffix == '.tmp'] == []
" "$1" "$3" "$4"
"""


def _may_mount() -> bool:
    tried = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
    )
    return tried.returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="needs a mount namespace of its own")
def test_a_full_disk_is_an_error_and_leaves_the_repository_as_it_was(tmp_path: Path) -> None:
    small, large = saved_model(tmp_path / "s", files=1), saved_model(tmp_path / "l", files=200)
    (tmp_path / "disk").mkdir()
    arguments = [str(tmp_path / "disk"), sys.executable, str(small), str(large)]

    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", FULL_DISK, "sh", *arguments],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "must have room" in done.stdout
