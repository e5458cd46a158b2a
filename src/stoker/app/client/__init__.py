"""Asking a model server over REST and gRPC, as any client of TensorFlow Serving does.

Loads neither TensorFlow nor Keras: `import stoker.client`, which names what is public of it, is quick,
and runs beside any framework.
"""
