"""Answers requests independently of the protocol: REST and gRPC only convert requests and answers."""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.core.errors import UserError
from stoker.registry.exported_model import DEFAULT_SIGNATURE, Signature, first_line
from stoker.serve.batching.batcher import Batcher
from stoker.serve.dataplane.joined_runs import PROVEN_RUNS, JoinedCounts, JoinedRequests, JoinedRun
from stoker.serve.dataplane.requests import (
    Answered,
    InferRequest,
    InferResponse,
    Metadata,
    ModelSpec,
    PredictRequest,
    PredictResponse,
    Tensors,
    VersionStatus,
)
from stoker.serve.dataplane.shadow_copies import CopiedCall, Copies
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError, SignatureNotFound
from stoker.serve.observability.counters import UNKNOWN_MODEL
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.prediction_quality import PredictionQuality
from stoker.serve.observability.sampled_examples import EXAMPLES, MAX_EXAMPLES
from stoker.serve.observability.version_metrics import VersionMetrics
from stoker.serve.request_record import RequestRecord
from stoker.serve.routing import Headers, Route, Router, RunningRequest
from stoker.serve.runtime.counted_threads import take_waited_s
from stoker.serve.servables.catalog import Models
from stoker.serve.servables.examples import (
    CLASSIFY,
    INPUT,
    Inferred,
    Task,
    check_signature,
    joined_examples,
    read_outputs,
)
from stoker.serve.servables.model_config import ModelConfig
from stoker.serve.servables.servable import State

_log = logging.getLogger(__name__)

_RELOAD_S = 600.0
"""Maximum wait for the models of a new configuration, seconds; a large model takes minutes to load."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Labels under which a request is counted."""

    model_name: str
    api: str
    """Name of the call: over gRPC, TensorFlow Serving's name; over REST, the method in the path."""

    entrypoint: str


