"""The command line, called in this process."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from raysim import cli
from raysim.tracking import spool_sender as tracking


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def last(self) -> dict[str, Any]:
        """The JSON object in the last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def raysim_(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandResult]:
    """raysim_("run", ...): the console script, in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["raysim", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return CommandResult(code, out, err)

    return call


def assert_refused(result: CommandResult, text: str) -> None:
    """The command prints nothing, and its last message is an error with this text."""
    assert result.code == 2 and result.out == "" and "Traceback" not in result.err, result
    message = result.err.splitlines()[-1]
    assert message.startswith("error: ") and text in message


def assert_one_message(result: CommandResult) -> None:
    stages = [line for line in result.out.splitlines() if not line.startswith("loading ")]
    assert result.code == 2 and not stages, result
    assert result.err.startswith("error: ") and result.err.count("error:") == 1
    assert "Traceback" not in result.err and 1 <= len(result.err.splitlines()) <= 2
