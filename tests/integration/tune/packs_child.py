"""Runs the scenarios of `strategy_scenarios.py`, and writes down how TensorFlow says it sends gradients.

Usage: packs_child.py DATASET TRANSFORM OUT, scenarios on stdin; OUT/sent.log gets TensorFlow's lines.
"""

from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path

import tensorflow as tf

SCENARIOS = Path(__file__).parents[1] / "train" / "strategy_scenarios.py"

if __name__ == "__main__":
    logger = tf.get_logger()
    logger.setLevel(logging.INFO)
    handler = logging.FileHandler(Path(sys.argv[3]) / "sent.log")
    handler.addFilter(
        lambda record: record.getMessage().startswith("Collective all_reduce tensors")
    )
    logger.handlers = [handler]
    runpy.run_path(str(SCENARIOS), run_name="__main__")
