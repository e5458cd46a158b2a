"""An A/B test through two real servers of one repository, from its begin to the chosen version."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from stoker.cli.main import invoke
from stoker.core.errors import EXIT_DONE, EXIT_USER
from stoker.registry.repository import Repository
from stoker.rollout.ab.assignments import logs_of
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.state import FOLDER

ADMIN = {"Authorization": "Bearer an-operator-of-this-shop"}
KEYS = """
- {name: shop, role: predict, key: only-for-predictions}
- {name: operator, role: admin, key: an-operator-of-this-shop}
"""


@dataclass
class Serving:
    """A server process, and a client of it."""

    process: subprocess.Popen[str]
    port: int

    def send(self, path: str, content: object = None, **headers: str) -> tuple[int, Any]:
        """Status and body of an answer; without content the request is a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = None if content is None else json.dumps(content)
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def version(self, user: str = "", **headers: str) -> int:
        """The version that answers a user: each adds its number."""
        if user:
            headers["x-user"] = user
        status, body = self.send("/v1/models/m:predict", {"instances": [[10.0]]}, **headers)
        assert status == 200, body
        return int(body["predictions"][0][0] - 10.0)

    def report(self, outcomes: dict[str, float], **headers: str) -> tuple[int, Any]:
        """Send outcomes of users."""
        given = [{"key": user, "value": value} for user, value in outcomes.items()]
        return self.send("/v1/rollouts/m/outcomes", {"outcomes": given}, **headers)


def exported(path: Path, *, addend: float) -> Path:
    """y = x + addend."""
    spec = tf.TensorSpec([None, 1], tf.float32, name="x")
    call = tf.function(lambda x: {"y": x + addend}, input_signature=[spec])
    tf.saved_model.save(tf.Module(), str(path), signatures={"serving_default": call})
    return path


class WithTable(tf.Module):
    table: tf.lookup.StaticVocabularyTable


def slow_to_load(folder: Path) -> Path:
    """Version 3, with a table of a million words."""
    (folder / "words.txt").write_text("\n".join(map(str, range(1_000_000))))
    module = WithTable()
    module.table = tf.lookup.StaticVocabularyTable(
        tf.lookup.TextFileInitializer(
            str(folder / "words.txt"),
            *(tf.string, tf.lookup.TextFileIndex.WHOLE_LINE),
            *(tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER),
        ),
        num_oov_buckets=1,
    )
    spec = tf.TensorSpec([None, 1], tf.float32, name="x")

    @tf.function(input_signature=[spec])
    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": x + tf.cast(module.table.lookup(tf.constant("3")), tf.float32)}

    tf.saved_model.save(module, str(folder / "3"), signatures={"serving_default": call})
    return folder / "3"


def rollout(models: Path, *arguments: str) -> int:
    """The exit code of a command."""
    return invoke(["rollout", *arguments, "--models", str(models)], debug=False)


