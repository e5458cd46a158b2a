"""Settings of Prometheus and Alertmanager, the programs on the PATH, and the manifests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.custom_resources import definition, validate
from tests.prometheus_programs import FOLDER, program

from stoker.cluster.processes.identity import began
from stoker.core.errors import ConfigError, DataError, UserError
from stoker.monitor.manifests.kubernetes import kubernetes_texts
from stoker.monitor.manifests.write import write_manifests
from stoker.monitor.settings import RuleSettings
from stoker.monitor.stack.processes import Stack, reason
from stoker.monitor.stack.programs import PROMETHEUS, find_program
from stoker.monitor.stack.state import Started, read_started
from stoker.monitor.stack.status import read_status
from stoker.monitor.stack.wiring import Receiver, Wiring


def wiring(folder: Path, *, time_scale: float = 1.0) -> Wiring:
    slack = folder / "slack-url"
    slack.write_text("https://hooks.slack.com/services/T/B/secret\n")
    return Wiring(
        runs=(str(folder / "runs"),),
        servers=("127.0.0.1:8501",),
        exporters=("127.0.0.1:9401",),
        rules=RuleSettings(time_scale=time_scale),
        receiver=Receiver(webhook="http://127.0.0.1:5001/alerts", slack_file=slack),
    )


@pytest.mark.parametrize("time_scale", [1.0, 60.0])
def test_both_programs_accept_their_settings(time_scale: float, tmp_path: Path) -> None:
    write_manifests(wiring(tmp_path, time_scale=time_scale), tmp_path / "out")
    folder = tmp_path / "out" / "compose"
    slack = Path("/etc/alertmanager/slack-url")
    text = (
        (folder / "alertmanager.yml").read_text().replace(str(slack), str(tmp_path / "slack-url"))
    )
    (folder / "alertmanager.yml").write_text(text)

    for call in (
        ("promtool", "check", "config", str(folder / "prometheus.yml")),
        ("amtool", "check-config", str(folder / "alertmanager.yml")),
    ):
        tool = program(call[0])
        done = subprocess.run([tool, *call[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "secret" not in text


def test_manifests_are_written_again_but_not_over_an_edit(tmp_path: Path) -> None:
    out = tmp_path / "out"
    files = write_manifests(wiring(tmp_path), out)
    assert write_manifests(wiring(tmp_path, time_scale=60.0), out) == files
    assert "interval: 1s" in (out / "kubernetes" / "servers.yaml").read_text()
    edited = out / "kubernetes" / "rules.yaml"
    edited.write_text(edited.read_text().replace("for: 8s", "for: 9s"))

    with pytest.raises(
        ConfigError, match=r"edited: .*/kubernetes/rules\.yaml\. Give another folder"
    ):
        write_manifests(wiring(tmp_path), out)
    assert "for: 9s" in edited.read_text()


def test_kubernetes_objects_fit_their_definitions(shared_data: Path, tmp_path: Path) -> None:
    kinds = []
    for text in kubernetes_texts(wiring(tmp_path)).values():
        custom = yaml.safe_load(text)
        kinds.append(custom["kind"])
        if custom["kind"] != "ConfigMap":
            validate(custom, definition(shared_data / "crds", custom["kind"]))

    assert sorted(set(kinds)) == ["ConfigMap", "PodMonitor", "PrometheusRule", "ServiceMonitor"]


def test_config_maps_are_valid_and_hold_the_dashboards(tmp_path: Path) -> None:
    import kubernetes_validate

    maps = [
        yaml.safe_load(text)
        for name, text in kubernetes_texts(wiring(tmp_path)).items()
        if name.startswith("dashboard-")
    ]

    assert len(maps) == 4
    for each in maps:
        kubernetes_validate.validate(each, "1.31", strict=True)
        (text,) = each["data"].values()
        assert '"uid": "stoker-' in text


def test_compose_mounts_the_runs_and_hides_the_secret(tmp_path: Path) -> None:
    hostile = tmp_path / "a:b $HOME"
    compose = tmp_path / "out" / "compose"
    write_manifests(
        replace(wiring(tmp_path), runs=(str(tmp_path / "runs"), str(hostile))), tmp_path / "out"
    )
    found = yaml.safe_load((compose / "compose.yaml").read_text())

    mounts = {
        each["target"]: each["source"]
        for service in found["services"].values()
        for each in service["volumes"]
        if isinstance(each, dict)
    }
    escaped = str(hostile).replace("$", "$$")
    assert mounts[escaped] == escaped
    assert mounts[str(tmp_path / "runs")] == str(tmp_path / "runs")
    assert all((compose / source).exists() for source in mounts.values() if source.startswith("."))
    assert mounts["/etc/prometheus/rules.d"] == "./rules.d"
    for service in found["services"].values():
        assert service["network_mode"] == "host"
        listen = [flag for flag in service.get("command", ()) if "web.listen-address" in flag]
        assert all("127.0.0.1:" in flag for flag in listen)
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or "T/B/secret" not in path.read_text()


def fake(folder: Path, name: str, said: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{said}'\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("said", "received"),
    [
        (None, "no prometheus on the PATH"),
        ("prometheus, version 1.8.2 (branch: master)", "prometheus: prometheus, version 1.8.2"),
        ("prometheus, version 2.41.0 (branch: HEAD)", "version 2.41.0"),
        ("prometheus, version 4.0.0 (branch: HEAD)", "version 4.0.0"),
        ("something else", "something else"),
    ],
)
def test_a_missing_or_other_prometheus_is_one_line(
    said: str | None, received: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said is not None:
        fake(tmp_path / "bin", "prometheus", said)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")

    with pytest.raises(ConfigError) as raised:
        find_program(PROMETHEUS)

    assert received in raised.value.line()
    assert "apt-get install prometheus" in raised.value.line()


def test_versions_2_and_3_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for version in ("2.42.0+ds", "3.5.1"):
        fake(tmp_path, "prometheus", f"prometheus, version {version} (branch: x)")
        assert find_program(PROMETHEUS) == str(tmp_path / "prometheus")


@pytest.mark.parametrize(
    "address", ["8501", "host:", ":8501", "host:99999", "http://host:80", "a b:80"]
)
def test_a_server_must_be_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="--server must be HOST:PORT"):
        Wiring(servers=(address,))


def test_receivers_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--webhook must be a URL"):
        Receiver(webhook="127.0.0.1:5001")
    with pytest.raises(ConfigError, match="--slack-file must be a file"):
        Receiver(slack_file=tmp_path / "none")


def test_a_full_disk_is_one_line(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prometheus", "alertmanager"):
        program(name)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{FOLDER}")
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    stack = Stack(
        folder=small_disk / "s", prometheus_port=free_port(), alertmanager_port=free_port()
    )

    with pytest.raises(UserError, match=r"must have room for it\. Received: 0 bytes free"):
        stack.up(wiring(tmp_path))

    assert read_started(small_disk / "s") == ()


def test_a_disk_that_was_full_is_named_by_the_status(tmp_path: Path) -> None:
    log = tmp_path / "prometheus.log"
    log.write_text('level=error err="write /s/wal/00: no space left on device"\nlevel=info msg=x\n')
    started = Started(name="Prometheus", pid=0, began="1", address="127.0.0.1:1", log=str(log))

    (found,) = read_status((started,)).programs

    assert found.problem == f"the disk of {tmp_path} was full: data is missing; free some space"
    assert found.state == "ended"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_reason_is_the_first_error_else_the_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'level=info msg=x\nts=1 level=error err="opening \\"series\\": no space"\n'
        'level=error err="one or more errors occurred"\n'
    )

    assert reason(log) == 'opening "series": no space'
    log.write_text("prometheus: error: unknown flag\n\n")
    assert reason(log) == "prometheus: error: unknown flag"
    assert "cannot be read" in reason(tmp_path / "none")


@pytest.mark.parametrize("text", ['[{"name": "Prometheus", "pid": 1, "later": 2}]', "[1]", "7"])
def test_a_record_of_another_version_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "started.json").write_text(text)

    with pytest.raises(DataError, match=r"started\.json must be a record that this version of"):
        read_started(tmp_path)


def test_a_process_of_the_same_number_is_left_alone(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    with subprocess.Popen([sleep, "60"]) as other:
        started = Started(
            name="Prometheus", pid=other.pid, began="1", address="127.0.0.1:1", log=str(tmp_path)
        )
        assert not started.runs
        started.end()
        assert other.poll() is None
        assert began(other.pid) != "1"
        other.kill()


# The programs outlive `stoker monitor up` on purpose, so no code waits for them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_edited_rules_stop_the_start_and_are_kept_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path / "bin", "prometheus", "prometheus, version 2.42.0")
    fake(tmp_path / "bin", "alertmanager", "alertmanager, version 0.25.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    stack = Stack(folder=tmp_path / "s", prometheus_port=free_port(), alertmanager_port=free_port())
    rules = tmp_path / "s" / "rules.yml"
    with pytest.raises(UserError, match=r"Prometheus must run\. Received: prometheus, version"):
        stack.up(wiring(tmp_path))  # these programs print their version, and end
    rules.write_text(rules.read_text().replace("> 87", "> 80"))
    edited = rules.read_text()

    with pytest.raises(ConfigError, match=r"edited: \S+/rules\.yml\. Move rules of your own to"):
        stack.up(wiring(tmp_path))
    with pytest.raises(UserError, match="Prometheus must run"):
        stack.up(wiring(tmp_path), keep_edited=True)

    assert rules.read_text() == edited
    assert read_started(tmp_path / "s") == ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_edited_rules_that_prometheus_refuses_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prometheus", "alertmanager"):
        program(name)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{FOLDER}")
    stack = Stack(folder=tmp_path, prometheus_port=free_port(), alertmanager_port=free_port())
    (tmp_path / "rules.yml").write_text("groups: [{name: a, rules: [{alert: b, expr: 'sum('}]}]")

    with pytest.raises(
        UserError, match=r'Received: \S+/rules.yml: .*"b": could not parse expression: '
    ):
        stack.up(Wiring(), keep_edited=True)
