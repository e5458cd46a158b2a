"""Gates that ask a real Prometheus."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.loopback import service
from tests.unit.rollout.cluster import SETTINGS, Cluster
from tests.unit.rollout.test_rollout_operations import saved_model

from stoker.cli.main import invoke
from stoker.core.errors import EXIT_DONE, EXIT_USER, ConfigError
from stoker.registry.repository import Repository
from stoker.rollout.control.hooks import read_user_results
from stoker.rollout.gates.gates import Verdict, compared_with_limits
from stoker.rollout.gates.prometheus import check_query, query_numbers
from stoker.rollout.http_call import NoAnswerError, send
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.state import Phase
from stoker.rollout.state.user_gates import UserGate

TOOLS = Path(__file__).resolve().parents[3] / ".tools"


def program() -> str:
    """Debian's Prometheus: on the PATH, or where `make test` has unpacked it."""
    unpacked = TOOLS / "prometheus" / "usr" / "bin" / "prometheus"
    found = shutil.which("prometheus") or (str(unpacked) if unpacked.is_file() else None)
    if found is None:
        outcome = TOOLS / "prometheus.txt"
        why = outcome.read_text().strip() if outcome.is_file() else "`make test` unpacks it"
        if os.environ.get("CI") == "true" and why == "installed":
            pytest.fail("`make test` unpacked prometheus, but it is not there")
        pytest.skip(f"no prometheus: {why}")
    return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 100ms}\n"
        f"scrape_configs: [{{job_name: self, static_configs: [{{targets: ['{address}']}}]}}]\n"
    )
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program(), *flags, f"--web.listen-address={address}"], stderr=log
        )
    try:
        wait_until_it_has_data(f"http://{address}")
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def wait_until_it_has_data(url: str) -> None:
    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        try:
            if query_numbers(url, "up", timeout_s=5.0) == [1.0]:
                return
        except NoAnswerError:
            pass
        time.sleep(0.1)
    raise AssertionError("Prometheus has no data")


@pytest.mark.parametrize(
    ("query", "verdict"),
    [
        ("up", Verdict.FAIL),
        ("up - 0.9", Verdict.PASS),
        ("scalar(up) * 0.1", Verdict.PASS),
        ('label_replace(up, "a", "1", "", "") or up * 0.1', Verdict.FAIL),
        ("no_such_metric", Verdict.INCONCLUSIVE),
        ("0 / vector(0)", Verdict.INCONCLUSIVE),
        ("1 / vector(0)", Verdict.INCONCLUSIVE),
    ],
)
def test_the_numbers_of_a_query_decide(prometheus: str, query: str, verdict: Verdict) -> None:
    found = query_numbers(prometheus, query, timeout_s=10.0)

    assert compared_with_limits("g", found, least=None, most=0.2).verdict is verdict


@pytest.mark.parametrize(
    ("query", "why"),
    [("up[1m]", "the query gives a matrix"), ('"text"', "the query gives a string")],
)
def test_a_value_that_is_not_a_number_gives_no_answer(
    prometheus: str, query: str, why: str
) -> None:
    with pytest.raises(NoAnswerError, match=why):
        query_numbers(prometheus, query, timeout_s=10.0)


def test_a_query_that_is_not_promql_is_refused_and_a_silent_prometheus_is_not_queried_twice(
    prometheus: str,
) -> None:
    assert check_query(prometheus, "rate(up[1m])", gate="g", timeout_s=10.0) == ""
    with pytest.raises(ConfigError, match=r"gate g must be PromQL.*unclosed left parenthesis"):
        check_query(prometheus, "rate(up[1m]", gate="g", timeout_s=10.0)
    for query in ("up[1m]", '"text"'):
        with pytest.raises(ConfigError, match="gate g must return numbers"):
            check_query(prometheus, query, gate="g", timeout_s=10.0)
    with service(is_silent=True) as silent:
        assert "no answer within 0.2 s" in check_query(silent.url, "up", gate="g", timeout_s=0.2)
        assert len(silent.got) == 1
    with service(status=404, body=b"<html>") as other:
        said = check_query(other.url, "up", gate="g", timeout_s=5.0)
    assert said == "status 404, not the answer of a Prometheus"


def test_start_refuses_a_query_that_is_not_promql_and_changes_nothing(
    prometheus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = Repository(tmp_path / "models")
    for noise in "ab":
        repository.push(saved_model(tmp_path / noise, noise=noise), "taxi")
    gates = tmp_path / "gates.yaml"
    section = "errors: {{prometheus: '{url}', query: '{query}', max: 0.2}}\n"

    def start(query: str, url: str = prometheus) -> int:
        gates.write_text(section.format(url=url, query=query))
        arguments = ["taxi", "2", "--models", str(repository.root), "--gates", str(gates)]
        return invoke(["rollout", "start", "--detach", *arguments], debug=False)

    assert start("sum(rate(x{version=${candidate}}[1m]))") == EXIT_USER
    assert "The query of gate errors must be PromQL" in capsys.readouterr().err
    assert not (repository.root / "taxi" / ".rollout").exists()

    assert start('sum(rate(x{version="${candidate}"}[1m]))') == EXIT_DONE
    gate = ModelRollouts(repository.root, "taxi").status().state.settings.user_gates[0]
    assert gate.query == 'sum(rate(x{version="${candidate}"}[1m]))'
    assert gate.question(model="taxi", candidate=2, baseline=1).count('version="2"') == 1


def test_a_silent_prometheus_does_not_keep_a_rollout_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = Repository(tmp_path / "models")
    for noise in "ab":
        repository.push(saved_model(tmp_path / noise, noise=noise), "taxi")
    with service() as gone:
        pass
    gate = UserGate(name="errors", prometheus=gone.url, query="up", max=1.0)
    rollouts = ModelRollouts(repository.root, "taxi")
    rollouts.start(2, replace(SETTINGS, user_gates=(gate,)), why="")

    assert "gate errors is inconclusive until Prometheus answers" in caplog.text
    found = rollouts.status().gates[-1]
    assert (found.gate, found.verdict) == ("errors", Verdict.INCONCLUSIVE)


def test_a_rollout_is_rolled_back_by_a_query(prometheus: str, tmp_path: Path) -> None:
    folder = tmp_path / "m" / ".rollout"
    folder.mkdir(parents=True)
    cluster = Cluster(folder=folder)
    gate = UserGate(name="errors", prometheus=prometheus, query="up * ${candidate}", max=1.5)
    cluster.start(replace(SETTINGS, user_gates=(gate,), dry_run=("slow_p99", "slow_p50")))
    controller = cluster.controller()
    end_s = time.monotonic() + 30.0
    while cluster.state().phase is not Phase.ROLLED_BACK and time.monotonic() < end_s:
        cluster.now_s += 0.1
        cluster.answer(20)
        controller.step()
        time.sleep(0.02)

    assert cluster.state().reason == "errors: it gave 2, accepted are -inf to 1.5"
    assert read_user_results(folder, cluster.state())[0].verdict is Verdict.FAIL
    assert send(f"{prometheus}/-/healthy", timeout_s=5.0).is_success
