"""Additions to the manifests for a model repository that all servers of a deployment mount.

Source: nfs(5) for the mount options; kubernetes.io, persistent volumes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from stoker.core.errors import ConfigError

ROOT = "/models"
"""Path at which servers mount the repository."""

IMAGE_ROOT = "/seed"
"""Folder of the model's first version in the image. It is not below `ROOT`, where the mounted volume would hide it."""

_NFS = re.compile(r"nfs://([A-Za-z0-9][A-Za-z0-9.-]*)((?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)+)")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_OBJECT_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
"""Name of a claim or a StorageClass. Source: RFC 1123, subdomain."""

_CLAIM = "pvc://"
"""Prefix of an existing claim, as in KServe's `storageUri`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedVolume:
    """A volume that many nodes can write."""

    nfs_server: str = ""
    """Host of an NFS export; empty: the volume comes from a storage class or an existing claim."""

    nfs_path: str = ""
    """Path of the NFS export."""

    storage_class: str = ""
    """Name of a StorageClass whose volumes many nodes can write (ReadWriteMany)."""

    claim: str = ""
    """Name of an existing PersistentVolumeClaim; empty: the deployment creates a claim."""

    @property
    def values(self) -> dict[str, str]:
        """Return the values for the placeholders of the templates."""
        return {
            "nfs_server": json.dumps(self.nfs_server),
            "nfs_path": json.dumps(self.nfs_path),
            # An empty class disables the default StorageClass, so the claim uses the volume that it names.
            "storage_class": json.dumps(self.storage_class),
        }


def parse_volume(text: str) -> SharedVolume:
    """Read `nfs://SERVER/PATH`, `pvc://CLAIM` or the name of a StorageClass.

    Raises:
        ConfigError: the text has none of these forms.
    """
    if found := _NFS.fullmatch(text):
        return SharedVolume(nfs_server=found[1], nfs_path=found[2])
    if text.startswith(_CLAIM) and _OBJECT_NAME.fullmatch(text.removeprefix(_CLAIM)):
        return SharedVolume(claim=text.removeprefix(_CLAIM))
    if _OBJECT_NAME.fullmatch(text):
        return SharedVolume(storage_class=text)
    raise ConfigError(
        "--shared-repository must be nfs://SERVER/PATH, pvc://CLAIM or the name of a StorageClass, "
        "and support ReadWriteMany",
        got=text,
        fix="For example --shared-repository nfs://10.0.0.7/srv/models.",
    )
