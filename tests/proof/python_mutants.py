"""Rules of the package, each switched off by a change to one place of its Python code: those of `python_mutants.txt`.

This is the counterpart of `mutants`, which does the same to the scripts in Redis. `python_switch` makes the change, and
`test_python_mutants` runs the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.proof.mutants import GONE, SWITCHES, As, If, Mutant, read_mutants

IT = "IT"
"""In the new text of a mutant: what the code has there."""


class Value(str):
    """The right side of the marked assignment, what is returned, looped over or entered, reads so."""

    __slots__ = ()


class Function(str):
    """The function of the first call reads so."""

    __slots__ = ()


class Operand(NamedTuple):
    """An operand of ``and`` and ``or``, counted through all of the marked statement, reads so."""

    at: int
    text: str


class Argument(NamedTuple):
    """An argument reads so: of the first call by its position, or of the first call that names it."""

    name: int | str
    text: str


Switch = str | Operand | Argument
"""`GONE` or `As`: the statement; `If`: its condition, or what it excepts; or `Value`, `Function`, `Operand`, `Argument`."""


def marks(text: str) -> dict[str, list[int]]:
    """Return where the marks of a file are: the numbers of the marked lines."""
    marked: dict[str, list[int]] = {}
    waiting: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        mark = re.search(r"# rule: (\w+)$", line)
        if line.lstrip().startswith("#"):
            waiting += [mark[1]] if mark else []
            continue
        for name in [*waiting, *([mark[1]] if mark else [])]:
            marked.setdefault(name, []).append(number)
        waiting = []
    return marked


def switched_off(mutant: Mutant, mark: str, text: str) -> str:
    """Return a file's text with a rule switched off at its ``mark``, if it is marked there."""
    code, tree = text.encode(), ast.parse(text)
    starts = [0]
    for line in code.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    edits = []
    for number in marks(text).get(mark, []):
        node = _part(_statement(tree, number), mutant.switch)
        if node is None:
            raise ValueError(f"{mark}: line {number} has nothing for {mutant.switch!r}")
        begin = starts[node.lineno - 1] + node.col_offset
        edits.append(
            (begin, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0), node.col_offset)
        )
    for begin, end, indent in sorted(edits, reverse=True):
        code = code[:begin] + _new(mutant.switch, code[begin:end].decode(), indent).encode() + code[end:]
    return code.decode()


def _new(switch: Switch, old: str, indent: int) -> str:
    if switch == GONE:
        return "pass"
    text = switch if isinstance(switch, str) else switch.text
    if isinstance(switch, As):
        return text.replace("\n", "\n" + " " * indent).replace(IT, old)
    return text.replace(IT, f"({old})")


def _statement(tree: ast.Module, number: int) -> ast.stmt | ast.ExceptHandler:
    """Return the innermost statement of a line."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.ExceptHandler)]
    around = [node for node in nodes if node.lineno <= number <= (node.end_lineno or 0)]
    return max(around, key=lambda node: (node.lineno, node.col_offset))


Part = ast.expr | ast.stmt | ast.ExceptHandler


def _part(node: ast.stmt | ast.ExceptHandler, switch: Switch) -> Part | None:
    """Return what a switch replaces of a statement."""
    if switch == GONE or isinstance(switch, As):
        return node
    if isinstance(switch, If):
        return _condition(node)
    if isinstance(switch, Value):
        if isinstance(node, ast.With):
            return node.items[0].context_expr
        return getattr(node, "iter", None) or getattr(node, "value", None)
    inside = list(_expressions(node))
    if isinstance(switch, Operand):
        operands = {id(each) for node in inside if isinstance(node, ast.BoolOp) for each in node.values}
        leaves = [each for each in inside if id(each) in operands and not isinstance(each, ast.BoolOp)]
        return leaves[switch.at] if switch.at < len(leaves) else None
    calls = [each for each in inside if isinstance(each, ast.Call)]
    if isinstance(switch, Argument) and isinstance(switch.name, str):
        return next((word.value for call in calls for word in call.keywords if word.arg == switch.name), None)
    if not calls:
        return None
    if isinstance(switch, Argument):
        return calls[0].args[int(switch.name)] if int(switch.name) < len(calls[0].args) else None
    return calls[0].func


def _condition(node: ast.stmt | ast.ExceptHandler) -> ast.expr | None:
    if isinstance(node, ast.ExceptHandler):
        return node.type
    if isinstance(node, ast.If | ast.While):
        return node.test
    inside = list(_expressions(node))
    choices = [each.test for each in inside if isinstance(each, ast.IfExp)]
    lists = [each for each in inside if isinstance(each, ast.ListComp | ast.SetComp | ast.GeneratorExp)]
    filters = [test for each in lists for part in each.generators for test in part.ifs]
    return next(iter(choices + filters), None)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Iterate over the expressions of a statement without the statements in it, in their order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from _expressions(child)


def _operand(text: str) -> Operand:
    at, _, new = text.partition(" ")
    return Operand(int(at), new)


def _argument(text: str) -> Argument:
    name, _, new = text.partition(" ")
    return Argument(int(name) if name.isdigit() else name, new)


PYTHON_MUTANTS = read_mutants(
    "python_mutants.txt",
    SWITCHES | {"value": Value, "function": Function, "operand": _operand, "argument": _argument},
)
