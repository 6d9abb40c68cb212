"""An axis: where a value stands between two ends, and the round values that are written at it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST = 1e-300
LEAST_SHARE = 1e-12  # of the highest value: below that no line of a figure shows anything

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """From the lowest to the highest value, linear or logarithmic."""

    low: float
    high: float
    is_log: bool

    def share(self, value: float) -> float:
        """Where a value stands: 0 at the low end, 1 at the high one."""
        if self.is_log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(value)
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values between the ends, `most` at most."""
        if self.is_log:
            return _log_ticks(self.low, self.high, most)
        return _even_ticks(self.low, self.high, most)


def scale_of(values: Iterable[float], is_log: bool, from_zero: bool = False) -> Scale:
    """One that all values fit into, its ends round; a log one only where all are positive.

    It is even as well where one value is far below the others, as 1e-310 is.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if is_log and low > max(high * LEAST_SHARE, LEAST):
        room = max(1.02, (high / low) ** 0.05)
        return Scale(low / room, high * room, True)
    low = min(low, 0.0) if from_zero else low
    if low == high:
        low, high = low - (abs(low) / 10 or 1.0), high + (abs(high) / 10 or 1.0)
        low = max(low, 0.0) if min(known) >= 0 else low
    step = _step(high - low, 5)
    return Scale(math.floor(low / step) * step, math.ceil(high / step) * step, False)


def written(value: float) -> str:
    """A value as a person reads it: 1,200 as it is, 3.4M, 1e-05."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            unit = 1e3 if name == "k" else unit
            return f"{value / unit:.4g}{name}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _step(length: float, most: int) -> float:
    rough = length / most
    size = 10.0 ** math.floor(math.log10(rough))
    return next(step * size for step in STEPS if step * size >= rough * (1 - 1e-9))


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    step = _step(high - low, most)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + at) * step, 12) for at in range(count)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2, 5 of each power of ten; the powers alone where those are many; even ones where few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices: list[Sequence[int]] = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)]
    for digits in choices:
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(inside) <= most:
            break
    if len(inside) < 3:
        return [tick for tick in _even_ticks(low, high, most) if tick > 0]
    return inside[:: math.ceil(len(inside) / most)]
