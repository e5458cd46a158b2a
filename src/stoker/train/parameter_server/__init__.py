"""Training with parameter servers: workers compute gradients, the servers hold every variable.

cluster  the processes: servers and workers serve, the chief connects
worker   what a worker computes of one batch: gradients, and nothing is written
server   where gradients wait and are applied, one after the other: the only writer
calls    batches handed out to whichever worker is free, and what came of them
meter    what steps took, and what is told of them
run      a run that is under way
loop     the whole of it, in its order

Keras's optimizers, metrics and BatchNorm read a variable and write it back; two workers that do so
at once lose one of the updates (of 400 steps by 2 workers `optimizer.iterations` counted 241-303).
So workers write no variable. See docs/decisions/0014-parameter-server.md.
"""
