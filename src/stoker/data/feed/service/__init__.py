"""Make batches in other processes and on other machines, with TensorFlow's tf.data service.

server    one process: a dispatcher or a worker
group     the processes of one machine: start, watch, restart, end together
status    state of a dispatcher and its workers, without TensorFlow
records   the training split as TFRecord files that TensorFlow's own operations can read
reading   the feed that training reads; the check whether a pipeline can run in another process
"""
