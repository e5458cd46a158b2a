"""The verbs of the API on stored objects: what a request does, without the wire."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes_api.problems import (
    Refusal,
    bad_request,
    conflict,
    expired,
    invalid,
    no_such_path,
)
from tests.kubernetes_api.resources import BUILT_IN, PODS, Object, Resource
from tests.kubernetes_api.server import admission, patches, selectors
from tests.kubernetes_api.server.access import Access
from tests.kubernetes_api.server.schemas import check_name, check_schema
from tests.kubernetes_api.storage import Change, Storage, now

BOOKMARK_S = 1.0
"""Interval of bookmarks in a watch, seconds; a real server sends one a minute."""

LONGEST_WATCH_S = 300.0

Logs = Callable[[Object, dict[str, str]], Iterator[bytes]]
"""Yields the log of a pod: the pod, the query."""


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    method: str
    path: str
    query: dict[str, str]
    kind: str = ""
    """Content type of the body."""

    authorization: str = ""
    body: Any = None


@dataclass
class Answer:
    """What it gets: JSON, or a stream."""

    code: int = 200
    body: Object | None = None
    stream: Iterator[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What a path names."""

    resource: Resource
    version: str
    namespace: str
    name: str
    subresource: str

    def to_dict(self) -> Object:
        """As messages need it."""
        return {"namespace": self.namespace, "name": self.name, "subresource": self.subresource}


