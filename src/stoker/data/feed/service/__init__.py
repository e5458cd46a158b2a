"""Batches made by other processes and machines, with TensorFlow's tf.data service.

server    one process: a dispatcher or a worker
group     the processes of one machine: start, watch, restart, end together
status    state of a dispatcher and its workers, without TensorFlow
records   the training split as TFRecord files that TensorFlow's own operations can read
reading   what training reads; which pipelines can leave their process
"""
