"""Pairs of a client rule and a server rule that can feed it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from raysim.errors import ConfigError
from raysim.rules.contract import CLIENT_RULES, SERVER_RULES
from raysim.rules.methods.pairs import refuse_pair

Pair = tuple[str, str]


@cache
def fits(client: str, server: str) -> bool:
    """Return whether a server rule can feed a client rule of the registry."""
    try:
        refuse_pair(CLIENT_RULES[client](), SERVER_RULES[server]())
    except ConfigError:
        return False
    return True


def all_pairs() -> list[Pair]:
    """Return every client rule with every server rule that can feed it."""
    clients, servers = sorted(CLIENT_RULES), sorted(SERVER_RULES)
    return [(client, server) for client in clients for server in servers if fits(client, server)]


def with_every_rule(pairs: Iterable[Pair]) -> list[Pair]:
    """Return pairs in which every rule occurs; the first pairs come first."""
    chosen: list[Pair] = []
    for client, server in pairs:
        if client not in dict(chosen) or server not in [
            chosen_server for _, chosen_server in chosen
        ]:
            chosen.append((client, server))
    return chosen


def first_server(client: str, servers: Iterable[str]) -> str:
    """Return the server rule of the client rule's name if it can feed it, or the first that can."""
    return next(
        server for server in [client, *servers] if server in SERVER_RULES and fits(client, server)
    )
