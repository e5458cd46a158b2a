"""A machine that is scraped: expositions written by hand, played by the clock, and a webhook that notes alerts.

In these files a counter or histogram has what it grows by in a second.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stoker.monitor.discovery import SERVER_PATH, Discovery
from stoker.telemetry.scrape_server import Page, ScrapeServer
from stoker.telemetry.targets import FOLDER

WRITTEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "monitor"
RUN = "20261127T180000Z-4f1a"


class Player:
    """One exposition; its values can be changed while it is played. Used by several threads."""

    def __init__(self, file: Path) -> None:
        """Start the clock. Args: file: the exposition."""
        self._lines = file.read_text("utf-8").splitlines()
        self._lock = threading.Lock()
        self._counted: dict[str, float] = {}
        self._changed: dict[str, float] = {}
        self._counted_until_s = time.monotonic()

    def change(self, series: str, value: float) -> None:
        """From now on, a series that contains this text has this value, or grows by it in a second."""
        with self._lock:
            self._count()
            self._changed[series] = value

    def text(self) -> str:
        """The exposition of now."""
        with self._lock:
            self._count()
            return "".join(
                line + "\n" if line.startswith("#") else f"{name} {self._counted[name]:.16g}\n"
                for line, name, _, _ in self._series()
            )

    def _count(self) -> None:
        now_s = time.monotonic()
        for line, name, value, grows in self._series():
            if not line.startswith("#"):
                before = self._counted.get(name, 0.0)
                passed_s = now_s - self._counted_until_s
                self._counted[name] = before + value * passed_s if grows else value
        self._counted_until_s = now_s

    def _series(self) -> Iterator[tuple[str, str, float, bool]]:
        grows = False
        for line in self._lines:
            if line.startswith("# TYPE"):
                grows = line.endswith((" counter", " histogram"))
            if line.startswith("#"):
                yield line, "", 0.0, grows
                continue
            name, _, written = line.rpartition(" ")
            changed = [value for part, value in self._changed.items() if part in name]
            yield line, name, changed[-1] if changed else float(written), grows


@dataclass
class Inbox:
    """What the webhook got: the first time of each firing alert, by the monotonic clock."""

    url: str = ""
    seen_s: dict[str, float] = field(default_factory=dict)
    contents: list[dict[str, Any]] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, names: set[str], timeout_s: float) -> set[str]:
        """The names that have come, when all have or the time is over."""
        with self.came:
            self.came.wait_for(lambda: names <= set(self.seen_s), timeout_s)
            return names & set(self.seen_s)

    def note(self, content: dict[str, Any]) -> None:
        """Note one post of Alertmanager."""
        with self.came:
            self.contents.append(content)
            for alert in content["alerts"]:
                if alert["status"] == "firing":
                    self.seen_s.setdefault(alert["labels"]["alertname"], time.monotonic())
            self.came.notify_all()


@contextmanager
def inbox() -> Iterator[Inbox]:
    """A webhook on this machine."""
    found = Inbox()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.note(json.loads(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}/alerts"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Machine:
    """A run, a server and a GPU exporter, and a second server that can be ended."""

    training: Player
    server: Player
    exporter: Player
    runs: Path
    named_server: str
    """Named by the exporter's `/sd`."""
    second_server: str
    exporter_address: str
    end_second_server: ExitStack


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Serve the files. Args: folder: for the run's targets."""
    players = [Player(WRITTEN / f"{name}.txt") for name in ("training", "server", "exporter")]
    training, server, exporter = players
    with ExitStack() as stack, ExitStack() as second:
        pages = {"/metrics": Page(content=training.text)}
        run = stack.enter_context(ScrapeServer(pages, port=0))
        first = stack.enter_context(ScrapeServer({SERVER_PATH: Page(content=server.text)}, port=0))
        other = second.enter_context(
            ScrapeServer({SERVER_PATH: Page(content=lambda: "other 1\n")}, port=0)
        )
        found = [{"targets": [run.address], "labels": {"job": "stoker-train"}}]
        (folder / FOLDER).mkdir(parents=True)
        named = Discovery(folder, [first.address])
        gpu = stack.enter_context(
            ScrapeServer(
                {
                    "/metrics": Page(content=exporter.text),
                    "/sd": Page(content=named.content, content_type="application/json"),
                },
                port=0,
            )
        )
        (folder / FOLDER / f"{RUN}.json").write_text(json.dumps(found))
        yield Machine(
            training=training,
            server=server,
            exporter=exporter,
            runs=folder,
            named_server=first.address,
            second_server=other.address,
            exporter_address=gpu.address,
            end_second_server=second,
        )
