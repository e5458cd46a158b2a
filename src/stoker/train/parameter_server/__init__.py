"""Training with parameter servers: workers compute gradients, and the servers store every variable.

cluster  starts servers and workers, and connects the chief to them
worker   computes the gradients of a batch and writes no variable
server   queues the gradients and applies them one by one; the only writer
calls    distributes batches to free workers and collects the results
run      a run in progress, and its metrics
loop     runs a training from start to end

Keras's optimizers, metrics and BatchNorm read a variable and write it back. If two workers do so at the
same time, one of the updates is lost: `optimizer.iterations` counted 241 to 303 of 400 steps by 2 workers.
So workers write no variables. See docs/decisions/0014-parameter-server.md.
"""
