"""One version of a model: its states from START to END, and the requests that use it."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import tensorflow as tf

from stoker.core.errors import UserError
from stoker.export.litert import FILE as LITERT_FILE
from stoker.registry.exported_model import SERVE_TAG, has_gpu
from stoker.registry.repository import verify
from stoker.serve.batching.batcher import Batcher
from stoker.serve.batching.config import (
    PARAMETERS_FILE,
    BatchingConfig,
    WarmSizes,
    read_batching_parameters,
)
from stoker.serve.batching.sizes import is_compiled, with_sizes
from stoker.serve.errors import ServeError
from stoker.serve.loading.endless_loops import may_not_end
from stoker.serve.loading.safety import check_model
from stoker.serve.loading.session import load_checked, too_large
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.routing import Router
from stoker.serve.runtime.gil_yield import GilYield, YieldGil, no_yield
from stoker.serve.runtime.stuck_call_watchdog import StuckCallWatchdog, VersionRuns
from stoker.serve.runtime.versions_in_use import LOADING, REQUESTS, VersionsInUse
from stoker.serve.servables.litert import load_litert
from stoker.serve.servables.load_error import reason_of
from stoker.serve.servables.warm_up import warm_up

_log = logging.getLogger(__name__)


class State(enum.IntEnum):
    """The state of a version.

    Source: tensorflow_serving/apis/get_model_status.proto, ModelVersionStatus.State.
    """

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How versions are loaded and called; the same for the whole server."""

    batching: BatchingConfig = field(default_factory=BatchingConfig)
    """How requests are joined."""

    per_model_batching: bool = False
    """Whether a version's own `batching_params.pbtxt` replaces `batching`."""

    router: Router | None = None
    """Decides which versions of a model with a rollout are loaded."""

    allow_ops: frozenset[str] = frozenset()
    """Operations that a model may have in addition to those that only compute."""

    runs: StuckCallWatchdog | None = None
    """Detects calls that do not end; None: calls have no time limit."""

    warm_up: bool = True
    """Whether a version's own warm-up requests are run."""

    warm_up_times: int = 1
    """How often each warm-up request is run."""

    saved_model_tags: tuple[str, ...] = (SERVE_TAG,)
    """The tags of the graph that is served from a SavedModel."""

    warm_sizes: WarmSizes = "auto"
    """Whether batches are padded to a few sizes, and a batch of each size is run before a version takes requests."""

    warm_s: float = 300.0
    """Maximum time for running the sizes of `warm_sizes`, seconds."""

    session: tf.compat.v1.ConfigProto | None = None
    """Configuration of sessions; None: the default."""

    unload_first: bool = False
    """Whether the old version is unloaded before the new one is loaded, not after. Then both need not fit in memory
    together, but the model is unavailable in between."""

    litert_interpreters: int = 0
    """Maximum number of calls of a version's `model.tflite` that run at the same time; 0: its SavedModel is served
    instead."""

    metrics: ServeMetrics | None = None
    """The metrics that batches update; None: no metrics."""

    in_use: VersionsInUse = field(default_factory=VersionsInUse)
    """Records the versions that are running or loading."""


