"""What the fork server imports before it forks (see children.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# oneDNN's allocator waits 10 s if memory is short.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from stoker.app.import_tensorflow import import_tensorflow

import_tensorflow()

from stoker.train.context import utilization  # noqa: E402 - after the warm imports

# How busy the device was is not the question here; measuring it takes a second of every training.
utilization.CEILING_S = 0.02
