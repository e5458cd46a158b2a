"""Calls the API of a cluster through the official client, with plain values instead of the client's models.

The models reject enumeration values that a newer server has added, and do not exist for TFJob and JobSet. The client
handles connections, kubeconfig, certificates and credentials.
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
"""Maximum time to connect, and maximum time to wait for an answer, seconds. An admission webhook may take 10 s by
default."""

TRIED = 5
"""Maximum number of attempts of a request."""

LONGEST_S = 45.0
"""Time after which a failed request is not sent again, seconds. A server that accepts connections but never answers
gets two attempts."""

PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
"""First pause between two attempts, which doubles each time, and the maximum pause that `Retry-After` may set,
seconds."""

PAGE = 500
"""Maximum number of objects in one answer; further requests complete the list."""

PLURALS = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "TFJob": "tfjobs",
    "Service": "services",
    "ConfigMap": "configmaps",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
}
"""Kind of object -> its name in the paths of the API."""

MERGE = "application/merge-patch+json"


class Cluster:
    """One namespace of a cluster."""

    def __init__(
        self, *, kubeconfig: Path | None = None, context: str | None = None, namespace: str | None
    ) -> None:
        """Read the credentials; send no request yet.

        Args:
            kubeconfig: File with the credentials; None: the default file.
            context: A context in that file; None: the current context.
            namespace: Namespace of the jobs; None: that of the context.

        Raises:
            ConfigError: credentials are missing, or the client is not installed.
        """
        self._api, found = open_client(kubeconfig, context)
        self.namespace = namespace or found or "default"

    def path(self, version: str, plural: str, name: str = "") -> str:
        """Return the path of a kind of objects in the namespace, or the path of one object."""
        root = "/api" if version == "v1" else "/apis"
        path = f"{root}/{version}/namespaces/{self.namespace}/{plural}"
        return f"{path}/{quote(name, safe='')}" if name else path

    def path_of(self, manifest: Mapping[str, Any], *, name: str = "") -> str:
        """Return the path of the objects of a manifest's kind, or the path of one object."""
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
        """Return all objects of a list, which is read page by page."""
        return self.all_with_version(path, **query)[0]

    def all_with_version(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]:
        """Return all objects of a list, and the list's version, from which a watch can continue."""
        for _ in range(TRIED - 1):
            # `Gone`: the cluster no longer has the version to which the next page belongs.
            with contextlib.suppress(Gone):
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
            path: Path of the objects of this kind.
            manifest: The object.
            dry_run: Let the cluster check the object, also against quotas and policies, without creating it.

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
            path: Path of the object.
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
            path: Path of the object.
            silent_s: Time without data after which the connection is treated as broken, seconds; None: `READ_S`.
            query: Query parameters of the request.

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
        """Send a request until it is answered. Repeating it is safe: a second creation of an object is a conflict."""
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
            # A PATCH here names no version of the object. So if the cluster reports a conflict with another change,
            # the next attempt succeeds.
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
                "the kubeconfig must trust the cluster's certificate",
                got=Plain(text),
                fix="Get a new kubeconfig for the cluster.",
            )
        host = self._api.configuration.host
        # Do not use isinstance(): the error of a refused connection is a subclass.
        if type(reason) is urllib3.exceptions.ConnectTimeoutError:
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
