"""Standard normal numbers of random words: exact to a unit in the last place, and normal."""

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from scipy.stats import kstest, norm

from raysim.numerics import normal_quantile
from raysim.numerics.normal_quantile import normal

# Wichura 1988, the values for checks of AS 241 that lie within a word of 32 bits.
PUBLISHED = {0.25: -0.6744897501960817, 0.001: -3.090232306167814}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
RECORDED = ["c0cad08d", "c0c55364", "afa06c99", "2fa06c99", "40c55364", "40cad08d"]


@pytest.fixture(scope="module")
def words() -> np.ndarray:
    """Random words, and those at both ends and on both sides of 1/2."""
    ends = np.arange(1000)
    random = np.random.default_rng(0).integers(0, 2**32, 10**6)
    edges = [ends, 2**31 - 1 - ends, 2**31 + ends, 2**32 - 1 - ends]
    return np.concatenate([*edges, random]).astype(np.uint32)


def numbers_of(words: np.ndarray, device: str = "cpu") -> np.ndarray:
    return normal(torch.from_numpy(words.view(np.int32)).to(device)).cpu().numpy()


def test_the_published_quantiles():
    for p, quantile in PUBLISHED.items():
        computed = -normal_quantile._upper_quantile(np.array([p]))[0]
        assert computed == pytest.approx(quantile, rel=1e-15)


def test_numbers_are_quantiles_to_a_unit_in_the_last_place(words):
    below = np.minimum(words, 2**32 - 1 - words).astype(np.float64)
    quantiles = ndtri((below + 0.5) / 2**32) * np.where(words < 2**31, 1, -1)
    numbers = numbers_of(words)
    units = np.abs(numbers - quantiles) / np.spacing(np.abs(quantiles).astype(np.float32))
    assert numbers.dtype == np.float32 and units.max() < 0.6


def test_numbers_grow_with_their_words_and_are_symmetric(words):
    words = np.sort(words)
    numbers = numbers_of(words)
    assert (np.diff(numbers) >= 0).all()
    assert np.array_equal(numbers_of(~words), -numbers)


def test_parts_and_other_devices_give_the_same_bits(words, monkeypatch):
    numbers = numbers_of(words)
    monkeypatch.setattr(normal_quantile, "NUMBERS_PER_PART", 1000)
    assert np.array_equal(numbers_of(words), numbers)
    assert numbers_of(words[:0]).shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits(words):
    assert np.array_equal(numbers_of(words, "cuda"), numbers_of(words))


def test_the_bits_are_those_of_the_definition():
    """On every machine: the table is made without any function of its mathematical library."""
    bits = numbers_of(np.array(EDGES, dtype=np.uint32)).view(np.uint32)
    assert [f"{word:08x}" for word in bits] == RECORDED


def test_numbers_are_normal():
    stream = np.random.Generator(np.random.Philox(key=1))
    numbers = numbers_of(stream.integers(0, 2**32, 10**6, dtype=np.uint32)).astype(np.float64)
    n = len(numbers)
    # Each statistic in units of its standard deviation.
    assert abs(numbers.mean()) * n**0.5 < 4
    assert abs((numbers**2).mean() - 1) * (n / 2) ** 0.5 < 4
    assert abs((numbers**4).mean() - 3) * (n / 96) ** 0.5 < 4
    assert kstest(numbers, "norm").pvalue > 1e-3
    for limit in (3, 4):
        expected = 2 * norm.sf(limit) * n
        assert abs((np.abs(numbers) > limit).sum() - expected) < 4 * expected**0.5
