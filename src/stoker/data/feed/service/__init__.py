"""Batches made on other processes and machines: TensorFlow's own tf.data service, kept in hand.

server    one process: a dispatcher or a worker
group     the processes of one machine: started, watched, started again, ended together
status    what a dispatcher and its workers answer, without TensorFlow
records   the training split as TFRecord files that TensorFlow's own operations can read
sendable  which pipelines can leave their process, and which cannot
reading   what training reads
"""
