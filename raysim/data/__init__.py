"""Data sets, their tensors on a device, partitions over clients, and plots of both."""

from raysim.config.sections.data import data_root
from raysim.data.dataset import Dataset
from raysim.data.examples import Examples, shared_tensor
from raysim.data.images import import_torchvision
from raysim.data.loading import (
    catalogue,
    dataset_names,
    download_dataset,
    files_pattern,
    is_present,
    load_dataset,
    loading_once,
    version_of,
)
from raysim.data.partition.clients import Clients, VirtualClients, partition_digest
from raysim.data.partition.split import split_dataset
from raysim.data.plots import dataset_summary, plot_partition, plot_samples

__all__ = [
    "Clients",
    "Dataset",
    "Examples",
    "VirtualClients",
    "catalogue",
    "data_root",
    "dataset_names",
    "dataset_summary",
    "download_dataset",
    "files_pattern",
    "import_torchvision",
    "is_present",
    "load_dataset",
    "loading_once",
    "partition_digest",
    "plot_partition",
    "plot_samples",
    "shared_tensor",
    "split_dataset",
    "version_of",
]
