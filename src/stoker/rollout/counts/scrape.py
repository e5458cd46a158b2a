"""Fetches the counts of servers that cannot write to the repository, and keeps them next to the state."""

from __future__ import annotations

import json
import logging
import os
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.client.connection import TOKEN_VARIABLE
from stoker.registry.repository import is_model_name
from stoker.rollout.counts.counts import parse_counts, write_counts
from stoker.rollout.http_call import NoAnswerError, send

_log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
"""Maximum time to wait for one server, seconds."""

_MAX_BYTES = 16 << 20
"""Largest accepted answer, bytes; the counts of a process take about 10 KiB."""

_HINTS = dict.fromkeys(
    (401, 403), f"; {TOKEN_VARIABLE} of this server must hold a key of the role admin"
)

_AT_ONCE = 16
"""Maximum number of concurrent requests."""


class Scraper:
    """Fetches the counts of servers; a server that does not answer is logged once."""

    def __init__(self) -> None:
        """Create a scraper."""
        self._silent: set[str] = set()

    def fetch(self, folder: Path, servers: Sequence[str], *, model: str, rollout: int) -> None:
        """Write the counts of all processes of some servers next to the state.

        Args:
            folder: Folder of the rollout's state.
            servers: REST addresses of the servers.
            model: Name of the model.
            rollout: Number of the rollout; counts of other rollouts are left out.
        """
        with ThreadPoolExecutor(min(_AT_ONCE, len(servers))) as pool:
            list(pool.map(lambda url: self._fetch(url, folder, model, rollout), servers))

    def _fetch(self, url: str, folder: Path, model: str, rollout: int) -> None:
        path = f"{url.rstrip('/')}/v1/rollouts/{urllib.parse.quote(model, safe='')}/counts"
        try:
            token = os.environ.get(TOKEN_VARIABLE, "").strip()
            answer = send(path, token=token, timeout_s=_TIMEOUT_S, max_bytes=_MAX_BYTES)
            if not answer.is_success:
                raise NoAnswerError(f"status {answer.status}{_HINTS.get(answer.status, '')}")
            content = json.loads(answer.body)
            if content["rollout"] != rollout:
                return  # the server has not read the state of this rollout yet
            for server, found in content["processes"].items():
                if is_model_name(server):
                    counts, failed = parse_counts(found)
                    write_counts(folder, counts, failed, rollout=rollout, server=server)
            self._silent.discard(url)
        except (NoAnswerError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if url not in self._silent:
                self._silent.add(url)
                _log.error(
                    "the counts of %s are not known: %s: %s", url, type(error).__name__, error
                )
