"""A real Prometheus and Alertmanager: `stoker monitor up`, every panel, and faults that reach a webhook."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import FAULTS, fire_all
from player import Machine, machine
from tests.integration.monitor.stack import Stack, chosen, panels, stoker, watching

from stoker.core.errors import EXIT_CHECK, EXIT_DONE, EXIT_USER
from stoker.monitor.rules.groups import all_groups
from stoker.monitor.settings import RuleSettings


@dataclass
class Running:
    """A machine of written metrics, and what watches it."""

    machine: Machine
    stack: Stack


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("monitor")
    with machine(folder / r"runs [1]\?") as found:  # characters with a meaning in a pattern
        server = ("--server", found.second_server)
        exporter = ("--exporter", found.exporter_address)
        with watching(folder, "--runs", str(found.runs), *server, *exporter) as stack:
            yield Running(found, stack)


def test_every_target_is_scraped(running: Running) -> None:
    assert running.stack.wait_for('count(up{job=~"stoker-.*"} == 1) == 4')

    found = running.stack.ask('up{job=~"stoker-.*"}')

    assert sorted(each["metric"]["job"] for each in found) == [
        *("stoker-exporter", "stoker-server", "stoker-server", "stoker-train")
    ]


def test_every_panel_and_variable_has_data(running: Running) -> None:
    running.stack.wait_for("model:stoker_request_errors:ratio_rate5m")
    running.stack.wait_for("run:stoker_train_step_seconds:p99_5m")

    without = [title for title, expr in panels() if not running.stack.wait_for(chosen(expr), 10.0)]

    assert without == []


def test_every_recorded_ratio_has_data(running: Running) -> None:
    groups = all_groups(RuleSettings())
    names = {rule.record for group in groups for rule in group.recordings}
    # The written server batches without padding.
    names -= {"model:stoker_batch_padding:ratio_rate5m"}

    assert [name for name in sorted(names) if not running.stack.wait_for(name, 10.0)] == []


def test_status_shows_programs_targets_and_alerts(running: Running) -> None:
    assert running.stack.wait_for('ALERTS{alertname="Watchdog",alertstate="firing"}')

    shown = stoker("status", "--state", str(running.stack.state))

    assert shown.returncode == EXIT_DONE, shown.stderr
    assert f"Prometheus: ready, http://127.0.0.1:{running.stack.ports[0]}\n" in shown.stdout
    assert f"Alertmanager: ready, http://127.0.0.1:{running.stack.ports[1]}\n" in shown.stdout
    assert f"target stoker-server {running.machine.named_server}: up\n" in shown.stdout
    assert "firing Watchdog: Alerts arrive\n" in shown.stdout


def test_series_of_earlier_targets_are_seen_for_seconds_not_minutes(running: Running) -> None:
    with urllib.request.urlopen(f"http://{running.stack.address}/api/v1/status/flags") as answer:
        flags = json.loads(answer.read())["data"]

    assert flags["query.lookback-delta"] == "20s"


def test_a_second_up_and_a_taken_port_are_one_line_and_change_nothing(
    running: Running, tmp_path: Path
) -> None:
    again = stoker("up", "--state", str(running.stack.state))
    taken = stoker("up", "--state", str(tmp_path), "--prometheus-port", running.stack.ports[0])

    assert (again.returncode, taken.returncode) == (EXIT_USER, EXIT_USER)
    assert again.stderr == (
        "stoker: Prometheus and Alertmanager must not run yet. Received: running, "
        f"http://{running.stack.address}, by {running.stack.state}. End it: stoker monitor down.\n"
    )
    assert "Prometheus's port must be free. Received: " + running.stack.address in taken.stderr
    assert taken.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.yml"))
    assert running.stack.ask("vector(1)")


def test_a_healthy_machine_raises_the_watchdog_only(running: Running) -> None:
    assert running.stack.notes.wait_for({"Watchdog"}, 30.0)

    assert set(running.stack.notes.seen_s) == {"Watchdog"}


def test_each_fault_reaches_the_webhook(running: Running) -> None:
    """The last of these tests: the machine is not healthy after it."""
    took_s = fire_all(running.machine, running.stack.notes, timeout_s=60.0)

    assert set(took_s) == set(FAULTS)
    (bound,) = [
        alert
        for content in running.stack.notes.contents
        for alert in content["alerts"]
        if alert["labels"]["alertname"] == "StokerInputBound"
    ][:1]
    assert bound["annotations"]["summary"].startswith("Run 20261127T180000Z-4f1a waits for input")
    assert bound["annotations"]["runbook_url"].endswith("runbooks.md#stokerinputbound")
    assert set(running.stack.notes.seen_s) == {"Watchdog", *FAULTS}


def test_an_ended_program_is_named_and_down_ends_the_other(running: Running) -> None:
    """After the faults: Alertmanager is gone then."""
    started = json.loads((running.stack.state / "started.json").read_text())
    alertmanager = next(each for each in started if each["name"] == "Alertmanager")
    os.kill(alertmanager["pid"], 9)
    shown = stoker("status", "--state", str(running.stack.state))

    assert shown.returncode == EXIT_CHECK
    assert "Alertmanager: ended" in shown.stdout

    ended = stoker("down", "--state", str(running.stack.state))
    assert ended.stdout == f"ended Prometheus, http://{running.stack.address}\n"
    assert stoker("down", "--state", str(running.stack.state)).stdout == "nothing to stop\n"
