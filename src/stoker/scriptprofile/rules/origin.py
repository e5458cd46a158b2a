"""Finds the line to change: traces a value from a call in the user's file back to the line that wrote the value.

Only unambiguous steps are followed: an assignment, the argument in a function's only call or else the parameter's
default, an option's default, a field of a class, a key of a dict.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

from stoker.scriptprofile.observations import Place

MAX_HOPS = 8
"""Maximum number of steps from one name to the next: a line that is further away does not help the user."""

_SAME_DATA = {"reshape", "copy", "ravel", "flatten", "transpose", "squeeze"}
"""Methods of an array that return the same values with the same dtype."""

_FOR_ALL_LAYERS = {"set_floatx", "set_dtype_policy", "set_global_policy"}

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = _Function | ast.ClassDef | ast.Module


def argument_line(
    place: Place, call: str, argument: str, *, position: int | None = None, value: object = None
) -> Place | None:
    """Return the line where the value of a call's argument was written.

    Args:
        place: A line of the call.
        call: Name of the function or method; empty: any call that passes the argument by name.
        argument: Name of the argument.
        position: Position of the argument, if it may be passed by position.
        value: Value of the argument: assignments of other constants are skipped.

    Returns:
        The line; None if the file cannot be read, or the call does not pass the argument.
    """
    for file, each in _calls(place, call):
        given = {keyword.arg: keyword.value for keyword in each.keywords}.get(argument)
        if given is None and position is not None and position < len(each.args):
            given = each.args[position]
        if given is not None:
            return _at(place, file.origin(given, value))
    return None


def array_line(place: Place, call: str, number: int) -> Place | None:
    """Return the line where an array of a dataset was computed; None if unknown.

    Args:
        place: A line of the call that creates the dataset.
        call: Name of the called function.
        number: Index of the array, in the order of `tf.nest.flatten`.
    """
    for file, each in _calls(place, call):
        leaves = list(_leaves(each.args[0])) if each.args else []
        if len(leaves) == 1:
            leaves = list(_leaves(file.origin(leaves[0])))
        if number < len(leaves):
            return _at(place, file.origin(leaves[number]))
    return None


def dtype_line(place: Place, dtype: str) -> Place | None:
    """Return the line of a file that sets a dtype for all layers or for a single layer; None if no line does."""
    file = _File.read(place.file)
    if file is None:
        return None
    for_all = [each for each in file.calls if _name(each.func) in _FOR_ALL_LAYERS and each.args]
    values = [each.args[0] for each in for_all]
    values += [word.value for each in file.calls for word in each.keywords if word.arg == "dtype"]
    found = (file.origin(given) for given in values)
    names = ((_value(node) or _name(node), node) for node in found)
    return next((_at(place, node) for name, node in names if name == dtype), None)


def step_line(calls: Sequence[tuple[Place, int]]) -> Place | None:
    """Return the line of the `def` of the function that is called for each step; None if it contains the loop.

    Args:
        calls: For each function on the stack when gradients were computed, innermost first: the current line, and
            the number of the function's first line.
    """
    step = None
    for place, first_line in calls:
        file = _File.read(place.file)
        function = file.function(first_line) if file else None
        if file is None or function is None or file.is_in_a_loop(place.line, function):
            break
        step = Place(file=place.file, line=function.lineno)
    return step


def _at(place: Place, node: ast.expr) -> Place:
    return Place(file=place.file, line=node.lineno)


def _name(function: ast.expr) -> str:
    """The last name of an expression: `batch` for `dataset.batch`."""
    return getattr(function, "attr", getattr(function, "id", ""))


def _calls(place: Place, name: str) -> Iterator[tuple[_File, ast.Call]]:
    """Yield the calls of this name that cover this line; the call whose name ends nearest to the line comes first."""
    file = _File.read(place.file)
    if file is None:
        return
    for node in sorted(file.calls, key=lambda each: abs((each.func.end_lineno or 0) - place.line)):
        if _holds(node, place.line) and name in ("", _name(node.func)):
            yield file, node


def _holds(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _leaves(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of tuples, lists and dicts, in the order of `tf.nest.flatten`."""
    parts = [node]
    if isinstance(node, (ast.Tuple, ast.List)):
        parts = node.elts
    elif isinstance(node, ast.Dict):
        keys = [str(getattr(key, "value", "")) for key in node.keys]
        parts = [part for _, part in sorted(zip(keys, node.values, strict=True), key=itemgetter(0))]
    for part in parts:
        yield from [part] if part is node else _leaves(part)