@dataclass
class Api:
    """The server's verbs."""

    storage: Storage
    access: Access
    logs: Logs
    is_stopping: Callable[[], bool]
    """Whether streams must end."""

    resources: list[Resource] = field(default_factory=lambda: list(BUILT_IN))
    """Kinds that are installed; without its CustomResourceDefinition a kind's paths are 404."""

    troubles: list[str] = field(default_factory=list)
    """Tracebacks of the server and of controllers: faults of this code."""

    def handle(self, request: Request) -> Answer:
        """Carry out a request; a `Refusal` is its answer."""
        if request.path in ("/version", "/version/"):
            return Answer(body={"major": "1", "minor": "37", "gitVersion": "v1.37.0"})
        if request.path in ("/healthz", "/livez", "/readyz"):
            return Answer(body={"status": "ok"})
        user = self.access.user(request.authorization)
        if found := self._discovered(request.path):
            return Answer(body=found)
        if "/selfsubjectaccessreviews" in request.path:
            return Answer(201, self.access.review(request.body))
        target = self.target(request.path)
        verb = _verb(request, target)
        self.access.require(user, verb, target.resource, target.to_dict())
        return self._do(verb, request, target)

    def target(self, path: str) -> Target:
        """Return what a path names; 404 where it leads nowhere."""
        parts = [part for part in path.split("/") if part]
        if len(parts) < 3 or parts[0] not in ("api", "apis"):
            raise no_such_path()
        group = "" if parts[0] == "api" else parts[1]
        version, *rest = parts[1:] if parts[0] == "api" else parts[2:]
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] != "status":
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource, *more = [*rest, "", "", ""]
        for each in self.resources:
            if (each.group, each.plural) == (group, plural) and version in each.versions:
                if any(more) or (namespace and not each.namespaced):
                    raise no_such_path()
                return Target(each, version, namespace, name, subresource)
        raise no_such_path()

    def create(
        self,
        resource: Resource,
        item: Object,
        *,
        version: str = "",
        dry_run: bool = False,
        checked: bool = False,
    ) -> Object:
        """Check and store an object.

        Args:
            resource: Its kind.
            item: The object.
            version: Of the API; the kind's first.
            dry_run: Check only.
            checked: It is a part of an object that was checked, so its schema is not checked again.
        """
        item = dict(item) | {"metadata": dict(item["metadata"])}
        if not checked:
            check_schema(resource, version or resource.versions[0], item)
        check_name(resource, item)
        with self.storage.changed:
            item = admission.admitted(self.storage, resource, item)
            if dry_run:
                return item
            return self.storage.create(resource, item)

    def _do(self, verb: str, request: Request, target: Target) -> Answer:
        if target.subresource in ("log", "eviction"):
            return self._of_pod(request, target)
        does: dict[str, Callable[[Request, Target], Answer]] = {
            "get": self._get,
            "list": self._list,
            "watch": self._watch,
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
            "deletecollection": self._delete_all,
        }
        return does[verb](request, target)

    def _get(self, request: Request, target: Target) -> Answer:
        found = self.storage.get(target.resource, target.namespace, target.name)
        return Answer(body=_as(found, target))

    def _list(self, request: Request, target: Target) -> Answer:
        query = request.query
        with self.storage.changed:
            items, revision = self._selected(query, target), self.storage.revision
        start = 0
        if query.get("continue"):
            revision, start = _read_token(query["continue"])
            if revision < self.storage.oldest:
                raise expired(
                    "The provided continue parameter is too old to display a consistent list result."
                )
        limit = int(query.get("limit") or 0) or len(items)
        metadata: Object = {"resourceVersion": str(revision)}
        page = items[start : start + limit]
        if start + limit < len(items):
            metadata["continue"] = _token(revision, start + limit)
            metadata["remainingItemCount"] = len(items) - start - limit
        listed = {"kind": f"{target.resource.kind}List", "metadata": metadata, "items": page}
        return Answer(body={"apiVersion": target.resource.api_version(target.version)} | listed)

    def _selected(self, query: dict[str, str], target: Target) -> list[Object]:
        matches = _matches(query, target)
        items = self.storage.items(target.resource, target.namespace)
        return [_as(item, target) for item in items if matches(item)]

    def _watch(self, request: Request, target: Target) -> Answer:
        _matches(request.query, target)
        revision = int(request.query.get("resourceVersion") or 0)
        with self.storage.changed:
            if revision:
                self.storage.since(revision)
                first: list[Object] = []
            else:
                first, revision = self._selected(request.query, target), self.storage.revision
        return Answer(stream=self._changes(request.query, target, first, revision))

    def _changes(
        self, query: dict[str, str], target: Target, first: list[Object], revision: int
    ) -> Iterator[bytes]:
        for item in first:
            yield _line("ADDED", item)
        bookmarks = query.get("allowWatchBookmarks") in ("true", "True", "1")
        end_s = time.monotonic() + float(query.get("timeoutSeconds") or LONGEST_WATCH_S)
        bookmark_s = time.monotonic() + BOOKMARK_S
        while time.monotonic() < end_s and not self.is_stopping():
            with self.storage.changed:
                self.storage.changed.wait(0.2)
                try:
                    found = self.storage.since(revision)
                except Refusal as gone:
                    yield _line("ERROR", gone.to_status())
                    return
                revision = self.storage.revision
            for change in found:
                yield from _shown(change, query, target)
            if bookmarks and time.monotonic() > bookmark_s:
                bookmark_s = time.monotonic() + BOOKMARK_S
                own = {"kind": target.resource.kind, "metadata": {"resourceVersion": str(revision)}}
                own["apiVersion"] = target.resource.api_version(target.version)
                yield _line("BOOKMARK", own)

    def _create(self, request: Request, target: Target) -> Answer:
        item = _body(request, target)
        if target.name:
            raise no_such_path()
        item["metadata"].setdefault("namespace", target.namespace)
        if item["metadata"]["namespace"] != target.namespace:
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        if not target.namespace:
            del item["metadata"]["namespace"]
        item["metadata"].pop("resourceVersion", None)
        item.pop("status", None)
        dry_run = request.query.get("dryRun") == "All"
        made = self.create(target.resource, item, version=target.version, dry_run=dry_run)
        return Answer(201, _as(made, target))

    def _update(self, request: Request, target: Target) -> Answer:
        item = _body(request, target)
        item["metadata"] |= {"namespace": target.namespace} if target.namespace else {}
        if item["metadata"].get("name") != target.name:
            raise bad_request("the name of the object does not match the name on the URL")
        return self._store(item, request, target)

    def _patch(self, request: Request, target: Target) -> Answer:
        with self.storage.changed:
            before = self.storage.get(target.resource, target.namespace, target.name)
            item = patches.patched(target.resource, before, request.body, kind=request.kind)
            sent = request.body.get("metadata", {}) if isinstance(request.body, dict) else {}
            if (
                sent.get("resourceVersion", before["metadata"]["resourceVersion"])
                != (before["metadata"]["resourceVersion"])
            ):
                raise conflict(target.resource, target.name)
            return self._store(item, request, target)

    def _store(self, item: Object, request: Request, target: Target) -> Answer:
        with self.storage.changed:
            before = self.storage.get(target.resource, target.namespace, target.name)
            if target.subresource not in ("", "status"):
                raise no_such_path()
            status = target.subresource == "status"
            if not status:
                item = item | ({"status": before["status"]} if "status" in before else {})
                check_schema(target.resource, target.version, item)
                check_name(target.resource, item)
                causes = admission.forbidden_changes(target.resource, before, item)
                if causes:
                    raise invalid(target.resource, target.name, causes)
            if request.query.get("dryRun") == "All":
                return Answer(body=_as(item, target))
            item = item | {"apiVersion": target.resource.api_version()}
            return Answer(
                body=_as(self.storage.update(target.resource, item, status=status), target)
            )

    def _delete(self, request: Request, target: Target) -> Answer:
        options = (request.body or {}) | request.query
        with self.storage.changed:
            found = self.storage.get(target.resource, target.namespace, target.name)
            wanted = (options.get("preconditions") or {}).get("uid", found["metadata"]["uid"])
            if wanted != found["metadata"]["uid"]:
                raise conflict(target.resource, target.name)
            if request.query.get("dryRun") == "All":
                return Answer(body=_as(found, target))
            deleted = self.delete(target.resource, found, options)
        if self.storage.find(target.resource, target.namespace, target.name) is not None:
            return Answer(body=_as(deleted, target))
        details = {
            "name": target.name,
            "group": target.resource.group,
            "kind": target.resource.plural,
        }
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return Answer(body=status | {"details": details | {"uid": found["metadata"]["uid"]}})

    def delete(self, resource: Resource, item: Object, options: Object) -> Object:
        """Delete an object as its kind is deleted: a pod that runs has its grace."""
        grace_s: int | None = None
        if resource is PODS:
            spec = item["spec"]
            grace_s = int(
                options.get("gracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30))
            )
            is_over = item.get("status", {}).get("phase") in ("Succeeded", "Failed")
            if not spec.get("nodeName") or is_over:
                grace_s = 0
        propagation = options.get("propagationPolicy") or "Background"
        if propagation not in ("Background", "Foreground", "Orphan"):
            raise bad_request(f'invalid propagationPolicy: "{propagation}"')
        return self.storage.delete(resource, item, propagation=propagation, grace_s=grace_s)

    def _delete_all(self, request: Request, target: Target) -> Answer:
        options = (request.body or {}) | request.query
        items = self._selected(request.query, target)
        for item in items:
            self.delete(target.resource, item, options)
        return Answer(body={"kind": f"{target.resource.kind}List", "metadata": {}, "items": items})

    def _of_pod(self, request: Request, target: Target) -> Answer:
        pod = self.storage.get(PODS, target.namespace, target.name)
        if target.subresource == "log":
            return Answer(
                stream=self.logs(pod, request.query), headers={"Content-Type": "text/plain"}
            )
        disrupt(self.storage, pod, "EvictionByEvictionAPI", "Eviction API: evicting")
        self.delete(PODS, pod, request.body.get("deleteOptions") or {})
        return Answer(201, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _discovered(self, path: str) -> Object | None:
        parts = [part for part in path.split("/") if part]
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        groups = {each.group for each in self.resources if each.group}
        if parts == ["apis"]:
            listed = [_group(name, self.resources) for name in sorted(groups)]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        if len(parts) == 2 and parts[0] == "apis" and parts[1] in groups:
            return {"kind": "APIGroup", "apiVersion": "v1"} | _group(parts[1], self.resources)
        group, version = (
            ("", parts[-1]) if parts[:1] == ["api"] else ("/".join(parts[1:2]), parts[-1])
        )
        if len(parts) != (2 if parts[:1] == ["api"] else 3):
            return None
        found = [
            each for each in self.resources if each.group == group and version in each.versions
        ]
        listed = [
            {"name": each.plural, "kind": each.kind, "namespaced": each.namespaced, "verbs": []}
            for each in found
        ]
        own = {"kind": "APIResourceList", "apiVersion": "v1", "resources": listed}
        return own | {"groupVersion": "/".join(parts[1:])} if found else None


def disrupt(storage: Storage, pod: Object, reason: str, message: str) -> None:
    """Set the condition of a pod that the cluster ends."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}

    def change(item: Object) -> None:
        conditions = item.setdefault("status", {}).setdefault("conditions", [])
        conditions[:] = [each for each in conditions if each["type"] != "DisruptionTarget"]
        conditions.append(condition | {"lastTransitionTime": now()})

    storage.change(PODS, pod, change, status=True)


def _verb(request: Request, target: Target) -> str:
    if request.method == "GET":
        if request.query.get("watch") in ("true", "True", "1"):
            return "watch"
        return "get" if target.name else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch"}
    if request.method not in verbs:
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method")
    return verbs[request.method]


def _body(request: Request, target: Target) -> Object:
    item = request.body
    if not isinstance(item, dict):
        raise bad_request("the body must be an object")
    expected = target.resource.api_version(target.version), target.resource.kind
    found = item.get("apiVersion", expected[0]), item.get("kind", expected[1])
    if found != expected:
        raise bad_request(f"the object provided is {found}, which is not {expected}")
    item = item | {"apiVersion": expected[0], "kind": expected[1]}
    return item | {"metadata": dict(item.get("metadata") or {})}


def _as(item: Object, target: Target) -> Object:
    return item | {"apiVersion": target.resource.api_version(target.version)}


def _matches(query: dict[str, str], target: Target) -> selectors.Matches:
    labels = selectors.by_labels(query.get("labelSelector", ""))
    fields = selectors.by_fields(target.resource, query.get("fieldSelector", ""))
    return lambda item: labels(item) and fields(item)


def _shown(change: Change, query: dict[str, str], target: Target) -> Iterator[bytes]:
    """A change as a watch with selectors shows it: what comes into the selection is added, what leaves is deleted."""
    namespace = change.item["metadata"].get("namespace", "")
    if change.resource is not target.resource or target.namespace not in ("", namespace):
        return
    matches = _matches(query, target)
    if target.name and change.item["metadata"]["name"] != target.name:
        return
    was = change.before is not None and matches(change.before)
    does = change.kind != "DELETED" and matches(change.item)
    if was or does:
        kind = "MODIFIED" if was and does else "ADDED" if does else "DELETED"
        yield _line(kind, _as(change.item, target))


def _line(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _token(revision: int, start: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([revision, start]).encode()).decode()


def _read_token(text: str) -> tuple[int, int]:
    try:
        revision, start = json.loads(base64.urlsafe_b64decode(text))
        return int(revision), int(start)
    except ValueError:
        raise bad_request("continue key is not valid") from None


def _group(name: str, resources: list[Resource]) -> Object:
    versions = dict.fromkeys(
        version for each in resources if each.group == name for version in each.versions
    )
    listed = [{"groupVersion": f"{name}/{each}", "version": each} for each in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}
