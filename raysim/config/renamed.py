"""Former names: one table for each kind of name, and the errors that give the present one.

The reference page of former names is generated from `TABLES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from raysim.errors import ConfigError

Value = TypeVar("Value")

KEYS = {
    "local.batch": "local.batch_size",
    "local.clip": "local.max_grad_norm",
    "evaluate.batch": "evaluate.batch_size",
    "privacy.clip": "privacy.max_grad_norm",
    "privacy.sigma": "privacy.noise_multiplier",
    "match.sigma": "match.noise_multiplier",
    "partition.redraw": "partition.redraw_below",
    "schedule.arrivals": "schedule.k (kasync) or schedule.buffer_size (buffered)",
    "schedule.speeds": "schedule.client_speeds",
    "schedule.dropouts": "schedule.client_dropout",
    "schedule.dropouts.rejoin": "schedule.client_dropout.rejoin_after",
    "block": "batching",
    "block.graphs": "batching.cuda_graphs",
    "observe": "record_updates",
    "store": "client_state",
    "claims.figure.spent": "claims.figure.x_axis",
}
"""Former configuration keys, and what they are called now. A section's name stands for all of its
keys."""

RENAMED_METRICS = {
    "clients": "clients/used",
    "clients_dropped": "clients/failed",
    "clients_lost": "clients/dropped_out",
    "clients_late": "clients/missed_deadline",
    "clients_too_stale": "clients/discarded_stale",
    "server/unheard": "clients/never_seen",
    "seconds": "system/round_seconds",
    "busy_share": "system/worker_utilization",
    "versions/alive": "system/versions_in_memory",
    "versions/bytes": "system/versions_bytes",
    "round_seconds": "system/round_seconds",
    "clients_per_second": "system/clients_per_second",
    "worker_utilization": "system/worker_utilization",
    "async/versions_in_memory": "system/versions_in_memory",
    "async/versions_bytes": "system/versions_bytes",
    "server/memory_bytes": "system/server_memory_bytes",
    "server/buffer_bytes": "system/server_buffer_bytes",
    "train_seconds": "system/train_seconds",
    "overhead_seconds": "system/overhead_seconds",
    "client/state_bytes": "system/client_state_bytes",
    "client/state_bytes_disk": "system/client_state_bytes_on_disk",
    "server/state_bytes": "system/server_state_bytes",
    "actors_lost": "system/actors_failed",
    "retried_blocks": "system/blocks_retried",
    "server_restarts": "system/server_restarts",
    "checkpoints_failed": "system/checkpoints_failed",
    "network/bytes_down": "system/network/bytes_down",
    "network/bytes_up": "system/network/bytes_up",
}
"""Former metrics, and what they are called now."""

VALUES = {
    ("batching.convolutions", "unfold"): "im2col",
    ("algorithm.preset", "reference"): "authors_code",
}
"""Former values of (configuration key, value)."""

COSTS = {
    "driver.deal": "driver.dispatch",
    "driver.judge": "driver.accept",
}
"""Former keys of the file of `raysim forecast --costs`, and what they are called now."""

COMMANDS = {
    "simulate": "forecast",
    "match": "privacy-match",
    "theory": "check-convergence",
    "track": "tracking",
    "track replay": "tracking sync",
}
"""Former commands, and what they are called now."""

OPTIONS = {
    "--spent": "--x-axis",
    "--of": "--relative-to",
    "--log": "--to-mlflow",
}
"""Former options of `raysim report`, and what they are called now."""


CONTRACT: dict[str, dict[str, str]] = {
    "ClientRule": {
        "exposes": "unprotected_uploads",
        "free": "not_counted_as_traffic",
        "make": "prepare",
        "makes": "prepares",
        "masks": "dropout_masks",
        "private": "supports_dp",
    },
    "ServerRule": {
        "admit": "before_round",
        "wants_bases": "needs_base_params",
        "weighs_late": "weights_after_training",
    },
    "Cohort": {"report": "log"},
    "Reports": {
        "change": "difference",
        "each": "per_client",
        "weigh": "set_weights",
    },
    "Task": {"received": "global_buffers"},
    "Batch": {"made": "prepared"},
}
"""For each class of the contract the former names of its attributes and methods, and the present
ones."""

ARGUMENTS = {"row": "client_state"}
"""Former parameters of rules' methods. raysim passes positions, so a former name still works."""