class _File:
    """A parsed Python file."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = list(ast.walk(tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self._parents = {each: node for node in self.nodes for each in ast.iter_child_nodes(node)}
        self._assigned = [
            (self._scope(target), target, given)
            for node in self.nodes
            for target, given in _assigned(node)
        ]

    @staticmethod
    @lru_cache(maxsize=64)
    def read(file: str) -> _File | None:
        """The current content of the file; None if it cannot be read."""
        try:
            return _File(ast.parse(Path(file).read_bytes()))
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None

    def function(self, first_line: int) -> _Function | None:
        """The function whose first line, including its decorators, is this line."""
        for node in self.nodes:
            if isinstance(node, _Function):
                lines = [node.lineno, *(each.lineno for each in node.decorator_list)]
                if min(lines) == first_line:
                    return node
        return None

    def is_in_a_loop(self, line: int, function: _Function) -> bool:
        """Whether a line of a function is inside one of the function's loops."""
        loops = ast.For | ast.AsyncFor | ast.While
        return any(isinstance(each, loops) and _holds(each, line) for each in ast.walk(function))

    def origin(self, node: ast.expr, value: object = None) -> ast.expr:
        """The expression that wrote a value, traced back as far as possible."""
        for _ in range(MAX_HOPS):
            before = self._before(node, value)
            given_otherwise = value is not None and _value(before) not in (None, value)
            if before is None or given_otherwise:
                break
            node = before
        return node

    def _before(self, node: ast.expr, value: object) -> ast.expr | None:
        """Trace a value one step back: the expression from which it comes; None if unknown."""
        match node:
            case ast.Name():
                return self._bound(node, value)
            case ast.Attribute(value=ast.Name() as owner, attr=name):
                return self._field(self._bound(owner) or owner, name)
            case ast.Subscript(value=ast.Name() as owner, slice=ast.Constant(value=key)):
                made = self._bound(owner)
                if not isinstance(made, ast.Dict):
                    return owner
                parts = zip(made.keys, made.values, strict=True)
                return next((part for each, part in parts if _value(each) == key), None)
            case ast.Subscript(value=inner):
                return inner
            case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in _SAME_DATA:
                return inner
        return None

    def _bound(self, name: ast.Name, value: object = None) -> ast.expr | None:
        """The value last assigned to a name, in its function or else in an enclosing function or the module."""
        own = scope = self._scope(name)
        while True:
            found = [
                given
                for where, target, given in self._assigned
                # A function may read a name that the module assigns below the function.
                if where is scope and (target.lineno < name.lineno or scope is not own)
                if target.id == name.id and (value is None or _value(given) in (None, value))
            ]
            if isinstance(scope, _Function) and not found:
                given = self._parameter(scope, name.id)
                found = [given] if given is not None else []
            if found or isinstance(scope, ast.Module):
                return max(found, key=lambda each: each.lineno, default=None)
            scope = self._scope(self._parents[scope])

    def _scope(self, node: ast.AST) -> _Scope:
        while not isinstance(node, _Scope):
            node = self._parents[node]
        return node

    def _parameter(self, function: _Function, name: str) -> ast.expr | None:
        """The value of a parameter: its argument in the function's only call, or else its default."""
        of = function.args
        names = [each.arg for each in (*of.posonlyargs, *of.args) if each.arg != "self"]
        calls = [node for node in self.calls if _name(node.func) == function.name]
        given = [word.value for call in calls for word in call.keywords if word.arg == name]
        if name in names:
            at = names.index(name)
            given += [call.args[at] for call in calls if at < len(call.args)]
        if given:
            return given[0] if len(calls) == 1 else None
        defaults = dict(zip((each.arg for each in of.kwonlyargs), of.kw_defaults, strict=True))
        defaults |= dict(zip(names[len(names) - len(of.defaults) :], of.defaults, strict=True))
        return defaults.get(name)

    def _field(self, owner: ast.expr, name: str) -> ast.expr | None:
        """The value of an attribute: an option's default, an argument of the constructor, or a field of the class."""
        made = _name(owner.func) if isinstance(owner, ast.Call) else _name(owner)
        words = {word.arg: word.value for word in getattr(owner, "keywords", ())}
        if made == "parse_args":
            return self._option(name)
        if name in words:
            return words[name]
        for scope, target, given in self._assigned:
            if isinstance(scope, ast.ClassDef) and (scope.name, target.id) == (made, name):
                return given
        return None

    def _option(self, name: str) -> ast.expr | None:
        """The default of `add_argument("--batch-size", default=4)`."""
        for node in self.calls:
            words = {word.arg: word.value for word in node.keywords}
            flags = [str(_value(each)).lstrip("-").replace("-", "_") for each in node.args]
            if _name(node.func) == "add_argument" and name in (*flags, _value(words.get("dest"))):
                return words.get("default")
        return None


def _value(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _assigned(node: ast.AST) -> Iterator[tuple[ast.Name, ast.expr]]:
    """The names that a statement assigns, and their values."""
    match node:
        case (
            ast.Assign(targets=[target], value=given)
            | ast.AnnAssign(target=target, value=ast.expr() as given)
        ):
            yield from _pairs(target, given)
        case ast.AugAssign(target=ast.Name() as name):
            both = ast.BinOp(left=name, op=node.op, right=node.value)
            yield name, ast.copy_location(both, node)


def _pairs(target: ast.expr, given: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yield names and their values; tuples are split into their parts if both sides have the same number."""
    if isinstance(target, ast.Name):
        yield target, given
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts: Sequence[ast.expr] = [given] * len(target.elts)
        if isinstance(given, (ast.Tuple, ast.List)) and len(given.elts) == len(parts):
            parts = given.elts
        for each, part in zip(target.elts, parts, strict=True):
            yield from _pairs(each, part)