class DataPlane:
    """Answers requests; thread-safe."""

    def __init__(
        self,
        models: Models,
        metrics: ServeMetrics,
        *,
        check_method_names: bool = False,
        allow_unavailable_labels: bool = False,
        tensor_content: bool = False,
    ) -> None:
        """Args: models: the served models; metrics: the metrics to update; other arguments: see `ServeConfig`."""
        self.allow_unavailable_labels = allow_unavailable_labels
        self.tensor_content = tensor_content
        self.models = models
        self.metrics = metrics
        self.check_method_names = check_method_names
        self.router: Router | None = None
        self.on_answered: Callable[[Answered], None] | None = None
        self.quality: PredictionQuality | None = None
        self._versions = VersionMetrics(metrics)
        self._joined = JoinedCounts(metrics, self._versions)
        self._copies = Copies(metrics)
        self._draining = False
        self._was_ready = False
        self._routed_now: dict[int, RequestRecord] = {}
        # (model, signature) -> the versions whose last request during a rollout was quick.
        self._proven: dict[tuple[str, str], set[int]] = defaultdict(set)

    def predict(self, request: PredictRequest) -> PredictResponse:
        """Call a model.

        Raises:
            ServeError: the request cannot be answered; the code says whose fault that is.
        """
        name, record = request.model.name, request.deadline.record
        signature = request.signature or DEFAULT_SIGNATURE
        record.model, record.signature = name, signature
        count = None if request.is_counted else Counted(name, "Predict", request.entrypoint)
        with self._answering(request.entrypoint, record, count):
            with self._use(self._routed(request.model, record)) as (served, model):
                record.version = served
                inputs, outputs = self._run(model, request)
            if record.route is not None:
                record.outputs = outputs
            response = PredictResponse(
                model=ModelSpec(name=name, version=served),
                signature=signature,
                outputs=_filtered(outputs, request.output_filter),
            )
            self._log_request(name, response, inputs=inputs)
            self._sample(name, served, signature, inputs)
            return response

    def route(self, spec: ModelSpec, headers: Headers) -> Route | None:
        """Return where a rollout sends a request; None: no rollout decides, so the named or the newest version answers.

        Every request of every protocol is routed here, once.

        Args:
            spec: The requested model.
            headers: The request's headers or metadata.
        """
        router = self.router
        if router is None:
            return None
        decide = router.routes.get(spec.name)
        if decide is None or spec.version is not None or spec.label is not None:
            return None
        return decide(headers)

    def predict_joined(
        self, joined: JoinedRequests, read_inputs: Callable[[Signature], Tensors]
    ) -> JoinedRun | None:
        """Answer several requests with one run in this thread, if the model is quick and free.

        Args:
            joined: The requests; `answered_joined` counts them.
            read_inputs: Returns the rows of all requests, concatenated.

        Returns:
            The run; None if each request must use `predict`, because the run would take long, the model is busy, or one
            of the requests is invalid.
        """
        model, name = joined.model, joined.signature or DEFAULT_SIGNATURE
        if self.on_answered is not None and self.models.request_log_of(model.name) is not None:
            return None
        try:
            servable, batcher = self.models.get(model.name, model.version).hold(
                model.version, label=model.label
            )
        except ServeError:
            return None
        try:
            compared = joined.routes[0].compared if joined.routes else ()
            is_quick = batcher.is_quick(name, min_runs=PROVEN_RUNS if compared else 0)
            if compared and is_quick:
                proven = self._proven[model.name, name]
                proven.add(servable.version)
                is_quick = proven.issuperset(compared)
            # known names only: a client could invent any number of others
            elif compared and (model.name, name) in self._proven:
                self._proven[model.name, name].discard(servable.version)
            if not is_quick:
                return None
            inputs = read_inputs(batcher.signatures[name])
            began_s = time.monotonic()
            outputs = batcher.call_at_once(name, inputs, joined.sizes)
        except Exception:  # noqa: BLE001 - each request runs alone and gets its own error
            return None
        finally:
            servable.release()
        if outputs is None:
            return None
        self._sample(model.name, servable.version, name, inputs)
        return JoinedRun(
            model=model.name,
            version=servable.version,
            signature=name,
            inputs=inputs,
            outputs=outputs,
            began_s=began_s,
            ended_s=time.monotonic(),
        )

    def answered_joined(self, joined: JoinedRequests, run: JoinedRun) -> None:
        """Count requests that a run of `predict_joined` has answered."""
        self._joined.add(joined, run)
        if joined.routes:
            route = joined.routes[0]
            route.answered(joined, run.outputs, run.ended_s)
            # In a shadow stage, requests may have to be copied.
            if not route.counts and self.router is not None:
                self._copies.of_run(self.router, joined, run)

    def max_rows(self, model: ModelSpec) -> int:
        """Maximum number of rows of a run of a model; 0 if the model is not loaded."""
        try:
            with self.models.get(model.name, model.version).use(
                model.version, label=model.label
            ) as (_, batcher):
                return batcher.max_batch_size
        except ServeError:
            return 0

    def infer(self, request: InferRequest) -> InferResponse:
        """Run the tasks of a request (classify, regress, or both) with one version of a model.

        Raises:
            ServeError: the request cannot be answered; the code says whose fault that is.
        """
        name, api = request.model.name, _api(request.tasks)
        record = request.deadline.record
        record.model, record.signature = name, ",".join(task.signature for task in request.tasks)
        # TensorFlow Serving does not count MultiInference.
        is_counted = request.is_counted or api == _SEVERAL
        count = None if is_counted else Counted(name, api, request.entrypoint)
        with self._answering(request.entrypoint, record, count):
            with self._use(self._routed(request.model, record)) as (served, model):
                record.version = served
                results = [self._infer(model, request, task, api) for task in request.tasks]
            response = InferResponse(model=ModelSpec(name=name, version=served), results=results)
            self._log_request(name, response, examples=request.examples, context=request.context)
            if self.quality is not None and self.quality.is_due(name, served):
                first = request.examples[:MAX_EXAMPLES]
                rows = joined_examples(first, context=request.context)
                self.quality.offer(name, served, {EXAMPLES: rows})
            return response

    def status(self, spec: ModelSpec) -> list[VersionStatus]:
        """Return the states of a model's versions, newest first; only one state if the spec names a version.

        Raises:
            ServeError: the model has no such version.
        """
        found: list[tuple[int, State, str]] = []
        version = spec.version
        if spec.name in self.models.names():
            versions = self.models.get(spec.name)
            if spec.label is not None:
                version = versions.version_of(spec.label)
            found = versions.statuses(version)
        if not found:
            which = "any versions" if version is None else f"version {version}"
            raise ServeError(Code.NOT_FOUND, f"Could not find {which} of model {spec.name}")
        return [VersionStatus(version=v, state=s, reason=r) for v, s, r in found]

    def signatures(self, spec: ModelSpec) -> Mapping[str, Signature]:
        """Return the signatures of a version by name; at least one.

        Raises:
            ServeError: no such version is loaded.
        """
        with self._use(spec) as (_, model):
            return model.signatures

    def metadata(self, spec: ModelSpec) -> Metadata:
        """Return the signatures of a version as TensorFlow's `SignatureDef`s.

        Raises:
            ServeError: no such version is loaded.
        """
        with self._use(spec) as (served, model):
            found = ModelSpec(name=spec.name, version=served)
            return Metadata(model=found, signature_defs=model.signature_defs)

    def reload(self, configs: Sequence[ModelConfig], *, deadline: Deadline) -> None:
        """Replace the configuration of the served models; return when all models can be called.

        Raises:
            ServeError: a repository is served, a model cannot be loaded, or a label would move to a version that is not
                loaded.
        """
        if self.models.root is not None:
            raise ServeError(
                Code.FAILED_PRECONDITION,
                "This server serves every model of a repository, so it has no configuration to "
                "reload. Start it with --model_config_file, or push to the repository.",
            )
        for config in configs:
            self._check_log(config)
        with _as_serve_error():
            self.models.reload(
                configs,
                allow_unavailable=self.allow_unavailable_labels,
                timeout_s=min(deadline.left_s, _RELOAD_S),
            )

    def _check_log(self, config: ModelConfig) -> None:
        """Refuse a request log that differs from the current one: a client must not choose which files are written."""
        if config.request_log not in (None, self.models.request_log_of(config.name)):
            raise ServeError(
                Code.FAILED_PRECONDITION,
                f"logging_config of model {config.name} is taken from --model_config_file only",
            )

    def unready(self) -> str:
        """Return why the server is not ready for requests; empty: it is ready."""
        if self._draining:
            return "the server shuts down"
        waits = self.models.waiting_for()
        if not waits:
            self._was_ready = True
        if not waits or (self._was_ready and self.models.can_answer()):
            return ""  # a model that is added later does not make the others unavailable
        return f"waiting for {', '.join(waits)}"

    @property
    def draining(self) -> bool:
        """Whether the server shuts down, so that clients should use another server."""
        return self._draining

    def drain(self) -> None:
        """Report the server as not ready from now on; requests are still answered."""
        self._draining = True

    def _routed(self, spec: ModelSpec, record: RequestRecord) -> ModelSpec:
        """Return the model with the version that a rollout chooses, unless the request names one."""
        route = record.route or self.route(spec, record.headers)
        if route is None:
            return spec
        versions = self.models.get(spec.name)
        # A user enters an A/B test only once all arms are loaded. Else, arms that load faster would get more users.
        needed = route.compared if route.test else (route.version,)
        if all(map(versions.serves, needed)):
            record.route = route
            self._routed_now[id(record)] = record
            return ModelSpec(name=spec.name, version=route.version)
        record.route = None
        if versions.serves(route.otherwise):
            return ModelSpec(name=spec.name, version=route.otherwise)
        return spec  # neither version is loaded yet: the newest loaded version answers

    def running(self) -> list[RunningRequest]:
        """Return the requests in progress that a rollout sent to a version."""
        now_s = time.monotonic()
        return [
            RunningRequest(model=each.model, route=each.route, took_s=now_s - each.began_s)
            for each in list(self._routed_now.values())
            if each.route is not None
        ]

    @contextmanager
    def _use(self, spec: ModelSpec) -> Iterator[tuple[int, Batcher]]:
        versions = self.models.get(spec.name, spec.version)
        with versions.use(spec.version, label=spec.label) as found:
            yield found

    def _run(self, model: Batcher, request: PredictRequest) -> tuple[Tensors, Tensors]:
        name = request.signature or DEFAULT_SIGNATURE
        signature = model.signatures.get(name)
        if signature is None:
            raise SignatureNotFound(name)
        inputs = request.read_inputs(signature)
        _check_filter(signature, request.output_filter)
        return inputs, self._call(model, name, inputs, request, api="Predict")

    def _call(
        self,
        model: Batcher,
        signature: str,
        inputs: Tensors,
        request: PredictRequest | InferRequest,
        *,
        api: str,
    ) -> Tensors:
        """Call a model; if the route requires it, a version in shadow repeats the call."""
        begun_s, route = time.monotonic(), request.deadline.record.route
        run = functools.partial(model.call, signature, inputs, deadline=request.deadline)
        if self.router is not None and route is not None and route.copied:
            copied = CopiedCall(model=request.model.name, signature=signature, inputs=inputs)
            outputs = self._copies.call(self.router, route, copied, run)
        else:
            outputs = run()
        self._observe_runtime(begun_s, model_name=request.model.name, api=api)
        return outputs

    def _log_request(
        self, name: str, response: PredictResponse | InferResponse, **given: Any
    ) -> None:
        if self.on_answered is None:
            return
        log = self.models.request_log_of(name)
        if log is not None:
            self.on_answered(Answered(log=log, response=response, **given))

    def _sample(self, model: str, version: int, signature: str, inputs: Tensors) -> None:
        """Pass the inputs to the comparison with the training data.

        Only inputs of the default signature, and of signatures that take Examples, certainly have raw columns.
        """
        if self.quality is None:
            return
        if signature == DEFAULT_SIGNATURE or (len(inputs) == 1 and EXAMPLES in inputs):
            self.quality.offer(model, version, inputs)

    def _infer(self, model: Batcher, request: InferRequest, task: Task, api: str) -> Inferred:
        definition = model.signature_defs.get(task.signature)
        if definition is None:
            message = "Requested signature not found in model graph" if api == _SEVERAL else ""
            message = message or "No signature was found with the name"
            raise ServeError(Code.INVALID_ARGUMENT, f"{message}: {task.signature}")
        check_signature(task, definition, by_name=self.check_method_names)
        rows = joined_examples(request.examples, context=request.context)
        outputs = self._call(model, task.signature, {INPUT: rows}, request, api=api)
        self.metrics.example_counts.observe(len(rows), model=request.model.name)
        self.metrics.example_count_total.add(len(rows), model=request.model.name)
        return read_outputs(task, outputs, rows=len(rows))

    def _observe_runtime(self, begun_s: float, *, model_name: str, api: str) -> None:
        took_us = (time.monotonic() - begun_s) * 1e6
        self.metrics.runtime_latency.observe(took_us, model_name=model_name, API=api, runtime="TF1")

    @contextmanager
    def _answering(
        self, entrypoint: str, record: RequestRecord, count: Counted | None
    ) -> Iterator[None]:
        """Turn an exception into a `ServeError`, and record how the request ended."""
        begun_s, waited_s, code = time.monotonic(), take_waited_s(), Code.OK
        try:
            with (
                self.metrics.requests_under_way.held(entrypoint=entrypoint),
                _as_serve_error(),
            ):
                yield
        except ServeError as error:
            code = error.code
            raise
        finally:
            took_s = time.monotonic() - begun_s
            record.code = code.name
            if record.version is not None or record.model in self.models.names():
                # Includes the wait for a thread: objectives cover the latency that clients see, even of a full server.
                self._versions.count(record.model, record.version, code, took_s=waited_s + took_s)
            if self.router is not None and record.route is not None:
                self._routed_now.pop(id(record), None)
                self.router.answered(
                    record.model,
                    record.route,
                    good=code is Code.OK and took_s <= record.patience_s,
                    took_s=took_s,
                    outputs=record.outputs,
                )
                record.outputs = None
            if count is not None:
                self.count(count, code, took_s=took_s)

    def count_refused(self, model: str, entrypoint: str, code: Code) -> None:
        """Count a request that was refused before it was read.

        Args:
            model: The model that the request names; empty: unknown.
            entrypoint: The protocol of the request.
            code: The code of the refusal.
        """
        self.count(Counted(model, "", entrypoint), code, took_s=0.0)
        if model in self.models.names():
            self._versions.count(model, None, code, took_s=0.0)

    def count(self, request: Counted, code: Code, *, took_s: float) -> None:
        """Count a finished request by its status; if it succeeded, also record its duration.

        Args:
            request: The labels of the request; a name may be empty.
            code: How the request ended.
            took_s: Duration of the request, seconds.
        """
        name = request.model_name
        if name and name not in self.models.names():
            name = UNKNOWN_MODEL
        self.metrics.request_count.add(model_name=name, status=code.name)
        if code is Code.OK:
            self.metrics.request_latency.observe(
                took_s * 1e6, model_name=name, API=request.api, entrypoint=request.entrypoint
            )


