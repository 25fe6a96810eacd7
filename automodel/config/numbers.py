"""Arithmetic that rules and their lists of legal values share."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """All divisors in ascending order.

    Beyond 10^12, where nobody means a size, only 1 and the number: a refusal must not take seconds.
    """
    if number > 10**12:
        return [1, number]
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return small + large
