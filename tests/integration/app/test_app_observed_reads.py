"""Files that the user's code reads count; other files in its folder do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.app.chain import ChainResult, run_chain
from stoker.app.experiment import load_experiment

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

STOKER_YAML = """\
name: reads
data: {source: data.csv, split_by: key}
model: model:build
label: y
train: {epochs: 2, batch_size: 16, callbacks: "model:callbacks", deterministic: true}
"""

MODEL_PY = """\
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras
import tensorflow as tf
IMPORTS

def build(features):
    READ
    x = keras.ops.expand_dims(features["a"], -1)
    model = keras.Model(features, keras.layers.Dense(1)(x))
    model.compile(optimizer="sgd", loss="mse")
    return model

def callbacks():
    here = os.path.dirname(__file__)
    return [CALLBACKS]
"""


class Lines:
    """Keeps the messages of the chain."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def stage_began(self, stage: str) -> None: ...

    def progress(self, line: str, share: float | None) -> None: ...

    def stage_ended(self, outcome: object) -> None: ...


def write(folder: Path, *, imports: str = "", read: str = "pass", callbacks: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = MODEL_PY.replace("IMPORTS", imports).replace("READ", read)
    (folder / "model.py").write_text(text.replace("CALLBACKS", callbacks))
    (folder / "stoker.yaml").write_text(STOKER_YAML)
    rows = "".join(f"{row},{row / 60},{row / 30}\n" for row in range(60))
    (folder / "data.csv").write_text("key,a,y\n" + rows)
    return folder


def train(folder: Path, listener: Lines | None = None) -> ChainResult:
    return run_chain(load_experiment(folder), listener or Lines(), until="train")


def ran(result: ChainResult) -> list[str]:
    return [outcome.stage for outcome in result.outcomes if not outcome.skipped]


def why(result: ChainResult, stage: str = "train") -> str:
    return next(outcome.why for outcome in result.outcomes if outcome.stage == stage)


def test_what_a_run_writes_and_what_nobody_reads_trains_nothing_again(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "mine",
        callbacks='keras.callbacks.ModelCheckpoint(f"{here}/best.keras"), '
        'keras.callbacks.CSVLogger(f"{here}/history.csv", append=True)',
    )
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_text("1")
    (folder / "nohup.out").write_text("begun\n")
    (folder / "notes.txt").write_text("first idea\n")
    (folder / "history.csv").write_text("epoch,loss,val_loss\n")
    (folder / "plots.py").write_text("print(1)\n")
    assert "train" in ran(train(folder))
    for name in (".git/index", "nohup.out", "notes.txt", "plots.py", ".notes.txt.swp", "a.ipynb"):
        (folder / name).write_text("changed\n")
    os.utime(folder / "data.csv")

    again = train(folder)

    assert (folder / "best.keras").exists()
    assert (folder / "history.csv").exists()
    assert "train" not in ran(again), why(again)


def text(path: Path, content: str) -> None:
    path.write_text(content)


def image(path: Path, content: str) -> None:
    cv2.imwrite(str(path), np.full((4, 4, 3), len(content), np.uint8))


def hdf5(path: Path, content: str) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = len(content)


def table(path: Path, content: str) -> None:
    pq.write_table(pa.table({"x": [content]}), path)


READ_VARIABLES = """
def read_variables():
    everything = dict(os.environ)
    os.environ["SET_BY_THE_CODE"] = everything["PATH"]
    os.environ["SET_BY_THE_CODE"]
    os.getenv("NOT_SET")
    os.getenv("OURS_RESTARTS"), os.getenv("SLURM_JOB_ID"), os.environ.get("HUB_TOKEN")
    return os.environ.get("UNITS_SETTING")
"""
READ_TEXT = """
def read_text(name):
    with open(name) as file:
        return file.read()
"""
LOOKUP = (
    "tf.lookup.StaticVocabularyTable("
    "tf.lookup.TextFileInitializer(NAME, tf.string, -2, tf.int64, -1), 1)"
)

READERS: dict[str, tuple[Callable[[Path, str], None], str, str]] = {
    "open": (text, READ_TEXT, "read_text(NAME)"),
    "pathlib": (text, "import pathlib", "pathlib.Path(NAME).read_bytes()"),
    "tf_io": (text, "", "tf.io.read_file(NAME)"),
    "gfile": (text, "", "tf.io.gfile.GFile(NAME).read()"),
    "text_line_dataset": (text, "", "list(tf.data.TextLineDataset(NAME))"),
    "lookup_table": (text, "", LOOKUP),
    "numpy": (text, "import numpy as np", "np.fromfile(NAME, dtype='uint8')"),
    "opencv": (image, "import cv2", "cv2.imread(NAME)"),
    "h5py": (hdf5, "import h5py", "h5py.File(NAME)['x'][()]"),
    "pyarrow": (table, "import pyarrow.parquet as pq", "pq.read_table(NAME)"),
    "duckdb": (table, "import duckdb", "duckdb.read_parquet(NAME).fetchall()"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_the_code_reads_counts_whoever_reads_it(reader: str, tmp_path: Path) -> None:
    make, imports, read = READERS[reader]
    name = tmp_path / "mine" / f"asset.{'png' if reader == 'opencv' else 'bin'}"
    folder = write(tmp_path / "mine", imports=imports, read=read.replace("NAME", repr(str(name))))
    make(name, "one\n")
    assert "train" in ran(train(folder))
    assert "train" not in ran(train(folder))
    make(name, "another\n")

    again = train(folder)

    assert "train" in ran(again)
    assert why(again) == f"file {name.name} has changed: made again"


def test_a_file_outside_of_the_folder_that_python_opens_counts(tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere" / "words.txt"
    outside.parent.mkdir()
    outside.write_text("one")
    folder = write(tmp_path / "mine", imports=READ_TEXT, read=f"read_text({str(outside)!r})")
    train(folder)
    assert "train" not in ran(train(folder))
    outside.write_text("two")

    again = train(folder)

    assert why(again) == f"file {outside} has changed: made again"


def test_a_variable_that_the_code_reads_counts_and_its_value_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNITS_SETTING", "a-secret-value")
    monkeypatch.setenv("OTHER", "1")
    folder = write(
        tmp_path / "mine",
        imports=READ_VARIABLES,
        read="read_variables()",
    )
    (folder / ".stokerignore").write_text("$OURS_*\n")
    train(folder)
    for name in ("OTHER", "OURS_RESTARTS", "SLURM_JOB_ID", "HUB_TOKEN"):
        monkeypatch.setenv(name, "2")
    assert "train" not in ran(train(folder))
    kept = "".join(path.read_text() for path in folder.rglob("*.json"))
    assert "a-secret-value" not in kept
    monkeypatch.setenv("UNITS_SETTING", "another")

    again = train(folder)

    assert why(again) == "environment UNITS_SETTING has changed: made again"
    monkeypatch.setenv("NOT_SET", "now")
    assert why(train(folder)) == "environment NOT_SET is new: made again"


def test_a_module_that_is_imported_by_a_computed_name_counts_and_its_comments_do_not(
    tmp_path: Path,
) -> None:
    folder = write(
        tmp_path / "mine",
        imports='import importlib\nLAYERS = importlib.import_module("lay" + "ers_")',
    )
    (folder / "layers_.py").write_text("SIZE = 1\n")
    train(folder)
    (folder / "layers_.py").write_text("# a comment\nSIZE = 1\n")
    assert "train" not in ran(train(folder))
    (folder / "layers_.py").write_text("SIZE = 200\n")

    again = train(folder)

    assert why(again) == "file layers_.py has changed: made again"


def test_patterns_of_stokerignore_never_count(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "mine", read='tf.io.read_file(os.path.dirname(__file__) + "/state.txt")'
    )
    (folder / ".stokerignore").write_text("# ours\nstate.*\n")
    (folder / "state.txt").write_text("1")
    train(folder)
    (folder / "state.txt").write_text("2")

    assert "train" not in ran(train(folder))


def test_a_file_behind_a_link_counts_and_a_change_of_its_entry_does_not(tmp_path: Path) -> None:
    name, target = tmp_path / "mine" / "asset.bin", tmp_path / "elsewhere.bin"
    target.write_text("one")
    folder = write(tmp_path / "mine", read=f"tf.io.read_file({str(name)!r})")
    name.symlink_to(target)
    train(folder)
    target.chmod(0o600)
    os.link(target, tmp_path / "backup")
    assert "train" not in ran(train(folder))
    target.write_text("another")

    assert "train" in ran(train(folder))


STOPS = """
class Waits(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and not os.path.exists(os.environ["GO_ON"]):
            open(os.environ["GO_ON"] + ".there", "w").close()
            import time; time.sleep(600)
"""


@pytest.mark.parametrize(("reader", "edited"), [("tf_io", True), ("h5py", True), ("tf_io", False)])
def test_a_killed_run_goes_on_unless_a_file_that_it_read_was_edited(
    reader: str, edited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, imports, read = READERS[reader]
    name = tmp_path / "mine" / "asset.bin"
    folder = write(
        tmp_path / "mine",
        imports=f"{imports}\n{STOPS}",
        read=read.replace("NAME", repr(str(name))),
        callbacks='Waits(), keras.callbacks.ModelCheckpoint(f"{here}/best.keras")',
    )
    text_of = (folder / "stoker.yaml").read_text()
    (folder / "stoker.yaml").write_text(text_of.replace("epochs: 2", "epochs: 4"))
    make(name, "one\n")
    (folder / "notes.txt").write_text("first\n")
    go_on = tmp_path / "go_on"
    monkeypatch.setenv("GO_ON", str(go_on))
    child = subprocess.Popen([sys.executable, "-m", "stoker", "train", str(folder)])
    try:
        until = time.monotonic() + 120
        while not go_on.with_suffix(".there").exists() and time.monotonic() < until:
            time.sleep(0.1)
            assert child.poll() is None
        time.sleep(0.3)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    go_on.touch()
    (folder / "notes.txt").write_text("second\n")
    if edited:
        make(name, "another\n")
    lines = Lines()

    result = train(folder, lines)

    said = "\n".join(lines.lines)
    assert result.result("train")["epochs"] == 4
    assert ("(continued)" in said) == (not edited), said
    assert ("file asset.bin has changed" in said) == edited, said
