"""A careful hand-written loop for this one experiment, in one process or in several.

Parameters are views of one flat vector, the data are in memory as floats, a step is `autograd.grad`
and one in-place update, and the clients' parameters are added to a running sum. Forked workers
share the parameters, and each has its own sum; the process that assigns the clients adds the sums.
"""

from __future__ import annotations

import ctypes
import multiprocessing

import torch
from measure import Meter
from torch import Tensor
from torch.nn import functional as F
from workloads import LR, Clients, Workload, arguments, make_net


def configure_process() -> None:
    """Use one thread, and configure glibc's allocator as raysim does."""
    torch.set_num_threads(1)
    libc, trim_threshold, mmap_threshold = ctypes.CDLL("libc.so.6"), -1, -3
    libc.mallopt(mmap_threshold, 1 << 30)
    libc.mallopt(trim_threshold, -1)


class Hand:
    """Local training in this process."""

    def __init__(self, work: Workload):
        self.work, self.clients, self.net = work, Clients(work), make_net(work)
        self.parameters = list(self.net.parameters())
        everything = [*self.parameters, *(b for b in self.net.buffers() if b.is_floating_point())]
        self.w = torch.cat([t.detach().reshape(-1) for t in everything])
        for t, view in zip(everything, self.w.split([t.numel() for t in everything]), strict=True):
            t.data = view.view(t.shape)
        self.views = [p.data for p in self.parameters]

    def train(self, x: Tensor, clients: list[int], total: Tensor) -> None:
        """Train clients from parameters x, and add the parameters of each to `total`."""
        for client in clients:
            self.w.copy_(x)
            for images, labels in self.clients.batches(client):
                loss = F.cross_entropy(self.net(images), labels)
                torch._foreach_add_(
                    self.views, torch.autograd.grad(loss, self.parameters), alpha=-LR
                )
            total += self.w


def in_one_process(work: Workload, meter: Meter) -> None:
    hand = Hand(work)
    x, total = hand.w.clone(), torch.zeros_like(hand.w)
    while True:
        hand.train(x, hand.clients.sample(), total.zero_())
        torch.div(total, work.cohort, out=x)
        if not meter.round():
            return meter.report(f"torch {torch.__version__}")


def in_many(work: Workload, meter: Meter, processes: int) -> None:
    hand, context = Hand(work), multiprocessing.get_context("fork")
    x = hand.w.clone().share_memory_()
    sums = torch.zeros(processes, len(x)).share_memory_()
    pipes = []

    def serve(rank: int, pipe) -> None:
        configure_process()
        while True:
            hand.train(x, pipe.recv(), sums[rank].zero_())
            pipe.send(None)

    for rank in range(processes):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(rank, theirs), daemon=True).start()
        pipes.append(ours)
    while True:
        cohort = hand.clients.sample()
        for rank, pipe in enumerate(pipes):
            pipe.send(cohort[rank::processes])
        for pipe in pipes:
            pipe.recv()
        torch.sum(sums, 0, out=x).div_(work.cohort)
        if not meter.round():
            return meter.report(f"torch {torch.__version__}")


if __name__ == "__main__":
    work, given = arguments()
    configure_process()
    meter = Meter(given.seconds)
    if given.processes == 1:
        in_one_process(work, meter)
    else:
        in_many(work, meter, given.processes)
