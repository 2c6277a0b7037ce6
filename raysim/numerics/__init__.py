"""Order-independent sums, inner products, QPs, GradMA's gradient memory, and linear layers."""

from raysim.numerics.closed_form_qp import project3
from raysim.numerics.coordinates import median_of_coordinates, sort_coordinates
from raysim.numerics.fixed_point import NonFiniteError, combine, to_float
from raysim.numerics.gradient_memory import (
    admit,
    memory_bytes,
    memory_init,
    project_on_memory,
    remember,
)
from raysim.numerics.inner_products import (
    aligned,
    check_finite,
    cross,
    dot,
    gram,
    norm,
    use_threads,
    weighted_sum,
)
from raysim.numerics.linear_layers import initial_layers, layers_of
from raysim.numerics.qp import QPInfo, least_on_simplex, project, solve_dual

__all__ = [
    "NonFiniteError",
    "QPInfo",
    "admit",
    "aligned",
    "check_finite",
    "combine",
    "cross",
    "dot",
    "gram",
    "initial_layers",
    "layers_of",
    "least_on_simplex",
    "median_of_coordinates",
    "memory_bytes",
    "memory_init",
    "norm",
    "project",
    "project3",
    "project_on_memory",
    "remember",
    "solve_dual",
    "sort_coordinates",
    "to_float",
    "use_threads",
    "weighted_sum",
]
