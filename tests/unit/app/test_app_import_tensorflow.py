"""What TensorFlow reads of the environment is set before it is imported, and the user's value wins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stoker.app.import_tensorflow import import_tensorflow

VARIABLE = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"

SEEN_AT_IMPORT = f"""
import importlib.abc, os, sys

class Look(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "tensorflow":
            print(os.environ.get({VARIABLE!r}))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Look())
from stoker.app.import_tensorflow import import_tensorflow
import_tensorflow()
"""


def test_cudnns_persistent_batch_norm_is_on_before_tensorflow_is_imported() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    ran = subprocess.run(
        [sys.executable, "-c", SEEN_AT_IMPORT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "1"


def test_the_users_own_value_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    import_tensorflow()
    assert os.environ[VARIABLE] == "0"
