"""FedMGDA+ (Hu et al., IEEE Transactions on Network Science and Engineering 2022).

The server looks for a direction that no client objects to. Updates are scaled to length 1, and the
weights lambda of their sum minimise its length on the simplex, with |lambda_i - 1/K| <= epsilon.
epsilon = 0 averages the scaled updates; epsilon = 1 is MGDA. Some implementations centre the
weights at the clients' shares of the examples. If the solver fails, the weights are
1/K and the metric `server/mgda_failed` is 1.

Run: raysim run quickstart algorithm=fedmgda
"""

from dataclasses import dataclass

import numpy as np

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, Logged, ServerRule, Share


@dataclass(frozen=True)
class FedMGDAServer(ServerRule):
    """Shortest weighted sum of the scaled updates."""

    counts_equally = True
    uploads = {"delta": "per_client"}
    logs = (Logged("mgda_failed", "1 if the solver failed, so that the weights are 1/K"),)
    epsilon: Share = 0.1
    """Largest difference of a weight from 1/K."""

    def update(self, state, reports):
        deltas = reports.per_client("delta")
        scaled = deltas / deltas.norm(dim=1, keepdim=True).clamp(min=1e-12)
        weights = shortest_sum((scaled @ scaled.T).double().cpu().numpy(), self.epsilon)
        reports.log(mgda_failed=float(weights is None))
        if weights is None:
            weights = np.full(len(deltas), 1 / len(deltas))
        return {"x": state["x"] - self.lr * deltas.new_tensor(weights) @ scaled}


def shortest_sum(gram, epsilon):
    """Return the weights [K] of the shortest sum of vectors with these inner products [K, K].

    Args:
        gram: inner products of the vectors.
        epsilon: largest difference of a weight from 1/K.

    Returns:
        The weights, None if the solver failed.
    """
    import cvxpy  # slow to import

    values, vectors = np.linalg.eigh(gram)
    root = np.sqrt(values.clip(0))[:, None] * vectors.T
    weights = cvxpy.Variable(len(gram), nonneg=True)
    limits = [cvxpy.sum(weights) == 1, cvxpy.abs(weights - 1 / len(gram)) <= epsilon]
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(root @ weights)), limits)
    tolerances = {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}
    try:
        problem.solve(solver=cvxpy.CLARABEL, **tolerances)
    except cvxpy.SolverError:
        return None
    return None if problem.status not in ("optimal", "optimal_inaccurate") else weights.value


Algorithm("fedmgda", FedAvgClient, FedMGDAServer, "Hu 2022")
