"""Asking a model server over REST and gRPC, as any client of TensorFlow Serving does.

Loads neither TensorFlow nor Keras: `import stoker.client` is quick, and runs beside any framework.
"""

from stoker.app.client.asking import ask_grpc, ask_rest
from stoker.app.client.connection import GRPC_URL, REST_URL, Connection, Tls
from stoker.app.client.errors import CallError, NoAnswerError, RefusedError
from stoker.app.client.grpc_client import GrpcClient
from stoker.app.client.rest_client import RestClient
from stoker.app.client.rows import json_instances
from stoker.app.client.signature import ModelAt, SignatureSpec, TensorSpec

__all__ = [
    "GRPC_URL",
    "REST_URL",
    "CallError",
    "Connection",
    "GrpcClient",
    "ModelAt",
    "NoAnswerError",
    "RefusedError",
    "RestClient",
    "SignatureSpec",
    "TensorSpec",
    "Tls",
    "ask_grpc",
    "ask_rest",
    "json_instances",
]
