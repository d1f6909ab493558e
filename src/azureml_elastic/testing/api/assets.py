"""Assets of a local workspace: code, data, models, components and environments, each in versions."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from azureml_elastic.testing.messages import Answer, NotFound, Request, document, properties_of, unsupported
from azureml_elastic.testing.storage import StorageAccount

WORKSPACES = "Microsoft.MachineLearningServices/workspaces"
"""Type of workspaces."""

_KINDS = ("codes", "components", "data", "environments", "models")
_PATH = re.compile(r"/([^/]+)(?:/([^/]+)(?:/versions(?:/([^/]+))?)?)?", re.DOTALL)
_PENDING_UPLOAD = re.compile(r"/[^/]+/([^/]+)/.*startPendingUpload")
_DEFAULT_VERSION = "azureml_default"
_ENVIRONMENT = {"image": "local", "environmentType": "Curated", "osType": "Linux"}
_LABEL = ":"
"""Part of an environment's version that is a label; labels are looked up among the versions."""


@dataclass
class Assets:
    """Handler of requests for assets, which stores the versions that were put."""

    root: str
    storage: StorageAccount
    _versions: dict[tuple[str, str], dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Documents by kind and name, and by version in the order of their creation."""
    _containers: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Properties of all versions that were put, by kind and name, such as whether they are archived."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def relative(self, resource: str) -> str | None:
        """Return the path below the workspace of a resource with this id, ``None`` for one that is elsewhere."""
        # Ids of the resource manager do not depend on case, and clients differ in how they write them.
        path, root = resource.removeprefix("azureml:"), f"{self.root}/".lower()
        return path[len(self.root) :] if f"{path}/".lower().startswith(root) else None

    def properties(self, resource: str) -> dict[str, Any] | None:
        """Return the properties of the version with this id, ``None`` if there is none."""
        match = _PATH.fullmatch(self.relative(resource) or "")
        if match is None:
            return None
        with self._lock:
            found = self._versions.get((match[1], match[2]), {}).get(match[3])
        return None if found is None else dict(found["properties"])

    def answer(self, request: Request, path: str) -> Answer:
        """Return the response to a request for a path below the workspace."""
        if request.method == "POST" and (upload := _PENDING_UPLOAD.fullmatch(path)):
            return self._pending_upload(upload[1].lower())
        match = _PATH.fullmatch(path)
        if match is None or match[1] not in _KINDS or request.method not in ("GET", "PUT"):
            return unsupported(request)
        kind, name, version = match[1], match[2], match[3]
        if request.method == "PUT":
            return unsupported(request) if name is None else self._put(request, kind, name, version)
        if name is None:
            return self._list_containers(request, kind)
        with self._lock:
            versions = dict(self._versions.get((kind, name), {}))
        if kind == "environments" and not versions and _LABEL not in path:
            # Every name is accepted, and stands for the Python that runs the workspace.
            each = version or "1"
            versions = {each: entity(self.root, f"environments/{name}/versions/{each}", _ENVIRONMENT)}
        if version == _DEFAULT_VERSION and versions:
            version = next(reversed(versions))
        if version is not None and version in versions:
            return document(versions[version])
        if path.endswith("/versions"):
            listed = [each for each in versions.values() if is_listed(request, each["properties"].get("isArchived"))]
            return document({"value": listed[::-1]})
        if versions and version is None:
            return document(self._container(kind, name, versions))
        raise NotFound(f"{path.strip('/')} is not in the local workspace.")

    def _put(self, request: Request, kind: str, name: str, version: str | None) -> Answer:
        properties = properties_of(request.json())
        with self._lock:
            if version is None:
                self._containers[kind, name] = properties
                versions = dict(self._versions.get((kind, name), {}))
                return document(self._container(kind, name, versions))
            if kind == "models":  # azure-ai-ml reads them of every model
                properties["flavors"] = properties.get("flavors") or {}
            made = entity(self.root, f"{kind}/{name}/versions/{version}", properties)
            self._versions.setdefault((kind, name), {})[version] = made
        return document(made, 201)

    def _list_containers(self, request: Request, kind: str) -> Answer:
        with self._lock:
            found = [
                self._container(kind, name, versions)
                for (other, name), versions in self._versions.items()
                # An anonymous one was made for one job, and is in no list.
                if other == kind and not all(each["properties"].get("isAnonymous") for each in versions.values())
            ]
        return document({"value": [each for each in found if is_listed(request, each["properties"].get("isArchived"))]})

    def _container(self, kind: str, name: str, versions: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the document of what all versions of a name have in common."""
        latest = next(reversed(versions), None)
        number = int(latest) if latest is not None and latest.isdecimal() else len(versions)
        properties = {
            "isArchived": False,
            "tags": {},
            "properties": {},
            **self._containers.get((kind, name), {}),
            "latestVersion": latest,
            "nextVersion": str(number + 1),
        }
        if kind == "data" and latest is not None:
            properties["dataType"] = versions[latest]["properties"].get("dataType")
        return entity(self.root, f"{kind}/{name}", properties)

    def _pending_upload(self, name: str) -> Answer:
        container = hashlib.sha256(name.encode()).hexdigest()[:40]  # a valid name of one, whatever the asset's is
        self.storage.make_container(container)
        uri = f"https://{self.storage.blob_host}/{container}"
        return document(
            {
                "blobReferenceForConsumption": {
                    "blobUri": uri,
                    "storageAccountArmId": self.storage.account,
                    "credential": {"credentialType": "SAS", "sasUri": f"{uri}?{self.storage.blob_signature}"},
                }
            }
        )


def entity(root: str, path: str, properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the document of a resource at a path below the workspace."""
    return {
        "id": f"{root}/{path}",
        "name": path.rpartition("/")[2],
        "type": f"{WORKSPACES}/{path.partition('/')[0]}",
        "properties": properties,
        "systemData": {"createdBy": "local"},
        **more,
    }


def is_listed(request: Request, archived: object) -> bool:
    """Return whether a list that was requested has something that may be archived; by default it has not."""
    view = request.query.get("listViewType")
    return view == "All" or (view == "ArchivedOnly") == bool(archived)
