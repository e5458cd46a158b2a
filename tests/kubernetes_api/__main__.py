"""`python -m tests.kubernetes_api FOLDER`: a cluster of this machine to try a page of the documentation on.

It has what docs/how-to/kubernetes.md takes for granted: the namespace `vision` with a claim `runs`, a queue and a
secret, and two nodes with GPUs that no process gets. It prints the path of its kubeconfig, and runs until Ctrl-C.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import signal
from pathlib import Path

from tests.kubernetes_api.cluster import USER, kubernetes_cluster
from tests.kubernetes_api.node.containers import Image
from tests.kubernetes_api.resources import SECRETS, Object

NAMESPACE, QUEUE, CONTEXT = "vision", "gpu-queue", "production"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Runs a cluster of this machine until Ctrl-C.")
    parser.add_argument("folder", type=Path, help="of its files")
    parser.add_argument("--runs", type=Path, default=Path("/mnt/runs"), help="volume of `runs`")
    parser.add_argument("--image", default="registry.example.com/vision/train:7")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    off = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with kubernetes_cluster(folder, {given.image: Image(environment=off)}) as cluster:
        cluster.access.anonymous = USER  # kubectl sends no token without TLS
        cluster.add_namespace(NAMESPACE)
        cluster.add_claim("runs", NAMESPACE, directory=given.runs)
        for number in range(2):
            name = f"node-{number}"
            cluster.add_node(name, labels={"gpu": "a100"}, taint="spot", gpus="16")
        cluster.add_queue(QUEUE, NAMESPACE, cpu="64", gpus="32", pods="64")
        data = {"api-key": base64.b64encode(b"not a key").decode()}
        metadata = {"name": "wandb", "namespace": NAMESPACE}
        secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        cluster.api.create(SECRETS, secret)
        path = cluster.kubeconfig(folder / "kubeconfig", namespace=NAMESPACE, context=CONTEXT)
        print(path, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
