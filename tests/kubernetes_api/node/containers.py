"""A container of a pod as a process sees it: its variables, its volumes, its command, its user."""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kubernetes_api.resources import CONFIG_MAPS, SECRETS, Object, Resource
from tests.kubernetes_api.storage import Storage

REPOSITORY = Path(__file__).resolve().parents[3]
_SYSTEM = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/sbin", "/usr", "/var")
"""What a pod sees of this machine, besides Python's environment and the repository."""

PROGRAMS = "/image"

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")


@dataclass(frozen=True)
class Image:
    """An image as this machine plays it."""

    programs: Path | None = None
    """Directory that is first on the PATH, at `/image`."""

    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    user: int = 0
    paths: tuple[Path, ...] = ()
    """Further directories of this machine that it contains."""

    def contents(self) -> list[tuple[str, str]]:
        """Paths of this machine that a pod sees, read-only, and where; what lies in another one is left out."""
        python = Path(sys.executable).resolve()
        own = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), python, *self.paths]
        inner = [each for each in _SYSTEM if os.path.lexists(each)]
        for path in sorted({str(each) for each in own}):
            if not any(path.startswith(f"{known}/") for known in inner):
                inner.append(path)
        programs = [(str(self.programs), PROGRAMS)] if self.programs else []
        return [*((each, each) for each in inner), *programs]


class NotReady(Exception):
    """A container cannot be made yet: the reason of its `waiting`, and an event's reason if it is one of a volume."""

    def __init__(self, reason: str, message: str, *, event: str = "Failed") -> None:
        super().__init__(message)
        self.reason, self.message, self.event = reason, message, event


