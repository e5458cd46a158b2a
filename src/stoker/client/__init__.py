"""A small client of model servers with TensorFlow Serving's REST and gRPC interfaces.

from stoker.client import RestClient

with RestClient("http://127.0.0.1:8501") as client:
    answers = client.predict("taxi", [{"fare": 12.5, "company": "Flash Cab"}])

Imports neither TensorFlow nor Keras.
"""

from stoker.client.connection import Connection, Tls
from stoker.client.grpc_client import GrpcClient
from stoker.client.model_client import CallError, NoAnswerError, RefusedError
from stoker.client.rest_client import RestClient
from stoker.client.signature import ModelAt, SignatureSpec, TensorSpec

__all__ = [
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
]
