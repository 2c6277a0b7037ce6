from dataclasses import dataclass

from raysim import Probe


@dataclass
class Odd(Probe):
    every: int = 1

    def metrics(self, round, results):
        return {"loss #1": 1.0}


@dataclass
class Stranger(Probe):
    def request(self, round):
        return {10**6: True}

    def measure(self, trainer, client, update, request):
        return {}


class Bare(Probe):
    every: int = 1


@dataclass
class Blind(Probe):
    def request(self, round):
        return {}


@dataclass
class Taken(Probe):
    name = "server"


class WithInit(Probe):
    def __init__(self):
        self.seen = 0

    def metrics(self, round, results):
        self.seen += 1
        return {"seen": self.seen}


class NoProbe:
    pass


class Refuses(Probe):
    def check(self, plan):
        raise ValueError("only for two classes")
