"""The garbage collector: what is owned goes with its owner, and a foreground deletion waits for it."""

from __future__ import annotations

from tests.kubernetes_api.resources import BUILT_IN, CUSTOM, PODS, Object, Resource
from tests.kubernetes_api.server.api import Api
from tests.kubernetes_api.storage import FOREGROUND, ORPHAN


class GarbageCollector:
    """Looks at all objects."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def sync(self) -> None:
        """Delete what has lost its owner, and end deletions that have waited for their dependents."""
        with self._api.storage.changed:
            everything = [
                (resource, item)
                # An object whose definition was removed stays in the storage, so its children keep their owner.
                for resource in (*BUILT_IN, *CUSTOM)
                for item in self._api.storage.items(resource)
            ]
            alive = {item["metadata"]["uid"] for _, item in everything}
            children: dict[str, list[tuple[Resource, Object]]] = {}
            for resource, item in everything:
                owners = item["metadata"].get("ownerReferences") or []
                for each in owners:
                    children.setdefault(each["uid"], []).append((resource, item))
                if owners and not any(each["uid"] in alive for each in owners):
                    self._delete(resource, item, "Background")
            for resource, item in everything:
                if "deletionTimestamp" in item["metadata"]:
                    self._fail_unscheduled(resource, item)
                    self._end(resource, item, children.get(item["metadata"]["uid"], []))

    def _fail_unscheduled(self, resource: Resource, item: Object) -> None:
        """End a pod that no kubelet ends, as the pod garbage collector does: its job counts it then."""
        if resource is not PODS or item["spec"].get("nodeName"):
            return
        if item["status"]["phase"] == "Pending":
            self._api.storage.change(
                PODS, item, lambda each: each["status"].update(phase="Failed"), status=True
            )

    def _end(
        self, resource: Resource, item: Object, children: list[tuple[Resource, Object]]
    ) -> None:
        finalizers = item["metadata"].get("finalizers") or []
        uid = item["metadata"]["uid"]
        if ORPHAN in finalizers:
            for kind, child in children:
                self._api.storage.change(kind, child, lambda each: _disown(each, uid))
            self._api.storage.change(resource, item, lambda each: _drop(each, ORPHAN))
        if FOREGROUND not in finalizers:
            return
        for kind, child in children:
            self._delete(kind, child, "Foreground")
        if not any(_blocks(child, uid) for _, child in children):
            self._api.storage.change(resource, item, lambda each: _drop(each, FOREGROUND))

    def _delete(self, resource: Resource, item: Object, propagation: str) -> None:
        if "deletionTimestamp" not in item["metadata"]:
            self._api.delete(resource, item, {"propagationPolicy": propagation})


def _disown(item: Object, uid: str) -> None:
    kept = [each for each in item["metadata"]["ownerReferences"] if each["uid"] != uid]
    item["metadata"]["ownerReferences"] = kept


def _drop(item: Object, finalizer: str) -> None:
    kept = [each for each in item["metadata"].get("finalizers", []) if each != finalizer]
    item["metadata"]["finalizers"] = kept


def _blocks(child: Object, uid: str) -> bool:
    references = child["metadata"].get("ownerReferences") or []
    return any(each["uid"] == uid and each.get("blockOwnerDeletion") for each in references)
