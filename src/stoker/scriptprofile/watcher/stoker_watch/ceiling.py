"""Measures the script's compiled step on a resident batch (a batch kept in memory): a step that never waits for input.

Nothing in the script is lost or changed. The script's own step uses the same batch, so no batch is skipped. Every
variable that the step can change is restored. A step that does more than change variables is not run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from .loops import clock
from .wall import LOAD, now
from .watch import FACTS

MAX_STATE_BYTES = 1 << 30
"""Maximum size of the step's variables, bytes. They are copied to the host's memory and back; 1 GiB takes about a
second each way."""

_MORE_THAN_VARIABLES = re.compile(
    r"^(EagerPyFunc|PyFunc.*|Print.*|.*Summary.*|LookupTable(Insert|Import|Remove).*|Random.*"
    r"|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|.*Enqueue.*|.*Dequeue.*|Save.*"
    r"|WriteFile|WriteImage.*|Collective.*|Nccl.*|Assert.*File|TensorListFromFile)$"
)
"""Types of operations that cannot be undone: they call Python, print, write, or generate random numbers."""


LONGEST_STEP_S = 2.0
"""Maximum duration of a step that is run again on a resident batch, seconds."""

MAX_CEILING_S = 1.0
"""Maximum duration of one window on a resident batch, seconds: training waits during this time."""

ROUNDS = 3
"""Number of measurements; each is a window of real steps followed by a window on a resident batch."""

MAX_DRAINED = 100
"""Maximum number of steps that are not measured after a window on a resident batch: during this window, the input
prepared batches ahead."""

COPIES = 10
"""Number of copies of a batch to a GPU in one measurement: the wait for the last copy then costs little per copy."""


class StepInput:
    """The batches of one real step; `once` is an iterator that gives them and then ends."""

    def __init__(self, batches: list[Any], once: Any) -> None:
        self.batches, self.once = batches, once


class Prepared:
    """A step that can be measured, before its resident batch is read."""

    def __init__(
        self, function: Callable[[Any], Any], concrete: Any, variables: list[Any], *, calls: int
    ) -> None:
        self._function, self._variables, self._per_call = function, variables, calls
        self.concrete = concrete
        """The traced function of the step."""

    def take(self, iterator: Any) -> tuple[StepInput, Ceiling | None]:
        """Take the batches of one call from the script's iterator.

        Returns:
            The input with which the script's step must be run now; and the measurement on these batches, None
            if it could not be created.

        Raises:
            StopIteration: the input has ended; the step itself would have raised it too.
        """
        batches = [next(iterator)]
        for _ in range(self._per_call - 1):
            try:
                batches.append(next(iterator))
            except StopIteration:
                break
        try:
            parts = [resident(batch, iterator.element_spec) for batch in batches]
            once = parts[0]
            for part in parts[1:]:
                once = once.concatenate(part)
            again = iter(plain(parts[0].repeat()))
            ceiling = Ceiling(self._function, again, self._variables, batches=batches)
            return StepInput(batches, iter(plain(once))), ceiling
        except Exception as error:  # noqa: BLE001 - the batch was read: training must use it
            FACTS.failed(error)
            # Keras's train function accepts any iterator, but is traced again for a new kind of iterator.
            return StepInput(batches, iter(batches)), None


class Ceiling:
    """Runs the step on the resident batch."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        iterator: Any,
        variables: list[Any],
        *,
        batches: list[Any],
    ) -> None:
        self._function, self._iterator, self._variables = function, iterator, variables
        self._batches = batches

    def transfer_s(self) -> float:
        """Seconds that copying the batches of a call to a GPU takes while nothing else runs; 0 without a GPU."""
        return transfer_s(self._batches[0]) * len(self._batches)

    def settle(self) -> float:
        """Wait until the device has finished; return the time that this took, seconds."""
        return settle(self._variables)

    def measure(self, calls: int) -> tuple[float, float]:
        """Measure the time of this many calls, and restore the variables; see `timed`."""
        return timed(lambda: self._function(self._iterator), self._variables, calls=calls)


def settle(variables: list[Any]) -> float:
    """Wait until the device has finished; return the time that this took, seconds."""
    begun_s = clock()
    if variables:
        min(variables, key=lambda each: each.shape.num_elements() or 0).numpy()
    return clock() - begun_s


def timed(
    call: Callable[[], Any], variables: list[Any], *, calls: int, warm: bool = True
) -> tuple[float, float]:
    """Time calls of a step, and restore its variables.

    Args:
        call: Runs the step.
        variables: All variables that the step can change.
        calls: Number of timed calls.
        warm: Whether to make one more call before them, which is not timed.

    Returns:
        Time of the calls, seconds, and the share of this time that other programs took.
    """
    kept = [variable.numpy() for variable in variables]
    try:
        if warm:
            call()
            settle(variables)
        moment, begun_s = now(), clock()
        for _ in range(calls):
            call()
        settle(variables)
        took_s = clock() - begun_s
        return took_s, LOAD.between(moment, now()).away()
    finally:
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)


