"""Metrics that carry their own reduction, so that results of ranks and micro-batches merge exactly. Torch-free.

A metric is frozen, pickles, merges with another one of its kind, and has one ``value``. Names are ``area/thing``.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

_NAME = re.compile(r"^[a-z0-9_]+(?:/[a-z0-9_]+)+$")

#: A metric, or its value.
Number = TypeVar("Number")


class Metric(ABC):
    """A value with its reduction. The default instance of every kind is empty and merges as the identity."""

    __slots__ = ()

    @property
    @abstractmethod
    def value(self) -> float:
        """The reduced value; NaN if ``empty`` (a sum of nothing is 0)."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether no observation went in."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The metric of both sets of observations together."""


@dataclass(frozen=True, slots=True)
class Mean(Metric):
    """``total / count``: the mean over all observations, not the mean of means."""

    total: float = 0.0
    count: float = 0.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def empty(self) -> bool:
        return self.count == 0

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum(Metric):
    """A total, such as a number of tokens. The sum of nothing is 0, so it is never empty."""

    total: float = 0.0

    @property
    def value(self) -> float:
        return self.total

    @property
    def empty(self) -> bool:
        return False

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total)


@dataclass(frozen=True, slots=True)
class Max(Metric):
    """The largest observation. One NaN makes the result NaN: a broken rank must be seen. -inf means empty."""

    maximum: float = -math.inf

    @property
    def value(self) -> float:
        return math.nan if self.empty else self.maximum

    @property
    def empty(self) -> bool:
        return self.maximum == -math.inf

    def merge(self, other: Self) -> Self:
        if math.isnan(self.maximum) or math.isnan(other.maximum):
            return type(self)(math.nan)
        return type(self)(max(self.maximum, other.maximum))


@dataclass(frozen=True, slots=True)
class Min(Metric):
    """The smallest observation. One NaN makes the result NaN. +inf means empty."""

    minimum: float = math.inf

    @property
    def value(self) -> float:
        return math.nan if self.empty else self.minimum

    @property
    def empty(self) -> bool:
        return self.minimum == math.inf

    def merge(self, other: Self) -> Self:
        if math.isnan(self.minimum) or math.isnan(other.minimum):
            return type(self)(math.nan)
        return type(self)(min(self.minimum, other.minimum))


@dataclass(frozen=True, slots=True)
class Std(Metric):
    """Population standard deviation (ddof = 0) from count, mean and sum of squared deviations.

    Moments around the mean are kept instead of raw squares, because sum(x^2) - n mean^2 loses all digits when the mean
    is large; they merge by the pairwise update of Chan, Golub and LeVeque (1983).
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, observations: Iterable[float]) -> Self:
        """The metric of these observations."""
        numbers = [float(x) for x in observations]
        if not numbers:
            return cls()
        mean = math.fsum(numbers) / len(numbers)
        return cls(float(len(numbers)), mean, math.fsum((x - mean) ** 2 for x in numbers))

    @property
    def value(self) -> float:
        # A NaN observation makes `squares` NaN and passes through max() only as its first argument.
        return math.sqrt(max(self.squares / self.count, 0.0)) if self.count else math.nan

    @property
    def empty(self) -> bool:
        return self.count == 0

    def merge(self, other: Self) -> Self:
        if self.empty or other.empty:
            return other if self.empty else self
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        return type(self)(count, mean, self.squares + other.squares + gap * gap * self.count * other.count / count)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of ranks, micro-batches or workers name by name, in the order given; names may differ.

    Raises ValueError for a name that is not ``area/thing`` or one name with two kinds of metric.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name not in merged:
                if not _NAME.match(name):
                    raise ValueError(f"metric {name!r}: write area/thing in lower case, digits and _")
                merged[name] = metric
                continue
            if type(merged[name]) is not type(metric):
                kinds = f"{type(merged[name]).__name__} and {type(metric).__name__}"
                raise ValueError(f"metric {name!r} comes as {kinds}: one name has one reduction")
            merged[name] = merged[name].merge(metric)
    return merged


def united(*parts: Mapping[str, Number]) -> dict[str, Number]:
    """Metrics of several sources as one mapping. ValueError for a name that two of them have: one would hide the other."""
    merged: dict[str, Number] = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise ValueError(f"metrics {twice} are there twice: one name has one meaning")
        merged.update(part)
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain numbers by name. Empty metrics are left out, because they have no number; a NaN that was observed stays."""
    return {name: metric.value for name, metric in metrics.items() if not metric.empty}
