"""Fixed sums on their way between processes: nothing of it shows in the sum."""

from __future__ import annotations

import pytest
import torch
from support.fixed_sums import same

from raysim.distributed.actors import as_limbs, packed, read_limbs, unpacked
from raysim.distributed.transport.shared_memory import SharedBuffer
from raysim.numerics.fixed_point import BlockSum, FixedSum, FixedTotal, combine

pytestmark = pytest.mark.ray


def sums(magnitude: float, is_fine: bool) -> dict[str, FixedTotal]:
    total = FixedSum(is_fine)
    values = magnitude * torch.randn(2, 9, generator=torch.Generator().manual_seed(1))
    total.add(BlockSum(values, [0.3, 0.7]))
    named = {
        "mean delta": total.total,
        "sum a/b": total.total,
        "mean buffers": {-40: values.new_zeros(0).long()},
    }
    return {name: limbs for name, limbs in named.items() if limbs is not None}


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("through", ["shared memory", "the object store"])
def test_sums_of_other_limbs_meet(through, is_fine):
    """Workers whose updates are of very different sizes send limbs of different units."""
    buffer = SharedBuffer.new(2**14)
    expected = [sums(magnitude, is_fine) for magnitude in (1.0, 1e-11, 1e4, 1e-300)]
    received = []
    for one in expected:
        arrays = packed({"sums": as_limbs(one)})
        if through == "shared memory":
            reference = buffer.write("client 0", arrays)
            assert reference is not None
            arrays = {
                group: {k: v.copy() for k, v in of.items()}
                for group, of in buffer.read(reference).items()
            }
        else:
            for array in arrays["sums"].values():
                array.flags.writeable = False
        received.append(read_limbs(unpacked(arrays, "cpu")["sums"]))
    for name in expected[0]:
        assert all(same(a[name], b[name]) for a, b in zip(received, expected, strict=True))
        backwards = combine([one[name] for one in reversed(received)], 1.0)
        assert same(backwards, combine([one[name] for one in expected], 1.0))
        assert same(received[0][name], expected[0][name])  # nothing was added in place
