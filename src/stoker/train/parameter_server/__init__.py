"""Training with parameter servers: workers compute gradients, the servers hold every variable.

cluster  the processes: servers and workers serve, the chief connects
worker   computes the gradients of a batch and writes no variable
server   queues the gradients and applies them one by one; the only writer
calls    distributes batches to free workers and collects the results
meter    measures steps for the metrics
run      a run in progress
loop     training from start to end

Keras's optimizers, metrics and BatchNorm read a variable and write it back; two workers that do so
at once lose one of the updates (of 400 steps by 2 workers `optimizer.iterations` counted 241-303).
So workers write no variable. See docs/decisions/0014-parameter-server.md.
"""
