"""What is done before a run costs little: no search for garbage during imports, no idle threads."""

from __future__ import annotations

import gc

import pytest
import torch

from raysim.errors import ConfigError
from raysim.imports import uncollected
from raysim.prepare import workload
from raysim.prepare.resolve import prepare


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_after_imports(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_what_was_imported_is_not_searched_soon() -> None:
    with uncollected():
        imported = [[] for _ in range(10)]
    young = {id(thing) for age in (0, 1) for thing in gc.get_objects(generation=age)}
    assert not young & {id(thing) for thing in imported}


def test_a_net_is_checked_with_the_threads_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for work compute in vain."""
    seen = []
    monkeypatch.setattr(
        workload, "check_reading", lambda *arguments: seen.append(torch.get_num_threads())
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepare("quickstart")
        prepare("quickstart", ["resources.threads=3"])
        with pytest.raises(ConfigError):
            prepare("quickstart", ["local.batch_size=0"])
        assert seen == [1, 3] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
