from __future__ import annotations

from pathlib import Path

import pytest

from stoker.core.errors import ConfigError
from stoker.core.source_fingerprint import function_fingerprint, names_bound

MODEL = '''
"""A module."""
import numpy as np
import helpers
from layers.dense import block as dense_block

SIZE = 3
OTHER = 4

def build(features):
    return dense_block(helpers.scale(SIZE))

def preprocessing_fn(inputs):
    return {"x": inputs["x"] + OTHER}
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "__init__.py").write_text("")
    (tmp_path / "layers" / "dense.py").write_text("def block(x):\n    return x\n")
    (tmp_path / "helpers.py").write_text(
        "FACTOR = 2\ndef scale(x):\n    return x * FACTOR\ndef unused():\n    return 1\n"
    )
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def both(folder: Path) -> tuple[str, str]:
    return (
        function_fingerprint(folder, "model", "build"),
        function_fingerprint(folder, "model", "preprocessing_fn"),
    )


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "build_changes", "preprocessing_changes"),
    [
        ("model.py", "SIZE = 3", "SIZE = 5", True, False),
        ("model.py", "OTHER = 4", "OTHER = 5", False, True),
        ("model.py", "+ OTHER", "- OTHER", False, True),
        ("model.py", "SIZE = 3", "# a comment\nSIZE = 3", False, False),
        ("model.py", '"""A module."""', "", False, False),
        ("model.py", "SIZE = 3", "SIZE = 3\nnp.seterr(all='raise')", True, True),
        ("helpers.py", "FACTOR = 2", "FACTOR = 3", True, False),
        ("helpers.py", "return 1", "return 2", False, False),
        ("layers/dense.py", "return x", "return x + 1", True, False),
    ],
)
def test_a_change_counts_for_exactly_the_functions_that_use_it(
    folder: Path,
    file: str,
    old: str,
    new: str,
    build_changes: bool,
    preprocessing_changes: bool,
) -> None:
    before = both(folder)
    edit(folder / file, old, new)
    after = both(folder)

    assert (before[0] != after[0], before[1] != after[1]) == (build_changes, preprocessing_changes)


@pytest.mark.parametrize(
    "line", ["from helpers import *", "X = eval('1')\nY = getattr(helpers, 'scale')"]
)
def test_what_cannot_be_followed_makes_the_whole_folder_count(folder: Path, line: str) -> None:
    edit(folder / "model.py", "SIZE = 3", f"SIZE = 3\n{line}")
    edit(
        folder / "model.py",
        "helpers.scale(SIZE)",
        "helpers.scale(SIZE + len(str(Y)))" if "Y =" in line else "scale(SIZE)",
    )
    before = function_fingerprint(folder, "model", "build")
    edit(folder / "helpers.py", "return 1", "return 2")

    assert function_fingerprint(folder, "model", "build") != before


@pytest.mark.parametrize(
    ("files", "changed", "old", "new"),
    [
        (
            {
                "model.py": "import pkg.sub\ndef build(f):\n    return pkg.sub.g()\n",
                "pkg/sub.py": "def g():\n    return 1\n",
            },
            "pkg/sub.py",
            "1",
            "2",
        ),
        (
            {"model.py": "import setup_\ndef build(f):\n    return f\n", "setup_.py": "print(1)\n"},
            "setup_.py",
            "1",
            "2",
        ),
        (
            {
                "model.py": "import keras\n_ = keras.config.set_floatx('float32')\n"
                "def build(f):\n    return f\n"
            },
            "model.py",
            "float32",
            "float16",
        ),
        (
            {
                "model.py": "from pkg.sub import g\ndef build(f):\n    return g()\n",
                "pkg/__init__.py": "print(1)\n",
                "pkg/sub.py": "def g():\n    return 1\n",
            },
            "pkg/__init__.py",
            "1",
            "2",
        ),
        (
            {
                "model.py": "from importlib import import_module\ndef build(f):\n"
                "    return import_module('h').g()\n",
                "h.py": "def g():\n    return 1\n",
            },
            "h.py",
            "1",
            "2",
        ),
        (
            {
                "model.py": "from h import g\ndef g():\n    return 1\ndef build(f):\n    return g()\n",
                "h.py": "def g():\n    return 3\n",
            },
            "model.py",
            "1",
            "2",
        ),
        (
            {
                "model.py": "import json\ndef build(f):\n    return json.load(open('u.json'))\n",
                "u.json": "1",
            },
            "u.json",
            "1",
            "2",
        ),
        (
            {
                "model.py": "from pathlib import Path\nU = Path('u.txt').read_text()\n"
                "def build(f):\n    return U\n",
                "u.txt": "1",
            },
            "u.txt",
            "1",
            "2",
        ),
        (
            {
                "model.py": "import tensorflow as tf\ndef build(f):\n"
                "    return tf.io.read_file('u.txt')\n",
                "u.txt": "1",
            },
            "u.txt",
            "1",
            "2",
        ),
        ({"model.py": "def build(f, size=1):\n    return size\n"}, "model.py", "1", "2"),
        (
            {
                "model.py": "class A:\n    n = 1\nclass B(A):\n    pass\ndef build(f):\n"
                "    return B.n\n"
            },
            "model.py",
            "1",
            "2",
        ),
    ],
)
def test_no_change_that_can_reach_the_function_is_missed(
    tmp_path: Path, files: dict[str, str], changed: str, old: str, new: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = function_fingerprint(tmp_path, "model", "build")
    edit(tmp_path / changed, old, new)

    assert function_fingerprint(tmp_path, "model", "build") != before


def test_runs_and_models_next_to_the_code_do_not_count(folder: Path) -> None:
    edit(folder / "model.py", "import helpers", "import helpers\nfrom helpers import *")
    before = function_fingerprint(folder, "model", "build")
    made = {"runs/r1": ["run.json", "lock"], "models/taxi/1": ["stoker.manifest.json"]}
    for name, files in made.items():
        (folder / name).mkdir(parents=True)
        for file in [*files, "copy.py"]:
            (folder / name / file).write_text("x = 1\n")

    assert function_fingerprint(folder, "model", "build") == before


@pytest.mark.parametrize("name", ["stoker.yaml", "stoker.lock.yaml", ".stoker.lock.yaml.x1.tmp"])
def test_what_stoker_writes_next_to_code_that_cannot_be_followed_does_not_count(
    folder: Path, name: str
) -> None:
    edit(folder / "model.py", "SIZE = 3", "import os\nSIZE = int(os.environ.get('SIZE', 3))")
    out = folder / "out" / "mine"
    before = function_fingerprint(folder, "model", "build", outputs=[out])
    (folder / name).write_text("name: other\n")
    out.mkdir(parents=True)
    (out / "metrics.json").write_text("{}")

    assert function_fingerprint(folder, "model", "build", outputs=[out]) == before
    (folder / "out" / "table.csv").write_text("a,b\n")
    assert function_fingerprint(folder, "model", "build", outputs=[out]) != before


def test_a_module_that_does_not_parse_is_named_with_its_line(folder: Path) -> None:
    (folder / "model.py").write_text("x = 1\ndef build(:\n")

    with pytest.raises(ConfigError, match=r"model\.py must be Python \(line 2\)"):
        function_fingerprint(folder, "model", "build")


@pytest.mark.parametrize(
    "line",
    [
        "def build(): ...",
        "class build: ...",
        "build = print",
        "from os import path as build",
        "import build",
        "if True:\n    def build(): ...",
        "try:\n    from fast import build\nexcept ImportError:\n    build = None",
        "for build in (1, 2): ...",
        "from os.path import *",
        "globals()['bui' + 'ld'] = print",
        "def __getattr__(name): ...",
        "def late():\n    global build\n    build = print",
        "def (",
    ],
)
def test_a_name_that_a_module_may_have_is_not_taken_for_missing(tmp_path: Path, line: str) -> None:
    (tmp_path / "model.py").write_text(line + "\n")

    names = names_bound(tmp_path / "model.py")

    assert names is None or "build" in names


@pytest.mark.parametrize(
    "line", ["def other():\n    build = 1", "x.build = 1", "# build", "class A:\n    build = 1"]
)
def test_a_name_that_a_module_does_not_bind_is_missing(tmp_path: Path, line: str) -> None:
    (tmp_path / "model.py").write_text("x = print\n" + line + "\n")

    names = names_bound(tmp_path / "model.py")

    assert names is not None
    assert "build" not in names
