"""Wraps the public functions of TensorFlow and Keras that are watched, and starts all parts of the watcher."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import GeneratorType, ModuleType
from typing import Any

from . import functions, loops, stages
from .device_trace import TRACER, layer_names
from .fits import FITS, Fit, watched_fit
from .loops import STATE
from .model_facts import late_facts
from .pipeline import CacheFill
from .places import NOWHERE, Place, of_code, place, who_called
from .wall import EPOCH_HOOKS, LOAD, WALL
from .watch import FACTS, wrap

MAX_FITS = 100
"""Maximum number of watched pairs of line and model: a search over models may call `fit` any number of times."""

_places: dict[int, tuple[Any, Place]] = {}
"""ID of a layer or model -> a weak reference to it, and the line that created it."""

_compiled: dict[int, Place] = {}
"""ID of a model -> the line of its `compile`."""

_jit_requested: dict[int, Any] = {}
"""ID of a model -> the argument `jit_compile` of its `compile`."""


_on_batches: dict[Place, int] = {}
"""Line that calls `train_on_batch` -> number of calls."""


def install_keras(keras: ModuleType) -> None:
    """Watch how models are created, compiled and trained."""
    wrap(keras.layers.Layer, "__init__", _layer)
    wrap(keras.Model, "compile", _compile)
    wrap(keras.Model, "fit", lambda original: _fit(keras, original))
    wrap(keras.Model, "train_on_batch", _on_batch)
    _wall(keras)
    wrap(keras.optimizers.Optimizer, "apply", _apply)
    wrap(keras.random.SeedGenerator, "next", _random)
    TRACER.knows_keras(lambda: list(FITS), lambda: layer_names(_places))
    FACTS.forgets.extend((FITS.clear, _on_batches.clear))
    FACTS.parts["on_batches"] = lambda: [[*at, count] for at, count in list(_on_batches.items())]
    FACTS.parts["fits"] = lambda: [fit.as_json() for fit in list(FITS)]
    FACTS.parts["keras"] = lambda: {
        "version": str(keras.version()),
        "backend": str(keras.config.backend()),
    }


def _wall(keras: Any) -> None:
    """Time a script's calls of a model's methods outside training: predict, evaluate, save and export."""
    methods = {"predict": "predict", "save": "saving", "save_weights": "saving", "export": "saving"}
    for name, kind in methods.items():
        wrap(keras.Model, name, WALL.around_method(partial(str, kind), place))
    validates = WALL.around_method(lambda: "validation" if STATE.fits else "evaluate", place)
    wrap(keras.Model, "evaluate", validates)


def _itself(at: Place) -> Place:
    return at


def _time_callbacks(keras: Any, given: Any) -> None:
    """Time the work of callbacks at the start and end of epochs and of training."""
    plain = keras.callbacks.Callback
    listed = given if isinstance(given, (list, tuple)) else [given]
    for callback in listed:
        for hook in EPOCH_HOOKS:
            found = getattr(type(callback), hook, None)
            if isinstance(callback, plain) and found is not getattr(plain, hook):
                at = of_code(getattr(found, "__code__", None))
                where = place if at == NOWHERE else partial(_itself, at)
                wrap(type(callback), hook, WALL.around_method(lambda: "callbacks", where))


def made_at(thing: Any) -> Place:
    """The line that created a layer or a model; `NOWHERE` if unknown."""
    reference, at = _places.get(id(thing), (None, NOWHERE))
    return at if reference is not None and reference() is thing else NOWHERE


def _layer(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        with FACTS.guarded():
            _places[id(self)] = (weakref.ref(self), place())

    return init


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with FACTS.guarded():
            _compiled[id(self)] = place()
            bound = _bound(signature, self, args, kwargs)
            _jit_requested[id(self)] = None if bound is None else bound.arguments.get("jit_compile")
        return original(self, *args, **kwargs)

    return call


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not STATE.fits:
            with FACTS.guarded():
                functions.applied()
        return original(self, *args, **kwargs)

    return call


def _on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with FACTS.guarded():
            at = place()
            _on_batches[at] = _on_batches.get(at, 0) + 1
        return original(self, *args, **kwargs)

    return call


def _random(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        stages.mark_random()
        return original(self, *args, **kwargs)

    return call


def _fit(keras: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        fit = None
        bound = _bound(signature, self, args, kwargs)
        # Only with the TensorFlow backend: others call their train functions differently.
        if bound is not None and not STATE.fits and keras.config.backend() == "tensorflow":
            with FACTS.guarded():
                fit = _begin(keras, self)
        if fit is not None and bound is not None:
            with FACTS.guarded():
                _data(keras, fit, bound.arguments)
                given = bound.arguments.get("callbacks")
                fit.hooks.watch(keras, given)
                _time_callbacks(keras, given)
                bound.arguments["callbacks"] = _with_ours(keras, given, fit, self)
                args, kwargs = bound.args[1:], bound.kwargs
        STATE.fits += 1
        try:
            with WALL.part("fit", NOWHERE if fit is None else fit.place):
                return original(self, *args, **kwargs)
        finally:
            STATE.fits -= 1
            if fit is not None:
                with FACTS.guarded():
                    fit.end(self)

    return call


def _bound(
    signature: inspect.Signature, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    """Bind the arguments to their names; None if they do not fit: the call then fails with Keras's own error."""
    try:
        return signature.bind(model, *args, **kwargs)
    except TypeError:
        return None


