"""Objects with versions, and what changed since one: the part that etcd and the watch cache play.

Each write takes the next revision, which is the `resourceVersion` of what was written. Changes are kept until
`compact`; a watch or a page from an older revision then gets 410. Objects are replaced and never changed, so a
reader needs no copy.
"""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tests.kubernetes_api.problems import already_exists, conflict, expired, forbidden, not_found
from tests.kubernetes_api.resources import NAMESPACES, Object, Resource, copied

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
"""Finalizers of the two kinds of deletion that wait for the garbage collector."""

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""Of generated names. Source: k8s.io/apimachinery/pkg/util/rand."""


@dataclass(frozen=True)
class Change:
    """What one revision has changed."""

    revision: int
    kind: str
    """ADDED, MODIFIED or DELETED."""

    resource: Resource
    item: Object
    before: Object | None


def now() -> str:
    """The time as objects have it, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def suffix(digits: int = 5) -> str:
    """Random letters at the end of a generated name."""
    return "".join(secrets.choice(_LETTERS) for _ in range(digits))


class Storage:
    """All objects of the cluster; every method may be called by any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.revision = 100
        self.oldest = 100
        """Revision before which changes are forgotten."""

        self.log: list[Change] = []
        self._objects: dict[str, dict[tuple[str, str], Object]] = {}

    def create(self, resource: Resource, item: Object) -> Object:
        """Store a new object, and return it with what the server adds."""
        with self.changed:
            item = copied(item)
            metadata = item["metadata"]
            if not metadata.get("name"):
                metadata["name"] = f"{metadata['generateName']}{suffix()}"
            key = metadata.get("namespace", ""), metadata["name"]
            if resource.namespaced:
                self._require_namespace(resource, *key)
            if key in self._of(resource):
                raise already_exists(resource, metadata["name"])
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
            for name in ("deletionTimestamp", "deletionGracePeriodSeconds"):
                metadata.pop(name, None)
            return self._write("ADDED", resource, key, item)

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return an object; None if it is not there."""
        with self.changed:
            return self._of(resource).get((namespace, name))

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return an object that must be there."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise not_found(resource, name)
        return found

    def items(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Return all objects of a namespace, or of all, ordered by name."""
        with self.changed:
            found = sorted(self._of(resource).items())
            return [item for (place, _), item in found if namespace in ("", place)]

    def update(self, resource: Resource, item: Object, *, status: bool = False) -> Object:
        """Replace an object, or only its status; a stale `resourceVersion` is a conflict."""
        with self.changed:
            metadata = item["metadata"]
            name = metadata["name"]
            before = self.get(resource, metadata.get("namespace", ""), name)
            if metadata.get("resourceVersion") not in (
                None,
                "",
                before["metadata"]["resourceVersion"],
            ):
                raise conflict(resource, name)
            if metadata.get("uid") not in (None, "", before["metadata"]["uid"]):
                raise conflict(resource, name)
            return self._replace(resource, before, item, status=status)

    def change(
        self,
        resource: Resource,
        item: Object,
        function: Callable[[Object], None],
        *,
        status: bool = False,
    ) -> Object | None:
        """Let a function change the newest copy of an object; None if it is gone or another has its name."""
        with self.changed:
            metadata = item["metadata"]
            before = self.find(resource, metadata.get("namespace", ""), metadata["name"])
            if before is None or before["metadata"]["uid"] != metadata["uid"]:
                return None
            after = copied(before)
            function(after)
            return self._replace(resource, before, after, status=status)

    def delete(
        self,
        resource: Resource,
        item: Object,
        *,
        propagation: str = "Background",
        grace_s: int | None = None,
    ) -> Object:
        """Delete an object, or begin to: it stays while it has finalizers, or for a pod's grace."""
        with self.changed:
            metadata = item["metadata"]
            key = metadata.get("namespace", ""), metadata["name"]
            before = self._of(resource).get(key)
            if before is None or before["metadata"]["uid"] != metadata["uid"]:
                return item
            after = copied(before)
            finalizers = list(after["metadata"].get("finalizers", []))
            wanted = {"Foreground": FOREGROUND, "Orphan": ORPHAN}.get(propagation)
            if wanted and wanted not in finalizers:
                finalizers.append(wanted)
            if not finalizers and not grace_s:
                return self._remove(resource, key, before)
            after["metadata"]["finalizers"] = finalizers
            after["metadata"].setdefault("deletionTimestamp", now())
            earlier = after["metadata"].get("deletionGracePeriodSeconds", grace_s)
            after["metadata"]["deletionGracePeriodSeconds"] = min(grace_s or 0, earlier or 0)
            return self._replace(resource, before, after)

    def compact(self) -> None:
        """Forget all changes so far, as etcd does every few minutes."""
        with self.changed:
            self.oldest = self.revision
            self.log.clear()
            self.changed.notify_all()

    def forget(self) -> None:
        """Expire every revision that was answered so far, as after many changes."""
        with self.changed:
            self.revision += 1
            self.compact()

    def since(self, revision: int) -> list[Change]:
        """Return the changes after a revision; 410 if some of them are forgotten."""
        with self.changed:
            if revision < self.oldest:
                raise expired(f"too old resource version: {revision} ({self.oldest})")
            return self.log[max(0, revision - self.oldest) :]

    def _of(self, resource: Resource) -> dict[tuple[str, str], Object]:
        return self._objects.setdefault(resource.name, {})

    def _require_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        found = self.find(NAMESPACES, "", namespace)
        if found is None:
            raise not_found(NAMESPACES, namespace)
        if "deletionTimestamp" in found["metadata"]:
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise forbidden(resource, name, why)

    def _replace(
        self, resource: Resource, before: Object, after: Object, *, status: bool = False
    ) -> Object:
        metadata = before["metadata"]
        key = metadata.get("namespace", ""), metadata["name"]
        if status:
            if after.get("status") == before.get("status"):
                return before
            after = before | {"status": after["status"], "metadata": dict(metadata)}
        after = copied(after)
        fixed = ("uid", "creationTimestamp", "resourceVersion", "generation", "namespace", "name")
        kept = ("deletionTimestamp", "deletionGracePeriodSeconds")
        after["metadata"] |= {name: metadata[name] for name in fixed if name in metadata}
        after["metadata"] |= {
            name: metadata[name]
            for name in kept
            if name in metadata and name not in after["metadata"]
        }
        if not after["metadata"].get("finalizers", True):
            del after["metadata"]["finalizers"]
        if "finalizers" not in after["metadata"] and _is_ended(after):
            return self._remove(resource, key, before)
        if after == before:
            return before
        if after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] = metadata["generation"] + 1
        return self._write("MODIFIED", resource, key, after)

    def _write(
        self, kind: str, resource: Resource, key: tuple[str, str], item: Object | None
    ) -> Object:
        before = self._of(resource).get(key)
        self.revision += 1
        if kind == "DELETED":
            assert before is not None
            written = copied(before)
            del self._of(resource)[key]
        else:
            assert item is not None
            written = self._of(resource)[key] = item
        written["metadata"]["resourceVersion"] = str(self.revision)
        self.log.append(Change(self.revision, kind, resource, written, before))
        self.changed.notify_all()
        return written

    def _remove(self, resource: Resource, key: tuple[str, str], before: Object) -> Object:
        return self._write("DELETED", resource, key, None)


def _is_ended(item: Object) -> bool:
    """Whether a pod that is to be deleted has ended: its kubelet has set the grace to 0."""
    metadata = item["metadata"]
    return "deletionTimestamp" in metadata and metadata.get("deletionGracePeriodSeconds") == 0
