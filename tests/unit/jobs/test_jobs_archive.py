"""What an archive of code holds, and that only the submitted code is ever unpacked."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError, DataError, UserError
from stoker.jobs.archive import CODE, Archive, pack, unpack


def names(archive: Archive) -> set[str]:
    return set(archive.sizes)


def saved(archive: Archive, folder: Path) -> Path:
    path = folder / CODE
    path.write_bytes(archive.content)
    return path


def tar_of(folder: Path, *members: tarfile.TarInfo) -> tuple[Path, str]:
    path = folder / CODE
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_equal_code_gives_equal_bytes_whenever_it_is_packed(experiment: Path) -> None:
    first = pack(experiment)
    for path in experiment.rglob("*"):
        os.utime(path, (1, 1))

    assert pack(experiment).content == first.content

    (experiment / "layers.py").write_text("UNITS = 9\n")
    assert pack(experiment).digest != first.digest


def test_data_runs_secrets_hidden_files_and_ignored_files_stay_where_they_are(
    experiment: Path,
) -> None:
    for left_out in (
        *("runs/small/1/run.json", ".env", ".git/config", "server.pem", "id_rsa", "id_ed25519.pub"),
        *("credentials.json", "__pycache__/model.pyc", "train.log", "venv/lib.py", "big/a.bin"),
        *("prod.env", "secrets.toml", "service_account.json", "keys/kubeconfig"),
    ):
        (experiment / left_out).parent.mkdir(parents=True, exist_ok=True)
        (experiment / left_out).write_text("secret")
    (experiment / "config").mkdir()
    (experiment / "config" / "sizes.yaml").write_text("a: 1\n")
    (experiment / "stoker.lock.yaml").write_text("settings: {}\n")
    (experiment / ".stokerignore").write_text("big/\n")

    packed = pack(experiment, outside=[experiment / "runs", experiment / "data" / "*.csv"])

    assert names(packed) == {
        f"experiment/{name}"
        for name in (
            *("model.py", "layers.py", "config/sizes.yaml"),
            *("stoker.yaml", "stoker.lock.yaml", ".stokerignore"),
        )
    }
    assert b"secret" not in packed.content


def test_links_to_data_elsewhere_stay_and_python_at_the_end_of_a_link_is_packed(
    experiment: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere.csv").write_text("1\n")
    (tmp_path / "shared.py").write_text("A = 1\n")
    (experiment / "link.csv").symlink_to(tmp_path / "elsewhere.csv")
    (experiment / "shared.py").symlink_to(tmp_path / "shared.py")
    (experiment / "gone.py").symlink_to(tmp_path / "gone.py")

    found = names(pack(experiment))

    assert "experiment/shared.py" in found
    assert not {"experiment/link.csv", "experiment/gone.py"} & found


def test_a_link_to_what_stays_stays_too(experiment: Path) -> None:
    left_out = ("data/small.csv", "shards/a/0.bin", ".env", "big/a.bin", "keys/server.key")
    for number, name in enumerate((*left_out, "sizes.yaml")):
        (experiment / name).parent.mkdir(exist_ok=True, parents=True)
        (experiment / name).write_text("x")
        (experiment / f"link{number}.txt").symlink_to(name)
    (experiment / ".hidden.py").write_text("A = 1\n")
    (experiment / "shown.py").symlink_to(".hidden.py")
    (experiment / ".stokerignore").write_text("big/\n")

    found = names(pack(experiment, outside=[experiment / "data" / "*.csv", experiment / "shards"]))

    assert {name for name in found if "link" in name} == {f"experiment/link{len(left_out)}.txt"}
    assert "experiment/shown.py" in found


def test_local_packages_come_along_and_installed_ones_do_not(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (experiment / "model.py").write_text("import numpy, common, json\nfrom onpath.deep import a\n")
    common = experiment.parent / "common"
    common.mkdir()
    (common / "__init__.py").write_text("import helper\n")
    (common / "sizes.yaml").write_text("a: 1\n")
    (common / "key.pem").write_text("secret")
    (experiment.parent / "helper.py").write_text("B = 2\n")
    (experiment.parent / "unused.py").write_text("C = 3\n")
    package = tmp_path / "path" / "onpath" / "deep"
    package.mkdir(parents=True)
    (package / "a.py").write_text("D = 4\n")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))

    found = {name for name in names(pack(experiment)) if name.startswith("packages/")}

    assert found == {
        *("packages/common/__init__.py", "packages/common/sizes.yaml", "packages/helper.py"),
        "packages/onpath/deep/a.py",
    }


def test_code_over_the_limit_is_one_line_with_the_largest_files(experiment: Path) -> None:
    for name, size in (("weights.bin", 3 << 20), ("table.bin", 2 << 20), ("small.bin", 10)):
        (experiment / name).write_bytes(bytes(size))

    with pytest.raises(ConfigError) as caught:
        pack(experiment, limit_bytes=4 << 20)

    line = caught.value.line()
    assert "5.0 MiB; the largest files: weights.bin (3.0 MiB), table.bin (2.0 MiB)" in line
    assert ".stokerignore" in line


def test_unpacking_gives_the_same_files_once(experiment: Path, tmp_path: Path) -> None:
    (experiment / "run.sh").write_text("#!/bin/sh\n")
    (experiment / "run.sh").chmod(0o755)
    packed = pack(experiment)
    path = saved(packed, tmp_path)

    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda _: unpack(path, packed.digest, into=tmp_path / "node"), range(4))
        )

    code = made[0]
    assert all(each == code for each in made)
    assert (code.experiment / "model.py").read_text() == "import layers\n"
    assert os.access(code.experiment / "run.sh", os.X_OK)
    copies = [each for each in (tmp_path / "node").iterdir() if each.suffix != ".lock"]
    assert copies == [tmp_path / "node" / packed.digest]


def test_a_copy_that_lost_a_file_is_made_again_and_extra_files_do_not_matter(
    experiment: Path, tmp_path: Path
) -> None:
    packed = pack(experiment)
    path = saved(packed, tmp_path)
    code = unpack(path, packed.digest, into=tmp_path / "node")
    (code.experiment / "__pycache__").mkdir()
    inode = code.experiment.stat().st_ino

    assert unpack(path, packed.digest, into=tmp_path / "node").experiment.stat().st_ino == inode

    (code.experiment / "layers.py").write_text("UNITS = 1\n")
    again = unpack(path, packed.digest, into=tmp_path / "node")

    assert (again.experiment / "layers.py").read_text() == "UNITS = 8\n"


def test_another_or_a_truncated_archive_is_refused(experiment: Path, tmp_path: Path) -> None:
    packed = pack(experiment)
    path = saved(packed, tmp_path)

    with pytest.raises(DataError, match="must be the code that was submitted"):
        unpack(path, "0" * 64, into=tmp_path / "node")

    path.write_bytes(packed.content[:-40])
    with pytest.raises(DataError, match="its SHA-256 is"):
        unpack(path, packed.digest, into=tmp_path / "node")
    short = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(DataError, match="must be the code that was submitted"):
        unpack(path, short, into=tmp_path / "node")


@pytest.mark.parametrize(
    "name", ["../out.py", "/out.py", "experiment/../../out.py", "other/a.py", "experiment"]
)
def test_names_that_lead_out_are_refused_and_nothing_stays(tmp_path: Path, name: str) -> None:
    path, digest = tar_of(tmp_path, tarfile.TarInfo(name))

    with pytest.raises(DataError, match="is not a file inside"):
        unpack(path, digest, into=tmp_path / "node")

    assert not (tmp_path / "out.py").exists()
    assert [each.name for each in (tmp_path / "node").iterdir()] == [f".{digest}.lock"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo("experiment/a.py")
    link.type, link.linkname = kind, "/etc/passwd"
    path, digest = tar_of(tmp_path, link)

    with pytest.raises(DataError, match="is not a file inside"):
        unpack(path, digest, into=tmp_path / "node")


def test_a_file_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path, digest = tar_of(
        tmp_path, tarfile.TarInfo("experiment/a.py"), tarfile.TarInfo("experiment/a.py")
    )

    with pytest.raises(DataError, match="occurs twice"):
        unpack(path, digest, into=tmp_path / "node")


def test_a_folder_for_copies_that_cannot_be_made_is_one_line(
    experiment: Path, tmp_path: Path
) -> None:
    packed = pack(experiment)
    path = saved(packed, tmp_path)
    (tmp_path / "file").touch()

    with pytest.raises(UserError, match="Name another folder for temporary files: TMPDIR"):
        unpack(path, packed.digest, into=tmp_path / "file" / "copies")
