"""A small client of model servers that speak TensorFlow Serving's REST and gRPC.

from stoker.client import RestClient

with RestClient("http://127.0.0.1:8501") as client:
    answers = client.predict("taxi", [{"fare": 12.5, "company": "Flash Cab"}])

Loads neither TensorFlow nor Keras.
"""

from stoker.app.client import (
    CallError,
    Connection,
    GrpcClient,
    ModelAt,
    NoAnswerError,
    RefusedError,
    RestClient,
    SignatureSpec,
    TensorSpec,
    Tls,
)

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