def _begin(keras: Any, model: Any) -> Fit | None:
    at = place()
    if STATE.current is not None:
        STATE.current.drop_step()
        STATE.current = None
    for fit in FITS:
        # A later call in the same line with the same model adds to the same figures.
        if fit.place == at and fit.is_of(model):
            return fit
    if len(FITS) >= MAX_FITS:
        return None
    fit = Fit(at, model)
    fit.model = _model_facts(keras, model)
    FITS.append(fit)
    return fit


def _model_facts(keras: Any, model: Any) -> dict[str, Any]:
    distribute, strategy = sys.modules["tensorflow"].distribute, model.distribute_strategy
    return {
        "name": str(model.name),
        "made": made_at(model),
        "compiled": _compiled.get(id(model), NOWHERE),
        "run_eagerly": bool(model.run_eagerly),
        "jit_compile": bool(getattr(model, "jit_compile", False)),
        "jit_requested": _jit_requested.get(id(model)) is True,
        "steps_per_execution": int(getattr(model, "steps_per_execution", 1)),
        "policy": str(keras.config.dtype_policy().name),
        "replicas": int(strategy.num_replicas_in_sync),
        "distributed": distribute.has_strategy() or strategy is not distribute.get_strategy(),
        "keras_distribution": _keras_distribution(keras),
    }


def _keras_distribution(keras: Any) -> str:
    """Class of the distribution that `keras.distribution.set_distribution` set; empty if none was set."""
    found = keras.distribution.distribution() if hasattr(keras, "distribution") else None
    return "" if found is None else type(found).__name__


def _data(keras: Any, fit: Fit, arguments: dict[str, Any]) -> None:
    x = arguments.get("x")
    fit.model["feed"] = _feed(keras, x)
    fit.model["batch_size"] = arguments.get("batch_size") or None
    fit.model["epochs"] = arguments.get("epochs", 1)
    chain = stages.chain(stages.of(x))
    fit.stages = [stage.id for stage in chain] or fit.stages
    if fit.cache is None and stages.has_cache(chain):
        fit.cache = CacheFill()


