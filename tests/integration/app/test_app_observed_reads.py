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
from stoker.app.run_folder import read_changes, runs_newest_first
from stoker.core.reads.reads import Reads

from .conftest import Recorder

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


def write(folder: Path, *, imports: str = "", read: str = "pass", callbacks: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = MODEL_PY.replace("IMPORTS", imports).replace("READ", read)
    (folder / "model.py").write_text(text.replace("CALLBACKS", callbacks))
    (folder / "stoker.yaml").write_text(STOKER_YAML)
    rows = "".join(f"{row},{row / 60},{row / 30}\n" for row in range(60))
    (folder / "data.csv").write_text("key,a,y\n" + rows)
    return folder


def train(folder: Path, listener: Recorder | None = None) -> ChainResult:
    return run_chain(load_experiment(folder), listener or Recorder(), until="train")


def ran(result: ChainResult) -> list[str]:
    return [outcome.stage for outcome in result.outcomes if not outcome.skipped]


def reads(folder: Path) -> Reads:
    """What the code of the newest training has read."""
    record = runs_newest_first(load_experiment(folder).runs_root)[0].record("train")
    assert record is not None
    return record.reads


def now_changed(folder: Path) -> list[str]:
    """What would be trained again for, one line each."""
    return [str(change) for change in read_changes(reads(folder), folder)]


def why(result: ChainResult, stage: str = "train") -> str:
    return next(outcome.why for outcome in result.outcomes if outcome.stage == stage)


LISTS = """
def preprocessing_fn(inputs):
    os.listdir(os.path.dirname(__file__))
    return {"a": inputs["a"], "y": inputs["y"]}
"""


def test_what_a_run_writes_and_what_no_code_reads_trains_nothing_again(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "mine",
        # The folder is listed too, by a stage before training as well.
        imports=LISTS,
        read="os.listdir(os.path.dirname(__file__))",
        callbacks='keras.callbacks.ModelCheckpoint(f"{here}/best.keras"), '
        'keras.callbacks.CSVLogger(f"{here}/history.csv", append=True)',
    )
    with (folder / "stoker.yaml").open("a") as settings:
        settings.write("preprocessing: model:preprocessing_fn\n")
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_text("1")
    (folder / "nohup.out").write_text("begun\n")
    (folder / "notes.txt").write_text("first idea\n")
    (folder / "history.csv").write_text("epoch,loss,val_loss\n")
    (folder / "plots.py").write_text("print(1)\n")
    assert "train" in ran(train(folder))
    assert reads(folder).listings.keys() == {"."}
    for name in (".git/index", "nohup.out", "notes.txt", "plots.py", ".notes.txt.swp", "a.ipynb"):
        (folder / name).write_text("changed\n")
    os.utime(folder / "data.csv")

    again = train(folder)

    assert (folder / "best.keras").exists()
    assert (folder / "history.csv").exists()
    assert ran(again) == [], [why(again, stage) for stage in ran(again)]
    (folder / "more.csv").write_text("a,b\n")
    assert why(train(folder)) == "folder . has changed: made again"


def text(path: Path, content: str) -> None:
    path.write_text(content)


def image(path: Path, content: str) -> None:
    cv2.imwrite(str(path), np.full((4, 4, 3), len(content), np.uint8))


def hdf5(path: Path, content: str) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = len(content)


def table(path: Path, content: str) -> None:
    pq.write_table(pa.table({"x": [content]}), path)


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
    "mapped": (text, "import pyarrow as pa\nKEPT = []", "KEPT.append(pa.memory_map(NAME))"),
    "duckdb": (table, "import duckdb", "duckdb.read_parquet(NAME).fetchall()"),
}


def test_a_file_that_the_code_reads_counts_whichever_function_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    names = {
        reader: folder / f"{reader}.{'png' if reader == 'opencv' else 'bin'}" for reader in READERS
    }
    write(
        folder,
        imports="\n".join(imports for _, imports, _ in READERS.values()),
        read="\n    ".join(
            read.replace("NAME", repr(str(names[reader]))) for reader, (*_, read) in READERS.items()
        ),
    )
    for reader, (make, *_) in READERS.items():
        make(names[reader], "one\n")
    assert "train" in ran(train(folder))
    assert "train" not in ran(train(folder))
    for reader, (make, *_) in READERS.items():
        make(names[reader], "another\n")

    assert now_changed(folder) == [
        f"file {names[reader].name} has changed" for reader in sorted(READERS)
    ]
    again = train(folder)
    assert "train" in ran(again)
    assert why(again) == f"file {names['duckdb'].name} has changed: made again"


READ_ALL = """
import importlib
LAYERS = importlib.import_module("lay" + "ers_")

def read_variables():
    everything = dict(os.environ)
    os.environ["SET_BY_THE_CODE"] = everything["PATH"]
    os.environ["SET_BY_THE_CODE"]
    os.getenv("NOT_SET")
    os.getenv("OURS_RESTARTS"), os.getenv("SLURM_JOB_ID"), os.environ.get("HUB_TOKEN")
    return os.environ.get("UNITS_SETTING")

def read_all():
    here = os.path.dirname(__file__)
    with open(OUTSIDE) as file:
        file.read()
    tf.io.read_file(here + "/state.txt")
    tf.io.read_file(here + "/link.bin")
    list(tf.data.Dataset.list_files(here + "/images/*").map(tf.io.read_file))
    return read_variables()
"""


