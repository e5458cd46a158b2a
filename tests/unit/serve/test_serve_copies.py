"""Which calls are copied for a version in shadow, and that a copy never costs an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stoker.core.errors import UserError
from stoker.rollout.routing.router import RolloutRouter
from stoker.serve.dataplane.joined_runs import JoinedRequests, JoinedRun
from stoker.serve.dataplane.requests import ModelSpec, Tensors
from stoker.serve.dataplane.shadow_copies import CopiedCall, Copies
from stoker.serve.errors import Code, ServeError
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.routing import CopyResult, RequestCopy, Route

CALL = CopiedCall(model="m", signature="s", inputs={"x": np.ones(1)})
ROUTE = Route(version=1, otherwise=1, copied=True)
OUTPUTS: Tensors = {"y": np.ones(1)}


class KeepsCopies(RolloutRouter):
    """Keeps what it is to copy."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(server="test")
        self.kept: list[RequestCopy] = []
        self._error = error

    def copy(self, model: str, route: Route, request: RequestCopy) -> None:
        self.kept.append(request)
        if self._error is not None:
            raise self._error


def raises(error: Exception) -> Callable[[], Tensors]:
    def run() -> Tensors:
        raise error

    return run


def count(metrics: ServeMetrics, result: str) -> bool:
    return f'stoker_rollout_copies{{model_name="m",result="{result}"}} 1' in metrics.exposition()


def test_an_answer_is_copied_and_counted() -> None:
    metrics, router = ServeMetrics(), KeepsCopies()

    assert Copies(metrics).call(router, ROUTE, CALL, lambda: OUTPUTS) is OUTPUTS
    copy = router.kept[0]
    assert (copy.signature, copy.inputs, copy.outputs) == ("s", CALL.inputs, OUTPUTS)
    copy.on_result(CopyResult(version=2, is_compared=True, is_different=True, took_s=0.5))
    assert all(count(metrics, each) for each in ("copied", "compared", "different"))
    assert not count(metrics, "bad")
    lines = metrics.exposition()
    for version in (1, 2):
        name = "stoker_rollout_copy_latency_count"
        assert f'{name}{{model_name="m",version="{version}"}} 1' in lines
    copy.on_result(CopyResult(version=2, is_compared=False))
    copy.on_result(CopyResult(version=2, is_compared=True, is_bad=True))
    assert count(metrics, "dropped")
    assert count(metrics, "bad")


def test_of_requests_that_one_run_answers_those_are_copied_whose_routes_say_so() -> None:
    plain = Route(version=1, otherwise=1)
    table = np.arange(12).reshape(6, 2)
    joined = JoinedRequests(
        model=ModelSpec(name="m", version=1),
        signature="s",
        came_s=[0.0] * 3,
        sizes=[1, 2, 3],
        routes=[plain, ROUTE, plain],
    )
    run = JoinedRun(
        model="m",
        version=1,
        signature="s",
        inputs={"x": table},
        outputs={"y": table + 1},
        began_s=1.0,
        ended_s=1.5,
    )
    router, copies = KeepsCopies(), Copies(ServeMetrics())

    copies.of_run(router, joined, run)
    copies.of_run(router, replace(joined, sizes=(), routes=[ROUTE]), run)

    assert [copy.took_s for copy in router.kept] == [0.5, 0.5]
    for copy, rows in zip(router.kept, (slice(1, 3), slice(0, 6)), strict=True):
        assert copy.outputs is not None
        np.testing.assert_array_equal(copy.inputs["x"], table[rows])
        np.testing.assert_array_equal(copy.outputs["y"], table[rows] + 1)


def test_a_lone_request_is_copied_whole_also_with_a_scalar_as_its_answer() -> None:
    joined = JoinedRequests(
        model=ModelSpec(name="m", version=1), signature="s", came_s=[0.0], routes=[ROUTE]
    )
    run = JoinedRun(
        model="m",
        version=1,
        signature="s",
        inputs={"x": np.arange(3)},
        outputs={"sum": np.asarray(3)},
        began_s=1.0,
        ended_s=1.5,
    )
    router = KeepsCopies()

    Copies(ServeMetrics()).of_run(router, joined, run)

    (copy,) = router.kept
    assert copy.outputs == run.outputs


def test_an_error_of_the_model_is_copied_and_a_request_that_never_ran_is_not() -> None:
    router = KeepsCopies()
    copies = Copies(ServeMetrics())

    with pytest.raises(UserError):
        copies.call(router, ROUTE, CALL, raises(UserError("x must be positive")))
    assert [copy.outputs for copy in router.kept] == [None]
    with pytest.raises(ServeError):
        copies.call(router, ROUTE, CALL, raises(ServeError(Code.UNAVAILABLE, "the queue is full")))
    assert len(router.kept) == 1


def test_a_copy_that_cannot_be_made_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    router = KeepsCopies(RuntimeError("can't start new thread"))

    assert Copies(ServeMetrics()).call(router, ROUTE, CALL, lambda: OUTPUTS) is OUTPUTS
    assert "a request to m cannot be copied" in caplog.text


def test_requests_in_a_queue_and_more_than_there_are_cores_are_waiting() -> None:
    metrics, router = ServeMetrics(), KeepsCopies()
    Copies(metrics).call(router, ROUTE, CALL, lambda: OUTPUTS)
    waits = router.kept[0].primary_waits

    assert not waits()
    with metrics.queued_requests.held(model_name="other"):
        assert waits()
    metrics.requests_under_way.add(1.0, entrypoint="REST")
    assert not waits()
    metrics.requests_under_way.add(10_000.0, entrypoint="REST")
    assert waits()
