"""The kubelet of all nodes: each pod with a node becomes a process of this machine, and its state goes back."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kubernetes_api.controllers.tf_jobs import NAME as TF_JOB_NAME
from tests.kubernetes_api.events import record
from tests.kubernetes_api.node.container_log import ContainerLog
from tests.kubernetes_api.node.containers import Container, Image, NotReady
from tests.kubernetes_api.problems import bad_request
from tests.kubernetes_api.resources import PODS, Object
from tests.kubernetes_api.server.api import Api
from tests.kubernetes_api.storage import now

LAUNCHER = Path(__file__).with_name("pod_process.py")
RETRY_S = 1.0
"""Interval of attempts to pull an image or to find a volume, seconds."""

CRASHES_S = 0.5
"""Delay before a container starts again, seconds; a real kubelet begins with 10."""

MESSAGE_S, MESSAGE_CHARS = 60.0, 2048
"""Longest wait for the end of a log that becomes the message of its container, and its length. A real kubelet reads
a file that is complete then; here a thread may have it still to read, as long as the machine is busy."""

TERMINATION_LOG = "termination-log"
"""File of a pod's folder, in the container `/dev/termination-log`."""

KILLED = 128 + signal.SIGKILL


@dataclass
class Running:
    """A pod on this machine."""

    pod: Object
    folder: Path
    logs: list[ContainerLog] = field(default_factory=list)
    """Of each start of the container."""

    process: subprocess.Popen[bytes] | None = None
    started: str = ""
    end_requested_s: float | None = None
    """When its end was requested, on the monotonic clock."""

    retry_s: float = 0.0
    attempts: int = 0
    last: Object | None = None
    """How the start before this one ended."""

    reason: str = ""
    """Why it was killed: OOMKilled, Evicted."""

    message: str = ""
    """What the kubelet says of an eviction."""

    is_abandoned: bool = False
    """Its node does not answer: the cluster has given it up, and it goes on."""


