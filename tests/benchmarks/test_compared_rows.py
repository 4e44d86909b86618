"""Contenders of a line are compared before and after they are timed."""

from benchmarks.overlap_times import compared_rows


def test_one_that_was_wrong_before_has_no_times_and_one_wrong_after_says_so():
    found = {"wrong": ["differs"], "right": ["", ""], "later": ["", "differs now"]}
    windows = {"gemm_all": 1000, "right": 2000, "later": 4000}
    timed = []

    def time(name):
        def window(number):
            timed.append(name)
            return {"stage": (0, windows[name])}

        return window

    rows = compared_rows(
        ["gemm_all", *found],
        checks={name: iter(verdicts).__next__ for name, verdicts in found.items()},
        timed=time,
        num_iters=4,
    )

    assert [(row[0], row[1], row[4], row[7]) for row in rows] == [
        ("gemm_all", 1.0, 1.0, "ok"),
        ("wrong", "", "", "differs"),
        ("right", 2.0, 2.0, "ok"),
        ("later", 4.0, 4.0, "differs now"),
    ]
    assert sorted(set(timed)) == ["gemm_all", "later", "right"]
