"""A group of clients with a client rule or local settings of their own."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.config.schema import Config
from raysim.rules.contract import ClientRule
from raysim.rules.upload_stages import UploadStage


@dataclass(frozen=True)
class ClientGroup:
    """One of the sections of `groups`, or all clients that are in none."""

    name: str
    """Its name in the configuration; "" for the clients that are in none."""
    rule: ClientRule
    """The client rule of its clients."""
    config: Config
    """The configuration of the run, with the local settings of its clients."""
    stages: tuple[UploadStage, ...] = ()
    """The stages that change its clients' uploads, with their parameters."""