class Kubelet:
    """Runs pods."""

    def __init__(self, api: Api, folder: Path, images: dict[str, Image]) -> None:
        """Run nothing yet.

        Args:
            api: The cluster.
            folder: Of the pods' files and the claims' directories.
            images: By name.
        """
        self._api, self._storage = api, api.storage
        self._folder, self.images = folder, images
        self.claims: dict[tuple[str, str], Path] = {}
        """Namespace and name of claims -> their directories, where a test chooses them."""

        self._running: dict[str, Running] = {}
        self._lock = threading.RLock()
        self._is_closed = False

    def sync(self) -> None:
        """Start, end and give up pods."""
        pods = {pod["metadata"]["uid"]: pod for pod in self._storage.items(PODS)}
        self._write_hosts(list(pods.values()))
        with self._lock:
            for uid, pod in pods.items():
                if pod["spec"].get("nodeName"):
                    self._sync(uid, pod)
            for uid, running in self._running.items():
                if uid not in pods and not running.is_abandoned:
                    _signal(running, signal.SIGKILL)

    def known(self) -> list[Running]:
        """Return all pods that ever had a node."""
        with self._lock:
            return list(self._running.values())

    def running(self, name: str) -> Running:
        """Return a pod that has a process."""
        with self._lock:
            for each in self._running.values():
                if each.pod["metadata"]["name"] == name and each.process is not None:
                    return each
        raise AssertionError(f"pod {name} does not run")

    def kill(self, name: str, reason: str, message: str = "") -> None:
        """Kill a pod at once, as the kernel or the kubelet does."""
        running = self.running(name)
        running.reason, running.message = reason, message
        _signal(running, signal.SIGKILL)

    def claim(self, namespace: str, name: str) -> Path:
        """Return the directory of a claim."""
        place = self.claims.get((namespace, name), self._folder / "claims" / namespace / name)
        place.mkdir(parents=True, exist_ok=True)
        return place

    def logs(self, pod: Object, query: dict[str, str]) -> Iterator[bytes]:
        """Return the log of a pod, for the API."""
        metadata = pod["metadata"]
        container = pod["spec"]["containers"][0]["name"]
        if query.get("container", container) != container:
            raise bad_request(
                f"container {query['container']} is not valid for pod {metadata['name']}"
            )
        with self._lock:
            running = self._running.get(metadata["uid"])
            logs = list(running.logs) if running else []
        what = f'container "{container}" in pod "{metadata["name"]}"'
        if query.get("previous") in ("true", "True"):
            if len(logs) < 2:
                raise bad_request(f"previous terminated {what} not found")
            return logs[-2].read(query, self._api.is_stopping)
        if not logs:
            waiting = _waiting(pod)
            if waiting in ("ImagePullBackOff", "ErrImagePull"):
                raise bad_request(f"{what} is waiting to start: trying and failing to pull image")
            raise bad_request(f"{what} is waiting to start: {waiting or 'ContainerCreating'}")
        return logs[-1].read(query, self._api.is_stopping)

    def close(self) -> None:
        """Kill all pods."""
        self._is_closed = True
        with self._lock:
            for running in self._running.values():
                _signal(running, signal.SIGKILL)
        for running in self._running.values():
            if running.process is not None:
                running.process.wait()

    def _sync(self, uid: str, pod: Object) -> None:
        running = self._running.get(uid)
        phase, metadata = pod["status"]["phase"], pod["metadata"]
        if running is None:
            running = Running(pod=pod, folder=self._folder / "pods" / uid)
            self._running[uid] = running
        leaving = "deletionTimestamp" in metadata
        has_process = running.process is not None and running.process.poll() is None
        if leaving and not running.is_abandoned:
            if has_process:
                self._ask_to_end(running, metadata.get("deletionGracePeriodSeconds", 30))
            elif running.process is None or phase in ("Succeeded", "Failed"):
                self._remove(pod)
        elif phase == "Pending" and running.process is None and time.monotonic() >= running.retry_s:
            self._start(running, pod)

    def _start(self, running: Running, pod: Object) -> None:
        running.attempts += 1
        running.retry_s = time.monotonic() + RETRY_S
        image = pod["spec"]["containers"][0]["image"]
        try:
            if image not in self.images:
                raise self._not_pulled(running, image)
            self._launch(running, Container(self._storage, pod, self.images[image]))
        except NotReady as problem:
            self._event(pod, problem.event, problem.message, warning=True)
            waiting = {"waiting": {"reason": problem.reason, "message": problem.message}}
            self._status(running, "Pending", waiting)
            return
        self._event(pod, "Pulled", f'Container image "{image}" already present on machine')
        self._event(pod, "Started", f"Started container {pod['spec']['containers'][0]['name']}")

    def _not_pulled(self, running: Running, image: str) -> NotReady:
        words = f'rpc error: code = NotFound desc = failed to pull and unpack image "{image}": not found'
        if running.attempts == 1:
            self._event(running.pod, "Failed", "Error: ErrImagePull", warning=True)
            return NotReady("ErrImagePull", f'Failed to pull image "{image}": {words}')
        return NotReady("ImagePullBackOff", f'Back-off pulling image "{image}"', event="BackOff")

    def _launch(self, running: Running, container: Container) -> None:
        pod, folder = running.pod, running.folder
        (folder / "root").mkdir(parents=True, exist_ok=True)
        (folder / TERMINATION_LOG).write_text("")
        spec: dict[str, Any] = {
            "root": str(folder / "root"),
            **self._image(pod),
            "hosts": str(self._hosts(pod["metadata"]["namespace"])),
            "termination_log": str(folder / TERMINATION_LOG),
            "mounts": container.mounts(folder, self.claim),
            "hostname": container.hostname(),
            "command": container.command(),
            "environment": container.environment(),
            **container.identity(),
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        argv = [sys.executable, "-I", "-S", str(LAUNCHER), str(folder / "spec.json")]
        log = ContainerLog()
        running.logs.append(log)
        running.started = now()
        # All state before the process: its end may come at once.
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        running.process = process
        self._status(running, "Running", {"running": {"startedAt": running.started}})
        assert process.stdout is not None
        threading.Thread(target=log.take, args=(process.stdout,), daemon=True).start()
        threading.Thread(target=self._wait, args=(running, process), daemon=True).start()

    def _image(self, pod: Object) -> dict[str, list[tuple[str, str]]]:
        """Return what the image has, in two parts: what a volume would hide is mounted after the volumes."""
        container = pod["spec"]["containers"][0]
        places = [f"{each['mountPath']}/" for each in container.get("volumeMounts") or []]
        contents = self.images[container["image"]].contents()
        hidden = [each for each in contents if each[1].startswith(tuple(places))]
        return {"image": [each for each in contents if each not in hidden], "hidden": hidden}

    def _wait(self, running: Running, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_closed:
            return
        reason = (
            running.reason
            if running.reason == "OOMKilled"
            else "Completed"
            if code == 0
            else "Error"
        )
        ended: Object = {"exitCode": code if code >= 0 else KILLED, "reason": reason}
        ended |= {"startedAt": running.started, "finishedAt": now()}
        if message := _message(running, code):
            ended["message"] = message
        with self._lock:
            self._after(running, {"terminated": ended}, code)
        shutil.rmtree(running.folder / "volumes", ignore_errors=True)

    def _after(self, running: Running, state: Object, code: int) -> None:
        pod = self._storage.find(PODS, *_place(running.pod))
        if pod is None or pod["metadata"]["uid"] != running.pod["metadata"]["uid"]:
            return
        policy = pod["spec"]["restartPolicy"]
        leaves = "deletionTimestamp" in pod["metadata"] or running.reason == "Evicted"
        again = policy == "Always" or (policy == "OnFailure" and code != 0)
        if again and not leaves:
            running.process, running.last = None, state
            running.retry_s = time.monotonic() + CRASHES_S
            words = f"back-off restarting failed container in pod {pod['metadata']['name']}"
            self._event(pod, "BackOff", words, warning=True)
            waiting = {"reason": "CrashLoopBackOff", "message": words}
            self._status(running, "Pending", {"waiting": waiting})
            return
        self._status(running, "Succeeded" if code == 0 else "Failed", state)
        if "deletionTimestamp" in pod["metadata"]:
            self._remove(pod)

    def _ask_to_end(self, running: Running, grace_s: float) -> None:
        if running.end_requested_s is None:
            running.end_requested_s = time.monotonic()
            words = f"Stopping container {running.pod['spec']['containers'][0]['name']}"
            self._event(running.pod, "Killing", words)
            _signal(running, signal.SIGTERM)
        elif time.monotonic() - running.end_requested_s >= grace_s:
            _signal(running, signal.SIGKILL)

    def _remove(self, pod: Object) -> None:
        self._storage.delete(PODS, pod, grace_s=0)

    def _status(self, running: Running, phase: str, state: Object) -> None:
        container = running.pod["spec"]["containers"][0]
        ready = "running" in state
        status = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "" if "waiting" in state else f"sha256:{container['image']}",
            "ready": ready,
            "started": ready,
            "restartCount": max(0, len(running.logs) - 1),
            "state": state,
            "lastState": running.last or {},
        }

        def change(item: Object) -> None:
            conditions = item["status"].setdefault("conditions", [])
            conditions[:] = [each for each in conditions if each["type"] not in _READY]
            value = {"status": "True" if ready else "False", "lastTransitionTime": now()}
            conditions += [{"type": kind} | value for kind in _READY]
            item["status"] |= {"phase": phase, "containerStatuses": [status]}
            if running.started:
                item["status"] |= {
                    "startTime": running.started,
                    "podIP": "127.0.0.1",
                    "hostIP": "127.0.0.1",
                }
            if running.reason == "Evicted":
                item["status"] |= {"reason": "Evicted", "message": running.message}

        self._storage.change(PODS, running.pod, change, status=True)

    def _hosts(self, namespace: str) -> Path:
        place = self._folder / "hosts" / namespace
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("127.0.0.1 localhost\n")
        return place

    def _write_hosts(self, pods: list[Object]) -> None:
        """Add the names of new pods to the file that the pods of a namespace share: each is 127.0.0.1."""
        for pod in pods:
            spec, namespace = pod["spec"], pod["metadata"]["namespace"]
            host = spec.get("hostname") or pod["metadata"]["name"]
            has_service = TF_JOB_NAME in (pod["metadata"].get("labels") or {})
            if pod["status"]["phase"] != "Running" or not (spec.get("subdomain") or has_service):
                continue
            if spec.get("subdomain"):
                host = f"{host}.{spec['subdomain']}"
            names = [host, f"{host}.{namespace}", f"{host}.{namespace}.svc"]
            line = " ".join(["127.0.0.1", *names, f"{names[-1]}.cluster.local"])
            place = self._hosts(namespace)
            if line not in place.read_text().splitlines():
                with place.open("a") as stream:
                    stream.write(f"{line}\n")

    def _event(self, pod: Object, reason: str, message: str, *, warning: bool = False) -> None:
        record(self._storage, pod, reason, message, source="kubelet", warning=warning)


_READY = ("Ready", "ContainersReady")


def _message(running: Running, code: int) -> str:
    """Return what a container says of its end: its own file, else the end of its log if it wants that."""
    own = (running.folder / TERMINATION_LOG).read_text()
    policy = running.pod["spec"]["containers"][0].get("terminationMessagePolicy")
    if own or not code or policy != "FallbackToLogsOnError":
        return own[-MESSAGE_CHARS:]
    log = running.logs[-1]
    log.wait(MESSAGE_S)
    return log.text()[-MESSAGE_CHARS:]


def _place(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _waiting(pod: Object) -> str:
    for status in pod["status"].get("containerStatuses") or []:
        found: str = status["state"].get("waiting", {}).get("reason", "")
        return found
    return ""


def _signal(running: Running, number: signal.Signals) -> None:
    if running.process is not None and running.process.poll() is None:
        running.process.send_signal(number)
