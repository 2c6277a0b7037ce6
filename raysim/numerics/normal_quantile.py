"""Standard normal numbers from random words, the same bits on every device.

A normal number is the normal quantile of a uniform number. It is computed by tables, additions and
multiplications, each a kernel of its own, so that no bit depends on a device's library of functions
or on fused operations.

The table has cubic polynomials, 32 for each octave of a uniform number between 0 and 1/2. They
interpolate algorithm AS 241 (Wichura 1988, "The percentage points of the normal distribution"),
which is exact to about 16 digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

SEGMENT_SHIFT = 47
"""float64 numbers that differ only in their last 47 bits are computed by one polynomial."""
NODES = 0.0, 0.25, 0.75, 1.0
"""Points of interpolation in a segment; with both ends, the quantile is continuous."""
NUMBERS_PER_PART = 1 << 16
"""Numbers that a CPU computes together: they stay in its cache."""

# Wichura's coefficients of PPND16, from the constant term on: numerator and denominator.
CENTRE = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
TAIL = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)


def normal(words: Tensor) -> Tensor:
    """Return the standard normal number of each random word.

    Args:
        words: [n], int32: random words of 32 bits.

    Returns:
        [n], float32: the normal quantile at (w + 1/2) / 2^32, where w is the word without a sign.
    """
    if words.device.type == "cpu":
        return torch.cat([_normal(part) for part in words.split(NUMBERS_PER_PART)])
    return _normal(words)


def _normal(words: Tensor) -> Tensor:
    """Return the standard normal number of each random word."""
    # The quantile at 1 - p is minus that at p, and ~w stands for 1 - p.
    x = (words ^ (words >> 31)).to(torch.float64).add_(0.5)
    bits = x.view(torch.int64)
    t = x - (bits & -(1 << SEGMENT_SHIFT)).view(torch.float64)
    segments = (bits >> SEGMENT_SHIFT).sub_(_segment(0.5))
    c0, c1, c2, c3 = (c.index_select(0, segments) for c in _polynomials(words.device))
    # Single operations in place: a fused one rounds once less.
    numbers = c3.mul_(t).add_(c2).mul_(t).add_(c1).mul_(t).add_(c0).to(torch.float32)
    # They are positive; below 1/2 the quantile is negative.
    numbers.view(torch.int32).bitwise_or_(~words & -(1 << 31))
    return numbers


def _segment(x: float) -> int:
    """Return the number of the segment of x > 0 among all of float64."""
    return int(np.float64(x).view(np.int64)) >> SEGMENT_SHIFT


@cache
def _polynomials(device: torch.device) -> tuple[Tensor, ...]:
    """Return the coefficients c0 to c3 of all segments: minus the quantile at x / 2^32."""
    first = _segment(0.5)
    numbers = np.arange(first, _segment(2.0**31) + 1, dtype=np.int64)
    edges = (numbers << SEGMENT_SHIFT).view(np.float64)
    left, width = edges[:-1], np.diff(edges)
    n0, n1, n2, n3 = NODES
    y0, y1, y2, y3 = (_upper_quantile((left + node * width) * 2.0**-32) for node in NODES)
    # Newton's divided differences, in units of the width.
    d01, d12, d23 = (y1 - y0) / (n1 - n0), (y2 - y1) / (n2 - n1), (y3 - y2) / (n3 - n2)
    d012, d123 = (d12 - d01) / (n2 - n0), (d23 - d12) / (n3 - n1)
    c3 = (d123 - d012) / (n3 - n0)
    c2 = d012 - c3 * (n0 + n1 + n2)
    c1 = d01 - d012 * (n0 + n1) + c3 * (n0 * n1 + n0 * n2 + n1 * n2)
    c0 = y0 - n0 * (d01 - n1 * (d012 - n2 * c3))
    powers = (c0, c1 / width, c2 / width**2, c3 / width**3)
    return tuple(torch.from_numpy(c).to(device) for c in powers)


def _upper_quantile(p: np.ndarray) -> np.ndarray:
    """Return minus the normal quantile at 1e-11 < p <= 1/2, by AS 241 without its far tail."""
    q = 0.5 - p
    r = np.sqrt(-_log(p)) - 1.6
    return np.where(q <= 0.425, q * _ratio(CENTRE, 0.180625 - q * q), _ratio(TAIL, r))


def _log(x: np.ndarray) -> np.ndarray:
    """Return the logarithm, from operations that round alike on every machine."""
    mantissa, exponent = np.frexp(x)
    # log m = 2 artanh s, with |s| <= 1/3
    s = (mantissa - 1) / (mantissa + 1)
    series = _polynomial([1 / k for k in range(1, 37, 2)], s * s)
    return exponent * 0.6931471805599453 + 2 * s * series


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: np.ndarray) -> np.ndarray:
    """Return the ratio of two polynomials."""
    return _polynomial(coefficients[0], x) / _polynomial(coefficients[1], x)


def _polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    """Return a polynomial by Horner's rule, from its constant term on."""
    value = np.zeros_like(x)
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value
