"""Copies requests for a version in shadow, after their inputs were decoded, and counts the copies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from stoker.cluster.limits import usable_cores
from stoker.serve.dataplane.joined_runs import JoinedRequests, JoinedRun
from stoker.serve.dataplane.requests import Tensors
from stoker.serve.errors import ServeError
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.routing import CopyResult, RequestCopy, Route, Router

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedCall:
    """A model call that another version must repeat."""

    model: str
    """The model's name."""

    signature: str
    """The signature's name."""

    inputs: Tensors
    """Input name -> array."""


class Copies:
    """Passes copies of calls to the router; thread-safe."""

    def __init__(self, metrics: ServeMetrics) -> None:
        """Args: metrics: counts the copies; also shows whether requests wait."""
        self._metrics = metrics
        self._cores = usable_cores()

    def call(
        self, router: Router, route: Route, call: CopiedCall, run: Callable[[], Tensors]
    ) -> Tensors:
        """Make a call, and pass a copy of the call and its answer to the router.

        Args:
            router: Receives the copy.
            route: Where the rollout sent the request.
            call: The call to copy.
            run: Makes the call.

        Raises:
            Exception: the error that the call raised; an error of the model is copied, too.
        """
        began_s = time.monotonic()
        try:
            outputs = run()
        except ServeError:  # the queue is full or the client is gone: the model did not run
            raise
        except Exception:
            self._hand_over(router, route, call, None, time.monotonic() - began_s)
            raise
        self._hand_over(router, route, call, outputs, time.monotonic() - began_s)
        return outputs

    def of_run(self, router: Router, joined: JoinedRequests, run: JoinedRun) -> None:
        """Pass copies of the requests of a run in the event loop to the router, if their routes require it."""
        first = 0
        for route, size in zip(joined.routes, joined.sizes or (None,), strict=True):
            if route.copied:
                inputs, outputs = run.inputs, run.outputs
                # several requests; the output of a single request may be a scalar
                if size is not None:
                    rows = slice(first, first + size)
                    inputs = {name: array[rows] for name, array in inputs.items()}
                    outputs = {name: array[rows] for name, array in outputs.items()}
                call = CopiedCall(model=run.model, signature=run.signature, inputs=inputs)
                self._hand_over(router, route, call, outputs, run.ended_s - run.began_s)
            first += size or 0

    def _hand_over(
        self,
        router: Router,
        route: Route,
        call: CopiedCall,
        outputs: Tensors | None,
        took_s: float,
    ) -> None:
        # so that the function below does not keep the call's arrays in memory
        model, version = (
            call.model,
            route.version,
        )
        copy = RequestCopy(
            signature=call.signature,
            inputs=call.inputs,
            outputs=outputs,
            took_s=took_s,
            primary_waits=self._primary_waits,
            on_result=lambda result: self._count(model, version, took_s, result),
        )
        try:
            router.copy(call.model, route, copy)
        except Exception:  # noqa: BLE001 - the answer exists, and goes to the client
            _log.exception("a request to %s cannot be copied", call.model)

    def _primary_waits(self) -> bool:
        """Whether a request waits in a queue, or more requests are in progress than there are cores."""
        metrics = self._metrics
        return metrics.queued_requests.total() > 0 or (
            metrics.requests_under_way.total() > self._cores
        )

    def _count(self, model: str, version: int, took_s: float, result: CopyResult) -> None:
        copies, latency = self._metrics.copies, self._metrics.copy_latency
        ended = "compared" if result.is_compared else "dropped"
        for each in ("copied", ended):
            copies.add(result.copies, model_name=model, result=each)
        if result.is_bad:
            copies.add(model_name=model, result="bad")
        elif result.is_compared:
            if result.is_different:
                copies.add(model_name=model, result="different")
            latency.observe(took_s * 1e6, model_name=model, version=str(version))
            latency.observe(result.took_s * 1e6, model_name=model, version=str(result.version))
