"""`stoker monitor up` with Debian's programs, and what its Prometheus knows."""

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import free_port
from player import Inbox, inbox
from tests.prometheus_programs import FOLDER, program

from stoker.core.errors import EXIT_DONE
from stoker.monitor.dashboards import dashboard_texts


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
class Stack:
    """What `up` started, and whom it notifies."""

    notes: Inbox
    state: Path
    ports: tuple[str, str]
    """Prometheus's and Alertmanager's."""

    @property
    def address(self) -> str:
        """Prometheus's."""
        return f"127.0.0.1:{self.ports[0]}"

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


@contextmanager
def watching(folder: Path, *options: str) -> Iterator[Stack]:
    """Both programs, with all windows a sixtieth as long.

    Args:
        folder: of their state.
        options: what they watch.
    """
    for name in ("prometheus", "alertmanager"):
        program(name)
    state, ports = folder / "state", (str(free_port()), str(free_port()))
    with inbox() as notes:
        done = stoker(
            *("up", *options, "--webhook", notes.url, "--time-scale", "60", "--state", str(state)),
            *("--prometheus-port", ports[0], "--alertmanager-port", ports[1]),
        )
        assert done.returncode == EXIT_DONE, done.stderr
        try:
            yield Stack(notes, state, ports)
        finally:
            stoker("down", "--state", str(state))


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
            label_query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert label_query is not None
            query = f"count by ({label_query[2]}) ({label_query[1]})"
            found.append((f"{name}: ${variable['name']}", query))
    return found


def chosen(expr: str) -> str:
    expr = re.sub(r"\$(?:run|experiment|node|gpu|model|version)\b", ".*", expr)
    return expr.replace("$__rate_interval", "5s")
