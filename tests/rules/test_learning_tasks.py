"""Losses and metrics of the learning tasks, against their definitions and scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from support.configurations import IID_MLP

from raysim.config.references import load_object
from raysim.rules import Batch, Classification, Multilabel, NextToken, Regression, TaskData
from raysim.rules.tasks.learning_task import LearningTask

N, K, T = 60, 5, 7
RNG = np.random.default_rng(3)
LOGITS = RNG.standard_normal((N, K)).round(1)  # rounded, so that some are equal
LABELS = RNG.integers(0, K - 1, N)  # the last class never occurs
TRUTH = (RNG.random((N, K)) < 0.3).astype(np.int64)
TRUTH[:, 2] = 0  # a label that nobody has
TARGETS = RNG.standard_normal((N, 3)) * 2 + 1
PREDICTED = TARGETS + RNG.standard_normal((N, 3))
TOKENS = RNG.integers(0, K, (N, T))
LENGTHS = RNG.integers(0, T + 1, N)
NEXT = np.where(np.arange(T) < LENGTHS[:, None], TOKENS, -100)
HAVE_TOKENS = LENGTHS > 0
"""Which sequences have a token to predict, bool [N]."""
TOKEN_LOGITS = RNG.standard_normal((N, T, K))


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


def measured(
    task: LearningTask, name: str, outputs: np.ndarray, y: np.ndarray, size: int = N
) -> float:
    """A metric over batches of `size`."""
    cls = task.metric_classes["top{k}" if name.startswith("top") else name]
    metric = cls(task, outputs.shape[-1], name)
    parts = [
        metric.rows(tensor(outputs[i : i + size]), tensor(y[i : i + size]))
        for i in range(0, len(y), size)
    ]
    return metric.value(torch.cat(parts).numpy())


def losses(task: LearningTask, outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    return task.loss(tensor(outputs), Batch(tensor(outputs), tensor(y))).numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


# -- losses ----------------------------------------------------------------------------------------


def test_classification_is_the_cross_entropy():
    expected = [-log_softmax(row)[label] for row, label in zip(LOGITS, LABELS, strict=True)]
    assert np.allclose(losses(Classification(), LOGITS, LABELS), expected)


BOUNDED = "configs/fedreg/bounded_loss.py:BoundedClassification"


def test_the_loss_of_the_methods_compared_with_fedreg_is_bounded():
    """-log(p + 1e-12), as in the code of Xu 2022."""
    bounded = load_object(BOUNDED, "task")()
    certain = np.concatenate([LOGITS, [[0, 20, 0, 0, 0], [0, 28, 0, 0, 0], [0, 500, 0, 0, 0]]])
    labels = np.concatenate([LABELS, [0, 0, 0]])
    p = np.exp(log_softmax(certain))[np.arange(len(labels)), labels]
    assert np.allclose(losses(bounded, certain, labels), -np.log(p + 1e-12), rtol=1e-12)
    assert losses(bounded, certain, labels).max() == pytest.approx(12 * math.log(10))
    outputs = tensor(certain).requires_grad_()
    bounded.loss(outputs, Batch(outputs, tensor(labels))).sum().backward()
    gradient = outputs.grad[np.arange(len(labels)), labels].numpy()
    assert np.allclose(gradient, p * (p - 1) / (p + 1e-12))


def test_fedreg_has_that_loss_with_either_task(engine):
    def trained(algorithm: str, task: str, lr: float = 0.1) -> np.ndarray:
        local = {"steps": 3, "batch_size": 8, "lr": lr}
        config = {**IID_MLP, "algorithm": algorithm, "task": task, "local": local}
        return engine(config)[0].executor.xs[-1]

    assert np.array_equal(trained("fedreg", "classification"), trained("fedreg", BOUNDED))
    plain, bounded = (trained("fedavg", task, 30.0) for task in ("classification", BOUNDED))
    assert np.linalg.norm(plain) > 2 * np.linalg.norm(bounded)


def test_multilabel_is_the_mean_binary_cross_entropy():
    p = 1 / (1 + np.exp(-LOGITS))
    expected = -(TRUTH * np.log(p) + (1 - TRUTH) * np.log(1 - p)).mean(1)
    assert np.allclose(losses(Multilabel(), LOGITS, TRUTH), expected)


@pytest.mark.parametrize("columns", [1, 3])
def test_regression_is_the_mean_squared_error(columns):
    outputs, y = PREDICTED[:, :columns], TARGETS[:, :columns]
    expected = ((outputs - y) ** 2).mean(1)
    assert np.allclose(losses(Regression(), outputs, y), expected)
    if columns == 1:
        assert np.allclose(losses(Regression(), outputs, y[:, 0]), expected)


def test_next_token_is_the_mean_over_a_sequences_real_positions():
    expected = np.zeros(N)
    for i in range(N):
        for j in range(LENGTHS[i]):
            expected[i] -= log_softmax(TOKEN_LOGITS[i, j])[TOKENS[i, j]] / LENGTHS[i]
    assert (LENGTHS == 0).any() and (LENGTHS == T).any()
    assert np.allclose(losses(NextToken(), TOKEN_LOGITS, NEXT), expected)


def test_longer_padding_changes_neither_loss_nor_metrics():
    longer = np.concatenate([NEXT, np.full((N, 5), -100)], 1)
    logits = np.concatenate([TOKEN_LOGITS, RNG.standard_normal((N, 5, K))], 1)
    task = NextToken()
    assert np.allclose(losses(task, logits, longer), losses(task, TOKEN_LOGITS, NEXT), rtol=1e-13)
    for name in task.metric_classes:
        assert math.isclose(
            measured(task, name, logits, longer),
            measured(task, name, TOKEN_LOGITS, NEXT),
            rel_tol=1e-13,
        )


# -- metrics ---------------------------------------------------------------------------------------


def token_rows() -> tuple[np.ndarray, np.ndarray]:
    real = NEXT != -100
    return TOKEN_LOGITS[real], NEXT[real]


def first_best(logits: np.ndarray, y: np.ndarray, k: int) -> float:
    """Top-k by sorting; of equal logits the lower class comes first."""
    order = np.argsort(-logits, 1, kind="stable")[:, :k]
    return float(np.mean([label in row for row, label in zip(order, y, strict=True)]))


def one_vs_rest(logits: np.ndarray, y: np.ndarray) -> float:
    p = np.exp(log_softmax(logits))
    return float(np.mean([sk.roc_auc_score(y == c, p[:, c]) for c in np.unique(y)]))


def with_both(y: np.ndarray, scores: np.ndarray) -> float:
    kept = [c for c in range(y.shape[1]) if 0 < y[:, c].sum() < len(y)]
    return float(np.mean([sk.roc_auc_score(y[:, c], scores[:, c]) for c in kept]))


ORACLES: list[tuple[LearningTask, str, np.ndarray, np.ndarray, Any]] = [
    (Classification(), "accuracy", LOGITS, LABELS, lambda o, y: sk.accuracy_score(y, o.argmax(1))),
    (Classification(), "top1", LOGITS, LABELS, lambda o, y: first_best(o, y, 1)),
    (Classification(), "top3", LOGITS, LABELS, lambda o, y: first_best(o, y, 3)),
    (Classification(), "f1", LOGITS, LABELS, lambda o, y: sk.f1_score(y, o.argmax(1), average="macro")),
    (Classification(), "f1", LOGITS[:, :4], LABELS, lambda o, y: sk.f1_score(y, o.argmax(1), average="macro")),
    (Classification(), "f1_micro", LOGITS, LABELS, lambda o, y: sk.f1_score(y, o.argmax(1), average="micro")),
    (Classification(), "auc", LOGITS, LABELS, one_vs_rest),
    (Multilabel(), "subset_accuracy", LOGITS, TRUTH, lambda o, y: sk.accuracy_score(y, o > 0)),
    (Multilabel(), "f1", LOGITS, TRUTH, lambda o, y: sk.f1_score(y, o > 0, average="macro", zero_division=0)),
    (Multilabel(), "f1_micro", LOGITS, TRUTH, lambda o, y: sk.f1_score(y, o > 0, average="micro")),
    (Multilabel(), "auc", LOGITS, TRUTH, lambda o, y: with_both(y, o)),
    (Regression(), "mse", PREDICTED, TARGETS, lambda o, y: sk.mean_squared_error(y, o)),
    (Regression(), "mae", PREDICTED, TARGETS, lambda o, y: sk.mean_absolute_error(y, o)),
    (Regression(), "r2", PREDICTED, TARGETS, lambda o, y: sk.r2_score(y, o)),
    (Regression(), "r2", PREDICTED[:, :1], TARGETS[:, 0], lambda o, y: sk.r2_score(y, o)),
    (NextToken(), "accuracy", TOKEN_LOGITS, NEXT, lambda o, y: np.mean(token_rows()[0].argmax(1) == token_rows()[1])),
    (
        NextToken(), "perplexity", TOKEN_LOGITS, NEXT,
        lambda o, y: np.exp(sk.log_loss(token_rows()[1], np.exp(log_softmax(token_rows()[0])), labels=range(K))),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "task, name, outputs, y, oracle", ORACLES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_metric_is_that_of_its_definition_whatever_the_batches(task, name, outputs, y, oracle):
    expected = float(oracle(outputs, y))
    value = measured(task, name, outputs, y)
    assert math.isclose(value, expected, rel_tol=1e-12)
    assert all(measured(task, name, outputs, y, size) == value for size in (1, 7, 59))


def test_every_shipped_metric_has_an_oracle():
    known = {
        (type(t), name)
        for t in (Classification(), Multilabel(), Regression(), NextToken())
        for name in t.metric_classes
    }
    tested = {(type(t), "top{k}" if name.startswith("top") else name) for t, name, *_ in ORACLES}
    assert tested == known


def test_figures_of_one_kind_only_are_nan():
    same = np.zeros(N, dtype=np.int64)
    assert math.isnan(measured(Classification(), "auc", LOGITS, same))
    for target in (1.0, 0.1):  # the mean of equal numbers may be another one
        assert math.isnan(measured(Regression(), "r2", PREDICTED[:, :1], np.full(N, target)))
    assert math.isnan(measured(NextToken(), "perplexity", TOKEN_LOGITS, np.full((N, T), -100)))


@pytest.mark.parametrize(
    "task, outputs, y",
    [(Classification(), LOGITS, LABELS), (Multilabel(), LOGITS, TRUTH), (NextToken(), TOKEN_LOGITS, NEXT)],
    ids=lambda v: getattr(v, "name", ""),
)  # fmt: skip
def test_an_output_that_is_nan_is_wrong(task, outputs, y):
    """A run that has diverged has no hits, neither of class 0 nor of labels that are absent."""
    outputs = np.full_like(outputs, np.nan)
    for name in task.metric_classes:
        value = measured(task, name.format(k=2), outputs, y)
        assert math.isnan(value) if name in ("auc", "perplexity") else value == 0, name


# -- checks of the data ----------------------------------------------------------------------------


def data(x: np.ndarray, y: np.ndarray, n_classes: int = 0, test: Any = None) -> TaskData:
    x_test, y_test = (x, y) if test is None else test
    return TaskData(x, y, x_test, y_test, n_classes)


def changed(array: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


X = np.zeros((N, 4))
BAD: list[tuple[LearningTask, TaskData, str]] = [
    (Classification(), data(X, changed(LABELS, (7,), 9), K), "training example 7 has the label 9, but the number of classes .* is 5"),
    (Classification(), data(X, LABELS, K, (X, changed(LABELS, (2,), -1))), "test example 2 has the label -1"),
    (Classification(), data(X, LABELS, 0, (X, changed(LABELS, (2,), -1))), "^test example 2 has the label -1; number the labels from 0, .* in its denominator too, .*index=-1\\), or, .* regression"),
    (Classification(), data(X, changed(LABELS, (7,), 10**9)), "^training example 7 has the label 1000000000, .* need 1000000001 outputs; .* task=regression"),
    (Classification(), data(X, TARGETS, K), r"y of type float64 and shape \[60, 3\], expected one integer label"),
    (Multilabel(), data(X, changed(TRUTH, (4, 1), 2)), "training example 4 has the value 2 for label 1"),
    (Multilabel(), data(X, changed(TRUTH[:, 0], (4,), 2)), "training example 4 has the value 2, expected 0 or 1"),
    (Multilabel(), data(X, TRUTH[:, None]), r"y of shape \[60, 1, "),
    (Regression(), data(X, changed(TARGETS, (8, 2), np.nan)), "training example 8 is nan"),
    (Regression(), data(X, TARGETS, 0, (X, TARGETS[:, :2])), r"test examples have y of type float64 and shape \[60, 2\]"),
    (NextToken(vocabulary=K), data(changed(TOKENS, (5, 3), K), NEXT), "x of training example 5 has the token 5 at position 3, but the task.vocabulary is 5"),
    (NextToken(vocabulary=K), data(TOKENS, changed(NEXT, (6, 0), -7)), "y of training example 6 has the token -7 at position 0"),
    (NextToken(), data(changed(TOKENS, (5, 3), -100), NEXT), "x of training example 5 has the token -100"),
    (NextToken(), data(X, NEXT), "x of type float64"),
    (NextToken(), data(TOKENS, LABELS), r"y of type int64 and shape \[60\]"),
    (NextToken(), data(TOKENS, NEXT, 0, (TOKENS[:, :4], NEXT[:, :4])), "have 7 positions and test sequences 4"),
]  # fmt: skip


@pytest.mark.parametrize("task, examples, message", BAD, ids=[m[:40] for *_, m in BAD])
def test_examples_that_do_not_fit_are_named(task, examples, message):
    with pytest.raises(ValueError, match=message):
        task.check(examples)


def test_the_number_of_outputs():
    assert Classification().outputs(data(X, LABELS, 10)) == 10
    assert Multilabel().outputs(data(X, TRUTH)) == K
    assert (
        Regression().outputs(data(X, TARGETS)) == 3
        and Regression().outputs(data(X, TARGETS[:, 0])) == 1
    )
    assert NextToken().outputs(data(TOKENS, NEXT)) == K == TOKENS.max() + 1
    assert NextToken(vocabulary=50).outputs(data(TOKENS, NEXT)) == 50
    padded = np.where(NEXT == -100, 99, NEXT)
    assert (padded == 99).any() and NextToken(ignore_index=99).outputs(data(TOKENS, padded)) == K
    for task, examples in (
        (Classification(), data(X, LABELS, K)),
        (NextToken(), data(TOKENS[HAVE_TOKENS], NEXT[HAVE_TOKENS])),
    ):
        task.check(examples)