_SEVERAL = "MultiInference"


def _api(tasks: Sequence[Task]) -> str:
    """Return TensorFlow Serving's name of the call, a label of the metrics."""
    if len(tasks) > 1:
        return _SEVERAL
    return "Classify" if tasks[0].method == CLASSIFY else "Regress"


@contextmanager
def _as_serve_error() -> Iterator[None]:
    """Convert any exception to a `ServeError`. The only place that does so."""
    try:
        yield
    except ServeError:
        raise
    except UserError as error:
        raise ServeError(Code.INVALID_ARGUMENT, error.line()) from error
    except tf.errors.ResourceExhaustedError as error:
        _log.error("a request did not fit in memory: %s", first_line(error))
        raise ServeError(Code.RESOURCE_EXHAUSTED, first_line(error)) from error
    except tf.errors.OpError as error:
        _log.exception("the model failed")
        # A variable or table without content is the model's fault, but FAILED_PRECONDITION would become HTTP 400.
        is_incomplete = isinstance(error, tf.errors.FailedPreconditionError)
        code = Code.INTERNAL if is_incomplete else Code(error.error_code)
        raise ServeError(code, "the model failed; see the server's log") from error
    except Exception as error:
        _log.exception("a request failed because of a bug in the server")
        raise ServeError(
            Code.INTERNAL, "the request failed because of a bug in the server; see its log"
        ) from error


def _check_filter(signature: Signature, wanted: tuple[str, ...]) -> None:
    """Raise if a name is not an output, or is repeated.

    Source of messages and order: TensorFlow Serving, `predict_util.cc`.
    """
    for number, name in enumerate(wanted):
        if name not in signature.outputs:
            known = ",".join(sorted(signature.outputs))
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"output tensor alias not found in signature: {name} "
                f"Outputs expected to be in the set {{{known}}}.",
            )
        if name in wanted[:number]:
            raise ServeError(Code.INVALID_ARGUMENT, f"duplicate output tensor alias: {name}")


def _filtered(outputs: Tensors, wanted: tuple[str, ...]) -> Tensors:
    return {name: outputs[name] for name in wanted} if wanted else outputs
