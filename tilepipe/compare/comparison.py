"""Two readings in, every verdict out. Knows nothing of the screen or of how arguments are typed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, hypot
from statistics import median
from typing import Any

from tilepipe.compare.differences import Fact, differing_facts
from tilepipe.compare.judge import (
    MIN_ROUNDS,
    Ratio,
    Verdict,
    judge,
    over_rounds,
    ratio,
    ratio_over_rounds,
)
from tilepipe.compare.pairs import Lone, Pair, Side, device_of, pair, settings_of
from tilepipe.measure.stats import integer_median
from tilepipe.records import Interval
from tilepipe.results.summary import Series, slowest_rank

__all__ = ["Comparison", "Row", "Shift", "Unjudged", "compare"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender of one configuration, judged."""

    name: str
    config_id: str  # of A
    executor: str
    settings: dict[str, Any]  # of A
    rounds: tuple[int, ...]  # repetitions behind it
    contender: str
    component: str
    num_iters: tuple[int, int]  # of A and B, all rounds together
    a_ns: int  # median over iterations; over rounds the median of those
    b_ns: int
    ratio: Ratio
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Shift:
    """One term of a breakdown on both sides; shown, not judged."""

    name: str
    config_id: str
    settings: dict[str, Any]
    rounds: tuple[int, ...]
    term: str
    a_ns: int | None  # over rounds the median; None where nothing was measured
    b_ns: int | None
    difference: Interval | None  # B - A in ns with its 95 % interval; over rounds their mean


@dataclass(frozen=True, kw_only=True)
class Unjudged:
    """A pair of points, or a contender of one, that has no times on one side or on both."""

    name: str
    config_id: str
    settings: dict[str, Any]
    repetition: int
    contender: str | None  # None: the whole point
    reason: str
    is_loss: bool  # A has times, B has none


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that was found; counts are of rows."""

    rows: list[Row] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    lone: list[Lone] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_pairs: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Verdict -> rows that got it, all four named."""
        found = Counter(row.verdict.name for row in self.rows)
        return {verdict.name: found[verdict.name] for verdict in Verdict}


def compare(a: Side, b: Side, *, tolerance: float, unlike: bool) -> Comparison:
    """Judge every contender of every pair.

    Raises ValueError for sides that must not be compared, or have no point in common.
    """
    _check_executors(a, b)
    pairing = pair(a, b, unlike=unlike)
    if not unlike:
        _check_devices(pairing.pairs or pair(a, b, unlike=True).pairs)
    if not pairing.pairs:
        raise ValueError(_nothing_in_common(pairing.lone))
    found = Comparison(
        lone=pairing.lone,
        facts=differing_facts([p for p, _ in pairing.pairs], [p for _, p in pairing.pairs]),
        notes=[*a.notes, *b.notes, *pairing.notes],
        num_pairs=len(pairing.pairs),
    )
    rounds: dict[tuple[str, str], list[Pair]] = {}
    for each in pairing.pairs:
        point = each[0].outcome.point
        rounds.setdefault((point.name, point.config_id), []).append(each)
    for pairs in rounds.values():
        _judge_rounds(pairs, tolerance, found)
        found.shifts.extend(_shifts(pairs))
    found.notes.extend(_cautions(found.rows))
    return found


def _check_executors(a: Side, b: Side) -> None:
    kinds = [sorted({point.executor for point in side.points}) for side in (a, b)]
    if not set(kinds[0]) & set(kinds[1]):
        raise ValueError(
            f"A holds points of executor {' and '.join(kinds[0])}, B of {' and '.join(kinds[1])}: "
            "executors are never compared, name runs of one"
        )


def _check_devices(pairs: Iterable[Pair]) -> None:
    for a, b in pairs:
        ran = (device_of(a), device_of(b))
        if ran[0] != ran[1]:
            raise ValueError(
                f"A ran on {ran[0]}, B on {ran[1]}: times of unlike devices say nothing of the "
                "build; --unlike allow compares them all the same"
            )


def _nothing_in_common(lone: Sequence[Lone]) -> str:
    told = Counter(", ".join(each.differing) for each in lone if each.label == "A")
    keys, _ = told.most_common(1)[0]
    nearest = f", the nearest differ in {keys}" if keys else ""
    return f"A and B have no point in common{nearest}: name runs of the same settings"


def _judge_rounds(pairs: Sequence[Pair], tolerance: float, found: Comparison) -> None:
    """Rows of one configuration: one a contender over all rounds, or one for each round."""
    series: dict[str, list[tuple[Pair, Series, Series]]] = {}
    for each in pairs:
        if not all(point.is_ok for point in each):
            found.unjudged.append(_not_ok(each))
            continue
        a, b = (slowest_rank(point.outcome.records) for point in each)
        mine, theirs = ({contender for contender, _ in side} for side in (a, b))
        for contender in sorted(mine | theirs):
            if _component(contender, a, b) is not None:
                series.setdefault(contender, []).append((each, a, b))
            else:
                found.unjudged.append(_only_one(each, contender, is_loss=contender in mine))
    for contender, taken in series.items():
        rows = [_row(*one, contender, tolerance) for one in taken]
        over = len(rows) >= MIN_ROUNDS and len({row.component for row in rows}) == 1
        found.rows.extend([_over_rounds(rows, tolerance)] if over else rows)


