"""Starts Prometheus and Alertmanager on the loopback address, and ends the programs that it started."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from stoker.cluster.processes.child import Child, ProcessOptions, last_line
from stoker.cluster.processes.identity import began
from stoker.core.errors import BusyError, ConfigError, Plain, UserError
from stoker.core.files import alone, writable
from stoker.monitor.generated import is_edited, write_generated
from stoker.monitor.rules.groups import rules_text
from stoker.monitor.rules.rule import scaled_duration
from stoker.monitor.stack.programs import ALERTMANAGER, PROMETHEUS, Program, find_program
from stoker.monitor.stack.state import Started, read_started, write_started
from stoker.monitor.stack.wiring import (
    Wiring,
    alertmanager_settings,
    as_yaml,
    prometheus_settings,
)

HOST = "127.0.0.1"
READY_S = 30.0
"""Maximum wait until a program is ready, seconds: Prometheus first reads its old data."""

_RETENTION = ("--storage.tsdb.retention.time=15d", "--storage.tsdb.retention.size=10GB")
"""Flags that limit the age and size of the data: time series must not fill the disk of the runs."""

_REASON = re.compile(r'level=error.* err="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Prometheus and Alertmanager with one state folder."""

    folder: Path
    """Folder of settings, data, logs, and the record of the running programs."""

    prometheus_port: int = 9090
    alertmanager_port: int = 9093

    def up(self, wiring: Wiring, *, keep_edited: bool = False) -> tuple[Started, ...]:
        """Write the settings and start both programs; after a failure, neither runs.

        Args:
            wiring: The scrape targets, the rules, and the receivers of alerts.
            keep_edited: Whether to use edited settings files as they are.

        Raises:
            BusyError: A program is already running.
            ConfigError: A port is in use, a program is missing or has an unsupported version, or a file was edited.
            UserError: A program does not become ready, or the disk is full.
        """
        with writable(self.folder, what="the state folder", fix="Give another one: --state DIR."):
            # Only this user may read it: the address of a webhook may contain a secret.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with alone(self.folder / "lock"):
                return self._up(wiring, keep_edited=keep_edited)

    def _up(self, wiring: Wiring, *, keep_edited: bool) -> tuple[Started, ...]:
        running = [each for each in read_started(self.folder) if each.runs]
        if running:
            raise BusyError(
                f"{' and '.join(each.name for each in running)} must not run yet",
                got=Plain(f"running, http://{running[0].address}, by {self.folder}"),
                fix="End it: stoker monitor down.",
            )
        programs = {
            PROMETHEUS: (find_program(PROMETHEUS), self.prometheus_port),
            ALERTMANAGER: (find_program(ALERTMANAGER), self.alertmanager_port),
        }
        for program, (_, port) in programs.items():
            require_free(port, program)
        self._write_settings(wiring, keep_edited=keep_edited)
        started: tuple[Started, ...] = ()
        try:
            for program, (path, port) in programs.items():
                started += (self._start(program, path, port, wiring=wiring),)
                write_started(self.folder, started)
            for each in started:
                _wait_until_ready(each)
        except BaseException:
            for each in started:
                each.end()
            write_started(self.folder, ())
            raise
        return started

    def down(self) -> tuple[Started, ...]:
        """End the programs that `up` started and that still run; return them. Their data and settings are kept."""
        if not self.folder.is_dir():
            return ()
        with alone(self.folder / "lock"):
            running = tuple(each for each in read_started(self.folder) if each.runs)
            for each in running:
                each.end()
            write_started(self.folder, ())
            return running

    def _write_settings(self, wiring: Wiring, *, keep_edited: bool) -> None:
        texts = {
            "rules.yml": rules_text(wiring.rules),
            "prometheus.yml": as_yaml(
                prometheus_settings(
                    wiring,
                    alertmanager=f"{HOST}:{self.alertmanager_port}",
                    prometheus=f"{HOST}:{self.prometheus_port}",
                )
            ),
            "alertmanager.yml": as_yaml(alertmanager_settings(wiring)),
        }
        if keep_edited:
            texts = {
                name: text for name, text in texts.items() if not is_edited(self.folder / name)
            }
        write_generated(
            self.folder,
            texts,
            fix=f"Move rules of your own to {self.folder / 'rules.d'} and delete the edited file, or use it "
            "as it is: --keep-edited.",
        )

    def _start(self, program: Program, path: str, port: int, *, wiring: Wiring) -> Started:
        name = program.package
        address = f"{HOST}:{port}"
        config = "prometheus.yml" if program is PROMETHEUS else "alertmanager.yml"
        flags = [
            f"--config.file={self.folder / config}",
            f"--web.listen-address={address}",
        ]
        if program is PROMETHEUS:
            # Send alerts again soon: alerts of the first seconds are lost, when Prometheus knows no Alertmanager yet.
            flags.append(f"--rules.alert.resend-delay={wiring.lasting('1m')}")
            # Queries see the last values of ended series (e.g. of an earlier `up`) for this long: 20 scrape intervals,
            # like Prometheus's default of 5 minutes at 15 s.
            lookback = scaled_duration("5m", wiring.scale, minimum="20s")
            flags.append(f"--query.lookback-delta={lookback}")
            flags += [f"--storage.tsdb.path={data_folder(self.folder, program.name)}", *_RETENTION]
        else:
            # Open no port for other Alertmanagers: by default, the network could reach it.
            data = data_folder(self.folder, program.name)
            flags += [f"--storage.path={data}", "--cluster.listen-address="]
        log = self.folder / f"{name}.log"
        child = Child(program.name, [path, *flags], ProcessOptions(output=log, parent_death=None))
        return Started(
            name=program.name,
            pid=child.pid,
            began=began(child.pid),
            address=address,
            log=str(log),
        )


def data_folder(state: Path, name: str) -> Path:
    """Return the folder for the data of a program, inside the state folder."""
    return state / ("series" if name == PROMETHEUS.name else "alerts")


def require_free(port: int, program: Program) -> None:
    """Raise ConfigError if a port of this machine is in use."""
    with socket.socket() as trial:
        # Set the same option as the program does, so that a port that was in use a moment ago counts as free.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HOST, port))
        except (OSError, OverflowError) as error:
            option = "prometheus" if program is PROMETHEUS else "alertmanager"
            raise ConfigError(
                f"{program.name}'s port must be free",
                got=Plain(f"{HOST}:{port} ({getattr(error, 'strerror', None) or error})"),
                fix=f"Give another port: --{option}-port PORT. The program that uses this port was not touched.",
            ) from None


def is_ready(address: str) -> bool:
    """Return whether Prometheus or Alertmanager reports that it is ready."""
    connection = http.client.HTTPConnection(address, timeout=2.0)
    try:
        connection.request("GET", "/-/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def reason(log: Path) -> str:
    """Return why a program ended: the first error in its log, which usually causes all others; or else its last line."""
    last = last_line(log)
    with contextlib.suppress(OSError), log.open(errors="replace") as lines:
        found = next(filter(None, map(_REASON.search, lines)), None)
        return found[1].replace('\\"', '"') if found else last
    return last


def _wait_until_ready(started: Started) -> None:
    end_s = time.monotonic() + READY_S
    while not is_ready(started.address):
        if not started.runs or time.monotonic() > end_s:
            what = f"get ready within {READY_S:.0f} s" if started.runs else "run"
            raise UserError(
                f"{started.name} must {what}",
                got=Plain(reason(Path(started.log)) or "nothing in its log"),
                fix=f"See its log: {started.log}.",
            )
        time.sleep(0.05)  # the program does not notify us when it is ready
