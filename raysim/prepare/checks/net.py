"""Check the net against the data, and on a few examples."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from raysim.config.schema import Config
from raysim.config.sections.data import Arrays, OwnData
from raysim.data.dataset import Dataset
from raysim.data.partition.groups import local_of_groups
from raysim.errors import ConfigError
from raysim.models import build
from raysim.models.checks.coupled_examples import couples_in_evaluation
from raysim.models.flat import BoundModel, Model
from raysim.system import startup_stages
from raysim.system.global_generators import generators_kept

logger = logging.getLogger("raysim")


def note_pixels(raw: Mapping[str, Any], config: Config, dataset: Dataset) -> None:
    """Log that a user's own uint8 arrays are read as images, if nobody has chosen how.

    A net that divides by 255 itself would get other numbers than its author thinks.

    Args:
        raw: the configuration of the run, before its defaults were written out.
        config: the configuration of the run.
        dataset: its data set.
    """
    section = raw.get("data")
    has_chosen = isinstance(section, Mapping) and "scaling" in section
    if dataset.are_images and isinstance(config.data, Arrays | OwnData) and not has_chosen:
        startup_stages.notes.info(
            "x is uint8 %s, read as images: before forward, pixels are divided by 255 and "
            "normalised by ImageNet's mean and deviation; data.scaling=unit divides only, and "
            "x.astype('float32') stays as it is",
            list(dataset.x.shape),
        )


def check_model_fits_data(config: Config) -> None:
    """Check that a classifier is not trained on quadratics, which have no classes.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: a model with labels is combined with `data=quadratics`.
    """
    classifiers = build.NETS.keys() - {"quadratic"}
    if config.data.name == "quadratics" and config.model.name in classifiers:
        raise ConfigError(
            f"model.name: '{config.model.name}' is a classifier, but data 'quadratics' has no "
            "classes; use model=quadratic"
        )


def note_coupled_evaluation(config: Config, model: Model, n_test: int) -> None:
    """Note that metrics depend on the batches of an evaluation, if examples meet in them.

    Args:
        config: the configuration of the run.
        model: its net.
        n_test: number of test examples.
    """
    size = config.evaluate.batch_size
    if n_test > size and couples_in_evaluation(model):
        startup_stages.notes.info(
            "%s turns an example into other outputs beside others in evaluation mode too, as "
            "BatchNorm without running statistics does: metrics depend on evaluate.batch_size, %d, "
            "and %d takes all test examples in one batch",
            model.label,
            size,
            n_test,
        )


def note_probabilities(model: Model) -> None:
    """Note that the net ends in a softmax, and that the cross-entropy makes another one.

    Args:
        model: the net of the run.
    """
    if model.learning_task.config_name != "classification" or model.classes < 2:
        return
    bound, buffers = BoundModel.at_start(model)
    with torch.no_grad():
        p = bound.forward(model.examples(2)[0], "eval", buffers)
    if p.dim() == 2 and (p >= 0).all() and (p.sum(1) - 1).abs().max() < 1e-3:
        startup_stages.notes.info(
            "the outputs of %s are probabilities, and the loss makes a softmax of them once more, "
            "as torch.nn.CrossEntropyLoss does: leave out the net's own softmax",
            model.label,
        )


def check_batches_of_one(config: Config, net: nn.Module, model: Model, sizes: np.ndarray) -> None:
    """Check that PyTorch trains the net on one example, if a mini-batch has a single one.

    BatchNorm refuses a single value for each channel; the engine's returns its shift, as the only
    example of a client needs it, and would learn nothing. A note names such clients.

    Args:
        config: the configuration of the run.
        net: the net as the user wrote it.
        model: the same net as the run reads it.
        sizes: [N], the numbers of training examples of the clients.

    Raises:
        ConfigError: PyTorch refuses it, and batches have one example by configuration.
    """
    has_batches_of_one = any(local.batch_size == 1 for local in local_of_groups(config))
    n_single = int((sizes == 1).sum())
    are_frozen = config.local.buffers == "frozen"
    if not (has_batches_of_one or n_single) or are_frozen or not model.needs_two_examples:
        return
    x, _ = model.examples(1)
    try:
        with generators_kept(), torch.no_grad():
            copy.deepcopy(net).to(model.dtype).train()(x)
    except ValueError as error:
        if has_batches_of_one:
            raise ConfigError(
                f"local.batch_size: PyTorch does not train this net on single examples: {error}; "
                "take at least 2"
            ) from None
        startup_stages.notes.info(
            "clients with a single training example: %d; PyTorch does not train this net on one "
            "(%s). Here its normalisation returns the shift, and a variance of 0 counts in its "
            "statistics: leave them out, take nn.GroupNorm, or set local.buffers=frozen",
            n_single,
            error,
        )


def check_net_is_finite(config: Config, net: nn.Module) -> None:
    """Check that the initial parameters and BatchNorm statistics of the net are finite.

    A net that loads its weights from a file may have NaN or infinite ones.

    Args:
        config: the configuration of the run.
        net: the net.

    Raises:
        ConfigError: a tensor has a value that is not finite; the message names the tensor.
    """
    tensors = dict(net.named_parameters())
    for prefix, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            tensors |= dict(module.named_buffers(prefix))
    for name, value in tensors.items():
        if not torch.isfinite(value.detach()).all():
            raise ConfigError(
                f"model.name: the initial '{name}' of model '{config.model.name}' is not finite; "
                "check the file of weights, or the net's initialisation"
            )
