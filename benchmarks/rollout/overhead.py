"""What routing costs: server CPU per request with an active 90/10 split against none, and the decision itself.

python benchmarks/rollout/overhead.py [--rounds R] [--only decision]

Both models are the same SavedModel in one server process, so that a window of one is next to a window of the
other. A second version costs something by itself, because it takes turns with the first one in the processor's caches, and
a batch of both is two runs: so the split is also compared with clients that name the versions, in the same shares. The server's loops do not poll
here, as polling would count as CPU time of the requests; and each run counts as quick, as on a busy machine a run that
was interrupted would send the next requests to threads. About 4 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "serve"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))

import rollout_parts
import servers
from figures import Figure, figure, spread
from turns import Grpc, Rest, closing, window_us

from stoker.rollout.control.controller import Event, change
from stoker.rollout.routing.router import RolloutRouter
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state.changes import advance, start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER
from stoker.serve.routing import Served

ROOT = Path(__file__).resolve().parents[2]

ONE, TWO = "one", "two"
"""Models: with version 1 only, and with versions 1 and 2 under rollout."""

PLAIN, NAMED, SPLIT = "plain", "named", "split"
ARMS: dict[str, tuple[str, Sequence[int | None]]] = {
    PLAIN: (ONE, (None,)),
    NAMED: (TWO, (1, 2)),
    SPLIT: (TWO, (None,)),
}
"""What is compared -> the model, and the versions that its clients name: nine of ten the first."""

SHARE = 0.1
CONNECTIONS = {1: 3.0, 64: 10.0}
"""Connections -> at most so many percent more CPU."""

DECISION_US, NO_ROLLOUT_US = 0.5, 0.2
REQUESTS = 10_000
CALLS, ROUNDS = 1_000_000, 5
WARM_TURNS = 3_000
"""First requests of each version: both have to prove that they are quick by 1,000 of their runs."""

WINDOW = 640
"""Requests of a window."""


def begin_rollout(base: Path, *, settings: RolloutSettings, name: str = "bench") -> None:
    """Put a rollout of version 2 over version 1 into its first stage."""
    files = StateFiles(base / FOLDER)
    begun = start(None, 2, serving=1, settings=settings, now_s=time.time())
    event = Event(what=name, who=name, why="", at_s=time.time())
    change(files, files.latest(), advance(begun, now_s=time.time()), event)


def decisions(folder: Path) -> list[Figure]:
    """How long the decision takes, and how near the shares are to the weights."""
    from stoker.serve.dataplane.plane import DataPlane
    from stoker.serve.dataplane.requests import ModelSpec
    from stoker.serve.observability.metrics import ServeMetrics
    from stoker.serve.servables.catalog import Models

    served = {}
    for model, key in (("random", ""), ("sticky", "x-user")):
        for version in (1, 2):
            (folder / model / str(version)).mkdir(parents=True)
        begin_rollout(folder / model, settings=RolloutSettings(stages="10,100", key=key))
        served[model] = Served(base=folder / model, failed={})
    router = RolloutRouter(server="bench")
    router.refresh(served)
    plane = DataPlane(Models(poll_s=1.0), ServeMetrics())
    plane.router = router
    users = itertools.cycle([b"user-%d" % number for number in range(1_000)])
    found = []

    def key_of(_: str) -> bytes:
        return next(users)

    for name, model, most_us in (
        ("The decision at random", "random", DECISION_US),
        ("The decision by key", "sticky", DECISION_US),
        ("Without a rollout", "none", NO_ROLLOUT_US),
    ):
        spec = ModelSpec(name=model)
        took_us = [time_of(plane.route, spec, key_of) for _ in range(ROUNDS)]
        how = f"`DataPlane.route`, a loop of {CALLS:,} calls, CPU time; best of {ROUNDS} ({spread(took_us)})"
        found.append(figure(name, min(took_us), "us", at_most=most_us, how=how))
    return found


def time_of(call: Callable[..., object], *arguments: object) -> float:
    """CPU time of one of many calls in a loop, microseconds."""
    times = range(CALLS)
    began_s = time.process_time()
    for _ in times:
        call(*arguments)
    return (time.process_time() - began_s) / CALLS * 1e6


def shares() -> list[Figure]:
    """How near the shares are to the weights."""
    found = []
    for weight in (0.5, 0.1):
        split = TrafficSplit({1: 1.0 - weight, 2: weight}, salt="bench/1")
        most = 4.0 * (weight * (1.0 - weight) / REQUESTS) ** 0.5 * 100.0
        drawn: dict[str, Callable[[int], int]] = {
            "requests": lambda _, split=split: split.any_version(),
            "keys": lambda at, split=split: split.version_of(b"user-%d" % at),
        }
        for kind, version_of in drawn.items():
            share = sum(version_of(at) == 2 for at in range(REQUESTS)) / REQUESTS
            found.append(
                figure(
                    f"Share error at {100 - 100 * weight:g}/{100 * weight:g}, {REQUESTS:,} {kind}",
                    abs(share - weight) * 100.0,
                    "points",
                    at_most=round(most, 2),
                    how=f"{share:.2%} of the {kind} to the candidate; target: 4 standard errors",
                )
            )
    return found


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A server with both models."""

    server: servers.Server
    grpc_port: int

    def load(
        self, protocol: str, model: str, connections: int, versions: Sequence[int | None]
    ) -> Rest | Grpc:
        """Clients of a model, with the versions that they name, in shares of 90 and 10 %; None: they name none."""
        if protocol == "gRPC":
            messages = [message(model, version) for version in versions]
            return Grpc(self.grpc_port, messages, share=SHARE, connections=connections)
        paths = [
            f"/v1/models/{model}{'' if version is None else f'/versions/{version}'}:predict"
            for version in versions
        ]
        body = json.dumps({"instances": [[0.5] * 16]}).encode()
        return Rest(self.server.port, paths, body, share=SHARE, connections=connections)

    def versions(self) -> dict[str, float]:
        """Version of the split model -> requests that it has answered."""
        text = servers.post(self.server.port, "/monitoring/prometheus/metrics", b"")[1].decode()
        start = f'stoker_request_count{{model_name="{TWO}",version="'
        return {
            line.removeprefix(start).partition('"')[0]: float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith(start) and 'status="OK"' in line
        }


