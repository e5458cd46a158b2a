"""Fingerprints of a user's function: its source, and everything in the user's folder that it uses.

Comments and blank lines do not matter. If the code cannot be followed, the fingerprint covers every file of the
folder. Such code has star imports, imports inside a function, `exec` and similar, or reads of files or of the
environment.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.core.fingerprint import fingerprint
from stoker.core.folder_files import file_mark, folder_files

_DYNAMIC = frozenset(
    [
        *("exec", "eval", "globals", "locals", "vars", "getattr"),
        *("__import__", "importlib", "import_module", "runpy"),
    ]
)
"""Names, alone or after a dot, that let a function use code that its source does not name."""

_READS = frozenset(
    [
        *("open", "read_text", "read_bytes", "read_file", "GFile", "__file__", "environ", "getenv"),
        *("load", "loads", "loadtxt", "genfromtxt", "fromfile", "imread", "load_model"),
        *("load_weights", "read_csv", "read_parquet", "read_json", "read_pickle"),
    ]
)
"""Names, alone or after a dot, of functions and attributes that can read a file or the environment."""


class _UndecidableError(Exception):
    """The source alone does not determine what the function uses."""


@dataclass
class _Module:
    """One parsed Python file."""

    path: Path
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    always: list[ast.stmt] = field(default_factory=list)
    stars: list[str] = field(default_factory=list)
    """Modules from which this module imports all names (`from X import *`)."""

    def local_imports(self) -> list[str]:
        """Return the modules that are imported inside functions and classes."""
        found: list[str] = []
        for statement in [*self.definitions.values(), *self.always]:
            for node in ast.walk(statement):
                if isinstance(node, ast.Import):
                    found += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        return found


def function_fingerprint(
    folder: Path, module: str, function: str, *, outputs: Collection[Path] = ()
) -> str:
    """Return the fingerprint of `module:function` and everything in `folder` that it refers to.

    Args:
        folder: The user's folder, where modules are searched.
        module: Dotted module name, e.g. `model`.
        function: A module-level name in the module.
        outputs: Folders that Stoker writes; they are left out.

    Returns:
        64 hexadecimal digits.

    Raises:
        ConfigError: the module does not exist or does not parse.
    """
    walk = _Walk(folder)
    try:
        walk.visit(module, function)
    except (_UndecidableError, RecursionError):
        return fingerprint({"folder": folder_files(folder, outputs)})
    return fingerprint({"parts": sorted(walk.parts)})


def source_fingerprint(folder: Path, module: str, function: str) -> tuple[str, frozenset[Path]]:
    """Return the fingerprint of `module:function` by source alone, for a run whose reads are observed.

    If the source cannot be followed (a star import, `getattr`), the fingerprint covers the complete modules that the
    source names. It does not cover files and environment variables that the code reads: `core.reads` records them.

    Args:
        folder: The user's folder, where modules are searched.
        module: Dotted module name, e.g. `model`.
        function: A module-level name in the module.

    Returns:
        64 hexadecimal digits, and the Python files that the fingerprint covers.

    Raises:
        ConfigError: the module does not exist or does not parse.
    """
    walk = _LenientWalk(folder)
    try:
        walk.visit(module, function)
    except (RecursionError, _UndecidableError):
        # A chain of a thousand functions, or a missing module: the fingerprint covers every file.
        return function_fingerprint(folder, module, function), frozenset()
    files = frozenset(parsed.path.resolve() for parsed in walk.modules.values())
    return fingerprint({"parts": sorted(walk.parts)}), files


def python_fingerprint(path: Path) -> str:
    """Return the fingerprint of a Python file without comments and blank lines.

    If the file is not valid Python, return the mark of its bytes (`file_mark`).
    """
    try:
        return fingerprint({"python": ast.unparse(ast.parse(path.read_text(encoding="utf-8")))})
    except (SyntaxError, ValueError):
        return file_mark(path)


def module_file(folder: Path, module: str) -> Path | None:
    """Return the file of a dotted module name below a folder; None if it does not exist."""
    base = folder.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


_BINDING = frozenset(["globals", "vars", "exec", "setattr", "__getattr__"])
"""Names through which a module can define other names that its source does not show."""


def names_bound(path: Path) -> set[str] | None:
    """Return the names that importing a module defines, without running it.

    Returns:
        None if the source does not show all names (a star import and similar), or is not valid Python.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree, table = ast.parse(text), symtable.symtable(text, str(path), "exec")
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            return None
        if isinstance(node, ast.Global) or getattr(node, "id", None) in _BINDING:
            return None
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    return None if names & _BINDING else names


