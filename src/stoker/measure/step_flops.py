"""Counts the operations of a graph: a model's forward pass, or a training step that a script's watcher wrote.

A step's graph contains the forward and the backward pass, so both are counted. Keras does not fix the
batch size, so each function's body is rebuilt with the shapes of a real batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from stoker.measure.flops_graph import Body, body_of, loop_iterations
from stoker.measure.operation_tally import Tally, tally_of
from stoker.measure.sized_graph import (
    ANY,
    Known,
    SizedGraph,
    common,
    declared,
    known_of,
    ordered,
    wanted_of,
)

_FEEDS = ("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")
"""Operations that return a batch."""

_PASSES = ("ReduceDataset", "ScanDataset")
"""Operations that call a function for each batch of a dataset: AutoGraph's loop over a dataset."""

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")


def count_graph(graph: Any, results: Sequence[str]) -> Tally:
    """Count the operations of a graph whose inputs have known sizes.

    Args:
        graph: A `GraphDef` with shapes.
        results: References to the requested results, and `^node` for other nodes that must run.

    Raises:
        RuntimeError: the graph has an operation that this TensorFlow does not know.
    """
    _, tally = _Walk(graph, batch=[], given={}, calls=1).count(graph.node, {}, results)
    return tally


def count_step(step: Mapping[str, Any], folder: Path) -> Tally:
    """Count the operations of a step.

    Args:
        step: The watcher's record of the step; `calls` is the number of steps per call, `kind` the kind
            of loop that the step belongs to.
        folder: The folder that contains the step's graph.

    Returns:
        The count of one call; for a loop inside a tf.function, the count of one iteration.

    Raises:
        ValueError: the batch's shapes do not fit the graph.
        RuntimeError: the graph has an operation that this TensorFlow does not know.
    """
    graph = tf.compat.v1.GraphDef.FromString((folder / step["graph"]).read_bytes())
    batch = [
        Known(dtype=tf.as_dtype(kind), shape=tf.TensorShape(shape)) for kind, shape in step["batch"]
    ]
    walk = _Walk(graph, batch=batch, given=step["given"], calls=step["calls"])
    results = [*step["outputs"], *(f"^{name}" for name in step["runs"])]
    _, tally = walk.count(graph.node, {}, results)
    if step["kind"] == "inside" and not tally.unknown and (tally.passes != 1 or tally.outside):
        why = "the tf.function computes more than one loop over its dataset"
        return Tally(unknown=(why,)).plus(tally)
    return tally.all_on_device() if step["compiled"] else tally


