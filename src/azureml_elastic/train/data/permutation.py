"""A random order whose elements are computed independently, without a list of all of them.

A number below ``a * b`` is split into two, below ``a`` and ``b``; alternately each is shifted by a hash of the other.
Every such round is invertible, so different numbers stay different. A result beyond the length goes through the rounds
again until it is within; this ends, for the same reason.

Sources: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), the generalised Feistel cipher
with cycle walking; the hash is the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["Permutation"]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Numbers = npt.NDArray[np.uint64]


class Permutation:
    """A permutation of ``range(length)``.

    Args:
        length: number of elements, at least 1 and below 2**62
        key: 64 bits; another key gives another permutation
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        self._a = math.isqrt(length - 1) + 1
        self._b = -(-length // self._a)
        self._keys = _mixed(np.array([(key + (number + 1) * _GOLDEN) & _MASK for number in range(_ROUNDS)], np.uint64))

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the elements at some positions; the time depends on their number alone."""
        result = self._rounds(positions.astype(np.uint64))
        while (beyond := np.flatnonzero(result >= self._length)).size:
            result[beyond] = self._rounds(result[beyond])
        return result.astype(np.int64)

    def _rounds(self, numbers: Numbers) -> Numbers:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = numbers // b, numbers % b
        for number in range(0, _ROUNDS, 2):
            left = (left + _mixed(right + self._keys[number]) % a) % a
            right = (right + _mixed(left + self._keys[number + 1]) % b) % b
        result: Numbers = left * b + right
        return result


def _mixed(numbers: Numbers) -> Numbers:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Numbers = numbers ^ (numbers >> np.uint64(31))
    return result
