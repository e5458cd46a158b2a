"""Workers of TensorFlow under the launcher: they agree or end, and a dead one changes no weight."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from stoker.cluster.launch import Launched, LaunchSettings, WorkerFailed, launch

STEPS = 400

TRAINER = """
import os, socket, sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from stoker.core.errors import UserError
from stoker.train.setup.handshake import handshake
from stoker.train.context.heartbeat import process_heartbeat
from stoker.train.setup.strategy import make_distribution

heartbeat = process_heartbeat()
folder, differs = Path(sys.argv[1]), sys.argv[2]
distribution = make_distribution("multi_worker", replicas=1)
rank, strategy = distribution.worker, distribution.strategy
identity = {"data": {"fare": "d" * 64}, "versions": {"tensorflow": tf.__version__}}
if rank == 1 and differs:
    identity["data"][differs] = "e" * 64
if rank == 2 and differs:
    identity["configuration"] = {"only here": "1"}
try:
    handshake(distribution, identity)
except UserError as error:
    print(error.line())
    os._exit(2)
held = [socket.socket(fileno=os.dup(int(fd))) for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}") and "socket:" in os.readlink(f"/proc/self/fd/{fd}")]
print("listens on", [s.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                     for s in held if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)])
print(f"agreed pid {os.getpid()}", len(os.listdir("/proc/self/fd")))
with strategy.scope():
    weights = tf.Variable(tf.zeros([4]))
    step = tf.Variable(0, dtype=tf.int64)
state = folder / "state.npz"
if state.exists():
    there = np.load(state)
    weights.assign(there["weights"])
    step.assign(there["step"])
print(f"at {int(step.numpy())} pid {os.getpid()}")

@tf.function
def one_step():
    def replica():
        noise = tf.random.stateless_normal([4], tf.stack([step.read_value(), rank]))
        return tf.distribute.get_replica_context().all_reduce("SUM", noise - weights)
    gradient = strategy.experimental_local_results(strategy.run(replica))[0]
    weights.assign_add(0.1 * gradient)
    step.assign_add(1)

while int(step.numpy()) < STEPS:
    one_step()
    heartbeat.beat(int(step.numpy()))
    heartbeat.enter("train")
    if int(step.numpy()) % 20 == 0:
        print(f"step {int(step.numpy())} pid {os.getpid()}")
        if rank == 0:
            np.savez(folder / "made.npz", weights=weights.numpy(), step=int(step.numpy()))
            os.replace(folder / "made.npz", state)
np.save(folder / f"final-{rank}.npy", weights.numpy())
heartbeat.finish()
os._exit(0)
""".replace("STEPS", str(STEPS))


def expected_weights() -> NDArray[np.float32]:
    """What the steps above make of it in one process."""
    weights = tf.zeros([4])
    for step in range(STEPS):
        noise = [tf.random.stateless_normal([4], (step, rank)) for rank in range(2)]
        weights += 0.1 * ((noise[0] - weights) + (noise[1] - weights))
    return weights.numpy()


@dataclass
class Seen:
    lines: list[str] = field(default_factory=list)
    at: Callable[[str], object] = lambda line: None

    def log(self, line: str) -> None:
        self.lines.append(line)
        self.at(line)


def train(folder: Path, seen: Seen, *, differs: str = "", **settings: float) -> Launched:
    folder.mkdir(exist_ok=True)
    return launch(
        [sys.executable, "-c", TRAINER, str(folder), differs],
        settings=LaunchSettings(**{"workers": 2, **settings}),  # type: ignore[arg-type]  # mypy cannot check **
        log=seen.log,
        on_beat=lambda beat: None,
        environ=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def once(pattern: str, number: signal.Signals) -> Callable[[str], None]:
    done: list[str] = []

    def at(line: str) -> None:
        if not done and (found := re.search(rf"{pattern} pid (\d+)", line)):
            done.append(line)
            os.kill(int(found[1]), number)

    return at


@pytest.mark.multiworker
@pytest.mark.slow
def test_killed_and_stopped_workers_are_named_and_all_go_on_to_the_same_weights(
    tmp_path: Path,
) -> None:
    kill = once(r"worker 1\] step 100", signal.SIGKILL)
    stop = once(r"worker 1\] step 240", signal.SIGSTOP)
    seen = Seen(at=lambda line: (kill(line), stop(line)))

    launched = train(tmp_path, seen, watchdog_s=3)

    killed, stopped = launched.restarts
    assert killed == "worker 1 was killed by SIGKILL"
    assert stopped.startswith("worker 1 hangs: no heartbeat"), "\n".join(seen.lines)
    assert any("[worker 1]   File" in line for line in seen.lines)
    said = [line for line in seen.lines if line.startswith("[worker") and "listens on" in line]
    listens = [line.split("listens on ")[1] for line in said]
    assert len(listens) == 6, "both, three times"
    assert {device for line in listens for device in line.strip("[]").split(", ")} == {
        repr(b"lo\0")
    }
    for rank in range(2):
        final = np.load(tmp_path / f"final-{rank}.npy")
        np.testing.assert_array_equal(final, expected_weights())


@pytest.mark.multiworker
def test_workers_that_do_not_agree_end_and_name_what_differs(tmp_path: Path) -> None:
    seen = Seen()

    with pytest.raises(WorkerFailed) as caught:
        train(tmp_path, seen, differs="fare", workers=3)

    assert caught.value.exit_code == 2
    said = {line.split("] ", 1)[1] for line in seen.lines if "must agree" in line and "[" in line}
    line = (
        "all workers must agree on data fare. Received: data fare is dddddddddddddddd... on worker 0 "
        "and eeeeeeeeeeeeeeee... on worker 1. Give every worker the same files, settings and "
        "versions."
    )
    assert said == {line}
    assert not any("agreed" in line for line in seen.lines)
