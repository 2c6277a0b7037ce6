"""The oracles of section 6 against rounds worked by hand. 2/e = 0.735759 and (2/e)^2 = 0.541341."""

from dataclasses import replace

import numpy as np
import pytest
from support.oracle_problems import quadratic

from . import asynchronous as A

FRESH, ONCE, TWICE = 1.0, 0.7357588823428847, 0.5413411329464508
"""(e/2)^-s for s = 0, 1, 2."""


def upload(s, d, n=1, client=0):
    d = np.array(d, dtype=np.float64)
    return A.Upload(client, s, n, d, np.full_like(d, np.nan))


def arrivals(staleness, n=None):
    """Uploads that are the unit vectors: the step of a rule that only weighs is minus its weights."""
    n = n or [1] * len(staleness)
    return [
        upload(s, row, size, k)
        for k, (s, size, row) in enumerate(zip(staleness, n, np.eye(len(n)), strict=True))
    ]


def step(rule, uploads, t=0):
    """x_t - x_{t+1}"""
    x = np.array([7.0, -3.0, 2.0])[: len(uploads[0].d)]
    return x - rule(t, x, uploads)


# --- the loop


def one_step(lr):
    return A.sgd(quadratic, lr)


def batches_for(turns, steps=1):
    return [{client: [None] * steps for client, _ in turn} for turn in turns]


def test_a_late_arrival_by_hand():
    """Centres (1, 0) and (0, 2). Client 1 starts from x_0 in round 0 with step 0.5 and arrives in
    round 1: d is what it did to x_0, and is taken off x_1. With the step size of round 1 x_2 were
    (.5, .2), with d relative to x_1 it were y itself, (0, 1), and from x_1 the client would have
    come to (.25, 1)."""
    turns = [[(0, 0)], [(1, 0)], [(0, 1)]]
    xs = A.run(
        [0.0, 0.0],
        turns,
        [1] * 5,
        batches_for(turns),
        one_step(lambda t: [0.5, 0.1, 0.2][t]),
        A.FedAvg(),
    )
    np.testing.assert_allclose(xs[1], [0.5, 0.0])
    np.testing.assert_allclose(xs[2], [0.5, 1.0])
    np.testing.assert_allclose(xs[3], [0.55, 1.0])  # from x_1 with 0.1: y = (.55, 0), d = (-.05, 0)


def test_prox_centre_is_the_base():
    """Client 1, centre (0, 2), two steps of 0.5 from x_0 = 0: (0, 1), then -= .5 ((0, -1) + (0,
    1)), so (0, 1) still. With x_1 = (0.5, 0) as the centre y would have a first coordinate."""
    turns = [[(0, 0)], [(1, 0)]]
    xs = A.run(
        [0.0, 0.0], turns, [1] * 5, batches_for(turns, 2), A.prox(quadratic, 0.5, 1.0), A.FedAvg()
    )
    np.testing.assert_allclose(xs[1], [0.5, 0.0])
    np.testing.assert_allclose(xs[2], [0.5, 1.0])


def test_a_round_without_uploads_changes_nothing_and_counts():
    turns = [[(0, 0)], [], [(1, 0)]]
    seen = []

    def rule(t, x, uploads):
        seen.append((t, [u.s for u in uploads]))
        return A.FedAvg()(t, x, uploads)

    xs = A.run([0.0, 0.0], turns, [1] * 5, batches_for(turns), one_step(0.5), rule)
    assert seen == [(0, [0]), (2, [2])]
    np.testing.assert_array_equal(xs[1], xs[2])
    assert len(xs) == 4 and (xs[3] != xs[2]).any()


# --- weights