class Servable:
    """A version, which is loaded once, used by many threads, and unloaded after its last request."""

    def __init__(
        self, version: int, path: Path, options: LoadOptions | None = None, *, model_name: str = ""
    ) -> None:
        """Args: version: the number; path: the version's folder; options: how it is loaded; model_name: the model."""
        self._model_name = model_name
        self._options = options or LoadOptions()
        self.version = version
        self.path = path
        self.state = State.START
        self.reason = ""
        self._model: Batcher | None = None
        self._users = 0
        self._use_row = self._options.in_use.row(model_name, path.parent, version)
        self._changed = threading.Condition(threading.Lock())

    def load(self) -> bool:
        """Check and load the files. The state becomes AVAILABLE, or END with the reason of the failure.

        Returns:
            Whether the version can be called now.
        """
        self._become(State.LOADING)
        self._use_row[LOADING] = 1.0
        try:
            with self._watched():
                self._model = (
                    _at_low_priority(lambda: self._loaded(GilYield()))
                    if _first_is_loaded.is_set()
                    else self._loaded(no_yield)
                )
        except (UserError, ServeError) as error:
            _log.error("%s cannot be loaded: %s", self.path, error)
            self._become(State.END, reason=reason_of(error, self.path))
            return False
        except Exception as error:  # noqa: BLE001 - an invalid file must not stop the checks
            _log.exception("%s cannot be loaded", self.path)
            self._become(State.END, reason=reason_of(error, self.path))
            return False
        finally:
            self._use_row[LOADING] = 0.0
        self._become(State.AVAILABLE)
        _first_is_loaded.set()
        return True

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        runs = self._runs()
        return contextlib.nullcontext() if runs is None else runs.loading()

    def _runs(self) -> VersionRuns | None:
        runs = self._options.runs
        return None if runs is None else runs.of_version(self._model_name, self.version)

    def _loaded(self, yield_gil: YieldGil) -> Batcher:
        verify(self.path)
        options, batching = self._options, self._options.batching
        parameters = self.path / PARAMETERS_FILE
        if options.per_model_batching and parameters.is_file():
            batching = read_batching_parameters(parameters)
        if options.litert_interpreters and (self.path / LITERT_FILE).is_file():
            loaded, endless = load_litert(self.path, interpreters=options.litert_interpreters)
        else:
            saved = check_model(self.path, allow=options.allow_ops, yield_gil=yield_gil)
            endless = may_not_end(saved, yield_gil=yield_gil)
            batching = with_sizes(
                batching, options.warm_sizes, compiled=is_compiled(saved), gpu=has_gpu()
            )
            loaded = load_checked(
                self.path,
                saved,
                yield_gil=yield_gil,
                session=options.session,
                tags=options.saved_model_tags,
            )
        model = Batcher(
            loaded,
            batching,
            name=self._model_name,
            metrics=options.metrics,
            runs=self._runs(),
            may_not_end=endless,
        )
        try:
            self._warm(model)
        except tf.errors.ResourceExhaustedError as error:
            model.close()
            raise too_large(self.path, error) from error
        except BaseException:
            model.close()
            raise
        return model

    def _warm(self, model: Batcher) -> None:
        """Run the version's own warm-up requests, then each size to which its batches are padded."""
        options = self._options
        times = options.warm_up_times
        count, samples = warm_up(model, self.path, times=times) if options.warm_up else (0, {})
        if count:
            _log.info("%s was warmed up with %d requests of its own", self.path, count)
        if options.warm_sizes == "off":
            return
        began_s = time.monotonic()
        runs = model.warm_up(samples, budget_s=options.warm_s)
        if runs:
            took_s = time.monotonic() - began_s
            _log.info(
                "%s was warmed up with %d runs of its batch sizes in %.1f s",
                self.path,
                runs,
                took_s,
            )

    def hold(self) -> Batcher | None:
        """Return the loaded model, which stays loaded until `release`; None if it is not loaded."""
        with self._changed:
            model = self._model if self.state is State.AVAILABLE else None
            self._users += model is not None
            self._use_row[REQUESTS] = self._users
        return model

    def release(self) -> None:
        """Release the model. Must be called once for each `hold` that returned the model."""
        with self._changed:
            self._users -= 1
            self._use_row[REQUESTS] = self._users
            if not self._users and self.state is State.UNLOADING:
                self._changed.notify_all()

    @contextlib.contextmanager
    def use(self) -> Iterator[Batcher | None]:
        """Keep the loaded model from being unloaded during the `with` block. Yields None if it is not loaded."""
        model = self.hold()
        try:
            yield model
        finally:
            if model is not None:
                self.release()

    def unload(self) -> None:
        """Accept no further request, wait for the requests in progress, and free the memory."""
        with self._changed:
            if self.state is not State.AVAILABLE:
                return
            self.state = State.UNLOADING
            self._changed.wait_for(lambda: self._users == 0)
            model, self._model = self._model, None
        if model is not None:
            model.close()
        self._become(State.END)

    def _become(self, state: State, *, reason: str = "") -> None:
        with self._changed:
            self.state, self.reason = state, reason


_NICE = 10
"""Niceness of the thread that loads a version, so that requests have priority; 19 is the lowest priority.

A higher niceness would do harm. If the loading thread holds the GIL but gets no time on a busy core, all Python threads
wait for it. Measured waits next to one busy thread: 16 to 81 ms with this value, 231 ms with 19, 816 ms with
`SCHED_IDLE`.
"""

_first_is_loaded = threading.Event()
"""Set after the first version was loaded. Only later loads have low priority, because TensorFlow creates its threads
during the first load, and they would inherit the priority."""

_T = TypeVar("_T")


def _at_low_priority(work: Callable[[], _T]) -> _T:
    """Run a function in a thread of low priority; return its result, or raise its exception."""
    done: Future[_T] = Future()

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):  # only Linux has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            done.set_exception(error)

    threading.Thread(target=run, name="stoker-load", daemon=True).start()
    return done.result()
