"""The flags that Stoker adds start TensorFlow: an unknown one would end the process, on a CPU too.

A stand-in plays the driver of two GPUs; TensorFlow itself runs on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.compiled import compiled

STARTS = """\
import json, os
from pathlib import Path
from stoker.app.import_tensorflow import import_tensorflow
import_tensorflow(compiles=True)
import tensorflow as tf

@tf.function(jit_compile=True)
def doubled(x):
    return x + x

assert float(doubled(tf.constant(2.0))) == 4.0
(home,) = Path(os.environ["STOKER_CACHE"], "xla").glob("*/")
print(json.dumps({
    "flags": {name: os.environ[name] for name in ("TF_XLA_FLAGS", "XLA_FLAGS")},
    "key": json.loads((home / "key.json").read_text()),
    "programs": len(list(home.glob("work-*/programs/*"))),
}))
"""


def test_tensorflow_starts_with_the_users_flags_and_ours_and_keeps_what_it_compiles(
    tmp_path: Path,
) -> None:
    compiled(Path(__file__).with_name("nvml_stand_in.c"), tmp_path / "libnvidia-ml.so.1")
    users = {
        "TF_XLA_FLAGS": "--tf_xla_max_cluster_size=9",
        "XLA_FLAGS": "--xla_gpu_autotune_level=2",
    }
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "STOKER_CACHE": str(tmp_path / "cache")}

    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env=os.environ | environment | users,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for name, flags in users.items():
        assert result["flags"][name].startswith(f"{flags} --")
    assert "--xla_gpu_per_fusion_autotune_cache_dir=" in result["flags"]["XLA_FLAGS"]
    assert result["key"]["gpus"] == ["NVIDIA H100 80GB HBM3 (9, 0)"]
    assert result["key"]["driver"] == "580.65.06"
    assert result["key"]["flags"] == users
    assert result["programs"] == 1
    # At its end the process has published it, and removed its own folder.
    assert len(list((tmp_path / "cache").glob("xla/*/store/programs/*"))) == 1
    assert list((tmp_path / "cache").glob("xla/*/work-*")) == []
