"""The runner of GPU tests in processes of their own: what it makes of an output that broke off."""

import pytest

from tests.gpu.isolated import chunks_of, ended

IDS = ("t.py::a[0]", "t.py::a[1]", "t.py::a[2]")


def test_tests_of_one_function_share_processes_of_a_few():
    chunks = chunks_of([*IDS, "t.py::b", "t.py::c[0]"], 2)

    assert list(chunks) == [IDS[:2], IDS[2:], ("t.py::b",), ("t.py::c[0]",)]


@pytest.mark.parametrize(
    ("text", "outcomes", "rest"),
    [
        ("".join(f"{name} PASSED [ 10%]\n" for name in IDS), dict.fromkeys(IDS, "PASSED"), ()),
        # A failure ends its process; the tests behind it have not begun.
        (f"{IDS[0]} FAILED [ 10%]\n", {IDS[0]: "FAILED"}, IDS[1:]),
        # Nothing was said of the second: it took its process along.
        (f"{IDS[0]} PASSED [ 10%]\n{IDS[1]} ", {IDS[0]: "PASSED", IDS[1]: "hung"}, IDS[2:]),
        ("", {IDS[0]: "hung"}, IDS[1:]),
    ],
)
def test_the_first_test_without_an_outcome_has_ended_its_process(text, outcomes, rest):
    result = ended(IDS, text, "hung")

    assert (result.outcomes, result.rest) == (outcomes, rest)
