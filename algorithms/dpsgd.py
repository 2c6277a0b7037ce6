"""DP-SGD: SGD with clipped and noised gradients (Abadi et al., CCS 2016).

    client   d_i = lr 1/B (sum_k g_k min(1, C / |g_k|) + N(0, (sigma C)^2 I))
             g_k is the gradient of example k; the batch is all of the client's data
    server   FedAvg

State: none. Traffic: P down, P up.

This is FedSGD with the section `privacy: {max_grad_norm: C, noise_multiplier: sigma}`, in the form
to which Xu 2022 compares. The section works with every client rule whose steps see the data through
one gradient (FedAvg, FedProx, FedCurv, MOON and others). Terms that such a rule adds to the
gradient are neither clipped nor noised. Noise is added to the sum over the batch, which is then
divided by the true batch size. C = 4 is Abadi's value for MNIST; Xu 2022 uses C = 1.
"""

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm

Algorithm(
    "dpsgd",
    FedAvgClient,
    FedAvgServer,
    "Abadi 2016",
    defaults={
        "local": {"steps": 1, "batch_size": "full"},
        "privacy": {"max_grad_norm": 4.0, "noise_multiplier": 0.01},
    },
)