def _component(contender: str, a: Series, b: Series) -> str | None:
    """The window that is compared: the whole launch where both sides timed it, as in a summary."""
    both = [part for part in ("e2e", "stage", "plan") if (contender, part) in a.keys() & b.keys()]
    return both[0] if both else None


def _row(each: Pair, a: Series, b: Series, contender: str, tolerance: float) -> Row:
    component = _component(contender, a, b)
    assert component is not None
    a_ns, b_ns = (side[contender, component] for side in (a, b))
    found = ratio(a_ns, b_ns)
    point = each[0].outcome.point
    return Row(
        name=point.name,
        config_id=point.config_id,
        executor=point.executor,
        settings=settings_of(each[0]),
        rounds=(point.repetition,),
        contender=contender,
        component=component,
        num_iters=(len(a_ns), len(b_ns)),
        a_ns=int(integer_median(a_ns)),
        b_ns=int(integer_median(b_ns)),
        ratio=found,
        verdict=judge(found, tolerance=tolerance),
    )


def _over_rounds(rows: Sequence[Row], tolerance: float) -> Row:
    found = ratio_over_rounds([row.ratio for row in rows])
    return replace(
        rows[0],
        rounds=tuple(number for row in rows for number in row.rounds),
        num_iters=(sum(row.num_iters[0] for row in rows), sum(row.num_iters[1] for row in rows)),
        a_ns=round(median(row.a_ns for row in rows)),
        b_ns=round(median(row.b_ns for row in rows)),
        ratio=found,
        verdict=judge(found, tolerance=tolerance),
    )


def _shifts(pairs: Sequence[Pair]) -> list[Shift]:
    """Terms of one configuration: one a term over all rounds, or one for each round."""
    taken: dict[str, list[Shift]] = {}
    for each in pairs:
        a, b = ({t.term: t.interval for t in point.outcome.terms} for point in each)
        for term in (term for term in a if term in b):
            taken.setdefault(term, []).append(_shift(each, term, a[term], b[term]))
    return [
        shift
        for rounds in taken.values()
        for shift in ([_mean_shift(rounds)] if len(rounds) >= MIN_ROUNDS else rounds)
    ]


def _shift(each: Pair, term: str, a: Interval | None, b: Interval | None) -> Shift:
    difference = None
    if a is not None and b is not None:
        value = b.value - a.value
        # The terms of two runs are independent, so their reaches add up as squares.
        low = value - hypot(b.value - b.low, a.high - a.value)
        high = value + hypot(b.high - b.value, a.value - a.low)
        difference = Interval(value=value, low=floor(low), high=ceil(high))
    point = each[0].outcome.point
    return Shift(
        name=point.name,
        config_id=point.config_id,
        settings=settings_of(each[0]),
        rounds=(point.repetition,),
        term=term,
        a_ns=None if a is None else a.value,
        b_ns=None if b is None else b.value,
        difference=difference,
    )


def _mean_shift(rounds: Sequence[Shift]) -> Shift:
    values = [float(s.difference.value) for s in rounds if s.difference is not None]
    difference = None
    if len(values) == len(rounds):
        mean, reach = over_rounds(values)
        difference = Interval(value=round(mean), low=floor(mean - reach), high=ceil(mean + reach))
    return replace(
        rounds[0],
        rounds=tuple(number for shift in rounds for number in shift.rounds),
        a_ns=_median_ns([shift.a_ns for shift in rounds]),
        b_ns=_median_ns([shift.b_ns for shift in rounds]),
        difference=difference,
    )


def _median_ns(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(median(known)) if len(known) == len(values) else None


def _not_ok(each: Pair) -> Unjudged:
    a, b = each
    told = [
        f"{label} ended {point.outcome.status.name}"
        for label, point in zip("AB", each, strict=True)
    ]
    said = next(point.outcome.reason for point in (b, a) if not point.is_ok)
    return _unjudged(each, None, f"{', '.join(told)}: {said}", is_loss=a.is_ok)


def _only_one(each: Pair, contender: str, *, is_loss: bool) -> Unjudged:
    reason = f"{contender} was timed only by {'A' if is_loss else 'B'}, or in another window"
    return _unjudged(each, contender, reason, is_loss=is_loss)


def _unjudged(each: Pair, contender: str | None, reason: str, *, is_loss: bool) -> Unjudged:
    point = each[0].outcome.point
    return Unjudged(
        name=point.name,
        config_id=point.config_id,
        settings=settings_of(each[0]),
        repetition=point.repetition,
        contender=contender,
        reason=reason,
        is_loss=is_loss,
    )


def _cautions(rows: Sequence[Row]) -> list[str]:
    single = [row for row in rows if row.ratio.method == "order95"]
    if not single:
        return []
    told = (
        f"{len(single)} of {len(rows)} verdicts rest on one run a side: their intervals hold what "
        f"varies inside a run, not from run to run; repetitions={MIN_ROUNDS} or more on both sides "
        "judges over rounds, and contenders of one run are compared best"
    )
    return [told]
