"""A run that tries XLA in a process with its own cache; prints what was compiled when, as JSON.

A call that XLA compiles leaves a file, so that the files count the compilations.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.train.small import on_one_device, small_dataset, unwatched

from stoker.app.import_tensorflow import import_tensorflow
from stoker.cluster.compile_flags import used


def main(folder: Path, cache_folder: Path) -> None:
    os.environ["STOKER_CACHE"] = str(cache_folder)
    import_tensorflow(compiles=True)
    import keras
    from keras import layers

    from stoker.data.features.preprocessing.build import build_transform
    from stoker.train.config import TrainConfig
    from stoker.train.context import utilization
    from stoker.train.loop.loop import fit
    from stoker.train.setup.build_model import build_model, prepare_process
    from stoker.train.setup.strategy import one_device
    from stoker.train.step import xla_trial

    utilization.CEILING_S = 0.02
    xla_trial.MIN_REMAINING_S = xla_trial.CALL_S = xla_trial.FORM_S = xla_trial.MARGIN = 0.0
    xla_trial.SWITCH_S = -1e9

    def build(features: dict[str, Any]) -> keras.Model:
        x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
        model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        return model

    counts: dict[str, Any] = {"calls": []}

    def ended(compiling: xla_trial._Compiling) -> bool:
        counts["calls"].append(compiling._thread.is_alive())
        compiling._thread.join()
        return True

    xla_trial._Compiling.ended = property(ended)  # type: ignore[assignment]  # replaced for this test

    def note_cache(progress: Any) -> None:
        cache = used()
        assert cache is not None
        counts.setdefault("written", {})[progress.step] = cache.written

    dataset = small_dataset(folder / "data")
    transform = build_transform(dataset, None, folder / "transform", label="y")
    prepare_process(precision="float32", seed=0, deterministic=False)
    result = fit(
        build_model(build, transform, what="build"),
        (dataset, transform),
        config=TrainConfig(epochs=20, batch_size=32),
        resolved=on_one_device(xla_trial=True),
        distribution=one_device(),
        context=unwatched(folder / "checkpoints", on_progress=note_cache),
    )
    files = list(cache_folder.glob("xla/*/work-*/programs/*"))
    print(json.dumps(counts | {"xla": result.xla, "files": len(files)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