def test_variables_modules_links_listings_and_files_outside_count_with_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, target = tmp_path / "elsewhere" / "words.txt", tmp_path / "elsewhere.bin"
    outside.parent.mkdir()
    outside.write_text("one")
    target.write_text("one")
    monkeypatch.setenv("UNITS_SETTING", "a-secret-value")
    monkeypatch.setenv("OTHER", "1")
    folder = write(
        tmp_path / "mine",
        imports=READ_ALL.replace("OUTSIDE", repr(str(outside))),
        read="read_all()",
    )
    (folder / ".stokerignore").write_text("# ours\nstate.*\n$OURS_*\n")
    (folder / "state.txt").write_text("1")
    (folder / "layers_.py").write_text("SIZE = 1\n")
    (folder / "link.bin").symlink_to(target)
    (folder / "images").mkdir()
    (folder / "images" / "1.png").write_text("1")
    assert "train" in ran(train(folder))

    # What is not read, what is ignored, comments, and a file's entry but not its content.
    for name in ("OTHER", "OURS_RESTARTS", "SLURM_JOB_ID", "HUB_TOKEN"):
        monkeypatch.setenv(name, "2")
    (folder / "state.txt").write_text("2")
    (folder / "layers_.py").write_text("# a comment\nSIZE = 1\n")
    target.chmod(0o600)
    os.link(target, tmp_path / "backup")
    assert "train" not in ran(train(folder))
    kept = "".join(path.read_text() for path in folder.rglob("*.json"))
    assert "a-secret-value" not in kept

    outside.write_text("two")
    target.write_text("another")
    (folder / "layers_.py").write_text("SIZE = 200\n")
    (folder / "images" / "2.png").write_text("2")
    monkeypatch.setenv("UNITS_SETTING", "another")
    monkeypatch.setenv("NOT_SET", "now")
    assert set(now_changed(folder)) == {
        "environment NOT_SET is new",
        "environment UNITS_SETTING has changed",
        f"file {outside} has changed",
        f"file {target} has changed",
        "file layers_.py has changed",
        "folder images has changed",
    }
    assert why(train(folder)) == "environment NOT_SET is new: made again"


STOPS = """
class Waits(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and not os.path.exists(os.environ["GO_ON"]):
            open(os.environ["GO_ON"] + ".there", "w").close()
            import time; time.sleep(600)
"""


@pytest.mark.soak
def test_a_killed_run_goes_on_unless_what_it_has_read_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    names = {reader: folder / f"{reader}.bin" for reader in ("tf_io", "h5py")}
    write(
        folder,
        imports=f"import h5py\n{STOPS}",
        read="\n    ".join(
            [
                *(
                    READERS[reader][2].replace("NAME", repr(str(name)))
                    for reader, name in names.items()
                ),
                "os.listdir(os.path.dirname(__file__) + '/images')",
            ]
        ),
        callbacks='Waits(), keras.callbacks.ModelCheckpoint(f"{here}/best.keras")',
    )
    text_of = (folder / "stoker.yaml").read_text()
    (folder / "stoker.yaml").write_text(text_of.replace("epochs: 2", "epochs: 4"))
    for reader, name in names.items():
        READERS[reader][0](name, "one\n")
    (folder / "images").mkdir()
    (folder / "notes.txt").write_text("first\n")
    go_on = tmp_path / "go_on"
    monkeypatch.setenv("GO_ON", str(go_on))
    child = subprocess.Popen([sys.executable, "-m", "stoker", "train", str(folder)])
    try:
        until = time.monotonic() + 120
        while not go_on.with_suffix(".there").exists() and time.monotonic() < until:
            time.sleep(0.1)
            assert child.poll() is None
        time.sleep(0.3)  # the reads so far are recorded
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    go_on.touch()
    (folder / "notes.txt").write_text("second\n")

    edits: dict[str, Callable[[], object]] = {
        "file tf_io.bin has changed": lambda: text(names["tf_io"], "another\n"),
        "file h5py.bin has changed": lambda: hdf5(names["h5py"], "another\n"),
        "folder images has changed": (folder / "images" / "new.png").touch,
    }
    for said, edit in edits.items():
        kept = {name: name.read_bytes() for name in names.values()}
        edit()
        (left,) = _left(folder)
        assert left == said
        for name, content in kept.items():
            name.write_bytes(content)
        (folder / "images" / "new.png").unlink(missing_ok=True)
    edits["file h5py.bin has changed"]()
    lines = Recorder()
    assert train(folder, lines).results["train"]["epochs"] == 4
    assert "file h5py.bin has changed" in "\n".join(lines.lines)
    assert "(continued)" not in "\n".join(lines.lines)

    names["h5py"].write_bytes(kept[names["h5py"]])
    lines = Recorder()
    result = train(folder, lines)

    assert result.results["train"]["epochs"] == 4
    assert "(continued)" in "\n".join(lines.lines)
    assert "has changed" not in "\n".join(lines.lines)


def _left(folder: Path) -> list[str]:
    """Why the killed run, the only one, is not gone on with."""
    (run,) = runs_newest_first(load_experiment(folder).runs_root)
    return [str(change) for change in read_changes(run.reads(), folder)]
