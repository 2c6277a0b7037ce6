"""Examples: data sets, their arrays on a device, partitions over clients, and pictures of both."""

from raysim.data.datasets import Dataset, fetch, import_torchvision, load, names, present, where
from raysim.data.examples import Examples, shared_tensor
from raysim.data.partitions import Clients, VirtualClients, digest, split
from raysim.data.plots import partition_plot, sample_grid, summary

__all__ = [
    "Clients",
    "Dataset",
    "Examples",
    "VirtualClients",
    "digest",
    "fetch",
    "import_torchvision",
    "load",
    "names",
    "partition_plot",
    "present",
    "sample_grid",
    "shared_tensor",
    "split",
    "summary",
    "where",
]
