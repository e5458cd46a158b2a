"""A real Prometheus and Alertmanager: `stoker monitor up`, every panel, and faults that reach a webhook."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import FAULTS, fire_all, free_port
from player import Inbox, Machine, inbox, machine
from tests.prometheus_programs import FOLDER, program

from stoker.core.errors import EXIT_CHECK, EXIT_DONE, EXIT_USER
from stoker.monitor.dashboards import dashboard_texts
from stoker.monitor.rules.groups import all_groups
from stoker.monitor.settings import RuleSettings


def stoker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`stoker monitor` with Debian's programs on the PATH."""
    path = f"{os.environ['PATH']}:{FOLDER}"
    return subprocess.run(
        [sys.executable, "-m", "stoker", "monitor", *arguments],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@dataclass
class Running:
    """What `up` started, what it watches, and whom it notifies."""

    machine: Machine
    notes: Inbox
    state: Path
    address: str
    ports: tuple[str, str]

    def ask(self, query: str) -> list[Any]:
        """The samples of a query, now."""
        path = "/api/v1/query?" + urllib.parse.urlencode({"query": query})
        connection = http.client.HTTPConnection(self.address, timeout=10.0)
        connection.request("GET", path)
        content = json.loads(connection.getresponse().read())
        connection.close()
        assert content["status"] == "success", f"{query}: {content}"
        return list(content["data"]["result"])

    def wait_for(self, query: str, timeout_s: float = 40.0) -> list[Any]:
        """Its samples, as soon as there are some."""
        end_s = time.monotonic() + timeout_s
        while not (found := self.ask(query)) and time.monotonic() < end_s:
            time.sleep(0.2)
        return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    for name in ("prometheus", "alertmanager"):
        program(name)
    folder = tmp_path_factory.mktemp("monitor")
    state = folder / "state"
    ports = (str(free_port()), str(free_port()))
    with inbox() as notes, machine(folder / "runs") as found:
        servers = [option for address in found.servers for option in ("--server", address)]
        done = stoker(
            *("up", "--runs", str(found.runs), *servers, "--exporter", found.exporter_address),
            *("--webhook", notes.url, "--time-scale", "60", "--state", str(state)),
            *("--prometheus-port", ports[0], "--alertmanager-port", ports[1]),
        )
        assert done.returncode == EXIT_DONE, done.stderr
        try:
            yield Running(found, notes, state, f"127.0.0.1:{ports[0]}", ports)
        finally:
            stoker("down", "--state", str(state))


def test_every_target_is_scraped(running: Running) -> None:
    assert running.wait_for('count(up{job=~"stoker-.*"} == 1) == 4')

    found = running.ask('up{job=~"stoker-.*"}')

    assert sorted(each["metric"]["job"] for each in found) == [
        *("stoker-exporter", "stoker-server", "stoker-server", "stoker-train")
    ]


def panels() -> list[tuple[str, str]]:
    """Title and PromQL of each panel and variable, as Grafana asks with all values chosen."""
    found = []
    for name, text in dashboard_texts().items():
        board = json.loads(text)
        found += [
            (f"{name}: {panel['title']}", target["expr"])
            for panel in board["panels"]
            for target in panel.get("targets", ())
        ]
        for variable in board["templating"]["list"][1:]:
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            query = f"count by ({asked[2]}) ({asked[1]})"
            found.append((f"{name}: ${variable['name']}", query))
    return found


def chosen(expr: str) -> str:
    expr = re.sub(r"\$(?:run|experiment|node|gpu|model|version)\b", ".*", expr)
    return expr.replace("$__rate_interval", "5s")


def test_every_panel_and_variable_has_data(running: Running) -> None:
    running.wait_for("model:stoker_request_errors:ratio_rate5m")
    running.wait_for("run:stoker_train_step_seconds:p99_5m")

    without = [title for title, expr in panels() if not running.wait_for(chosen(expr), 10.0)]

    assert without == []


def test_every_recorded_ratio_has_data(running: Running) -> None:
    groups = all_groups(RuleSettings())
    names = {rule.record for group in groups for rule in group.recordings}
    # The recorded server batches without padding.
    names -= {"model:stoker_batch_padding:ratio_rate5m"}

    assert [name for name in sorted(names) if not running.wait_for(name, 10.0)] == []


def test_status_shows_programs_targets_and_alerts(running: Running) -> None:
    assert running.wait_for('ALERTS{alertname="Watchdog",alertstate="firing"}')

    shown = stoker("status", "--state", str(running.state))

    assert shown.returncode == EXIT_DONE, shown.stderr
    assert f"Prometheus: ready, http://127.0.0.1:{running.ports[0]}\n" in shown.stdout
    assert f"Alertmanager: ready, http://127.0.0.1:{running.ports[1]}\n" in shown.stdout
    assert f"target stoker-server {running.machine.servers[0]}: up\n" in shown.stdout
    assert "firing Watchdog: Alerts arrive\n" in shown.stdout


def test_a_second_up_and_a_taken_port_are_one_line_and_change_nothing(
    running: Running, tmp_path: Path
) -> None:
    again = stoker("up", "--state", str(running.state))
    taken = stoker("up", "--state", str(tmp_path), "--prometheus-port", running.ports[0])

    assert (again.returncode, taken.returncode) == (EXIT_USER, EXIT_USER)
    assert again.stderr == (
        "stoker: Prometheus and Alertmanager must not run yet. Received: running, "
        f"http://{running.address}, by {running.state}. End it: stoker monitor down.\n"
    )
    assert "Prometheus's port must be free. Received: " + running.address in taken.stderr
    assert taken.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.yml"))
    assert running.ask("vector(1)")


def test_a_healthy_machine_raises_the_watchdog_only(running: Running) -> None:
    assert running.notes.wait_for({"Watchdog"}, 30.0)

    assert set(running.notes.seen_s) == {"Watchdog"}


def test_each_fault_reaches_the_webhook(running: Running) -> None:
    """The last of these tests: the machine is not healthy after it."""
    took_s = fire_all(running.machine, running.notes, timeout_s=60.0)

    assert set(took_s) == set(FAULTS)
    (bound,) = [
        alert
        for content in running.notes.contents
        for alert in content["alerts"]
        if alert["labels"]["alertname"] == "StokerInputBound"
    ][:1]
    assert bound["annotations"]["summary"].startswith("Run 20261127T180000Z-4f1a waits for input")
    assert bound["annotations"]["runbook_url"].endswith("runbooks.md#stokerinputbound")
    assert set(running.notes.seen_s) == {"Watchdog", *FAULTS}


def test_an_ended_program_is_named_and_down_ends_the_other(running: Running) -> None:
    """After the faults: Alertmanager is gone then."""
    started = json.loads((running.state / "started.json").read_text())
    alertmanager = next(each for each in started if each["name"] == "Alertmanager")
    os.kill(alertmanager["pid"], 9)
    shown = stoker("status", "--state", str(running.state))

    assert shown.returncode == EXIT_CHECK
    assert "Alertmanager: ended" in shown.stdout

    ended = stoker("down", "--state", str(running.state))
    assert ended.stdout == f"ended Prometheus, http://{running.address}\n"
    assert stoker("down", "--state", str(running.state)).stdout == "nothing to end\n"
