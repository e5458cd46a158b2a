"""Copies of requests for a version in shadow: taken where inputs are decoded, and counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stoker.cluster.limits import usable_cores
from stoker.serve.dataplane.requests import Tensors
from stoker.serve.errors import ServeError
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.request_record import RequestRecord
from stoker.serve.routing import CopyResult, RequestCopy, Route, Router


@dataclass(slots=True)
class Call:
    """A call of a model."""

    outputs: Tensors = field(default_factory=dict)
    """Its outputs, once it has ended."""


class Copies:
    """Hands calls to a router that wants them copied; may be used by many threads."""

    def __init__(self, metrics: ServeMetrics) -> None:
        """Args: metrics: the counts, and what shows that requests wait."""
        self._metrics = metrics
        self._cores = usable_cores()

    @contextmanager
    def of(
        self, router: Router | None, record: RequestRecord, signature: str, inputs: Tensors
    ) -> Iterator[Call]:
        """Copy the call that is made in this context, if its route says so.

        Args:
            router: what asked for copies; None: nothing did.
            record: of the request.
            signature: the signature that is called.
            inputs: input name -> array.
        """
        call, route = Call(), record.route
        if router is None or route is None or not route.copied:
            yield call
            return
        began_s = time.monotonic()
        outputs: Tensors | None = None
        try:
            yield call
            outputs = call.outputs
        except ServeError:  # the queue was full or the client gone: the model was not asked
            raise
        except Exception:
            self._hand_over(router, record, signature, inputs, outputs, began_s)
            raise
        self._hand_over(router, record, signature, inputs, outputs, began_s)

    def _hand_over(
        self,
        router: Router,
        record: RequestRecord,
        signature: str,
        inputs: Tensors,
        outputs: Tensors | None,
        began_s: float,
    ) -> None:
        route, took_s = record.route, time.monotonic() - began_s
        assert route is not None
        model = record.model
        self._metrics.copies.add(model_name=model, result="copied")
        router.copy(
            model,
            route,
            RequestCopy(
                signature=signature,
                inputs=inputs,
                outputs=outputs,
                took_s=took_s,
                primary_waits=self._primary_waits,
                on_result=lambda result: self._count(model, route, result, took_s),
            ),
        )

    def _primary_waits(self) -> bool:
        """Whether a request is in a queue, or more are answered than there are cores."""
        metrics = self._metrics
        return metrics.queued_requests.total() > 0 or (
            metrics.requests_under_way.total() > self._cores
        )

    def _count(self, model: str, route: Route, result: CopyResult, took_s: float) -> None:
        metrics = self._metrics
        metrics.copies.add(model_name=model, result="compared" if result.is_compared else "dropped")
        if not result.is_compared:
            return
        if result.is_bad:
            metrics.copies.add(model_name=model, result="bad")
        elif result.is_different:
            metrics.copies.add(model_name=model, result="different")
        if not result.is_bad:
            for version, seconds in ((route.version, took_s), (result.version, result.took_s)):
                metrics.copy_latency.observe(seconds * 1e6, model_name=model, version=str(version))
