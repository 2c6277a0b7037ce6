"""Examples: data sets, their arrays on a device, partitions over clients, and pictures of both."""

from raysim.data.arrays import Examples
from raysim.data.datasets import Dataset, fetch, load, names
from raysim.data.partitions import Clients, VirtualClients, digest, split
from raysim.data.pictures import partition_plot, sample_grid, summary

__all__ = [
    "Clients",
    "Dataset",
    "Examples",
    "VirtualClients",
    "digest",
    "fetch",
    "load",
    "names",
    "partition_plot",
    "sample_grid",
    "split",
    "summary",
]
