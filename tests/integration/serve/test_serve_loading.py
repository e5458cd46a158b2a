"""What loading costs those who are served, and what unloading gives back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.serve.command_line import without_meaningless
from stoker.registry.exported_model import LoadedModel
from stoker.serve.loading.session import load_checked
from stoker.serve.runtime.gil_yield import YieldGil, no_yield
from stoker.serve.servables import servable
from stoker.serve.servables.servable import LoadOptions, Servable, State


def test_a_load_next_to_a_version_that_serves_has_low_priority(
    exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []

    def recorded(*args: Any, yield_gil: YieldGil, **more: Any) -> LoadedModel:
        seen.append(
            (os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), yield_gil is no_yield)
        )
        return load_checked(*args, yield_gil=yield_gil, **more)

    monkeypatch.setattr(servable, "load_checked", recorded)
    monkeypatch.setattr(servable, "_first_is_loaded", threading.Event())
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    versions = [Servable(n, exported["half_plus_two"]) for n in (1, 2)]
    for version in versions:
        assert version.load(), version.reason
        version.unload()
    assert seen == [(mine, True), (10, False)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
    broken = Servable(3, exported["half_plus_two"] / "none")
    assert not broken.load()
    assert (broken.state, bool(broken.reason)) == (State.END, True)


def test_warm_up_requests_are_run_only_where_they_are_wanted(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(exported["half_plus_two"], tmp_path / "1")
    (tmp_path / "1" / "assets.extra").mkdir()
    (tmp_path / "1" / "assets.extra" / "tf_serving_warmup_requests").write_bytes(b"broken")
    assert not Servable(1, tmp_path / "1").load()
    version = Servable(1, tmp_path / "1", LoadOptions(warm_up=False))
    assert version.load(), version.reason
    version.unload()


CYCLES = """
import sys
from pathlib import Path
import keras, numpy as np, tensorflow as tf
from stoker.serve.runtime.machine import resident_bytes
from stoker.serve.servables.servable import Servable
import os
folder = Path(sys.argv[1])
module = tf.Module()
module.weights = tf.Variable(np.random.default_rng(0).random((2048, 4096), np.float32))
call = tf.function(lambda x: {"y": x @ module.weights},
                   input_signature=[tf.TensorSpec([None, 2048], tf.float32, name="x")])
tf.saved_model.save(module, str(folder), signatures={"serving_default": call.get_concrete_function()})
sizes = []
for _ in range(12):
    version = Servable(1, folder)
    assert version.load(), version.reason
    with version.use() as model:
        model.call("serving_default", {"x": np.zeros((4, 2048), np.float32)})
    version.unload()
    sizes.append(resident_bytes(os.getpid()))
print(*sizes)
"""


@pytest.mark.soak
def test_memory_is_given_back_after_unload(tmp_path: Path) -> None:
    """A model of 32 MiB, twelve times: kept, it would be 320 MiB more from the second on."""
    ended = subprocess.run(
        [sys.executable, "-c", CYCLES, str(tmp_path / "1")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    sizes = [int(text) for text in ended.stdout.split()]
    assert sizes[-1] - sizes[1] < 128 << 20, sizes


def test_flags_that_mean_nothing_are_taken_with_and_without_an_equals_sign() -> None:
    args = ["x", "--num_load_threads=4", "--max_num_load_retries", "5", "--port", "0"]
    args += ["--flush_filesystem_caches", "--json", "--flush_filesystem_caches=false"]
    kept, names = without_meaningless(args)
    assert kept == ["x", "--port", "0", "--json"]
    assert list(names) == [
        "--num_load_threads",
        "--max_num_load_retries",
        "--flush_filesystem_caches",
    ]