class _Walk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, _Module] = {}
        self.seen: set[tuple[str, str]] = set()
        self.parts: list[str] = []

    def visit(self, module: str, name: str) -> None:
        if (module, name) in self.seen:
            return
        self.seen.add((module, name))
        parsed = self.load(module)
        if name in parsed.imports:
            self.follow_import(*parsed.imports[name], attributes=None)
        elif name in parsed.definitions:
            self.take(module, parsed.definitions[name])
        else:
            self.cannot_follow(module)

    def cannot_follow(self, module: str) -> None:
        """Refuse a module whose source does not show which code it uses, e.g. `from x import *`.

        Args:
            module: Name of the module.
        """
        raise _UndecidableError(module)

    def reads(self, module: str) -> None:
        """Refuse a module that may read a file or an environment variable."""
        self.cannot_follow(module)

    def load(self, module: str) -> _Module:
        if module not in self.modules:
            path = module_file(self.folder, module)
            if path is None:
                raise _UndecidableError(module)
            self.modules[module] = _parse_module(path, module)
            if self.modules[module].stars:
                self.cannot_follow(module)
            for statement in self.modules[module].always:
                self.take(module, statement)
            self.run_imports(module)
        return self.modules[module]

    def run_imports(self, module: str) -> None:
        """Include the user's modules that an import runs, even if none of their names is used."""
        parents = [module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)]
        imported = [name for name, _ in self.modules[module].imports.values()]
        for name in [*parents, *imported]:
            if module_file(self.folder, name) is not None:
                self.load(name)

    def take(self, module: str, statement: ast.stmt) -> None:
        self.parts.append(f"{module}: {ast.unparse(statement)}")
        if any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(statement)):
            # Whether a local import runs, and in which order, is known only at run time.
            self.cannot_follow(module)
        for name, attribute in _references(statement):
            if name in _DYNAMIC or attribute in _DYNAMIC:
                self.cannot_follow(module)
            if name in _READS or attribute in _READS:
                self.reads(module)
            target = self.load(module).imports.get(name)
            if target is not None:
                self.follow_import(*target, attributes=attribute)
            elif name in self.load(module).definitions:
                self.visit(module, name)

    def follow_import(self, module: str, name: str | None, *, attributes: str | None) -> None:
        if name is not None:
            submodule = f"{module}.{name}" if module else name
            if module_file(self.folder, submodule) is not None:
                module, name = submodule, attributes
            elif module_file(self.folder, module) is None:
                self.parts.append(f"import {module}.{name}")
                return
        else:
            name = attributes
            if name is not None and module_file(self.folder, f"{module}.{name}") is not None:
                # `package.module.name`: only the first two names are known here, so the whole module is included.
                self.cannot_follow(f"{module}.{name}")
                return
            if module_file(self.folder, module) is None:
                self.parts.append(f"import {module}")
                return
        if name is None:
            self.cannot_follow(module)
            return
        self.visit(module, name)


