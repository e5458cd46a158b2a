"""The API of a cluster by the official client, with plain values instead of the client's models.

The models reject new values of enumerations from newer servers, and do not exist for TFJob and JobSet. Connections,
kubeconfig, certificates and credentials are handled by the client.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.jobs.providers.kubernetes.credentials import open_client
from stoker.jobs.providers.kubernetes.problems import (
    CONFLICT,
    REPEAT,
    RETRIED,
    AnswerLost,
    Gone,
    NotFound,
    problem,
)

CONNECT_S, READ_S = 10.0, 30.0
"""Longest time to connect and to get an answer, seconds; an admission webhook may take 10 s by default."""

TRIED = 5
"""Number of attempts of a request."""

LONGEST_S = 45.0
"""A request that has failed is not sent again after so long, seconds: a server that accepts connections and sends
nothing gets two attempts."""

PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
"""First pause between two attempts, seconds, which doubles; and the longest pause that `Retry-After` may set."""

PAGE = 500
"""Most objects in one answer; a list continues until it is complete."""

PLURALS = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "TFJob": "tfjobs",
    "Service": "services",
    "ConfigMap": "configmaps",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
}
"""Kind -> its name in paths."""

MERGE = "application/merge-patch+json"


class Cluster:
    """One namespace of a cluster."""

    def __init__(
        self, *, kubeconfig: Path | None = None, context: str | None = None, namespace: str | None
    ) -> None:
        """Read the credentials; send no request yet.

        Args:
            kubeconfig: File of the credentials; None: the default.
            context: One of its contexts; None: the current one.
            namespace: Of the jobs; None: that of the context.

        Raises:
            ConfigError: credentials are missing, or the client is not installed.
        """
        self._api, found = open_client(kubeconfig, context)
        self.namespace = namespace or found or "default"

    def path(self, version: str, plural: str, name: str = "") -> str:
        """Return the path of objects in the namespace, or of one of them."""
        root = "/api" if version == "v1" else "/apis"
        path = f"{root}/{version}/namespaces/{self.namespace}/{plural}"
        return f"{path}/{quote(name, safe='')}" if name else path

    def path_of(self, manifest: Mapping[str, Any], *, name: str = "") -> str:
        """Return the path of objects of a manifest's kind."""
        return self.path(manifest["apiVersion"], PLURALS[manifest["kind"]], name)

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return one object.

        Raises:
            NotFound: it does not exist.
        """
        return self._json("GET", path, query=query)

    def exists(self, path: str) -> bool:
        """Whether an object, or an API group, exists."""
        try:
            self.get(path)
        except NotFound:
            return False
        return True

    def all(self, path: str, **query: str) -> list[dict[str, Any]]:
        """Return all objects of a list, page by page."""
        return self.all_with_version(path, **query)[0]

    def all_with_version(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]:
        """Return all objects of a list, and the version from which a watch continues."""
        for _ in range(TRIED - 1):
            with contextlib.suppress(
                Gone
            ):  # the next page belongs to a version that the cluster has forgotten
                return self._pages(path, query, size=PAGE)
        return self._pages(path, query, size=0)

    def _pages(
        self, path: str, query: Mapping[str, str], *, size: int
    ) -> tuple[list[dict[str, Any]], str]:
        found: list[dict[str, Any]] = []
        more = ""
        while True:
            part = {"limit": str(size)} | ({"continue": more} if more else {})
            page = self._json("GET", path, query={**query, **part})
            found += page.get("items") or []
            meta = page.get("metadata") or {}
            more = meta.get("continue") or ""
            if not more:
                return found, str(meta.get("resourceVersion", ""))

    def create(
        self, path: str, manifest: Mapping[str, Any], *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Create an object, and return the created object.

        Args:
            path: Of the objects of its kind.
            manifest: The object.
            dry_run: Let the cluster check it, with its quotas and policies, and keep nothing.

        Raises:
            Conflict: an object with this name exists, perhaps from a request whose answer was lost.
        """
        query = {"dryRun": "All"} if dry_run else {}
        return self._json("POST", path, query=query, body=manifest)

    def patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change some values of an object."""
        return self._json("PATCH", path, body=change, content=MERGE)

    def delete(self, path: str, *, uid: str | None = None) -> None:
        """Delete an object and everything that it owns; a missing object is ignored. Deletion continues after the call.

        Args:
            path: Of the object.
            uid: Delete the object only if it has this UID.
        """
        body: dict[str, Any] = {"propagationPolicy": "Foreground"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", path, body=body)
        except NotFound:
            return

    def stream(self, path: str, *, silent_s: float | None = None, **query: str) -> Iterator[str]:
        """Yield the lines of an answer, until the connection breaks or the server closes it.

        Args:
            path: Of the object.
            silent_s: A connection over which nothing has come for so long is broken, seconds; `READ_S`.
            query: Of the request.

        Raises:
            AnswerLost: the connection broke.
        """
        try:
            response = self._send("GET", path, query=query, read_s=silent_s)
        except _transport_errors() as error:
            raise self._lost(error, silent_s) from None
        try:
            if response.status >= 300:
                raise self._problem(response, "GET", path)
            rest = b""
            for block in response.response.stream(1 << 16, decode_content=True):
                *lines, rest = (rest + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except _transport_errors() as error:
            raise self._lost(error, silent_s) from None
        finally:
            response.response.release_conn()
            response.response.close()

    def request_of(self, path: str, **query: str) -> tuple[Any, str, dict[str, str]]:
        """Return the client's settings, the URL and the headers of a GET with credentials, for a WebSocket."""
        _, url, headers, _, _ = self._api.param_serialize(
            method="GET",
            resource_path=path,
            query_params=list(query.items()),
            header_params={},
            auth_settings=["BearerToken"],
        )
        return self._api.configuration, url, dict(headers)

    def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = "application/json",
    ) -> dict[str, Any]:
        """Send a request until it is answered. Each is one that may be repeated: a second creation conflicts."""
        attempt, until_s = 0, time.monotonic() + LONGEST_S
        while True:
            attempt, last = attempt + 1, attempt + 1 >= TRIED
            try:
                response = self._send(method, path, query=query, body=body, content=content)
                data = response.read()
            except _transport_errors() as error:
                if last or time.monotonic() > until_s:
                    raise self._lost(error) from None
                time.sleep(_pause_s(None, attempt))  # the server may restart
                continue
            if response.status < 300:
                return _parsed(data)
            # A change names no version: what the cluster refuses as outdated succeeds on the next attempt.
            again = response.status in RETRIED or (
                method == "PATCH" and response.status == CONFLICT
            )
            if last or not again:
                raise self._problem(response, method, path)
            time.sleep(_pause_s(response.headers.get("Retry-After"), attempt))  # set by the server

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = "application/json",
        read_s: float | None = None,
    ) -> Any:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content
        _, url, headers, body, _ = self._api.param_serialize(
            method=method,
            resource_path=path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        limits_s = (CONNECT_S, READ_S if read_s is None else read_s)
        return self._api.call_api(method, url, headers, body, _request_timeout=limits_s)

    def _problem(self, response: Any, method: str, path: str) -> UserError:
        what = f"{method} {path.partition('/namespaces/')[2] or path}"
        text = response.read().decode(errors="replace")
        return problem(response.status, text, what=what, namespace=self.namespace)

    def _lost(self, error: BaseException, read_s: float | None = None) -> UserError:
        import urllib3

        reason = getattr(error, "reason", None) or error
        text = str(reason)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return ConfigError(
                "the cluster's certificate must be one that the kubeconfig trusts",
                got=Plain(text),
                fix="Take a new kubeconfig from the cluster.",
            )
        host = self._api.configuration.host
        if type(reason) is urllib3.exceptions.ConnectTimeoutError:  # not one that was refused
            text = f"{host} accepts no connection within {CONNECT_S:g} s"
        if isinstance(reason, urllib3.exceptions.ReadTimeoutError):
            text = f"{host} accepts connections and sends no whole answer within {read_s or READ_S:g} s"
        return AnswerLost("the cluster's API must answer", got=Plain(text), fix=REPEAT)


def _transport_errors() -> tuple[type[BaseException], ...]:
    import urllib3

    return (urllib3.exceptions.HTTPError, OSError)


def _pause_s(retry_after: str | None, attempt: int) -> float:
    if retry_after is not None and retry_after.isdecimal():
        return min(float(retry_after), MAX_PAUSE_S)
    return PAUSE_S * 2.0**attempt


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(
            "the server of the kubeconfig must be a cluster's API",
            got=Plain(data[:80].decode(errors="replace")),
            fix="Check `server` in the kubeconfig.",
        )
    return value
