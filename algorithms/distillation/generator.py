"""A generator of features from labels and noise, for FedGen.

G(y, eps) = W2 ReLU(W1 [eps, onehot(y)] + b1) + b2.
"""

import torch
from torch.nn.functional import cross_entropy

from raysim.numerics import initial_layers

GENERATOR = "W1", "b1", "W2", "b2"
"""Its tensors: [H, d + C], [H], [F, H], [F]."""


def initial_generator(x0, problem, rule):
    """Return PyTorch's initial values of a generator.

    Args:
        x0: a tensor of the parameters' type.
        problem: the sizes of the run.
        rule: has the numbers of noise and hidden units.
    """
    sizes = rule.noise_dim + problem.classes, rule.hidden, problem.features
    values = initial_layers(problem.rng("generator"), sizes)
    return {key: x0.new_tensor(v) for key, v in zip(GENERATOR, values, strict=True)}


def generated(generator, y, eps, classes):
    """Return features [B, F] of labels y [B] and noise eps [B, d]."""
    one_hot = torch.eye(classes, dtype=eps.dtype, device=eps.device)[y]
    hidden = (torch.cat([eps, one_hot], 1) @ generator["W1"].T + generator["b1"]).relu()
    return hidden @ generator["W2"].T + generator["b2"]


def labels(prior, uniform):
    """Return labels [B] with probabilities [C], from uniform numbers [B]."""
    # A cumulative sum is not deterministic on GPUs.
    cdf = prior @ torch.ones_like(prior).expand(len(prior), -1).triu()
    return (uniform[:, None] >= cdf).sum(1).clamp(max=len(prior) - 1)


def trained(generator, nets, weights, prior, rng, rule):
    """Return a generator after steps of Adam on the cross-entropy of its features and labels.

    Args:
        generator: its tensors, among others.
        nets: the clients' nets [K], whose classifiers run on its features.
        weights: of the nets' logits [K].
        prior: probabilities of the labels, [C].
        rng: generator of the random numbers.
        rule: has the numbers of steps, of examples in a step, and of noise, and the step size.
    """
    generator = {key: generator[key].clone().requires_grad_() for key in GENERATOR}
    adam = torch.optim.Adam(list(generator.values()), lr=rule.generator_lr)
    for _ in range(rule.generator_steps):
        y = labels(prior, prior.new_tensor(rng.random(rule.generator_batch)))
        eps = prior.new_tensor(rng.standard_normal((rule.generator_batch, rule.noise_dim)))
        adam.zero_grad()
        z = generated(generator, y, eps, len(prior))
        logits = torch.stack([net.classify(z) for net in nets], -1) @ prior.new_tensor(weights)
        cross_entropy(logits, y).backward()
        adam.step()
    return {key: value.detach() for key, value in generator.items()}