def prepare(
    function: Callable[[Any], Any], iterator: Any, model: Any
) -> tuple[Prepared | None, str]:
    """Check whether a step can be measured on a resident batch; no batch is read yet.

    Args:
        function: The train function of a model.
        iterator: The argument of the train function.
        model: The model of the train function.

    Returns:
        The prepared measurement and "", or None and the reason.
    """
    tf: Any = sys.modules["tensorflow"]
    if model is None or not isinstance(iterator, tf.data.Iterator):
        return None, "the batches are spread over a strategy's replicas"
    compiled = _compiled(function)
    if compiled is None:
        return None, "the step is not compiled: Python starts each of its operations"
    if any(not isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(iterator.element_spec)):
        return None, "the batches contain ragged or sparse tensors"
    if resident(_zeros(iterator.element_spec), iterator.element_spec).element_spec != (
        iterator.element_spec
    ):
        return None, "a batch cannot be used again with the shapes that its dataset declares"
    traced = compiled.experimental_get_tracing_count()
    concrete = compiled.get_concrete_function(iterator)
    if compiled.experimental_get_tracing_count() != traced:
        return None, "the step is traced again for each batch"
    if found := does_more(concrete):
        return (
            None,
            f"the step has operations that cannot be undone ({', '.join(sorted(found)[:3])})",
        )
    variables = _variables(concrete, model)
    size = sum(each.shape.num_elements() * each.dtype.size for each in variables)
    if size > MAX_STATE_BYTES:
        return None, f"the step's variables take {size / 2**30:.1f} GiB, too much to copy"
    calls = int(getattr(model, "steps_per_execution", 1))
    return Prepared(function, concrete, variables, calls=calls), ""


def _compiled(function: Any) -> Any:
    """The train function itself if it is a `tf.function`, or else the `tf.function` in its closure; None without."""
    tf: Any = sys.modules["tensorflow"]
    kind = type(tf.function(lambda: None))
    if isinstance(function, kind):
        return function
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, kind):
            return cell.cell_contents
    return None


def operations(concrete: Any) -> set[str]:
    """Types of all operations of a compiled step."""
    graph = concrete.graph.as_graph_def()
    nodes = [graph.node, *(inner.node_def for inner in graph.library.function)]
    return {node.op for each in nodes for node in each}


def does_more(concrete: Any) -> set[str]:
    """Types of operations of a step that do more than change variables."""
    return {kind for kind in operations(concrete) if _MORE_THAN_VARIABLES.match(kind)}


def _variables(concrete: Any, model: Any) -> list[Any]:
    """All variables that the step captures, and all variables of the model and its optimizer."""
    known = [*model.variables, *getattr(model.optimizer, "variables", ())]
    found = {}
    for variable in [*concrete.graph.variables, *(each.value for each in known)]:
        if hasattr(variable, "assign") and hasattr(variable, "ref"):
            found[variable.ref()] = variable
    return list(found.values())


def _zeros(element_spec: Any) -> Any:
    """A batch of zeros, to check whether `resident` keeps the declared shapes; unknown sizes become 1."""
    tf: Any = sys.modules["tensorflow"]

    def zeros(spec: Any) -> Any:
        shape = [1 if size is None else size for size in spec.shape]
        return tf.zeros(shape, spec.dtype)

    return tf.nest.map_structure(zeros, element_spec)


def plain(dataset: Any) -> Any:
    """The dataset without the autotuner, which can delay the end of its iterator by seconds."""
    tf: Any = sys.modules["tensorflow"]
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def resident(batch: Any, spec: Any) -> Any:
    """A dataset with only this batch; it declares the same shapes as the script's own dataset."""
    tf: Any = sys.modules["tensorflow"]

    def relaxed(_: Any) -> Any:
        return tf.nest.map_structure(
            lambda value, like: tf.compat.v1.placeholder_with_default(value, like.shape),
            batch,
            spec,
        )

    return tf.data.Dataset.range(1).map(relaxed)


def transfer_s(batch: Any) -> float:
    """Seconds that a copy of a batch to the first GPU takes; 0 without a GPU, or if the batch is already on it.

    Args:
        batch: Tensors; they are not changed.
    """
    tf: Any = sys.modules["tensorflow"]
    if not tf.config.list_logical_devices("GPU"):
        return 0.0
    try:
        return copied_s(batch, device="GPU:0")
    except tf.errors.OpError as error:
        # E.g. the GPU has too little memory for a copy; the step itself is still measured.
        FACTS.failed(error)
        return 0.0


def copied_s(batch: Any, *, device: str) -> float:
    """Seconds that a copy of a batch to a device takes.

    Args:
        batch: Tensors or NumPy arrays.
        device: TensorFlow's name of the device, e.g. `GPU:0`.
    """
    tf: Any = sys.modules["tensorflow"]
    with tf.device("CPU:0"):
        # Leave out strings, which stay on the host, and tensors that are already on a GPU.
        parts = [tf.convert_to_tensor(part) for part in tf.nest.flatten(batch) if _moves(part)]
    if not parts:
        return 0.0
    # The first copy allocates memory, so it is not timed.
    _wait(_copies(tf, parts, device))
    begun_s = clock()
    for _ in range(COPIES):
        copies = _copies(tf, parts, device)
    _wait(copies)
    return (clock() - begun_s) / COPIES


def _moves(part: Any) -> bool:
    kind = getattr(getattr(part, "dtype", None), "name", "string")
    return kind not in ("string", "object", "resource", "variant") and "GPU" not in str(
        getattr(part, "device", "")
    )


def _copies(tf: Any, parts: list[Any], device: str) -> list[Any]:
    with tf.device(device):
        return [tf.identity(part) for part in parts]


def _wait(copies: list[Any]) -> None:
    """Wait until all copies are complete, by reading one number of each."""
    tf: Any = sys.modules["tensorflow"]
    for copy in copies:
        tf.reshape(copy, [-1])[:1].numpy()
