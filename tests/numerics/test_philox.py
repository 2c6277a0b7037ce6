"""Philox in tensors gives the published words, and NumPy's numbers."""

import numpy as np
import pytest
import torch

from raysim.numerics.philox import philox, random_words, uniform
from raysim.randomness import generator, key_words

# Random123 (Salmon et al. 2011), its file kat_vectors: counter, key, words.
PUBLISHED = [
    (
        [0, 0, 0, 0],
        [0, 0],
        [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
    ),
    (
        [0xFFFFFFFFFFFFFFFF] * 4,
        [0xFFFFFFFFFFFFFFFF] * 2,
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    (
        [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
        [0x452821E638D01377, 0xBE5466CF34E90C6C],
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def words(values: list[int], device: str) -> tuple[torch.Tensor, ...]:
    signed = np.array(values, dtype=np.uint64).view(np.int64)
    return tuple(torch.tensor([int(value)], device=device) for value in signed)


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_the_published_vectors(counter, key, expected, device):
    c0, c1, c2, c3 = words(counter, device)
    given = philox((c0, c1, c2, c3), *words(key, device))
    assert [int(word) % 2**64 for word in given] == expected


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 4096])
def test_the_words_and_numbers_of_numpy(count, device):
    places = [(seed, "dropout", t, client) for seed in (0, 7) for t in (0, 3) for client in (0, 99)]
    keys = np.stack([key_words(*place) for place in places]).view(np.int64)
    words = random_words(torch.from_numpy(keys).to(device), count + 16)
    skipped = random_words(torch.from_numpy(keys).to(device), count, first=16)
    assert torch.equal(words[:, 16:], skipped)
    for k, place in enumerate(places):
        drawn = generator(*place).integers(0, 2**32, count + 16, dtype=np.uint32)
        assert np.array_equal(words[k].cpu().numpy().view(np.uint32), drawn)
        numbers = generator(*place).random(count + 16, dtype=np.float32)
        assert np.array_equal(uniform(words[k]).cpu().numpy(), numbers)