class _Walk:
    """Counts the bodies of functions, each with the shapes of its arguments."""

    def __init__(
        self,
        graph: Any,
        *,
        batch: Sequence[Known],
        given: Mapping[str, Sequence[int]],
        calls: int,
    ) -> None:
        self._functions = {each.signature.name: each for each in graph.library.function}
        self._library = {name: body_of(each) for name, each in self._functions.items()}
        self._batch, self._given, self._calls = list(batch), given, calls

    def count(
        self, nodes: Sequence[Any], arguments: Mapping[str, Known], results: Sequence[str]
    ) -> tuple[list[Known], Tally]:
        """Rebuild a body with its arguments, and count its operations.

        Args:
            nodes: The nodes of the body.
            arguments: Name of each of the function's arguments -> what is known about it.
            results: References to the requested results, and `^node` for other nodes that must run.

        Returns:
            What is known about each result that is a tensor, in order; and the count.
        """
        needed = ordered({node.name: node for node in nodes}, results)
        wanted = wanted_of(needed, results)
        outer = Body(nodes, arguments=list(arguments))
        sized, tally = SizedGraph(), Tally(placed=tuple(needed))
        for name, known in arguments.items():
            sized.put(name, [known])
        for node in needed:
            if called := _called(node):
                entering = [known_of(tensor) for tensor in sized.inputs(node)]
                only = wanted.get(node.name, set())
                outputs, part = self._call(node, called, entering, outer=outer, only=only)
                sized.put(node.name, outputs)
                tally = tally.plus(part)
            elif fed := self._fed(node):
                sized.put(node.name, fed)
            else:
                sized.make(node)
        found = [known_of(sized.tensor(each)) for each in results if not each.startswith("^")]
        return found, tally.plus(tally_of(sized.definition()))

    def _fed(self, node: Any) -> list[Known]:
        """The known outputs of a node that returns a batch or a fed value; empty for other nodes."""
        if node.op == "Placeholder" and node.name in self._given:
            kind = tf.as_dtype(node.attr["dtype"].type)
            return [Known(dtype=kind, shape=tf.TensorShape(self._given[node.name]))]
        if node.op not in _FEEDS:
            return []
        kinds = [tf.as_dtype(each) for each in node.attr["output_types"].list.type]
        shapes = [tf.TensorShape(each) for each in node.attr["output_shapes"].list.shape]
        fits = len(kinds) == len(shapes) == len(self._batch) and all(
            kind == part.dtype and shape.is_compatible_with(part.shape)
            for kind, shape, part in zip(kinds, shapes, self._batch, strict=True)
        )
        return self._batch if fits else []

    def _call(
        self,
        node: Any,
        called: Sequence[str],
        entering: list[Known],
        *,
        outer: Body,
        only: set[int],
    ) -> tuple[list[Known], Tally]:
        """The outputs of a node that calls functions, and the count of these functions."""
        missing = [name for name in called if name not in self._functions]
        if missing:
            why = f"{missing[0]}: a function whose body is not in the graph"
            return declared(node), Tally(unknown=(why,))
        if node.op in _LOOPS:
            outputs, tally = self._loop(node, entering, outer=outer)
        elif node.op in _BRANCHES:
            outputs, tally = self._branches(node, called, entering[1:])
        elif node.op in _CALLS:
            outputs, tally = self._function(called[0], entering, only=only)
        elif node.op in _PASSES:
            return declared(node), self._iteration(node, called[0], entering)
        elif "Dataset" in node.op:
            # A stage of the input pipeline, which does not run on a device.
            return declared(node), Tally()
        else:
            why = f"{node.name}: it is not known how often {node.op} calls its function"
            return declared(node), Tally(unknown=(why,))
        return _merged(outputs, declared(node)), tally

    def _function(
        self, name: str, entering: Sequence[Known], *, only: set[int] | None = None
    ) -> tuple[list[Known], Tally]:
        """Count a function; `only`: the indices of the outputs that are read, None: all."""
        function = self._functions[name]
        arguments = [argument.name for argument in function.signature.input_arg]
        outputs = [function.ret[output.name] for output in function.signature.output_arg]
        # A function that XLA compiles as a whole computes all its outputs, even unread ones.
        compiled = "_XlaMustCompile" in function.attr and function.attr["_XlaMustCompile"].b
        places = [
            place for place in range(len(outputs)) if only is None or compiled or place in only
        ]
        runs = [f"^{node}" for node in function.control_ret.values()]
        found, tally = self.count(
            function.node_def,
            dict(zip(arguments, entering, strict=True)),
            [*(outputs[place] for place in places), *runs],
        )
        kinds = [tf.as_dtype(output.type) for output in function.signature.output_arg]
        given = [Known(dtype=kind, shape=ANY) for kind in kinds]
        for place, known in zip(places, found, strict=True):
            given[place] = known
        return given, tally.all_on_device() if compiled else tally

    def _branches(
        self, node: Any, called: Sequence[str], entering: Sequence[Known]
    ) -> tuple[list[Known], Tally]:
        found = [self._function(name, entering) for name in called]
        tallies = [tally for _, tally in found]
        most = max(tallies, key=lambda tally: tally.total)
        # Keras's branches in a call of several steps only check whether a batch is left.
        if len({tally.total for tally in tallies}) > 1 and self._calls == 1:
            note = f"{node.name}: the largest branch of {node.op} is counted"
            most = Tally(notes=(note,)).plus(most)
        outputs = [
            Known(dtype=parts[0].dtype, shape=common([part.shape for part in parts]))
            for parts in zip(*(outputs for outputs, _ in found), strict=True)
        ]
        return outputs, most

    def _loop(self, node: Any, entering: list[Known], *, outer: Body) -> tuple[list[Known], Tally]:
        name = node.attr["body"].func.name
        body = self._library[name]
        # A value that an iteration passes on unchanged stays known; all others may change.
        kept = [body.argument(result) == place for place, result in enumerate(body.results)]
        entering = [
            known if place < len(kept) and kept[place] else known.without_value()
            for place, known in enumerate(entering)
        ]
        leaving, tally = self._function(name, entering)
        if [str(known.shape) for known in leaving] != [str(known.shape) for known in entering]:
            entering = [
                Known(dtype=before.dtype, shape=common([before.shape, after.shape]))
                if str(before.shape) != str(after.shape)
                else before
                for before, after in zip(entering, leaving, strict=True)
            ]
            leaving, tally = self._function(name, entering)
        leaving = [
            Known(dtype=before.dtype, shape=common([before.shape, after.shape]))
            for before, after in zip(entering, leaving, strict=True)
        ]
        return leaving, self._whole_loop(node, tally, outer=outer)

    def _whole_loop(self, node: Any, iteration: Tally, *, outer: Body) -> Tally:
        """The count of a loop, from the count of one iteration."""
        if not iteration.total:
            return iteration
        iterations = loop_iterations(outer, node, library=self._library)
        if iterations.number is None:
            return Tally(unknown=(f"{node.name}: a loop of unknown length",)).plus(iteration)
        # Keras's loop over the steps of a call ends early only if the dataset ends.
        own = self._calls > 1 and iterations.number == self._calls
        if iterations.at_most and not own:
            number = iterations.number
            note = f"{node.name}: a loop of at most {number} iterations, counted as {number}"
            return Tally(notes=(note,)).plus(iteration, times=number)
        return Tally().plus(iteration, times=iterations.number)

    def _iteration(self, node: Any, name: str, entering: Sequence[Known]) -> Tally:
        """The count of one iteration of a loop over a dataset, which is a step."""
        arguments = self._functions[name].signature.input_arg
        states = len(node.attr["Tstate"].list.type)
        # The dataset comes first, then what an iteration passes to the next, then captured tensors.
        carried = [known.without_value() for known in entering[1 : 1 + states]]
        captured = entering[1 + states :]
        elements = len(arguments) - len(carried) - len(captured)
        if self._takes_batch(name, arguments[len(carried) : len(carried) + elements]):
            _, tally = self._function(name, [*carried, *self._batch, *captured])
            return tally.in_a_pass()
        # AutoGraph adds a second loop over the results of its loop over a dataset; it computes nothing.
        kinds = [tf.as_dtype(each.type) for each in arguments[states : states + elements]]
        other = [Known(dtype=kind, shape=ANY) for kind in kinds]
        _, tally = self._function(name, [*carried, *other, *captured])
        if not tally.total and not tally.unknown:
            return Tally(placed=tally.placed)
        return Tally(unknown=(f"{node.name}: a loop over another dataset",))

    def _takes_batch(self, name: str, arguments: Sequence[Any]) -> bool:
        """Whether these arguments of a function have the dtypes and shapes of a batch's parts."""
        if len(arguments) != len(self._batch):
            return False
        shapes = [self._library[name].shape(argument.name) for argument in arguments]
        return all(
            tf.as_dtype(argument.type) == part.dtype
            and (shape is None or part.shape.is_compatible_with(shape))
            for argument, shape, part in zip(arguments, shapes, self._batch, strict=True)
        )


def _merged(outputs: Sequence[Known], also: Sequence[Known]) -> list[Known]:
    """Combine the computed and the declared shapes of outputs."""
    if len(outputs) != len(also):
        return list(outputs)
    return [
        Known(dtype=one.dtype, shape=one.shape.merge_with(other.shape), value=one.value)
        for one, other in zip(outputs, also, strict=True)
    ]


def _called(node: Any) -> list[str]:
    """The functions that a node calls, except a loop's condition."""
    # Iterate over the items: looking up a missing attribute by its key would add it to the definition.
    found = [
        value.func.name
        for key, value in node.attr.items()
        if key != "cond" and value.HasField("func")
    ]
    lists = (value.list.func for value in node.attr.values() if value.HasField("list"))
    return [*found, *(each.name for functions in lists for each in functions)]
