"""The perceptron and the CNN over REST, compared with the peers and with the limit."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import models
import numpy as np
import servers
from figures import Figure, figure, spread
from lineup import (
    Contest,
    Contestant,
    Lineup,
    answer,
    best,
    check_equal,
    contest,
    inferred,
    middle,
    ratio,
    shown,
)
from load import Request

ENGINE = "our HTTP engine, no model"

_RAW = "stoker, raw body"
_FLAT = "stoker, v2"
_OURS = ("stoker", _FLAT, _RAW, ENGINE)

_MLP_TARGETS = {1: 5.0, 16: 15.0, 64: 20.0}
"""Connections -> times the best peer."""

_MLP_P99_MS = 5.0
"""At most, at the most connections."""

_IMAGE_CONNECTIONS = 4

_BATCHES = (1, 8)
"""Rows of a call whose rate in process is looked at; the better one is the limit."""


def mlp(lineup: Lineup, *, seconds: int, rounds: int) -> list[Figure]:
    """The perceptron at 1, 16 and 64 connections."""
    names = ["stoker", *lineup.peers]
    lineup.start(names)
    contestants = lineup.contestants("mlp", names)
    check_equal(contestants)
    contestants.append(_engine(lineup, contestants[0]))
    figures = []
    for connections, target in _MLP_TARGETS.items():
        found = contest(
            contestants,
            connections=connections,
            seconds=seconds,
            rounds=rounds,
            scratch=lineup.scratch,
        )
        figures += _mlp_figures(found, connections, target)
    return figures


def _engine(lineup: Lineup, ours: Contestant) -> Contestant:
    """The engine, that says what ours says."""
    name = "engine"
    if name not in lineup:
        with ours.server.running():
            constant = answer(ours)
        path = lineup.scratch / "answer.json"
        path.write_bytes(constant)
        server = servers.of_ours(ENGINE, "engine.py", str(path), log=lineup.scratch / "engine.log")
        request = ours.request
        lineup.add(
            name,
            server,
            lambda: servers.post(server.port, request.path, request.body) == (200, constant),
        )
    return replace(ours, name=ENGINE, server=lineup[name])


def _mlp_figures(found: Contest, connections: int, target: float) -> list[Figure]:
    begin = f"MLP, {_plural(connections)}"
    ours = found["stoker"]
    figures = []
    if len(found) > 2:
        peer = best(found, ["stoker", ENGINE])
        how = f"{len(ours)} windows in turn; ours: {shown(ours)}; {peer}: {shown(found[peer])}"
        figures.append(
            figure(
                f"{begin}: against the best peer, {peer}",
                ratio(ours, found[peer]),
                "x",
                at_least=target,
                peer=peer,
                how=how,
            )
        )
    figures.append(
        figure(
            f"{begin}: against our HTTP engine without a model",
            100 * ratio(ours, found[ENGINE]),
            "%",
            at_least=50.0,
            peer=ENGINE,
            how=f"engine: {shown(found[ENGINE])}",
        )
    )
    if connections == max(_MLP_TARGETS):
        p99_ms = [window.p99_ms for window in ours]
        figures.append(
            figure(
                f"{begin}: p99 of ours",
                float(np.median(p99_ms)),
                "ms",
                at_most=_MLP_P99_MS,
                how=f"{spread(p99_ms)} ms in {len(ours)} windows",
            )
        )
    return figures + _rates(begin, found)


def _rates(begin: str, found: Contest) -> list[Figure]:
    """Every peer's ratio, and what ours did in absolute figures."""
    ours = found["stoker"]
    return [
        figure(f"{begin}: {name}", middle(windows), "requests/s", how=shown(windows))
        if name in _OURS
        else figure(
            f"{begin}: against {name}", ratio(ours, windows), "x", peer=name, how=shown(windows)
        )
        for name, windows in found.items()
    ]


def _plural(connections: int) -> str:
    return f"{connections} connection" + ("s" if connections > 1 else "")