@pytest.mark.parametrize(
    "rule, staleness, n, expected",
    [
        (A.FedAvg(), [0, 1, 4], [1, 2, 5], [1 / 3, 1 / 3, 1 / 3]),
        (A.FedAvg(weights="samples", lr=2.0), [0, 1, 4], [1, 2, 5], [0.25, 0.5, 1.25]),
        # 1, 1/2, 1/5 of 17/10
        (A.DynSGD(), [0, 1, 4], [1, 2, 5], [10 / 17, 5 / 17, 2 / 17]),
        (A.DynSGD(normalise=False), [0, 1, 4], [1, 2, 5], [1 / 3, 1 / 6, 1 / 15]),
        (A.DynSGD(weights="samples"), [0, 1, 4], [1, 2, 5], [1 / 3, 1 / 3, 1 / 3]),
        (A.DynSGD(weights="samples"), [0, 1, 4], [4, 2, 5], [2 / 3, 1 / 6, 1 / 6]),
        (A.DynSGD(weights="samples", normalise=False), [0, 1, 4], [1, 2, 5], [1 / 8, 1 / 8, 1 / 8]),
        (A.TWAFL(weights="uniform"), [0, 1, 2], [1, 2, 5], [0.439155, 0.323112, 0.237733]),
        # n (2/e)^s = 1, 1.471518, 2.706706 of 5.178224
        (A.TWAFL(), [0, 1, 2], [1, 2, 5], [0.193116, 0.284174, 0.522709]),
        # only differences of staleness count
        (A.TWAFL(weights="uniform"), [3, 4, 5], [1, 2, 5], [0.439155, 0.323112, 0.237733]),
        (A.FedBuff(), [0, 3, 8], [1, 2, 5], [1 / 3, 1 / 6, 1 / 9]),
        (A.FedBuff(weights="samples"), [0, 3, 8], [1, 2, 5], [1 / 8, 1 / 8, 5 / 24]),
        (A.FedBuff(lr=0.5), [3, 3, 3], [1, 2, 5], [1 / 12, 1 / 12, 1 / 12]),
        (A.FedHist(2, ina=False), [0, 1, 2], [1, 2, 5], [0.439155, 0.323112, 0.237733]),
        (
            A.FedHist(2, ina=False, weights="samples"),
            [0, 1, 2],
            [1, 2, 5],
            [0.193116, 0.284174, 0.522709],
        ),
        # nothing is positive: 1/K
        (A.FedHist(2, ina=False, b=1.0), [0, 1, 2], [1, 2, 5], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_weights_by_hand(rule, staleness, n, expected):
    np.testing.assert_allclose(step(rule, arrivals(staleness, n)), expected, rtol=3e-6)


def test_fedbuffs_momentum_by_hand():
    """m = 2, then 0.5 x 2 + 4/2 = 3."""
    rule = A.FedBuff(beta1=0.5, lr=0.1)
    np.testing.assert_allclose(step(rule, [upload(0, [2.0])]), [0.2])
    np.testing.assert_allclose(step(rule, [upload(3, [4.0])]), [0.3])


def test_refl_by_hand():
    """u_F = (2, 0), n = 2. Deviations are |u_F - u_k|^2 / ((n+1)^2 |u_F|^2): (2, 3): 9/36; (2, -6):
    36/36, the largest. Boosts 1 - e^(-1/4) = 0.221199 and 1 - e^-1 = 0.632121; w = .65/2 + .35 x
    .221199, .65/4 + .35 x .632121."""
    uploads = [
        upload(0, [1, 0], 3),
        upload(1, [2, 3], 1),
        upload(0, [3, 0], 1),
        upload(3, [2, -6], 2),
    ]
    np.testing.assert_allclose(A.REFL().raw(uploads), [1, 0.402420, 1, 0.383742], rtol=2e-6)
    # Sum 2.786162 with equal samples: (1 + .804840 + 3 + .767484, 1.207260 - 2.302452) / 2.786162
    np.testing.assert_allclose(
        step(A.REFL(lr=2.0), uploads), [4.0, 2 * -1.095192 / 2.786162], rtol=1e-5
    )
    # 3, .402420, 1, .767484: sum 5.169904;  (3 + .804840 + 3 + 1.534968, 1.207260 - 4.604904)
    of_samples = step(A.REFL(weights="samples"), uploads)
    np.testing.assert_allclose(of_samples, [8.339808 / 5.169904, -3.397644 / 5.169904], rtol=1e-5)
    # authors' code: boosts 1 - e^(-1/4)/10 = .922120, .963212
    np.testing.assert_allclose(
        A.REFL(boost_scale=10.0).raw(uploads),
        [1, 0.325 + 0.322742, 1, 0.1625 + 0.337124],
        rtol=2e-6,
    )
    np.testing.assert_allclose(A.REFL(beta=1.0).raw(uploads), [1, 0.221199, 1, 0.632121], rtol=2e-6)


def test_refl_without_anybody_fresh():
    """The two of staleness 1 stand for the fresh, with weight 1/2; the one of 4 deviates most,
    being alone."""
    uploads = [upload(4, [5, 1]), upload(1, [1, 0]), upload(1, [3, 0])]
    np.testing.assert_allclose(
        A.REFL().raw(uploads), [0.65 / 5 + 0.35 * 0.632121, 0.5, 0.5], rtol=2e-6
    )
    np.testing.assert_allclose(A.REFL().raw(uploads[1:]), [0.5, 0.5])


def test_refl_without_a_boost():
    """u_F = 0, and stale ones that are u_F."""
    for stale, fresh in (([1, 1], [0, 0]), ([1, 1], [1, 1])):
        w = A.REFL().raw([upload(0, fresh), upload(1, stale)])
        np.testing.assert_allclose(w, [1, 0.325])


def test_fedasync_by_hand():
    """x = 4 takes y = 0 with 0.6/2 (s = 3), then y = 1 with 0.6: 2.8, then 0.4 x 2.8 + 0.6."""
    first, second = (
        A.Upload(0, s, 1, np.array([np.nan]), np.array([y])) for s, y in ((3, 0.0), (0, 1.0))
    )
    x = np.array([4.0])
    np.testing.assert_allclose(A.FedAsync()(0, x, [first]), [2.8])
    np.testing.assert_allclose(A.FedAsync()(0, x, [first, second]), [1.72])
    np.testing.assert_allclose(A.FedAsync()(0, x, [second, first]), [0.7 * 2.2])
    np.testing.assert_allclose(A.FedAsync(staleness="constant", alpha=0.5)(0, x, [first]), [2.0])
    np.testing.assert_allclose(A.FedAsync(alpha=lambda t: [0.6, 0.2][t])(1, x, [first]), [3.6])
    np.testing.assert_allclose([A.FedAsync(a=2.0).h(s) for s in (0, 1, 3)], [1, 1 / 4, 1 / 16])
    np.testing.assert_allclose(
        [A.FedAsync(staleness="hinge").h(s) for s in (0, 3, 4, 5, 6)], [1, 1, 1, 1 / 11, 1 / 21]
    )
    np.testing.assert_allclose(
        [A.FedAsync(staleness="hinge", a=3, c=1).h(s) for s in (1, 2, 4)], [1, 1 / 4, 1 / 10]
    )


def test_statistics_by_hand():
    """Weights 1/3 and 1/6 of 12 and 6: two parts and one, 10; mixed, half is the server's own: 12/3
    + 6/6 + 4/2. One after the other with 0.3 and 0.6: 0.3 x 0.4 and 0.6. WKAFL: of those that it
    keeps."""
    rule = A.FedBuff()
    step(rule, arrivals([0, 3, 8]))
    np.testing.assert_allclose(rule.p, [1 / 3, 1 / 6, 1 / 9])
    given = np.array([4.0]), rule.p[:2], [np.array([12.0]), np.array([6.0])]
    np.testing.assert_allclose(A.averaged(*given), [10.0])
    np.testing.assert_allclose(A.averaged(*given, mixes=True), [7.0])
    mixed = A.FedAsync()
    mixed(0, np.zeros(2), [replace(upload(s, [0, 0]), y=np.zeros(2)) for s in (3, 0)])
    np.testing.assert_allclose(mixed.p, [0.12, 0.6])
    chooses = wkafl()
    step(chooses, THREE)
    np.testing.assert_allclose(chooses.p, [0.342811, 0.657189, 0], rtol=1e-5)
    none_agree = wkafl(theta=0.98)
    step(none_agree, THREE)
    np.testing.assert_allclose(none_agree.p, [1 / 3] * 3)


# --- WKAFL


AGREE = {"alpha": 0.5, "clip": 1.0, "sharpness": 2.0, "decay": 0.1, "clip2": 1.0, "stage2": 5}
THREE = [upload(0, [2, 4], 1), upload(0, [-1, 1], 1), upload(0, [-2, 0], 1)]


def wkafl(**changes):
    return A.WKAFL(**{**AGREE, "G": np.array([2.0, 0.0]), **changes})


def test_wkafls_selection_by_hand():
    """With alpha G = (1, 0): (3, 4), clipped to (.6, .8); (0, 1); (-1, 0). Mean (-.133333, .6),
    norm .614636. Cosines .650791, .976187, .216930: the third is out. e^(2 (.650791 - .976187)) =
    .521633, so q = .342811, .657189 and G = (.205687, .931438)."""
    rule = wkafl()
    x = step(rule, THREE)
    assert rule.kept == [[0, 1]]
    np.testing.assert_allclose(rule.G, [0.205687, 0.931438], rtol=1e-5)
    np.testing.assert_allclose(x, np.array([0.205687, 0.931438]) / 1.1, rtol=1e-5)
    # Stage two: what is kept is clipped to 1 x .614636.
    early, late = wkafl(), wkafl()
    np.testing.assert_allclose(step(early, THREE, t=4), x)
    np.testing.assert_allclose(step(late, THREE, t=5), 0.614636 * x, rtol=1e-5)
    np.testing.assert_allclose(step(wkafl(stage2=None), THREE, t=5000), x)
    np.testing.assert_allclose(
        step(wkafl(clip2=5.0), THREE, t=5), x
    )  # 5 x .614636 is longer than 1
    # Staleness: only the least counts for the step; all equal leave the weights.
    stale = [replace(u, s=3) for u in THREE]
    np.testing.assert_allclose(step(wkafl(), stale), 1.1 / 1.4 * x)
    # A threshold that nobody passes, or everybody.
    empty = wkafl(theta=0.98)
    np.testing.assert_allclose(step(empty, THREE) * 1.1, [-0.133333, 0.6], rtol=1e-5)
    assert empty.kept == [[]]
    np.testing.assert_allclose(empty.G, [-0.133333, 0.6], rtol=1e-5)
    lax = wkafl(theta=0.2)
    step(lax, THREE)
    assert lax.kept == [[0, 1, 2]]


def test_wkafls_weights_by_hand():
    """Two of equal length and direction but for the sign of their second half; sharpness 0 leaves p
    among the kept."""
    uploads = [upload(1, [1, 0.1], 3), upload(0, [1, -0.1], 1)]
    plain = {"alpha": 0.0, "clip": None, "sharpness": 0.0, "decay": 0.0}
    p = np.array([ONCE, FRESH]) / (ONCE + FRESH)
    np.testing.assert_allclose(step(A.WKAFL(**plain), uploads), [1, 0.1 * (p[0] - p[1])])
    p = np.array([3 * ONCE, FRESH]) / (3 * ONCE + FRESH)
    np.testing.assert_allclose(
        step(A.WKAFL(**plain, weights="samples"), uploads), [1, 0.1 * (p[0] - p[1])]
    )
    stale = [replace(u, s=s) for u, s in zip(uploads, (4, 2), strict=True)]  # 1 + 0.5 (2 + 1)
    p = np.array([TWICE, FRESH]) / (TWICE + FRESH)
    np.testing.assert_allclose(
        step(A.WKAFL(**{**plain, "decay": 0.5}), stale), [0.4, 0.04 * (p[0] - p[1])]
    )


def test_wkafl_remembers_what_it_took():
    """G of the round before, before the step size: after (4, 0), alpha 0.5 adds (2, 0). In its
    first round it adds nothing. A zero upload is kept, with cosine 1."""
    rule = A.WKAFL(alpha=0.5, clip=None, sharpness=0.0, lr=0.1, decay=0.0)
    np.testing.assert_allclose(step(rule, [upload(0, [4, 0])]), [0.4, 0])
    np.testing.assert_allclose(step(rule, [upload(0, [0, 1])]), [0.2, 0.1])
    rule = A.WKAFL(clip=None, sharpness=0.0, decay=0.0)
    np.testing.assert_allclose(step(rule, [upload(0, [4, 0]), upload(0, [0, 0])]), [2, 0])
    assert rule.kept == [[0, 1]]


# --- FedHist


HALF = 0.5**0.5


def test_two_rounds_of_fedhist_by_hand():
    """L = 1; a = b = kappa = rho = 1/2.

    Round 0: (1, 0) and (0, 1), fresh. G = (.5, .5), brought to the length 1: (h, h), h = sqrt(.5).
    Version 0: both cosines h, both uploads of it of two: u = h; u-bar = h/2. Round 1: client 0 with
    (0, 2), fresh; client 2 with (-3, -4), late by 1. Fused with half of (h, h): (h/2, 1 + h/2) and
    (-1.5 + h/2, -2 + h/2). w = .5 + .25 h and .5 (2/e) + 0. Length rho^1 3.5 = 1.75. Version 1:
    only client 0's;
    |F|/K = 1/2. Client 0: cos 1, u = 1/2, u-bar = h/4 + 1/4. Client 2: cos -0.8, u = .5 (-.8) (2/e), u-bar half of it.
    """
    rule = A.FedHist(2, a=0.5, b=0.5, kappa=0.5, rho=0.5, length=1)
    np.testing.assert_allclose(
        step(rule, [upload(0, [1, 0]), upload(0, [0, 1], client=1)]), [HALF, HALF]
    )
    assert rule.utility == pytest.approx({0: HALF / 2, 1: HALF / 2})
    x = step(rule, [upload(0, [0, 2]), upload(1, [-3, -4], client=2)], t=1)
    w = np.array([0.5 + HALF / 4, 0.5 * ONCE])
    G = w @ np.array([[HALF / 2, 1 + HALF / 2], [-1.5 + HALF / 2, -2 + HALF / 2]])
    np.testing.assert_allclose(x, 1.75 * G / np.hypot(*G))
    np.testing.assert_allclose(rule.lg, [x])
    assert rule.utility == pytest.approx({0: HALF / 4 + 0.25, 1: HALF / 2, 2: -0.2 * ONCE})


def three_rounds(**changes):
    """Two arrivals in each of three rounds, among three clients. Client 1's second task began with
    version 1."""
    rule = A.FedHist(2, **{"a": 0.0, "b": 0.0, "kappa": 0.0, "length": 2, "ina": False, **changes})
    turns = [
        [upload(0, [1, 0], client=0), upload(0, [0, 1], client=1)],
        [upload(0, [2, 0], client=0), upload(1, [0, -1], client=2)],
        [upload(1, [0, 6], client=1), upload(0, [-9, 0], client=0)],
    ]
    after = []
    for t, uploads in enumerate(turns):
        rule(t, np.zeros(2), uploads)
        after.append(dict(rule.utility))
    return after


def test_gradients_of_one_version_are_found_by_version():
    """L = 2: nothing is scored in round 0. In round 1, version 0: (1, 0), (0, 1) and the late (0,
    -1), three of two: their mean is (1/3, 0); cosines 1 and 0. In round 2, version 1: (2, 0), and
    (0, 6) which is late by 1; mean (1, 3). Client 0: 1/sqrt(10), fresh; client 2: -3/sqrt(10),
    late. By staleness 0 it would be the mean of (2, 0) and (-9, 0).
    """
    after = three_rounds()
    assert after[0] == {}
    assert after[1] == pytest.approx({0: 1.0, 1: 0.0})
    assert after[2] == pytest.approx({0: 10**-0.5, 1: 0.0, 2: -3 * 10**-0.5 * ONCE})


def test_utilities_by_threshold_staleness_and_memory():
    """theta = -1: client 2's e is 1 - 3/sqrt(10), above 0: a late reward is larger. theta = 0.5:
    1/sqrt(10) is below, and client 1's 0 is -0.5. kappa = 0.9: a tenth is new, and client 0's
    second score is added to 0.9 of its first."""
    e = 10**-0.5
    assert three_rounds(theta=-1.0)[2] == pytest.approx(
        {0: 1 + e, 1: 1.0, 2: (1 - 3 * e) * (2 - ONCE)}
    )
    assert three_rounds(theta=0.5)[2] == pytest.approx(
        {0: e - 0.5, 1: -0.5, 2: -(3 * e + 0.5) * ONCE}
    )
    after = three_rounds(kappa=0.9)
    assert after[1] == pytest.approx({0: 0.1, 1: 0.0})
    assert after[2] == pytest.approx({0: 0.09 + 0.1 * e, 1: 0.0, 2: -0.3 * e * ONCE})


def test_leaving_ones_own_out():
    """Round 1: client 0 against the mean of (0, 1) and (0, -1), 0: no direction; client 1 against
    (.5, -.5): -h, both with two of two. Round 2: client 0 against (0, 6), one of two: 0; client 2
    is not among (2, 0), (0, 6)."""
    after = three_rounds(leave_one_out=True)
    assert after[1] == pytest.approx({0: 0.0, 1: -HALF})
    assert after[2] == pytest.approx({0: 0.0, 1: -HALF, 2: -3 * 10**-0.5 * ONCE})
    alone = A.FedHist(2, length=1, leave_one_out=True)
    alone(0, np.zeros(2), [upload(0, [1, 0])])
    assert alone.utility == {}  # nothing left of version 0: not scored


def test_scores_are_out_of_k():
    """One upload of version 0, of the K = 4 that a round waits for: a quarter of its cosine, 1."""
    rule = A.FedHist(4, length=1, kappa=0.0)
    rule(0, np.zeros(2), [upload(0, [1, 0])])
    assert rule.utility == pytest.approx({0: 0.25})


def test_versions_of_which_nothing_arrives():
    """L = 1: both arrivals of round 1 are of version 0, none of version 1: nobody is scored."""
    rule = A.FedHist(2, length=1)
    rule(0, np.zeros(2), arrivals([0, 0]))
    before = dict(rule.utility)
    rule(1, np.zeros(2), [upload(1, [1, 0], client=2), upload(1, [0, 1], client=3)])
    assert rule.utility == before and len(before) == 2


def test_fusion_takes_the_least_similar():
    """Of (1, 0), (0, 1), (2, 2) the one least like (3, 1) is (0, 1), and like (0, 3) it is (1, 0);
    length 2 knows only the last two, for which (0, 3) finds (2, 2). A tie goes to the oldest."""
    rule = A.FedHist(2, a=0.25, b=0.0, ina=False, length=3)
    rule.lg = [np.array(v, dtype=float) for v in ((1, 0), (0, 1), (2, 2))]
    np.testing.assert_allclose(rule.fused(np.array([3.0, 1.0])), [2.25, 1.0])
    np.testing.assert_allclose(rule.fused(np.array([0.0, 3.0])), [0.25, 2.25])
    np.testing.assert_allclose(rule.fused(np.array([1.0, 1.0])), [1.0, 0.75])
    rule = A.FedHist(2, a=0.25, ina=False, length=2)
    for row in (1.0, 0.0), (0.0, 1.0), (2.0, 2.0):
        rule.fused = lambda g: g
        rule(0, np.zeros(2), [upload(0, row)])
    del rule.fused
    np.testing.assert_allclose(rule.lg, [[0, 1], [2, 2]])
    np.testing.assert_allclose(rule.fused(np.array([0.0, 3.0])), [0.5, 2.75])


def test_norm_matching_by_hand():
    """Mean (2, 1) of (4, 0) and (0, 2), brought to the length 3 rho^t; a mean of 0 is left. The
    buffer gets what x got, but for the step size."""
    uploads = [upload(0, [4, 0]), upload(0, [0, 2], client=1)]
    of_length_1 = np.array([2, 1]) / 5**0.5
    rule = A.FedHist(2, rho=0.5, lr=0.1)
    np.testing.assert_allclose(step(rule, uploads, t=3), 0.1 * 0.375 * of_length_1)
    np.testing.assert_allclose(rule.lg, [0.375 * of_length_1])
    np.testing.assert_allclose(step(A.FedHist(2, ina=False), uploads, t=3), [2, 1])
    np.testing.assert_allclose(step(A.FedHist(2), [upload(0, [1, 1]), upload(0, [-1, -1])]), [0, 0])


def test_penalised_clients_are_left_out():
    """b = 0.5: a utility of -1 takes all of a fresh upload's weight, -2 no more than that; only the
    third counts."""
    rule = A.FedHist(2, b=0.5, ina=False)
    rule.utility = {0: -1.0, 1: -2.0, 2: 0.4}
    np.testing.assert_allclose(step(rule, arrivals([0, 0, 1])), [0, 0, 1], atol=1e-15)
    rule = A.FedHist(2, b=0.5, ina=False)
    rule.utility = {0: 1.0, 1: -0.5, 2: 0.5}
    np.testing.assert_allclose(step(rule, arrivals([0, 0, 0])), [0.5, 0.125, 0.375])
    rule = A.FedHist(2, b=0.5, ina=False)
    rule.utility = {0: -1.0, 1: -2.0, 2: -1.0}
    np.testing.assert_allclose(step(rule, arrivals([0, 0, 1], [5, 1, 1])), [1 / 3] * 3)
