"""Two workers on two cores against one on one; the client is on the same two cores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import servers
from figures import Figure, figure
from grpc_case import METHOD, predict_request, predicted
from lineup import Lineup, ratio, shown
from load import Window, by_h2load, by_wrk
from rest_cases import raw_request

_CONNECTIONS = 16
_PATH = "/v1/models/cnn:predict"


def workers(lineup: Lineup, *, seconds: int, rounds: int) -> list[Figure]:
    """The CNN by the cheapest way in that the server has: a raw body, or gRPC."""
    both = [servers.SERVER_CORE, servers.CLIENT_CORE]
    with ExitStack() as stack:
        found: dict[str, list[Window]] = {}
        contestants = {}
        for name, count, cores in (("1 worker", 1, both[:1]), ("2 workers", 2, both)):
            log = lineup.scratch / f"{count}-workers.log"
            server, port = servers.ours(lineup.root, log, workers=count, cores=cores, name=name)
            stack.callback(server.stop)
            server.wait_until(
                lambda server=server: servers.post(server.port, "/readyz", b"")[0] == 200
            )
            found[name], contestants[name] = [], (server, port)
        raw = _takes_raw(contestants["1 worker"][0])
        for server, _ in contestants.values():
            server.signal(servers.signal.SIGSTOP)
        for number in range(rounds):
            for name in list(found)[:: -1 if number % 2 else 1]:
                server, port = contestants[name]
                with server.running():
                    window = _window(server, port, raw, 2 * seconds, lineup)
                found[name].append(window)
                sys.stderr.write(f"bench-serve: {name}: {shown([window])}\n")
    return _figures(found, raw=raw)


def _takes_raw(server: servers.Server) -> bool:
    request = raw_request(_PATH)
    return servers.post(server.port, request.path, request.body, request.headers)[0] == 200


def _window(server: servers.Server, port: int, raw: bool, seconds: int, lineup: Lineup) -> Window:
    if raw:
        return by_wrk(
            server,
            raw_request(_PATH),
            connections=_CONNECTIONS,
            seconds=seconds,
            warm=False,
            scratch=lineup.scratch,
        )
    request = predict_request("cnn")
    return by_h2load(
        server,
        port=port,
        method=METHOD,
        message=request.SerializeToString(),
        answer_bytes=predicted(port, request).ByteSize(),
        connections=_CONNECTIONS,
        seconds=seconds,
        scratch=lineup.scratch,
    )


def _figures(found: dict[str, list[Window]], *, raw: bool) -> list[Figure]:
    one, two = found["1 worker"], found["2 workers"]
    client = _percent(window.client_share for window in two)
    way = "raw body" if raw else "gRPC (NOT the raw body, which the server refuses)"
    how = (
        f"{way}, {_CONNECTIONS} connections, the client pinned to the second core; one worker, on "
        f"the first core: {shown(one)}; two, on both, the second shared with the client: {shown(two)}"
    )
    return [
        figure(
            "CNN: 2 workers on 2 cores against 1 on 1", ratio(two, one), "x", at_least=1.7, how=how
        ),
        figure("CNN: the client of 2 workers", client, "% of a core", how=how),
    ]


def _percent(shares: Sequence[float]) -> float:
    return 100 * float(np.median(list(shares)))
