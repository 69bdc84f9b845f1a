"""As much of PromQL as the dashboard uses, over samples scraped here: selectors, rate, sum/max/min by, quantile, / and or.

It lets the dashboard's own expressions be tried on real series without a Prometheus. Values are per instant; a
vector is {labels: value} with labels as a frozenset of (name, value).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_MATCHER = re.compile(r'(\w+)\s*(=~|=)\s*"([^"]*)"')


@dataclass
class Series:
    """Scraped samples: labels (``__name__`` among them) -> times in seconds and values."""

    rows: dict[Labels, tuple[list[float], list[float]]] = field(default_factory=dict)

    def add(self, at_s: float, samples: Iterable[tuple[str, dict[str, str], float]]) -> None:
        """One scrape."""
        for name, labels, value in samples:
            times, values = self.rows.setdefault(frozenset({"__name__": name, **labels}.items()), ([], []))
            times.append(at_s)
            values.append(value)


class Query:
    """One expression; ``at`` evaluates it. Raises ValueError for what is not understood.

    Args:
        window_s: stands in for the range in brackets, since a short run has no five minutes.
    """

    def __init__(self, text: str, window_s: float) -> None:
        self._text, self._at, self._window_s = text.strip(), 0, window_s
        self._run = self._binary()
        if self._at != len(self._text):
            raise ValueError(f"not understood: {self._text[self._at :]!r}")

    def at(self, series: Series, now_s: float) -> Vector:
        return self._run(series, now_s)

    # ---- parser: each method returns a function of (series, now)

    def _eat(self, token: str) -> bool:
        rest = self._text[self._at :].lstrip()
        if not rest.startswith(token):
            return False
        self._at = len(self._text) - len(rest) + len(token)
        rest = self._text[self._at :]
        self._at += len(rest) - len(rest.lstrip())
        return True

    def _need(self, token: str) -> None:
        if not self._eat(token):
            raise ValueError(f"{token!r} is missing before {self._text[self._at :]!r}")

    def _binary(self) -> Callable[[Series, float], Vector]:
        left = self._term()
        while True:
            if self._eat("/"):
                left = _divide(left, self._term())
            elif self._eat("or "):
                left = _either(left, self._term())
            else:
                return left

    def _term(self) -> Callable[[Series, float], Vector]:
        for name, fold in (("sum", sum), ("max", max), ("min", min)):
            if self._eat(f"{name} by ("):
                labels = [w.strip() for w in self._until(")").split(",")]
                self._need("(")
                return _fold(self._closed(), fold, labels)  # type: ignore[arg-type]
            if self._eat(f"{name}("):
                return _fold(self._closed(), fold, [])  # type: ignore[arg-type]
        if self._eat("rate("):
            matchers = self._selector()
            self._need("[")
            self._until("]")
            self._need(")")
            return _rate(matchers, self._window_s)
        if self._eat("histogram_quantile("):
            share = float(self._until(","))
            return _quantile(share, self._closed())
        return _instant(self._selector())

    def _closed(self) -> Callable[[Series, float], Vector]:
        inner = self._binary()
        self._need(")")
        return inner

    def _until(self, end: str) -> str:
        stop = self._text.index(end, self._at)
        found = self._text[self._at : stop]
        self._at = stop
        self._need(end)
        return found

    def _selector(self) -> list[tuple[str, re.Pattern[str]]]:
        self._need("{")
        found = _MATCHER.findall(self._until("}"))
        return [(name, re.compile(value if op == "=~" else re.escape(value))) for name, op, value in found]


def _matching(series: Series, matchers: list[tuple[str, re.Pattern[str]]]) -> Iterable[Labels]:
    for labels in series.rows:
        have = dict(labels)
        if all(pattern.fullmatch(have.get(name, "")) for name, pattern in matchers):
            yield labels


def _instant(matchers: list[tuple[str, re.Pattern[str]]]) -> Callable[[Series, float], Vector]:
    def run(series: Series, now: float) -> Vector:
        out: Vector = {}
        for labels in _matching(series, matchers):
            times, values = series.rows[labels]
            if last := bisect_right(times, now):
                out[labels] = values[last - 1]
        return out

    return run


def _rate(matchers: list[tuple[str, re.Pattern[str]]], window_s: float) -> Callable[[Series, float], Vector]:
    def run(series: Series, now: float) -> Vector:
        out: Vector = {}
        for labels in _matching(series, matchers):
            times, values = series.rows[labels]
            first, last = bisect_right(times, now - window_s), bisect_right(times, now)
            if last - first >= 2:
                span = times[last - 1] - times[first]
                out[_nameless(labels)] = (values[last - 1] - values[first]) / span
        return out

    return run


def _fold(
    inner: Callable[[Series, float], Vector], fold: Callable[[list[float]], float], by: list[str]
) -> Callable[[Series, float], Vector]:
    def run(series: Series, now: float) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner(series, now).items():
            groups.setdefault(frozenset((n, v) for n, v in labels if n in by), []).append(value)
        return {labels: fold(values) for labels, values in groups.items()}

    return run


def _divide(
    left: Callable[[Series, float], Vector], right: Callable[[Series, float], Vector]
) -> Callable[[Series, float], Vector]:
    def run(series: Series, now: float) -> Vector:
        below = right(series, now)
        return {k: v / below[k] for k, v in left(series, now).items() if below.get(k)}

    return run


def _either(
    left: Callable[[Series, float], Vector], right: Callable[[Series, float], Vector]
) -> Callable[[Series, float], Vector]:
    """As Prometheus compares them: without the name, so an element of the right with the labels of one on the left goes."""

    def run(series: Series, now: float) -> Vector:
        first = left(series, now)
        taken = {_nameless(labels) for labels in first}
        return {**first, **{k: v for k, v in right(series, now).items() if _nameless(k) not in taken}}

    return run


def _nameless(labels: Labels) -> Labels:
    return frozenset(x for x in labels if x[0] != "__name__")


def _quantile(share: float, inner: Callable[[Series, float], Vector]) -> Callable[[Series, float], Vector]:
    """Linear inside the bucket, as Prometheus does; the last finite bound above it."""

    def run(series: Series, now: float) -> Vector:
        groups: dict[Labels, list[tuple[float, float]]] = {}
        for labels, value in inner(series, now).items():
            bound = float(dict(labels)["le"].replace("+Inf", "inf"))
            groups.setdefault(frozenset(x for x in labels if x[0] != "le"), []).append((bound, value))
        return {k: found for k, rows in groups.items() if (found := _of_buckets(share, sorted(rows))) is not None}

    return run


def _of_buckets(share: float, rows: list[tuple[float, float]]) -> float | None:
    total = rows[-1][1]
    if total <= 0:
        return None
    low, before = 0.0, 0.0
    for bound, count in rows:
        if count >= share * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (share * total - before) / max(count - before, 1e-12)
        low, before = bound, count
    return low