UPLOAD_MODES = {"change": "difference", "each": "per_client"}
"""The former modes of uploads, and the present ones."""

TABLES: dict[str, Mapping[str, str]] = {
    "Configuration keys": KEYS,
    "Configuration values": {
        f"{key}: {former}": f"{key}: {value}" for (key, former), value in VALUES.items()
    },
    "Keys of the costs of `raysim forecast`": COSTS,
    "Metrics": RENAMED_METRICS,
    "Commands": {f"raysim {old}": f"raysim {new}" for old, new in COMMANDS.items()},
    "Options of `raysim report`": OPTIONS,
    "Attributes and methods of rules and of what they are given": {
        f"{family}.{former}": f"{family}.{present}"
        for family, names in CONTRACT.items()
        for former, present in names.items()
    },
    "Parameters of rules' methods (the former name still works)": ARGUMENTS,
    "Modes of uploads": UPLOAD_MODES,
}
"""All tables by title, as former name and present name."""


def now_called(kind: Mapping[str, str], name: str) -> str | None:
    """Return the sentence that refuses a former name, or None for a name that is no former one.

    Args:
        kind: present names by former names, one of `TABLES`.
        name: the name that was given. Its beginning, up to any dot, may be the former name.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        former = ".".join(parts[:count])
        if former in kind:
            return f"{name} is now called {'.'.join([kind[former], *parts[count:]])}"
    return None


def with_present_metrics(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return metrics that an older version wrote, under their present names.

    Args:
        values: values by name of a metric. A former name stays if its present name is there too:
            then it is a metric of the user's own.
    """
    present = {name: RENAMED_METRICS.get(name, name) for name in values}
    return {
        name if present[name] in values else present[name]: value for name, value in values.items()
    }


def refuse_former_keys(
    config: Mapping[str, Any], source: str = "", keys: Mapping[str, str] = KEYS
) -> None:
    """Refuse a configuration that uses former names.

    Args:
        config: a file's mapping, or overrides by dotted keys.
        source: the file, for the message.
        keys: the table of the former keys.

    Raises:
        ConfigError: there are former names; the message has a line for each key or value.
    """
    lines = [line for key, value in config.items() for line in _sentences(str(key), value, keys)]
    if lines:
        raise ConfigError("\n".join(f"{source}: {line}" if source else line for line in lines))


def _sentences(key: str, value: Any, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield the messages about a key, its value, and the keys of its section or sections."""
    sentence = now_called(keys, key)
    if sentence is not None:
        yield sentence
    for section in value if isinstance(value, list) else [value]:
        if isinstance(section, Mapping):
            for inner, inner_value in section.items():
                path = f"{key}.{inner}"
                if sentence is None or path in keys:  # the section's sentence stands for the rest
                    yield from _sentences(path, inner_value, keys)
        elif isinstance(section, str) and (key, section) in VALUES:
            yield f"{key}={section} is now called {key}={VALUES[key, section]}"


def refuse_former_command(arguments: Sequence[str]) -> None:
    """Refuse a command line that uses a former command or a former option.

    Args:
        arguments: the command line without the program's name.

    Raises:
        ConfigError: there is one; the message has the present name.
    """
    for words in (2, 1):
        command = " ".join(arguments[:words])
        if command in COMMANDS:
            raise ConfigError(f"raysim {command} is now called raysim {COMMANDS[command]}")
    if arguments[:1] == ["report"]:
        for option in (argument.partition("=")[0] for argument in arguments):
            if option in OPTIONS:
                raise ConfigError(f"{option} is now called {OPTIONS[option]}")