class Container:
    """The first container of a pod; others are refused."""

    def __init__(self, storage: Storage, pod: Object, image: Image) -> None:
        self._storage, self._pod, self._image = storage, pod, image
        (self._container,) = pod["spec"]["containers"]
        self._namespace: str = pod["metadata"]["namespace"]

    def environment(self) -> dict[str, str]:
        """Return the variables of the process."""
        programs = [PROGRAMS] if self._image.programs else []
        path = [*programs, str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        found = {"PATH": ":".join(path), "HOME": "/root", "HOSTNAME": self.hostname()}
        found |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        found |= self._image.environment
        for source in self._container.get("envFrom") or []:
            for resource, kind in ((CONFIG_MAPS, "configMapRef"), (SECRETS, "secretRef")):
                if kind in source:
                    data = self._data(resource, source[kind]["name"])
                    found |= {name: value.decode() for name, value in data.items()}
        for each in self._container.get("env") or []:
            value = (
                self._value(each["valueFrom"]) if "valueFrom" in each else each.get("value") or ""
            )
            if value is not None:
                found[each["name"]] = _expanded(value, found)
        return found

    def command(self) -> list[str]:
        """Return the command and its arguments."""
        words = self._container.get("command") or list(self._image.entrypoint)
        words = [*words, *(self._container.get("args") or [])]
        if not words:
            raise NotReady("CreateContainerError", "no command specified")
        environment = self.environment()
        return [_expanded(word, environment) for word in words]

    def hostname(self) -> str:
        """Return the name of the pod's machine."""
        return str(self._pod["spec"].get("hostname") or self._pod["metadata"]["name"])[:63]

    def mounts(self, folder: Path, claims: Callable[[str, str], Path]) -> list[Object]:
        """Make the volumes of the pod, and return what is mounted where.

        Args:
            folder: Of the pod's own volumes.
            claims: Returns the directory of a claim: namespace, name.
        """
        group = (self._pod["spec"].get("securityContext") or {}).get("fsGroup")
        volumes = {each["name"]: each for each in self._pod["spec"].get("volumes") or []}
        found = []
        for mount in self._container.get("volumeMounts") or []:
            volume = volumes[mount["name"]]
            source = self._volume(volume, folder / "volumes" / mount["name"], claims)
            if group is not None and ("emptyDir" in volume or "persistentVolumeClaim" in volume):
                os.chown(source, -1, group)
                source.chmod(0o2775)
            if mount.get("subPath"):
                source = source / mount["subPath"]
            fixed = "configMap" in volume or "secret" in volume or bool(mount.get("readOnly"))
            found.append({"source": str(source), "path": mount["mountPath"], "read_only": fixed})
        return sorted(found, key=lambda each: each["path"])

    def identity(self) -> Object:
        """Return user, group, further groups and rights, as security contexts set them."""
        pod = self._pod["spec"].get("securityContext") or {}
        own = pod | (self._container.get("securityContext") or {})
        user = own.get("runAsUser", self._image.user)
        if own.get("runAsNonRoot") and user == 0:
            message = "container has runAsNonRoot and image will run as root"
            raise NotReady("CreateContainerConfigError", message)
        return {
            "user": user,
            "group": own.get("runAsGroup", 0),
            "may_gain": own.get("allowPrivilegeEscalation", True),
            "read_only_root": bool(own.get("readOnlyRootFilesystem")),
            "directory": self._container.get("workingDir") or "",
        }

    def _volume(self, volume: Object, place: Path, claims: Callable[[str, str], Path]) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return claims(self._namespace, claim["claimName"])
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777 if "emptyDir" in volume else 0o755)
        for resource, kind, name in (
            (CONFIG_MAPS, "configMap", "name"),
            (SECRETS, "secret", "secretName"),
        ):
            if kind in volume:
                self._files(volume, resource, volume[kind], volume[kind][name], place)
        for source in (volume.get("projected") or {}).get("sources") or []:
            for resource, kind in ((CONFIG_MAPS, "configMap"), (SECRETS, "secret")):
                if kind in source:
                    self._files(volume, resource, source[kind], source[kind]["name"], place)
        return place

    def _files(
        self, volume: Object, resource: Resource, source: Object, name: str, place: Path
    ) -> None:
        try:
            data = self._data(resource, name, optional=source.get("optional", False))
        except NotReady:
            kind = "configmap" if resource is CONFIG_MAPS else "secret"
            words = f'MountVolume.SetUp failed for volume "{volume["name"]}" : {kind} "{name}" not found'
            raise NotReady("ContainerCreating", words, event="FailedMount") from None
        chosen = {each["key"]: each["path"] for each in source.get("items") or []}
        for key, content in data.items():
            if not chosen or key in chosen:
                path = place / chosen.get(key, key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(source.get("defaultMode") or 0o644)

    def _data(self, resource: Resource, name: str, *, optional: bool = False) -> dict[str, bytes]:
        found = self._storage.find(resource, self._namespace, name)
        if found is None:
            if optional:
                return {}
            kind = "configmap" if resource is CONFIG_MAPS else "secret"
            raise NotReady("CreateContainerConfigError", f'{kind} "{name}" not found')
        if resource is SECRETS:
            return {key: base64.b64decode(each) for key, each in (found.get("data") or {}).items()}
        binary = {
            key: base64.b64decode(each) for key, each in (found.get("binaryData") or {}).items()
        }
        return {key: each.encode() for key, each in (found.get("data") or {}).items()} | binary

    def _value(self, source: Object) -> str | None:
        if "fieldRef" in source:
            return _field(self._pod, source["fieldRef"]["fieldPath"])
        for resource, kind in ((CONFIG_MAPS, "configMapKeyRef"), (SECRETS, "secretKeyRef")):
            if kind not in source:
                continue
            name, key, optional = (source[kind].get(each) for each in ("name", "key", "optional"))
            data = self._data(resource, name, optional=bool(optional))
            if key in data:
                return data[key].decode()
            if optional:
                return None
            what = "ConfigMap" if resource is CONFIG_MAPS else "Secret"
            message = f"couldn't find key {key} in {what} {self._namespace}/{name}"
            raise NotReady("CreateContainerConfigError", message)
        resources: Any = self._container.get("resources") or {}
        kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
        return str((resources.get(kind) or {}).get(name, ""))


def _field(pod: Object, path: str) -> str:
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        return str(pod["metadata"].get(found[1], {}).get(found[2], ""))
    values: dict[str, Callable[[], Any]] = {
        "metadata.name": lambda: pod["metadata"]["name"],
        "metadata.namespace": lambda: pod["metadata"]["namespace"],
        "metadata.uid": lambda: pod["metadata"]["uid"],
        "spec.nodeName": lambda: pod["spec"]["nodeName"],
        "spec.serviceAccountName": lambda: pod["spec"]["serviceAccountName"],
        "status.podIP": lambda: "127.0.0.1",
        "status.hostIP": lambda: "127.0.0.1",
    }
    if path not in values:
        raise NotReady("CreateContainerConfigError", f"unsupported fieldPath: {path}")
    return str(values[path]())


def _expanded(text: str, environment: dict[str, str]) -> str:
    def replaced(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else environment.get(found[2], found[0])

    return _REFERENCE.sub(replaced, text)
