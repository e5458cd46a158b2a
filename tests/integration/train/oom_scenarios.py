"""A process of its own, in which memory that is not there is refused at once.

Prints one JSON: results and errors of the runs of a model that takes too much memory.
oneDNN's allocator would wait 10 s for each tensor that does not fit; TF_ENABLE_ONEDNN_OPTS=0, set
before TensorFlow is imported, leaves it out.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.integration.train.small import small_dataset
from tests.integration.train.test_train_numbers import hungry, hungry_own, train

from stoker.core.errors import ConfigError
from stoker.data.features.preprocessing.build import build_transform


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    root, said = Path(tempfile.mkdtemp()), Said()
    logging.getLogger("stoker").addHandler(said)
    dataset = small_dataset(root / "data")
    sound = dataset, build_transform(dataset, None, root / "transform", label="y")
    _, plain = train(sound, root / "plain")
    result, built = train(sound, root / "hungry", function=hungry)
    seen: dict[str, Any] = {
        "reductions": len(result.health["reductions"]),
        "said": said.lines,
        "alike": all(
            np.allclose(ours.numpy(), theirs.numpy(), rtol=1e-3, atol=1e-5)
            for ours, theirs in zip(built.model.weights, plain.model.weights, strict=True)
        ),
    }
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("stopped", hungry, {"on_oom": "stop"}),
        ("own", hungry_own, {}),
    ]
    for name, function, more in cases:
        try:
            train(sound, root / name, function=function, **more)
        except ConfigError as error:
            seen[name] = error.line()
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
