"""TensorFlow Serving's own integration test, run against `stoker serve`.

python tests/oracle_tensorflow_serving.py CHECKOUT [CASE ...]

CHECKOUT is a copy of github.com/tensorflow/serving; nothing of it is changed. Its test starts
`tensorflow_serving/model_servers/tensorflow_model_server`, which here is `stoker serve`. The two cases that
build a Keras 2 model run in processes of their own, under tf-keras (`TF_USE_LEGACY_KERAS=1`). `test_tf_text`
needs TensorFlow Text, which has no release for this TensorFlow, and is left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "tensorflow_serving"
TEST = "model_servers/tensorflow_model_server_test.py"
NEEDED = ("portpicker", "six", "tf_keras")
KERAS_2 = (
    "test_sequential_keras_saved_model_save",
    "test_distrat_sequential_keras_saved_model_save",
)
LEFT_OUT = ("test_tf_text",)

SERVER = """#!/bin/sh
exec {python} -m stoker serve "$@"
"""

RUN = """\
import runpy, sys, types
import tensorflow_serving
root, test = sys.argv[1], sys.argv[2]
# Messages come from the installed package, test helpers from the checkout.
tensorflow_serving.__path__.append(root)
sys.path.insert(0, root + "/model_servers")
sys.argv = [test, *sys.argv[3:]]
runpy.run_path(test, run_name="__main__")
"""


def main() -> int:
    """Run every case, or those that are named.

    Returns:
        0 if all passed, 1 if one failed, 2 if the checkout or a package is missing.
    """
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / PACKAGE / TEST).is_file():
        print(
            f"tf-serving-oracle: SRC must be a checkout of tensorflow/serving, with {PACKAGE}/{TEST}",
            file=sys.stderr,
        )
        return 2
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"tf-serving-oracle: missing packages: {', '.join(missing)}", file=sys.stderr)
        return 2
    source = (Path(sys.argv[1]) / PACKAGE).resolve()
    cases = sys.argv[2:] or [
        name
        for name in re.findall(r"  def (test\w+)\(self", (source / TEST).read_text())
        if name not in LEFT_OUT
    ]
    with tempfile.TemporaryDirectory(prefix="tf-serving-oracle-") as made:
        tree = lay_out(source, Path(made))
        others = [case for case in cases if case not in KERAS_2]
        groups = [others] if others else []
        groups += [[case] for case in cases if case in KERAS_2]
        failed = [group for group in groups if run(tree, Path(made), group)]
    print(f"tf-serving-oracle: {len(cases)} cases in {len(groups)} processes, {len(failed)} failed")
    return 1 if failed else 0


def lay_out(source: Path, made: Path) -> Path:
    """The tree that the test expects: the checkout by links, and our server as its program."""
    tree = made / "src" / "tf_serving" / PACKAGE
    servers = tree / "model_servers"
    servers.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name != "model_servers":
            (tree / entry.name).symlink_to(entry)
    for entry in (source / "model_servers").iterdir():
        (servers / entry.name).symlink_to(entry)
    program = servers / "tensorflow_model_server"
    program.write_text(SERVER.format(python=shlex.quote(sys.executable)))
    program.chmod(0o755)
    return tree


def run(tree: Path, made: Path, cases: list[str]) -> bool:
    """Run cases in one process; whether one failed."""
    scratch = made / "tmp"
    scratch.mkdir(exist_ok=True)
    environment = os.environ | {
        "TEST_SRCDIR": str(made / "src"),
        "TEST_TMPDIR": str(scratch),
        "TF_USE_LEGACY_KERAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    names = [f"TensorflowModelServerTest.{case}" for case in cases]
    command = [sys.executable, "-c", RUN, str(tree), str(tree / TEST), *names]
    return subprocess.run(command, env=environment, check=False).returncode != 0


if __name__ == "__main__":
    raise SystemExit(main())