class _LenientWalk(_Walk):
    """Includes a whole module if its source cannot be followed, and continues."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._whole: set[str] = set()

    def reads(self, module: str) -> None:
        """Do nothing: reads are observed at run time, see `core.reads`."""

    def cannot_follow(self, module: str) -> None:
        if module in self._whole:
            return
        self._whole.add(module)
        parsed = self.load(module)
        for name in list(parsed.definitions):
            self.visit(module, name)
        named = [name for name, _ in parsed.imports.values()]
        for name in [*named, *parsed.stars, *parsed.local_imports()]:
            path = module_file(self.folder, name)
            if path is None:
                continue
            try:
                self.cannot_follow(name)
            except ConfigError:
                # The module is not valid in this version of Python; the user's code may import it only in another
                # version.
                self.parts.append(f"{name}: {file_mark(path)}")


def _parse_module(path: Path, module: str) -> _Module:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{path} must be Python" + (f" (line {line})" if line else ""),
            got=Plain(str(error)),
        ) from None
    parsed = _Module(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for statement in tree.body:
        _sort_statement(parsed, statement, package)
    # A decorator of the user may register a function, which is then called although no code names it.
    parsed.always += [
        statement
        for statement in parsed.definitions.values()
        if any(_is_own(name, parsed, path) for name in _decorators(statement))
    ]
    return parsed


def _decorators(statement: ast.stmt) -> list[str]:
    decorators = getattr(statement, "decorator_list", [])
    return [name for node in decorators for name, _ in _references(ast.Expr(node)) if name]


def _is_own(name: str, parsed: _Module, path: Path) -> bool:
    if name in parsed.definitions:
        return True
    imported = parsed.imports.get(name)
    folders = [path.parent, *path.parents[1:3]]
    return imported is not None and any(module_file(f, imported[0]) for f in folders if imported[0])


def _sort_statement(parsed: _Module, statement: ast.stmt, package: str) -> None:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        parsed.imports.pop(statement.name, None)  # the last binding of a name wins
        parsed.definitions[statement.name] = statement
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            parsed.stars.append(_base(statement, package))
            return
        for name, target in _imports(statement, package).items():
            parsed.definitions.pop(name, None)
            parsed.imports[name] = target
    elif names := _assigned(statement):
        if _calls(statement):
            parsed.always.append(statement)
        for name in names:
            # If a name is assigned twice, its value depends on the order, so both statements are always included.
            if name in parsed.definitions:
                parsed.always += [parsed.definitions[name], statement]
            parsed.imports.pop(name, None)
            parsed.definitions[name] = statement
    elif not _is_docstring(statement):
        parsed.always.append(statement)


def _imports(
    statement: ast.Import | ast.ImportFrom, package: str
) -> dict[str, tuple[str, str | None]]:
    if isinstance(statement, ast.Import):
        # `import a.b` defines the name a, but runs a.b. So it is also stored under its whole name.
        top: dict[str, tuple[str, str | None]] = {
            alias.asname or alias.name.partition(".")[0]: (
                alias.name if alias.asname else alias.name.partition(".")[0],
                None,
            )
            for alias in statement.names
        }
        return top | {alias.name: (alias.name, None) for alias in statement.names}
    base = _base(statement, package)
    return {alias.asname or alias.name: (base, alias.name) for alias in statement.names}


def _base(statement: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module in `from X import ...`; X may be relative."""
    base = statement.module or ""
    if not statement.level:
        return base
    parents = package.split(".") if package else []
    kept = parents[: len(parents) - statement.level + 1]
    return ".".join([*kept, base] if base else kept)


def _assigned(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _calls(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _references(statement: ast.stmt) -> list[tuple[str, str | None]]:
    """Return (name, attribute or None) for every name that a statement reads; `a.b` gives ("a", "b")."""
    found: list[tuple[str, str | None]] = []
    bases: set[int] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append((node.value.id, node.attr))
            bases.add(id(node.value))
        elif isinstance(node, ast.Attribute):
            found.append((node.attr, None) if node.attr in _DYNAMIC | _READS else ("", None))
    found += [
        (node.id, None)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in bases
    ]
    return found
