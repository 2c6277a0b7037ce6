"""The clients of each group of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from raysim.config.schema import Config
from raysim.config.sections.groups import Group
from raysim.config.sections.local import Local
from raysim.data.partition.clients import Clients, ExampleLists, VirtualClients, union
from raysim.errors import ConfigError
from raysim.randomness import generator

AnyLists = TypeVar("AnyLists", bound=ExampleLists)


def group_members(config: Config, n_clients: int) -> np.ndarray | None:
    """Return the group of each client; None if the configuration has no groups.

    Clients that are named by number come first. Groups by share then draw from the others, in the
    order of the configuration.

    Args:
        config: the configuration of the run.
        n_clients: N, the number of clients.

    Returns:
        [N], 0 for a client of no group, k for one of the k-th group.

    Raises:
        ConfigError: a client does not exist or is in two groups, or there are too few clients.
    """
    if not config.groups:
        return None
    members = np.zeros(n_clients, np.int16)
    names = ["", *config.groups]
    for k, (name, group) in enumerate(config.groups.items(), 1):
        for client in _named_clients(name, group):
            place = f"groups.{name}: client {client}"
            if not 0 <= client < n_clients:
                raise ConfigError(
                    f"{place} does not exist; the clients have the numbers 0 to {n_clients - 1}"
                )
            if members[client]:
                other = (
                    "twice" if members[client] == k else f"in '{names[members[client]]}' as well"
                )
                raise ConfigError(f"{place} is {other}; name each client in one group, once")
            members[client] = k
    _draw_shares(config, members)
    return members


def local_of_groups(config: Config) -> list[Local]:
    """Return the local settings of clients of no group, and of those of each group.

    Args:
        config: the configuration of the run.
    """
    return [config.local, *(group.local.changed(config.local) for group in config.groups.values())]


def batch_sizes_of(config: Config, sizes: np.ndarray) -> np.ndarray:
    """Return the configured batch size of each client, at most its number of examples, [N].

    Args:
        config: the configuration of the run.
        sizes: [N], examples of each client.
    """
    return np.minimum(sizes, _configured_batch_sizes(config, sizes))


def drops_last(config: Config, n_clients: int) -> np.ndarray:
    """Return whether each client leaves out a last batch that is not full, bool [N].

    Args:
        config: the configuration of the run.
        n_clients: N, the number of clients.
    """
    return _by_group(config, n_clients, lambda local: np.full(n_clients, local.drop_last))


def without_clients_without_batch(
    config: Config, clients: Clients | VirtualClients
) -> Clients | VirtualClients:
    """Return the partition without the examples of clients that have no batch.

    With `local.drop_last` these are the clients with fewer examples than a batch. They do not
    train, as clients without examples. If examples change over the rounds, this holds for each
    phase.

    Args:
        config: the configuration of the run.
        clients: the partition.

    Raises:
        ConfigError: no client has a batch, perhaps in one phase.
    """
    if not any(local.drop_last for local in local_of_groups(config)):
        return clients
    if isinstance(clients, VirtualClients):
        _have_batch(config, clients.sizes)
        return clients
    if not clients.phases:
        return _only(clients, _have_batch(config, clients.sizes))
    phases = []
    for start, part in clients.phases:
        phases.append((start, _only(part, _have_batch(config, part.sizes))))
    return clients.with_lists(union([part for _, part in phases]), phases=tuple(phases))


def _only(lists: AnyLists, chosen: np.ndarray) -> AnyLists:
    """Return lists without the examples of the clients that are not chosen, bool [N]."""
    offsets = np.concatenate([[0], np.cumsum(lists.sizes * chosen)])
    return replace(lists, indices=lists.indices[chosen[lists.owners]], offsets=offsets)


def _have_batch(config: Config, sizes: np.ndarray) -> np.ndarray:
    """Return whether each client has a batch, bool [N]; an error if none has."""
    batch_sizes = _configured_batch_sizes(config, sizes)
    has_batch = (sizes > 0) & ((sizes >= batch_sizes) | ~drops_last(config, len(sizes)))
    if not has_batch.any():
        raise ConfigError(
            f"local.drop_last: no client has a full batch of {batch_sizes.min()} examples; the "
            f"largest has {sizes.max()} examples; lower local.batch_size, or set "
            "local.drop_last=false"
        )
    return has_batch


def _configured_batch_sizes(config: Config, sizes: np.ndarray) -> np.ndarray:
    """Return the configured batch size of each client, [N]; "full": its number of examples."""

    def of_group(local: Local) -> np.ndarray:
        return sizes if local.batch_size == "full" else np.full(len(sizes), local.batch_size)

    return _by_group(config, len(sizes), of_group)


def _by_group(
    config: Config, n_clients: int, value_of: Callable[[Local], np.ndarray]
) -> np.ndarray:
    """Return the value [N] that the local settings of each client's group give it."""
    of_group = list(map(value_of, local_of_groups(config)))
    return by_group(of_group, group_members(config, n_clients))


def by_group(of_group: list[np.ndarray], members: np.ndarray | None) -> np.ndarray:
    """Return for each client the value of its group, [N].

    Args:
        of_group: for no group and for each group, the values [N] that all clients would have in it.
        members: the result of `group_members`.
    """
    return of_group[0] if members is None else np.stack(of_group)[members, np.arange(len(members))]


def _named_clients(name: str, group: Group) -> list[int]:
    """Return the clients that a group names by number, in the configuration or in a file."""
    if group.file is None:
        return list(group.ids or ())
    key = f"groups.{name}.file"
    try:
        words = Path(group.file).expanduser().read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{key}: {group.file} cannot be read: {reason}") from None
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise ConfigError(
                f"{key}: {group.file} contains '{word}'; it must hold numbers of clients, "
                "separated by white space"
            )
    return [int(word) for word in words]


def _draw_shares(config: Config, members: np.ndarray) -> None:
    """Draw the clients of the groups by share; `members` is changed in place.

    Raises:
        ConfigError: the shares add up to more than 1, a group is empty, or clients are missing.
    """
    shares = {name: g.share for name, g in config.groups.items() if g.share is not None}
    total = sum(shares.values())
    if total > 1 + 1e-9:
        raise ConfigError(
            f"groups: the shares of {' and '.join(shares)} add up to {total:g}; lower them to at "
            "most 1"
        )
    # Cumulated shares are rounded, so that the rounded numbers add up.
    ends = np.floor(np.cumsum([0.0, *shares.values()]) * len(members) + 0.5 + 1e-9).astype(int)
    free = np.flatnonzero(members == 0)
    if ends[-1] > len(free):
        raise ConfigError(
            f"groups: the shares of {' and '.join(shares)} need {ends[-1]} clients, but the other "
            f"groups leave {len(free)}; lower the shares"
        )
    drawn = generator(config.seed, "groups").permutation(free)
    for name, start, end in zip(shares, ends[:-1], ends[1:], strict=True):
        if start == end:
            raise ConfigError(
                f"groups.{name}.share: {shares[name]:g} of {len(members)} clients is none; raise it"
            )
        members[drawn[start:end]] = list(config.groups).index(name) + 1