@contextmanager
def serving(models: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A server that has begun to start."""
    ports = ["--rest_api_port", "0", "--port", "0", "--poll-s", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "serve", str(models), *ports, "--json", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ready(process: subprocess.Popen[str]) -> Serving:
    assert process.stdout is not None
    return Serving(process=process, port=json.loads(process.stdout.readline())["rest_port"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ab")
    repository = Repository(folder / "models")
    for version in (1, 2):
        repository.push(exported(folder / str(version), addend=float(version)), "m")
    return repository.root


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ab", "m", "--arms", "1=50,2=40", "--key", "u"], "must sum to 100. Received: 1=50,2=40"),
        (["ab", "m", "--arms", "1=100", "--key", "u"], "at least two arms"),
        (["ab", "m", "--arms", "1=50,1=50", "--key", "u"], "must be a different version"),
        (["ab", "m", "--arms", "1=99.9999,2=0.0001", "--key", "u"], "at least 0.01 %"),
        (["ab", "m", "--arms", "1=nan,2=50", "--key", "u"], "at least 0.01 %"),
        (["ab", "m", "--arms", "1=50,two=50", "--key", "u"], "'two=50' is not an arm"),
        (["ab", "m", "--arms", "1=50,9=50", "--key", "u"], "must have a version 9"),
        (["ab", "m", "--arms", "1=50,2=50", "--key", "u", "--baseline", "3"], "one of its arms"),
        (["ab", "m", "--arms", "1=50,2=50", "--key", "u", "--metric", "mean"], "first or sum"),
        (["ab", "m", "--arms", "1=50,2=50", "--key", ""], "needs a key"),
        (["outcome", "m", "--key", "a", "--value", "1"], "has no A/B test"),
        (["result", "m"], "has no A/B test"),
    ],
)
def test_a_test_that_cannot_begin_changes_nothing(
    models: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(models, *arguments) == EXIT_USER
    assert said in capsys.readouterr().err
    assert not (models / "m" / FOLDER).exists()


def test_an_ab_test_from_the_first_user_to_the_chosen_version(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    begin = ["--arms", "1=50,2=50", "--key", "x-user", "--max-value", "1", "--why", "retrained"]
    assert rollout(models, "ab", "m", *begin) == EXIT_DONE
    assert "A/B test of version 1 50%, version 2 50%; baseline" in capsys.readouterr().out
    with (
        serving(models) as one,
        serving(models, "--keys-file", str(tmp_path / "keys.yaml")) as two,
    ):
        first, second = ready(one), ready(two)
        arms = users_get_and_keep_a_version(first, second)
        outcomes_are_recorded_or_refused(models, first, second, arms)
        the_result_is_the_same_over_rest(models, first, second, capsys)
        the_result_holds_after_a_kill(models, first, arms, capsys)
        the_chosen_version_takes_all_traffic(models, second, capsys)
        users_count_once_all_arms_are_loaded(models, tmp_path, second, capsys)


def users_get_and_keep_a_version(first: Serving, second: Serving) -> dict[str, int]:
    users = [f"user-{number}" for number in range(400)]
    arms = {user: first.version(user) for user in users}
    assert set(arms.values()) == {1, 2}
    assert 150 < sum(arm == 2 for arm in arms.values()) < 250
    assert {user: second.version(user, **ADMIN) for user in users[:40]} == {
        user: arms[user] for user in users[:40]
    }
    assert {first.version() for _ in range(10)} == {1}
    return arms


def outcomes_are_recorded_or_refused(
    models: Path, first: Serving, second: Serving, arms: dict[str, int]
) -> None:
    logs = logs_of(models / "m" / FOLDER, 1)
    # The last user was answered by the first server only, and the second server learns of it at once.
    late = {"just-now": 1.0}
    arms["just-now"] = first.version("just-now")
    assert second.report(late, **ADMIN) == (200, {"recorded": 1})

    before = {path.name: path.read_bytes() for path in logs.glob("outcomes-*")}
    status, body = second.report({"user-0": 1.0, "nobody": 1.0}, **ADMIN)
    assert (status, "taken part in the A/B test. Received: 'nobody'" in body["error"]) == (
        404,
        True,
    )
    assert second.report({"user-0": 2.0}, **ADMIN)[0] == 400
    assert second.report(late, Authorization="Bearer only-for-predictions")[0] == 403
    assert second.report(late)[0] == 401
    assert first.send("/v1/rollouts/m/outcomes", {"outcomes": [{"key": "user-0"}]})[0] == 400
    assert first.send("/v1/rollouts/other/outcomes", {"outcomes": []})[0] == 400
    assert first.send("/v1/rollouts/x/outcomes", {"outcomes": [{"key": "a", "value": 1}]})[0] == 404
    command = ["outcome", "m", "--value", "1", "--key"]
    assert rollout(models, *command, "nobody") == EXIT_USER
    assert {path.name: path.read_bytes() for path in logs.glob("outcomes-*")} == before

    assert rollout(models, *command, "user-0") == EXIT_DONE
    random.seed(1)
    several = {
        user: float(random.random() < (0.9 if arm == 2 else 0.45))
        for user, arm in arms.items()
        if user not in ("user-0", "just-now")
    }
    assert first.report(several) == (200, {"recorded": 399})
    # A key counts once, whatever else it does.
    assert first.report(dict.fromkeys(several, 1.0))[0] == 200


def the_result_is_the_same_over_rest(
    models: Path, first: Serving, second: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/v1/rollouts/m/result"
    capsys.readouterr()
    assert rollout(models, "result", "m", "--json") == EXIT_DONE
    result = json.loads(capsys.readouterr().out)

    assert len(result["arms"]) == 2
    assert first.send(path) == second.send(path, **ADMIN) == (200, result)
    assert second.send(path, Authorization="Bearer only-for-predictions")[0] == 403
    assert second.send(path)[0] == 401
    # What is refused is one line, also for a model without a server.
    assert first.send(path, {})[0] == first.send("/v1/rollouts/x/result")[0] == 404


def the_result_holds_after_a_kill(
    models: Path, first: Serving, arms: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    def result() -> dict[str, Any]:
        assert rollout(models, "result", "m", "--json") == EXIT_DONE
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    capsys.readouterr()
    found = result()
    one, two = found["arms"]
    assert [one["keys"], two["keys"]] == [sum(arm == n for arm in arms.values()) for n in (1, 2)]
    assert one["keys_with_outcome"] + two["keys_with_outcome"] == len(arms) == 401
    assert (one["verdict"], two["verdict"]) == ("baseline", "higher")
    assert 0.0 < two["low"] < two["difference"] < two["high"] < 1.0
    assert found["warnings"] == []

    first.process.kill()
    first.process.wait()
    log = next((models / "m" / FOLDER / "ab" / "1").glob("assignments-*"))
    with log.open("a") as file:
        file.write('{"at":1.0,"key":"00')  # as a machine that stops may leave it
    assert result() == {
        **found,
        "warnings": ["1 lines of the logs are cut or damaged, and left out."],
    }
    assert rollout(models, "result", "m") == rollout(models, "status", "m") == EXIT_DONE
    text = capsys.readouterr().out
    assert "higher" in text
    assert "warning: 1 lines" in text
    assert "user-" not in log.read_text()


def the_chosen_version_takes_all_traffic(
    models: Path, second: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    for refused, said in (
        (["promote", "m"], "An A/B test has no stages"),
        (["promote", "m", "--version", "7"], "must be one of its arms"),
        (["start", "m", "2"], "Only one rollout"),
        (["ab", "m", "--arms", "1=50,2=50", "--key", "u"], "Only one rollout or A/B test"),
    ):
        assert rollout(models, *refused) == EXIT_USER
        assert said in capsys.readouterr().err
    assert rollout(models, "promote", "m", "--version", "2") == EXIT_DONE
    end_s = time.monotonic() + 20.0
    while second.version(**ADMIN) != 2 and time.monotonic() < end_s:
        time.sleep(0.1)
    assert {second.version(f"user-{number}", **ADMIN) for number in range(40)} == {2}

    assert second.report({"user-0": 1.0}, **ADMIN)[0] == 404
    assert rollout(models, "outcome", "m", "--key", "user-0", "--value", "1") == EXIT_USER
    assert "must be in an A/B test" in capsys.readouterr().err
    assert rollout(models, "result", "m") == EXIT_DONE
    assert "over (completed)" in capsys.readouterr().out
    assert [event.what for event, _ in ModelRollouts(models, "m").history()] == ["ab", "promote"]


def users_count_once_all_arms_are_loaded(
    models: Path, folder: Path, second: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    Repository(models).push(slow_to_load(folder), "m")
    assert rollout(models, "ab", "m", "--arms", "2=50,3=50", "--key", "x-user") == EXIT_DONE
    users = 0
    while second.version(f"new-{users}", **ADMIN) != 3:
        users += 1
        assert users < 20_000
    # Each user gets version 3 with a probability of one half.
    assert users > 40
    capsys.readouterr()
    assert rollout(models, "result", "m", "--json") == EXIT_DONE
    assert sum(arm["keys"] for arm in json.loads(capsys.readouterr().out)["arms"]) < 20