def cnn(lineup: Lineup, *, seconds: int, rounds: int) -> list[Figure]:
    """The CNN: an image as JSON against the peers, as raw bytes against calls in process."""
    names = ["stoker", *lineup.peers]
    lineup.start(names)
    contestants = lineup.contestants("cnn", names)
    check_equal(contestants)
    ours = contestants[0]
    raw, refused = _if_taken(ours, replace(ours, name=_RAW, request=raw_request(ours.request.path)))
    flat = replace(ours, name=_FLAT, request=_flat_request(), read=inferred)
    found = contest(
        [*contestants, *_if_taken(ours, flat)[0], *raw],
        connections=_IMAGE_CONNECTIONS,
        seconds=2 * seconds,  # the slowest peer answers a few times a second
        rounds=rounds,
        scratch=lineup.scratch,
    )
    begin = f"CNN, {_plural(_IMAGE_CONNECTIONS)}"
    figures = []
    if len(set(found) - set(_OURS)):
        peer = best(found, _OURS)
        mine = best(found, [name for name in found if name not in ("stoker", _FLAT)])
        how = f"JSON image; {mine}: {shown(found[mine])}; {peer}: {shown(found[peer])}"
        figures.append(
            figure(
                f"{begin}: JSON image against the best peer, {peer}",
                ratio(found[mine], found[peer]),
                "x",
                peer=peer,
                how=how,
            )
        )
    limits, how = _in_process(lineup, seconds=seconds, rounds=rounds)
    if len(set(found) - set(_OURS)):
        most = [limit / window.per_s for limit, window in zip(limits, found[peer], strict=True)]
        figures.append(
            figure(
                f"{begin}: the model alone, with nothing read or answered, against {peer}",
                float(np.median(most)),
                "x",
                peer=peer,
                how=f"no server of this model can do more than this; {how}",
            )
        )
    share = [
        100 * window.per_s / limit
        for window, limit in zip(found.get(_RAW, []), limits, strict=False)
    ]
    name = f"{begin}: raw body against in process"
    figures.append(
        figure(
            name if share else f"{name} (NOT RUN: the server refuses a raw body)",
            float(np.median(share)) if share else 0.0,
            "%",
            at_least=60.0,
            peer="in process",
            how=refused or f"{how}; ours: {shown(found[_RAW])}",
        )
    )
    figures.append(figure("CNN: in process", float(np.median(limits)), "rows/s", how=how))
    return figures + _rates(begin, found)


RAW_HEADERS = {
    "Content-Type": "application/octet-stream",
    "X-Tensor-Shape": ",".join(map(str, (1, *models.IMAGE_SHAPE))),
    "X-Tensor-Dtype": "float32",
}
"""The header that describes the bytes to the server."""


def raw_request(path: str) -> Request:
    """The image as raw bytes."""
    row = models.request_of("cnn").row
    return Request(path=path, body=row.tobytes(), headers=RAW_HEADERS)


def _flat_request() -> Request:
    """The image by the Open Inference Protocol."""
    body = models.request_of("cnn").infer
    return Request(
        path="/v2/models/cnn/infer", body=body, headers={"Content-Type": "application/json"}
    )


def _if_taken(ours: Contestant, other: Contestant) -> tuple[list[Contestant], str]:
    """Another way to ask ours; none, and why, where the server refuses it."""
    try:
        check_equal([ours, other])
    except ConnectionError as error:
        sys.stderr.write(f"bench-serve: {other.name} NOT RUN: {error}\n")
        return [], str(error)
    return [other], ""


def _in_process(lineup: Lineup, *, seconds: int, rounds: int) -> tuple[list[float], str]:
    """Rows a second in each round, at the number of rows a call that gives the most."""
    name = "in process"
    if name not in lineup:
        log = lineup.scratch / "inprocess.log"
        server = servers.of_ours(name, "inprocess.py", str(lineup.root), log=log)
        lineup.add(name, server, lambda: _rate_of(server, 1, 0.1) > 0)
    found: dict[int, list[float]] = {rows: [] for rows in _BATCHES}
    for _ in range(rounds):
        for rows in _BATCHES:
            with lineup[name].running():
                found[rows].append(_rate_of(lineup[name], rows, seconds))
    rows = max(found, key=lambda rows: float(np.median(found[rows])))
    texts = [
        f"{np.median(each):.4g} rows a second with {rows} a call" for rows, each in found.items()
    ]
    return found[rows], f"in process on the same core: {', '.join(texts)}"


def _rate_of(server: servers.Server, rows: int, seconds: float) -> float:
    status, body = servers.post(server.port, f"/{rows}/{seconds:g}", b"")
    if status != 200:
        raise RuntimeError(f"{server.name} answers {status}")
    return json.loads(body)
