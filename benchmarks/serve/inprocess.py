"""The limit: the CNN called in its own process, by the call path that the server uses.

python inprocess.py PORT MODELS; answers GET /<rows of a call>/<seconds> with rows a second as JSON
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import models
import numpy as np

from stoker.registry.exported_model import DEFAULT_SIGNATURE, LoadedModel, load_model


def rows_per_s(model: LoadedModel, *, rows: int, seconds: float) -> float:
    """Ask it over and over."""
    batch = np.ascontiguousarray(np.repeat(models.request_of("cnn").row[None], rows, axis=0))
    model.call(DEFAULT_SIGNATURE, {"input": batch})
    calls, begun_s = 0, time.monotonic()
    while (took_s := time.monotonic() - begun_s) < seconds:
        model.call(DEFAULT_SIGNATURE, {"input": batch})
        calls += 1
    return calls * rows / took_s


def main() -> None:
    """Wait for requests."""
    model = load_model(Path(sys.argv[2]) / "cnn" / "1")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, rows, seconds = self.path.split("/")
            found = rows_per_s(model, rows=int(rows), seconds=float(seconds))
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
