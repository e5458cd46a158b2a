"""The same compiled step on one batch that is there already: what the input can reach at best.

Nothing that the script has is lost or changed: the batch is one that the script's own step has
used, every variable that the step can change is put back, and a step that does more than change
variables is not run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from .facts import FACTS
from .load import LOAD, now
from .loops import clock
from .transfer import transfer_s

MOST_STATE_BYTES = 1 << 30
"""Variables are copied to the host's memory and back: 1 GiB takes about a second each way."""

_MORE_THAN_VARIABLES = re.compile(
    r"^(EagerPyFunc|PyFunc.*|Print.*|.*Summary.*|LookupTable(Insert|Import|Remove).*|Random.*"
    r"|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|.*Enqueue.*|.*Dequeue.*|Save.*"
    r"|WriteFile|WriteImage.*|Collective.*|Nccl.*|Assert.*File|TensorListFromFile)$"
)
"""Operations that cannot be put back: they call Python, print, write, or draw random numbers."""


class Taken:
    """The batches of one real step, as an input that ends after them."""

    def __init__(self, batches: list[Any], once: Any) -> None:
        self.batches, self.once = batches, once


class Prepared:
    """What can be measured, before its batch has been taken."""

    def __init__(
        self, function: Callable[[Any], Any], concrete: Any, variables: list[Any], *, calls: int
    ) -> None:
        self._function, self._variables, self._per_call = function, variables, calls
        self.concrete = concrete
        """What the function runs."""

    def take(self, iterator: Any) -> tuple[Taken, Ceiling | None]:
        """Take the batches of one call from the script's iterator.

        Returns:
            The step's input, with which it must be run now; and what measures, None where that
            could not be made.

        Raises:
            StopIteration: the input has ended, as the step itself would have said.
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
            return Taken(batches, iter(plain(once))), ceiling
        except Exception as error:  # noqa: BLE001 - the batch was taken: it must be trained with
            FACTS.failed(error)
            # A train function of Keras's takes any iterator, and traces once more for it.
            return Taken(batches, iter(batches)), None


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
        """Seconds that the copies of a call's batches to a GPU take, alone; 0 without one."""
        return transfer_s(self._batches[0]) * len(self._batches)

    def settle(self) -> float:
        """Wait until the device has done all it was given; the time that it took, seconds."""
        begun_s = clock()
        if self._variables:
            smallest = min(self._variables, key=lambda each: each.shape.num_elements() or 0)
            smallest.numpy()
        return clock() - begun_s

    def measure(self, calls: int) -> tuple[float, float]:
        """Seconds that so many calls take, and the share that others took; variables are as before."""
        kept = [variable.numpy() for variable in self._variables]
        try:
            self._function(self._iterator)
            self.settle()
            moment, begun_s = now(), clock()
            for _ in range(calls):
                self._function(self._iterator)
            self.settle()
            took_s = clock() - begun_s
            return took_s, LOAD.between(moment, now()).away()
        finally:
            for variable, value in zip(self._variables, kept, strict=True):
                variable.assign(value)


def prepare(
    function: Callable[[Any], Any], iterator: Any, model: Any
) -> tuple[Prepared | None, str]:
    """See whether the step may be run on its own, without taking anything yet.

    Args:
        function: The train function of a model.
        iterator: What it is given.
        model: Whose it is.

    Returns:
        What measures, or None; and why not.
    """
    tf: Any = sys.modules["tensorflow"]
    if model is None or not isinstance(iterator, tf.data.Iterator):
        return None, "the batches are spread over a strategy's replicas"
    compiled = _compiled(function)
    if compiled is None:
        return None, "the step is not compiled: Python runs each of its operations"
    if any(not isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(iterator.element_spec)):
        return None, "the batches hold ragged or sparse tensors"
    if resident(_zeros(iterator.element_spec), iterator.element_spec).element_spec != (
        iterator.element_spec
    ):
        return None, "a batch cannot be given again with the shapes that its dataset declares"
    traced = compiled.experimental_get_tracing_count()
    concrete = compiled.get_concrete_function(iterator)
    if compiled.experimental_get_tracing_count() != traced:
        return None, "the step is traced again for each batch"
    if found := does_more(concrete):
        return None, f"the step does what cannot be undone ({', '.join(sorted(found)[:3])})"
    variables = _variables(concrete, model)
    size = sum(each.shape.num_elements() * each.dtype.size for each in variables)
    if size > MOST_STATE_BYTES:
        return None, f"the step's variables take {size / 2**30:.1f} GiB, which would be copied"
    calls = int(getattr(model, "steps_per_execution", 1))
    return Prepared(function, concrete, variables, calls=calls), ""


def _compiled(function: Any) -> Any:
    """The `tf.function` that a train function is, or closes over."""
    tf: Any = sys.modules["tensorflow"]
    kind = type(tf.function(lambda: None))
    if isinstance(function, kind):
        return function
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, kind):
            return cell.cell_contents
    return None


def does_more(concrete: Any) -> set[str]:
    """Operations of a step that do more than change variables."""
    graph = concrete.graph.as_graph_def()
    kinds = {node.op for node in graph.node}
    for inner in graph.library.function:
        kinds |= {node.op for node in inner.node_def}
    return {kind for kind in kinds if _MORE_THAN_VARIABLES.match(kind)}


def _variables(concrete: Any, model: Any) -> list[Any]:
    """Every variable that the step captures, and every one of the model's and its optimizer's."""
    known = [*model.variables, *getattr(model.optimizer, "variables", ())]
    found = {}
    for variable in [*concrete.graph.variables, *(each.value for each in known)]:
        if hasattr(variable, "assign") and hasattr(variable, "ref"):
            found[variable.ref()] = variable
    return list(found.values())


def _zeros(element_spec: Any) -> Any:
    """A batch of one row, to see whether such batches can be given again at all."""
    tf: Any = sys.modules["tensorflow"]

    def zeros(spec: Any) -> Any:
        shape = [1 if size is None else size for size in spec.shape]
        return tf.zeros(shape, spec.dtype)

    return tf.nest.map_structure(zeros, element_spec)


def plain(dataset: Any) -> Any:
    """The dataset, without the autotuner: to end it can take its iterator seconds."""
    tf: Any = sys.modules["tensorflow"]
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def resident(batch: Any, spec: Any) -> Any:
    """A dataset of this batch alone, with the shapes that the script's own dataset declares."""
    tf: Any = sys.modules["tensorflow"]

    def relaxed(_: Any) -> Any:
        return tf.nest.map_structure(
            lambda value, like: tf.compat.v1.placeholder_with_default(value, like.shape),
            batch,
            spec,
        )

    return tf.data.Dataset.range(1).map(relaxed)