def message(model: str, version: int | None) -> bytes:
    """A call of one row."""
    from tensorflow_serving.apis.predict_pb2 import PredictRequest

    request = PredictRequest()
    request.model_spec.name = model
    if version is not None:
        request.model_spec.version.value = version
    tensor = request.inputs["input"]
    tensor.dtype = 1  # DT_FLOAT
    for size in (1, 16):
        tensor.tensor_shape.dim.add(size=size)
    tensor.float_val.extend([0.5] * 16)
    return request.SerializeToString()


@contextmanager
def served(scratch: Path) -> Iterator[Bench]:
    """A server with the model twice: as version 1 of `plain`, and as versions 1 and 2 of `split`."""
    write = (
        f"import sys; sys.path.append({str(ROOT / 'benchmarks' / 'serve')!r}); "
        f"import models, pathlib; models.write_models(pathlib.Path({str(scratch / 'made')!r}))"
    )
    subprocess.run([sys.executable, "-c", write], check=True)
    made = next((scratch / "made" / "mlp").glob("[0-9]*"))
    root = scratch / "models"
    for place in (f"{ONE}/1", f"{TWO}/1", f"{TWO}/2"):
        shutil.copytree(made, root / place)
    settings = RolloutSettings(stages="10:1000h,100", max_shift=1.0, alpha=1e-9)
    begin_rollout(root / TWO, settings=settings)
    port, grpc_port = servers.free_port(), servers.free_port()
    script = str(Path(__file__).with_name("overhead_server.py"))
    command = [sys.executable, script, str(port), str(grpc_port), str(root)]
    server = servers.Server("stoker", command, port=port, log=scratch / "serve.log")
    try:
        server.wait_until(lambda: servers.post(port, "/readyz", b"")[0] == 200)
        yield Bench(server=server, grpc_port=grpc_port)
    finally:
        server.stop()


def overheads(bench: Bench, *, rounds: int) -> list[Figure]:
    """The figures of each protocol and number of connections."""
    process = bench.server.pids()[0]
    for version in (1, 2):
        with closing(bench.load("REST", TWO, 1, (version,))) as load:
            window_us(load, process, turns=WARM_TURNS)
    found = []
    for protocol in ("REST", "gRPC"):
        for connections, most in CONNECTIONS.items():
            before = bench.versions()
            took = windows(bench, protocol, connections, rounds=rounds)
            after = bench.versions()
            found += overhead(protocol, connections, took, most=most)
            more = {version: after[version] - before[version] for version in after}
            found[-1]["how"] += f"; {more['2'] / sum(more.values()):.1%} to the candidate"
    return found


def windows(
    bench: Bench, protocol: str, connections: int, *, rounds: int
) -> dict[str, list[float]]:
    """Arm -> CPU time per request in each window, microseconds; the arms take turns."""
    process, turns = bench.server.pids()[0], WINDOW // connections
    took: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        loads = {}
        for arm, (model, versions) in ARMS.items():
            loads[arm] = stack.enter_context(
                closing(bench.load(protocol, model, connections, versions))
            )
            window_us(loads[arm], process, turns=turns)
        for number in range(rounds):
            for arm in ARMS if number % 2 else reversed(ARMS):
                took[arm].append(window_us(loads[arm], process, turns=turns))
    return took


def overhead(
    protocol: str, connections: int, took: dict[str, list[float]], *, most: float
) -> list[Figure]:
    """What routing costs, and what a second version costs by itself."""
    of = f"{protocol}, {connections} connection{'s' * (connections > 1)}"
    return [
        more(f"A second version with 10 % of the requests, {of}", took[NAMED], took[PLAIN]),
        more(f"Routing 90/10 to two versions, {of}", took[SPLIT], took[NAMED], at_most=most),
        more(f"A 90/10 split against one version, {of}", took[SPLIT], took[PLAIN], at_most=most),
    ]


def more(
    name: str, took: Sequence[float], than: Sequence[float], *, at_most: float | None = None
) -> Figure:
    """How much more CPU time requests take, by pairs of windows."""
    ratios = [100.0 * (more / less - 1.0) for more, less in zip(took, than, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    found = figure(
        name,
        statistics.median(ratios),
        "%",
        at_most=at_most,
        how=f"server CPU per request, median of {len(ratios)} pairs of windows of {WINDOW:,} requests "
        f"(half of them {low:.1f} to {high:.1f} %): {statistics.median(took):.1f} us and "
        f"{statistics.median(than):.1f} us",
    )
    sys.stderr.write(f"bench-rollout: {name}: {found['value']:.1f} %\n")
    return found


def main() -> None:
    """Measure, and write the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of windows")
    parser.add_argument("--only", choices=("decision",), help="leave the server out")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        found = [*decisions(Path(folder) / "decisions"), *shares()]
        if arguments.only is None:
            with served(Path(folder)) as bench:
                found = [*overheads(bench, rounds=arguments.rounds), *found]
    rollout_parts.write_part("overhead", found, results=arguments.results)


if __name__ == "__main__":
    main()
