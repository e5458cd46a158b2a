"""A rollout through a real server: versions earn their traffic, and bad ones lose it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from keras.export import ExportArchive
from tests.loopback import Service, service

from stoker.cli.main import invoke
from stoker.core.errors import EXIT_CHECK, EXIT_DONE, EXIT_USER
from stoker.registry.repository import Repository
from stoker.rollout.gates.gates import Verdict
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.state import Phase, RolloutState

LIMIT_S = 90.0
"""Longest that a rollout may take here; on a quiet machine each takes 10 s."""

CHECKS = """
def good(rollout):
    return rollout["candidate"] == 2
"""

FAST = ["--step-time", "1s", "--warm-up", "0s", "--min-requests", "200"]


def exported(path: Path, *, addend: float, fails_at: float = -1.0) -> Path:
    """y = x + addend; a row with the value `fails_at` is an error."""

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.control_dependencies([tf.debugging.assert_none_equal(x, fails_at)]):
            return {"y": x + addend}

    archive = ExportArchive()
    spec = [tf.TensorSpec([None, 1], tf.float32, name="x")]
    archive.add_endpoint("serving_default", tf.function(call), input_signature=spec)
    archive.write_out(str(path), verbose=False)
    return path


@dataclass
class Serving:
    """A server process, and a client of it."""

    models: Path
    process: subprocess.Popen[str]
    port: int
    hook: Service | None = None
    """What its controller asks and reports to."""

    answers: list[tuple[int, float | None]] = field(default_factory=list)
    """Status and y - x of each answer."""

    def ask(self, x: float, *, path: str = "/v1/models/m:predict") -> float | None:
        status, body = self.send(path, {"instances": [[x]]})
        answer = body["predictions"][0][0] - x if status == 200 else None
        self.answers.append((status, answer))
        return answer

    def send(self, path: str, content: object = None) -> tuple[int, Any]:
        """Status and body of an answer on a connection of its own; without content the request is a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = None if content is None else json.dumps(content)
        try:
            connection.request("GET" if body is None else "POST", path, body)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    @property
    def workers(self) -> set[int]:
        """Process numbers of the workers."""
        parent = self.process.pid
        return {int(n) for n in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()}

    def kill(self) -> None:
        """End the process as a crash of the machine would."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def load(self, until: Phase) -> RolloutState:
        """Ask all the time until the rollout is in a phase."""
        end_s, at = time.monotonic() + LIMIT_S, 0
        while time.monotonic() < end_s:
            for _ in range(100):
                at += 1
                self.ask(float(at % 10))
            state = ModelRollouts(self.models, "m").status().state
            if state.phase is until:
                return state
        raise AssertionError(f"not {until}: {state}")


def rollout(models: Path, *arguments: str) -> int:
    """The exit code of a command."""
    return invoke(["rollout", *arguments, "--models", str(models)], debug=False)


def serve(models: Path, ready: Path, *more: str) -> Serving:
    flags = ["--rest_api_port", "0", "--port", "0", "--ready-file", str(ready), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "serve", str(models), *flags, "--poll-s", "0.2", *more],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return Serving(
        models=models, process=process, port=json.loads(process.stdout.readline())["rest_port"]
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    folder = tmp_path_factory.mktemp("rollout")
    repository = Repository(folder / "models")
    for version, fails_at in ((1, -1.0), (2, -1.0)):
        repository.push(exported(folder / str(version), addend=version, fails_at=fails_at), "m")
    (folder / "checks.py").write_text(CHECKS)
    (folder / "gates.yaml").write_text("mine: {python: 'checks:good', every_s: 0.5}\n")
    with service() as hook:
        own = ["--gates", str(folder / "gates.yaml"), "--inconclusive-limit", "10m", "--strict"]
        own += ["--webhook", f"stage,end={hook.url}", "--notify", f"{hook.url}/slack"]
        start = ["start", "m", "2", "--detach", "--canary", "50,100", *FAST, *own]
        assert rollout(repository.root, *start) == EXIT_DONE
        running = [serve(repository.root, folder / "ready.json", "--gate-folder", str(folder))]
        running[0].hook = hook
        yield running
        for each in running:
            each.kill()


def test_a_rollout_from_the_first_percent_to_a_rollback(
    serving: list[Serving], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serving[0]
    # The state decides, not "the newest": the candidate waits until the baseline is measured.
    assert [server.ask(1.0) for _ in range(20)] == [1.0] * 20
    assert server.ask(1.0, path="/v1/models/m/versions/2:predict") == 2.0

    done = server.load(Phase.COMPLETED)
    assert (done.candidate, done.share) == (2, 1.0)
    assert [server.ask(1.0) for _ in range(20)] == [2.0] * 20
    assert {status for status, _ in server.answers} == {200}
    shared = Counter(answer for _, answer in server.answers)
    assert shared[1.0] > 1_000

    # The gate and the webhook were called by the process that judges, and the changes reported.
    assert done.settings.strict
    assert server.hook is not None
    calls = [(each["event"], each["stage"]) for each in server.hook.contents() if "event" in each]
    assert list(dict.fromkeys(calls)) == [("stage", "50 %"), ("end", "100 %")]
    texts = [json.loads(body)["text"] for path, body in server.hook.got if path == "/slack"]
    assert "version 2: start by" in texts[0]
    verdicts = {
        each.gate: each.verdict for each in ModelRollouts(server.models, "m").status().gates
    }
    assert verdicts["mine"] is Verdict.PASS

    # A push only adds a candidate, which here fails for each tenth request.
    Repository(server.models).push(exported(tmp_path / "3", addend=3.0, fails_at=5.0), "m")
    time.sleep(1.0)  # several polls of the repository: the servers know version 3
    assert [server.ask(1.0) for _ in range(20)] == [2.0] * 20
    before = len(server.answers)
    with ThreadPoolExecutor(1) as pool:
        start = ("start", "m", "3", "--canary", "20,100", *FAST)
        followed = pool.submit(rollout, server.models, *start)
        back = server.load(Phase.ROLLED_BACK)
        assert followed.result() == EXIT_CHECK
    shown = capsys.readouterr()
    assert (
        "version 3 running, 20 % of the traffic; baseline version 2; stage 1: 20 %\n" in shown.out
    )
    assert "Version 3 was rolled back to version 2. Received: bad" in shown.err
    assert back.rejected == (3,)
    assert back.reason.startswith("bad_answers: candidate ")
    failed = sum(status != 200 for status, _ in server.answers[before:])
    assert 0 < failed < 60
    time.sleep(2.0)  # the longest time until the workers know
    assert [server.ask(5.0) for _ in range(20)] == [2.0] * 20

    # kill -9, and another server: the version stays out.
    server.kill()
    again = serve(server.models, tmp_path / "again.json")
    serving.append(again)
    assert [again.ask(5.0) for _ in range(20)] == [2.0] * 20
    what = [event.what for event, _ in ModelRollouts(again.models, "m").history()]
    assert what.count("start") == 2
    assert what[-1] == "roll back"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["start", "m", "9"], "must have a version 9"),
        (["start", "m", "1", "--canary", "50,10"], "must rise to 100"),
        (["start", "other", "1"], "must hold the model 'other'"),
        (["pause", "m"], "Only a running rollout can be paused"),
        (["start", "m", "3", "--step-time", "5"], "a duration from 0 s to a year, with its unit"),
        (["start", "m", "-1"], "-1"),
        (["start", "../m", "1"], "model"),
        (["start", "m", "3", "--canary", "10,nan,100"], "'nan' is not a stage"),
        (["start", "m", "3", "--dry-run", "slow_p9"], "'slow_p9' is not a gate"),
        (["start", "m", "3", "--key", "x user"], "must be the name of a header, or cookie:NAME"),
        (["start", "m", "3", "--key", "cookie:"], "must be the name of a header, or cookie:NAME"),
        (["start", "m", "3", "--server", "http://"], "must be a URL"),
        (["start", "m", "3", "--server-memory", "nan"], "--server-memory"),
        (["start", "m", "3", "--shadow-tolerance", "nan"], "must be a number of at least 0"),
        (["promote", "m", "--version", "3"], "--version must be used for an A/B test only"),
        (["rollback", "m", "--to", "9"], "must have a version 9"),
    ],
)
def test_a_command_that_cannot_be_followed_changes_nothing(
    serving: list[Serving], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    models = serving[0].models
    before = ModelRollouts(models, "m").history()

    assert rollout(models, *arguments) == EXIT_USER
    assert said in capsys.readouterr().err
    assert ModelRollouts(models, "m").history() == before


def test_status_and_history_as_text_and_as_json(
    serving: list[Serving], capsys: pytest.CaptureFixture[str]
) -> None:
    models = serving[0].models
    assert rollout(models, "status", "m") == rollout(models, "history", "m") == EXIT_DONE
    text = capsys.readouterr().out
    assert "version 3 rolled back, 0 % of the traffic; baseline version 2" in text
    assert "bad_answers: fail; candidate" in text
    assert rollout(models, "status", "m", "--json") == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["gates"][0]["verdict"] == "fail"
    assert rollout(models, "history", "m", "--json") == EXIT_DONE
    assert json.loads(capsys.readouterr().out)[-1]["what"] == "roll back"


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[Serving]:
    """A server of two processes; version 1 takes all traffic, and version 2 waits."""
    repository = Repository(tmp_path / "models")
    for version in (1, 2):
        repository.push(exported(tmp_path / str(version), addend=version), "m")
        ModelRollouts(repository.root, "m").hold(why="a push takes no traffic")
    server = serve(repository.root, tmp_path / "ready.json", "--workers", "2")
    yield server
    server.kill()


@pytest.mark.soak
def test_admins_change_a_rollout_over_rest_whichever_of_two_workers_answers(
    two_workers: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    server = two_workers
    wait_for(lambda: len(server.workers) == 2)
    settings = {"stages": "50,100", "step_time_s": 600.0, "warm_up_s": 0.0}
    begin = {"version": 2, "settings": settings, "why": "retrained"}
    status, begun = server.send("/v1/rollouts/m/start", begin)
    assert (status, begun["candidate"], begun["baseline"]) == (200, 2, 1), begun
    assert server.send("/v1/rollouts/m/start", begin)[0] == 400
    assert server.send("/v1/rollouts/m/promote", {})[1]["phase"] == "running"

    def shown() -> set[str]:
        """What new connections see; the kernel gives each of them to one of the workers."""
        answers = [server.send("/v1/rollouts/m") for _ in range(16)]
        return {f"{status} {body['phase']} {body['share']}" for status, body in answers}

    assert shown() == {"200 running 0.5"}
    wait_for(lambda: {server.ask(1.0) for _ in range(20)} == {1.0, 2.0})
    assert server.send("/v1/rollouts/m")[1]["bad_answers_needed"] > 0

    def shows_what_a_rollback_takes() -> bool:
        assert rollout(server.models, "status", "m") == EXIT_DONE
        return "more bad answers roll back, after about" in capsys.readouterr().out

    wait_for(shows_what_a_rollback_takes)  # workers write their counts every second
    killed = min(server.workers)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: len(server.workers - {killed}) == 2)
    assert shown() == {"200 running 0.5"}

    assert server.send("/v1/rollouts/m/rollback", {"why": "page 17"})[1]["phase"] == "rolled back"
    assert shown() == {"200 rolled back 0.0"}
    time.sleep(2.0)  # the longest time until both workers know
    assert [server.ask(1.0) for _ in range(40)] == [1.0] * 40
    history = server.send("/v1/rollouts/m")[1]["history"]
    operators = [each for each in history if "over REST" in each["who"]]
    assert [each["what"] for each in operators] == ["start", "promote", "rollback"]
    assert operators[-1]["why"] == "page 17"


def wait_for(claim: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < end_s
        time.sleep(0.1)
