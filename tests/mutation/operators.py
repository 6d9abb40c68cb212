"""The mutants of one source file: cosmic-ray's operators, and statements left out."""

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword

# The first two need arguments, and cosmic-ray leaves them out as well unless it is given some; the
# others change nothing, for small numbers and names are the same object wherever they are equal.
LEFT_OUT = {
    "VariableReplacer",
    "VariableInserter",
    "ReplaceComparisonOperator_Eq_Is",
    "ReplaceComparisonOperator_NotEq_IsNot",
}
# Of the ten operators that may stand for one, as many are tried at each place.
PER_PLACE = 2


@dataclass(frozen=True)
class Mutant:
    line: int
    operator: str
    before: str  # the changed line, and what it became
    after: str
    source: str


class RemoveStatement:
    """Leaves out one statement: an assignment, a call, a return, a raise or an assertion."""

    KINDS = frozenset({"expr_stmt", "atom_expr", "return_stmt", "raise_stmt", "assert_stmt"})

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type != "simple_stmt" or node.children[0].type not in self.KINDS:
            return
        in_class = node.parent.parent is not None and node.parent.parent.type == "classdef"
        if not in_class:
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        statement = node.children[0]
        prefix = statement.get_first_leaf().prefix
        node.children[0] = Keyword("pass", statement.start_pos, prefix)
        return node


def mutants_of(source: str, seed: int, most: int) -> tuple[list[Mutant], int]:
    """Mutants that parse and mean something else, and the number of all that may be made.

    Where those are more than `most`, they are so many drawn by `seed`.
    """
    operators = {name: each() for name, each in _operators().items()}
    places: dict[Any, list[tuple[str, int, int]]] = defaultdict(list)
    for name, operator in operators.items():
        for number, node in enumerate(ast_nodes(parso.parse(source))):
            for index, position in enumerate(operator.mutation_positions(node)):
                places[position, name.split("_")[0]].append((name, number, index))
    generator = random.Random(seed)
    candidates = []
    for _, choices in sorted(places.items()):
        candidates += generator.sample(choices, min(PER_PLACE, len(choices)))
    generator.shuffle(candidates)
    mutants: list[Mutant] = []
    seen = {_meaning(source), None}
    for name, number, index in candidates:
        changed = _mutated(source, operators[name], number, index)
        meaning = _meaning(changed)
        if meaning not in seen:
            seen.add(meaning)
            mutants.append(_described(source, changed, name))
        if len(mutants) == most:
            break
    return sorted(mutants, key=lambda mutant: mutant.line), len(candidates)


def _operators() -> dict[str, Any]:
    provider = OperatorProvider()
    own: dict[str, Any] = {"RemoveStatement": RemoveStatement}
    return own | {name: provider[name] for name in provider if name not in LEFT_OUT}


def _mutated(source: str, operator: Any, number: int, index: int) -> str:
    tree = parso.parse(source)
    node = list(ast_nodes(tree))[number]
    parent = node.parent
    changed = operator.mutate(node, index)
    if parent is not None and changed is not node:
        place = next(at for at, child in enumerate(parent.children) if child is node)
        parent.children[place : place + 1] = [] if changed is None else [changed]
    code: str = tree.get_code()
    return code


def _meaning(source: str) -> str | None:
    """What runs, without annotations; None where it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("object", ast.Load())
    return ast.dump(tree)


def _described(source: str, changed: str, operator: str) -> Mutant:
    old, new = source.splitlines(), changed.splitlines()
    for tag, first, last, start, end in SequenceMatcher(None, old, new, False).get_opcodes():
        if tag != "equal":
            before, after = (" ".join(map(str.strip, x)) for x in (old[first:last], new[start:end]))
            return Mutant(first + 1, operator, before, after, changed)
    raise AssertionError("nothing has changed")
