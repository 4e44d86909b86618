"""A warp in Python: the text of a kernel module, run by 32 lanes that meet where a warp would.

Knows nothing of what a kernel does, and needs no compiler: decorators and annotations are dropped,
names that the module imports are given. What the compiler makes of the same text is not seen here.
"""

import ast
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

__all__ = ["LANES", "lane_functions", "run_warp"]

LANES = 32
# Operations of all lanes of a warp; each gives every lane an answer.
_MEETINGS = ("shuffle_sync", "vote_all_sync", "sync_warp")

Lane = Generator[tuple[Any, ...], Any, Any]


def lane_functions(
    text: str, given: dict[str, Any], meetings: Sequence[str] = _MEETINGS
) -> dict[str, Any]:
    """Functions and constants of a module's text; functions in which lanes meet are generators.

    A generator yields (operation, line, arguments) and is sent the operation's answer. Classes are
    left out: what they hold is given.
    """
    names = dict(given)
    exec(_compiled(text, tuple(meetings)), names)
    return names


@lru_cache(maxsize=64)
def _compiled(text: str, meetings: tuple[str, ...]) -> CodeType:
    tree = ast.parse(text)
    left_out = (ast.Import, ast.ImportFrom, ast.ClassDef)
    tree.body = [node for node in tree.body if not isinstance(node, left_out)]
    lanes = _Lanes(_meeting_functions(tree, meetings), meetings)
    return compile(ast.fix_missing_locations(lanes.visit(tree)), "<lanes>", "exec")


def run_warp(
    lanes: Sequence[Lane], *, entered: Callable[[int], None], met: Callable[[str], None]
) -> None:
    """Run all lanes to their ends; `entered` hears which one runs next, `met` at which operation.

    Asserts that lanes meet at one place of the text: nothing warp-wide stands where they diverge.
    """
    answers: list[Any] = [None] * len(lanes)
    while True:
        asked = []
        for number, lane in enumerate(lanes):
            entered(number)
            try:
                asked.append(lane.send(answers[number]))
            except StopIteration:
                asked.append(None)
        places = {request and request[:2] for request in asked}
        assert len(places) == 1, f"lanes have diverged: {places}"
        if asked[0] is None:
            return
        met(asked[0][0])
        answers = _answers(asked)


def _answers(asked: Sequence[tuple[Any, ...]]) -> list[Any]:
    operation = asked[0][0]
    if operation == "shuffle_sync":
        return [asked[source][2] for *_, source in asked]
    if operation == "vote_all_sync":
        return [all(vote for *_, vote in asked)] * len(asked)
    return [None] * len(asked)


def _meeting_functions(tree: ast.Module, meetings: Sequence[str]) -> set[str]:
    """Functions that hold a meeting, or call one that does."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    meeting: set[str] = set()
    while True:
        more = {
            function.name
            for function in functions
            if any(_is_meeting(node, meeting, meetings) for node in ast.walk(function))
        }
        if more == meeting:
            return meeting
        meeting = more


def _is_meeting(node: ast.AST, meeting: set[str], meetings: Sequence[str]) -> bool:
    """Whether a node calls an operation at which lanes meet, or a function that holds one."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Attribute):
        return called.attr in meetings
    return isinstance(called, ast.Name) and (called.id in meeting or called.id in meetings)


class _Lanes(ast.NodeTransformer):
    """Turns meetings into yields."""

    def __init__(self, meeting: set[str], meetings: Sequence[str]) -> None:
        self.meeting, self.meetings = meeting, meetings

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not _is_meeting(node, self.meeting, self.meetings):
            return node
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if name in self.meetings:
            request = [ast.Constant(name), ast.Constant(node.lineno), *node.args]
            return ast.Yield(ast.Tuple(request, ast.Load()))
        return ast.YieldFrom(node)