def _feed(keras: Any, x: Any) -> dict[str, Any] | None:
    """Facts about the Python object that makes the batches; None if TensorFlow makes them."""
    kind, code = type(x), None
    feed: dict[str, Any] = {"name": kind.__name__, "workers": 1, "processes": False}
    if isinstance(x, keras.utils.PyDataset):
        code = getattr(kind.__getitem__, "__code__", None)
        feed |= {"workers": int(x.workers), "processes": bool(x.use_multiprocessing)}
        feed["kind"] = "PyDataset"
    elif isinstance(x, GeneratorType):
        feed |= {"kind": "generator", "name": ""}
        code = x.gi_code
    elif kind.__module__.startswith("torch.utils.data"):
        feed["kind"] = "DataLoader"
    else:
        return None
    return feed | {"place": of_code(code)}


def _with_ours(keras: Any, given: Any, fit: Fit, model: Any) -> Any:
    ours = _callback(keras, fit)
    if isinstance(given, keras.callbacks.CallbackList):
        ours.set_model(model)
        given.callbacks.append(ours)
        return given
    if given is None:
        return [ours]
    return [*given, ours] if isinstance(given, (list, tuple)) else [given, ours]


def _callback(keras: Any, fit: Fit) -> Any:
    class StokerWatch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        """A callback without hooks for batches: with such a hook, Keras would wait for each step's values."""

        def on_train_begin(self, logs: Any = None) -> None:
            del logs
            with FACTS.guarded():
                self.model.train_function = watched_fit(fit, self.model)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            fit.begin_epoch()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            with FACTS.guarded():
                fit.end_epoch()

        def on_train_end(self, logs: Any = None) -> None:
            del logs
            with FACTS.guarded():
                fit.model.update(late_facts(self.model, made_at))

    return StokerWatch()


def install_tensorflow(tf: ModuleType) -> None:
    """Watch datasets, their iterators, `tf.function`, gradients and strategies."""
    stages.install(tf)
    loops.install(tf)
    functions.install(tf)
    _strategies(tf)
    TRACER.install(tf, lines=lambda: list(loops.STATE.loops.values()))
    FACTS.parts["wall"] = WALL.as_json
    FACTS.parts["load"] = LOAD.as_json
    LOAD.begin()
    FACTS.forgets += [WALL.forget, LOAD.begin]
    FACTS.parts["versions"] = lambda: {"tensorflow": str(tf.__version__)}
    FACTS.parts["stages_made"] = stages.made
    FACTS.parts["loops"] = loops.as_json
    FACTS.parts["functions"] = functions.as_json
    FACTS.forgets += [loops.forget, functions.forget, STRATEGIES.clear]
    FACTS.parts["machine"] = lambda: _machine(tf)


STRATEGIES: list[dict[str, Any]] = []
"""Kind, line and number of replicas of every `tf.distribute.Strategy` that the user's code created."""


def _strategies(tf: Any) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            with FACTS.guarded():
                kind = type(self).__name__
                if "Strategy" in kind and not kind.startswith("_"):
                    place, maker = who_called()
                    if maker == "user":
                        replicas = int(self.num_replicas_in_sync)
                        STRATEGIES.append({"kind": kind, "place": place, "replicas": replicas})

        return init

    wrap(tf.distribute.Strategy, "__init__", make)
    FACTS.parts["strategies"] = lambda: list(STRATEGIES)


def _machine(tf: Any) -> dict[str, Any]:
    # Listing devices initializes TensorFlow. Once a step has run, it is initialized already.
    if not (loops.any_step() or FACTS.parts.get("fits", list)()):
        return {}
    gpus = len(tf.config.list_logical_devices("GPU"))
    return {
        "gpus": gpus,
        "gpu_peak_bytes": [
            tf.config.experimental.get_memory_info(f"GPU:{index}")["peak"] for index in range(gpus)
        ],
        "functions_run_eagerly": bool(tf.config.functions_run_eagerly()),
        "cores": sorted(os.sched_getaffinity(0)),
        "intra_op_threads": int(tf.config.threading.get_intra_op_parallelism_threads()),
        "tensor_float_32": bool(tf.config.experimental.tensor_float_32_execution_enabled()),
    }
