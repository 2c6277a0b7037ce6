"""Sub-models of a chain of layers by their width: which parameters a width has."""

from math import prod

import torch


def check_chain(shapes):
    """Refuse a net in which the units of a layer are not the inputs of the next one.

    Args:
        shapes: shapes of the net's tensors.

    Raises:
        ValueError: they are not weights and biases of linear layers or convolutions in a chain.
    """
    weights, biases, units = shapes[::2], shapes[1::2], 1
    ok = len(weights) == len(biases) > 0
    for weight, bias in zip(weights, biases, strict=False):
        inputs = prod(weight[1:])
        ok = ok and len(weight) > 1 and bias == weight[:1] and inputs % units == 0
        units = weight[0] if weight else 1
    if not ok:
        raise ValueError(
            "name: sub-models are for nets of linear layers and convolutions with biases, one "
            "after the other; use mlp or lenet"
        )


def places(shapes):
    """Return the place of each parameter, [P] in float64: widths above it have the parameter.

    A sub-model of width p has the first ceil(p · n) of the n units of each hidden layer, that is
    those with i / n < p for i from 0, and all outputs. A weight belongs to a unit of its own layer
    and to one of the layer before; several inputs may come from one unit, as those of a linear
    layer above a convolution.

    Args:
        shapes: shapes of the net's tensors, which `check_chain` accepts.
    """
    found, units = [], 1
    for k, shape in enumerate(shapes):
        rows, columns = shape[0], prod(shape[1:])
        row = torch.zeros(rows, dtype=torch.float64)
        column = torch.zeros(columns, dtype=torch.float64)
        if k < len(shapes) - 2:  # the last layer has all of its outputs
            row = torch.arange(rows, dtype=torch.float64) / rows
        if k and len(shape) > 1:
            column = (torch.arange(columns) // (columns // units)).double() / units
        found.append(torch.maximum(row[:, None], column).flatten())
        units = rows
    return torch.cat(found)
