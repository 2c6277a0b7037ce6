"""What must hold of the rows that clients keep: whatever is put, checkpointed, lost and gone back
to, wherever the rows lie, what is got is what a plain dict would give; and no run can tell from its
result where they lay."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.torch import save_file
from support.stopped_runs import TIMES, checkpoint_rounds, stop_at

import raysim
from raysim.engine.state import checkpoint, client_store
from raysim.engine.state.client_store import ROWS_FILE, ClientStateStore, StoredState
from raysim.engine.state.gpu_store import GpuStateStore
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.runs.result import RunResult
from raysim.runs.resume import reopen, resume
from raysim.tracking import spool_sender as tracking
from raysim.training.messages import KeptState

N = 6


def row(client: int, version: int) -> StoredState:
    """Of every kind of array; 12 + 32 + 8 + 0 + 0 + 1 bytes."""
    rng = np.random.default_rng([client, version])
    return {
        "z": rng.random(3, dtype=np.float32),
        "matrix": rng.random((2, 2)),
        "count": np.array(1000 * client + version),
        "nothing": np.zeros(0, np.float32),
        "no/columns": np.zeros((3, 0)),
        "flag": rng.random(1) < 0.5,
    }


ROW = 53


def assert_same(got: Mapping[str, Any] | None, wanted: StoredState | None) -> None:
    assert (got is None) == (wanted is None)
    if got is not None and wanted is not None:
        assert set(got) == set(wanted)
        for key in wanted:
            array = np.asarray(got[key])
            assert array.dtype == wanted[key].dtype and array.shape == wanted[key].shape
            assert np.array_equal(array, wanted[key]), key


def copied(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in packed.items()}


def slots(packed: dict[str, torch.Tensor]) -> np.ndarray:
    return packed["disk/slots"].numpy()


class AgainstADict(RuleBasedStateMachine):
    """Any sequence of puts, checkpoints (two are kept), puts on a full disk, and crashes: after a
    crash what no checkpoint refers to is garbage, and the store goes back to either checkpoint,
    with another limit perhaps."""

    @initialize(rows=st.integers(0, N))
    def begin(self, rows: int) -> None:
        self.home = Path(tempfile.mkdtemp())
        (self.home / "full").mkdir()
        (self.home / "full" / ROWS_FILE).symlink_to("/dev/full")
        self.version, self.expected, self.seen = 0, {}, set()
        self.kept: list[
            tuple[dict[str, torch.Tensor], dict[int, StoredState], set[int], np.ndarray]
        ] = []
        self.store = self.of_rows(rows)

    def of_rows(self, rows: int) -> ClientStateStore:
        """Return a store that has room in memory for some rows."""
        return ClientStateStore(N, rows * ROW, self.home / "rows")

    @rule(client=st.integers(0, N - 1))
    def put(self, client: int) -> None:
        self.version += 1
        self.store.put(client, self.given(client))
        self.store.cursors[client] += 3
        self.expected[client] = row(client, self.version)
        self.seen.add(client)

    def given(self, client: int) -> KeptState:
        """Return the row of the newest version, as a trainer gives it."""
        return row(client, self.version)

    @rule(client=st.integers(0, N - 1))
    def put_nothing(self, client: int) -> None:
        self.store.put(client, None)
        self.seen.add(client)

    @rule(client=st.integers(0, N - 1))
    def put_while_the_disk_is_full(self, client: int) -> None:
        self.version += 1
        self.store.dir = self.home / "full"
        try:
            self.store.put(client, self.given(client))
            self.expected[client] = row(client, self.version)
            self.seen.add(client)
        except RaysimError as error:
            assert "No space left" in str(error)
        self.store.dir = self.home / "rows"

    @rule()
    def keep(self) -> None:
        packed = copied(self.store.pack())
        self.kept = [
            *self.kept,
            (packed, dict(self.expected), set(self.seen), self.store.cursors.copy()),
        ][-2:]
        self.store.hold([slots(packed) for packed, *_ in self.kept])

    @rule(which=st.integers(0, 1), rows=st.integers(0, N))
    def crash(self, which: int, rows: int) -> None:
        if which >= len(self.kept):
            return
        self.kept = self.kept[: which + 1]
        needed = {int(slot) for packed, *_ in self.kept for slot in slots(packed)}
        file = self.home / "rows" / ROWS_FILE
        if file.exists():
            records = np.fromfile(file, np.uint8)
            for slot in set(range(len(records) // ROW)) - needed:
                records[slot * ROW : (slot + 1) * ROW] ^= 0xFF
            records.tofile(file)
        packed, expected, seen, cursors = self.kept[-1]
        self.expected, self.seen = dict(expected), set(seen)
        self.store = self.of_rows(rows)
        client_store.check_rows(packed, self.home / "rows")
        self.store.unpack(packed, [slots(packed) for packed, *_ in self.kept])
        assert np.array_equal(self.store.cursors, cursors)

    @rule()
    def checksums(self) -> None:
        """They are those of the rows, wherever these are."""
        wanted = np.full(N, -1)
        for client, arrays in self.expected.items():
            wanted[client] = zlib.crc32(b"".join(arrays[key].tobytes() for key in sorted(arrays)))
        assert np.array_equal(self.store.checksums(), wanted)

    @invariant()
    def agrees(self) -> None:
        for client in range(N):
            assert_same(self.store.get(client), self.expected.get(client))
        assert set(np.flatnonzero(self.store.seen)) == self.seen
        self.memory_is_kept()
        file = self.home / "rows" / ROWS_FILE
        assert not file.exists() or file.stat().st_size <= (3 * N + 1) * ROW

    def memory_is_kept(self) -> None:
        assert self.store.bytes + self.store.disk_bytes == len(self.expected) * ROW
        assert self.store.bytes <= max(self.store.memory, ROW)

    def teardown(self) -> None:
        shutil.rmtree(self.home)


class OnAGPU(AgainstADict):
    """The same of a store whose newest rows may be on a GPU. What was asked for before a checkpoint
    is used after it."""

    def of_rows(self, rows: int) -> GpuStateStore:
        return GpuStateStore(N, rows * ROW, self.home / "rows")

    def given(self, client: int) -> KeptState:
        """Return arrays too, as when the states no longer fit."""
        arrays = super().given(client)
        if self.version % 3 == 0:
            return arrays
        return {key: torch.from_numpy(array) for key, array in arrays.items()}

    @rule()
    def keep(self) -> None:
        asked = {client: self.store.get(client, copy=False) for client in range(N)}
        super().keep()
        for client, got in asked.items():
            assert_same(got, self.expected.get(client))

    def memory_is_kept(self) -> None:
        assert self.store.bytes <= len(self.expected) * ROW


for machine in (AgainstADict, OnAGPU):
    machine.TestCase.settings = settings(
        deadline=None, max_examples=60, stateful_step_count=40, derandomize=True, database=None
    )
TestAgainstADict, TestOnAGPU = AgainstADict.TestCase, OnAGPU.TestCase


# -- rows ------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "disk"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStateStore:
    """A store with all of its rows in memory, or all but one on disk."""
    return ClientStateStore(N, 10**6 if request.param == "memory" else 0, tmp_path / "rows")


def test_a_checkpoint_is_small(tmp_path):
    """Three tensors for all rows on disk, one for each name in memory, however many clients there
    are."""
    rows = ClientStateStore(1000, 0, tmp_path / "rows")
    for client in range(1000):
        rows.put(client, {"c": np.zeros(250, np.float32)})
    packed = rows.pack()
    assert len(packed) == 7 and rows.disk_bytes == 999 * 1000
    save_file(packed, tmp_path / "clients.safetensors")
    assert (tmp_path / "clients.safetensors").stat().st_size < 1000 * 40


def test_what_is_got_is_a_copy(either):
    given = row(1, 0)
    either.put(1, given)
    either.put(2, row(2, 0))
    before = [either.get(1), either.get(2)]
    given["z"][:] = -1
    for client in (1, 2):
        either.put(client, row(client, 1))
    assert_same(before[0], row(1, 0))
    assert_same(before[1], row(2, 0))
    before[0]["z"][:] = -1
    assert_same(either.get(1), row(1, 1))


def test_rows_can_be_sent_and_put_back_read_only(either):
    """As Ray hands them on."""
    either.put(1, row(1, 0))
    either.put(2, row(2, 0))
    sent = pickle.loads(pickle.dumps(either.get(1), protocol=5))
    for array in sent.values():
        array.setflags(write=False)
    either.put(3, sent)
    assert_same(either.get(3), row(1, 0))


def test_a_row_without_bytes_never_needs_a_disk():
    rows = ClientStateStore(N, 0, None)
    for client in range(N):
        rows.put(client, {"nothing": np.zeros((0, 3))})
    assert_same(rows.get(N - 1), {"nothing": np.zeros((0, 3))})
    assert rows.bytes == rows.disk_bytes == 0


def test_a_rule_without_rows_leaves_nothing(tmp_path):
    rows = ClientStateStore(N, 0, tmp_path / "rows")
    rows.put(1, None)
    rows.put(2, {})
    assert rows.get(1) is rows.get(2) is None
    assert np.flatnonzero(rows.seen).tolist() == [1, 2]
    rows.pack()
    rows.close()
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    "other",
    [
        {"c": np.zeros(4, np.float32)},
        {"c": np.zeros(3)},
        {"c": np.zeros((1, 3), np.float32)},
        {"d": np.zeros(3, np.float32)},
        {"c": np.zeros(3, np.float32), "d": np.zeros(())},
    ],
)
def test_a_row_of_another_kind_is_refused(other):
    rows = ClientStateStore(N)
    rows.put(0, {"c": np.ones(3, np.float32)})
    with pytest.raises(RaysimError, match=r"client 5 keeps .*other clients keep c float32\[3\]"):
        rows.put(5, other)
    assert rows.get(5) is None and not rows.seen[5]


# -- where they lie --------------------------------------------------------------------------------


def test_the_row_put_longest_ago_goes_to_disk(tmp_path):
    rows = ClientStateStore(N, 2 * ROW + ROW // 2, tmp_path)
    for client in (0, 1, 2, 1, 3):
        rows.put(client, row(client, 0))
    assert rows.bytes == rows.disk_bytes == 2 * ROW
    rows.get(0)
    (tmp_path / ROWS_FILE).unlink()
    for client in (1, 3):
        assert_same(rows.get(client), row(client, 0))
    for client in (0, 2):
        with pytest.raises(
            RaysimError, match=rf"row of client {client} in .*{ROWS_FILE}.*is damaged"
        ):
            rows.get(client)


def test_without_checkpoints_the_file_is_as_large_as_its_rows(tmp_path):
    """And one more: the row that leaves memory is written before the one that comes back is given
    up."""
    rng, rows = np.random.default_rng(0), ClientStateStore(40, 5 * ROW, tmp_path)
    for i in range(1, 400):
        rows.put(int(rng.integers(1 + i // 10)), row(0, i))
    assert rows.bytes == 5 * ROW and (tmp_path / ROWS_FILE).stat().st_size <= rows.disk_bytes + ROW


@pytest.mark.ray
def test_memory_stays_where_it_was(tmp_path):
    """400 MB of rows through a store of 20 MB, in a process that may grow by 100 MB."""
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from raysim.engine.state.client_store import ClientStateStore

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

rows, before = ClientStateStore(200, 20_000_000, Path(sys.argv[1])), peak()
for i in range(400):
    rows.put(i % 200, {"c": np.full(500_000, i, np.float32)})
rows.pack()
assert all(rows.get(i)["c"][-1] == 200 + i for i in range(200))
assert rows.disk_bytes == 380_000_000 and rows.bytes == 20_000_000
assert peak() - before < 100_000_000, peak() - before
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_close_leaves_what_a_checkpoint_needs_and_nothing_else(tmp_path):
    for held in (True, False):
        rows = ClientStateStore(N, 0, tmp_path / "rows")
        for client in range(3):
            rows.put(client, row(client, 0))
        rows.close([slots(rows.pack())] if held else [])
        assert (tmp_path / "rows" / ROWS_FILE).exists() == (tmp_path / "rows").exists() == held


def test_store_dir_is_a_link_to_a_folder_of_the_runs_own(tmp_path):
    big, runs = tmp_path / "big", [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        run.mkdir()
        rows = ClientStateStore(N, 0, client_store.rows_folder(run, str(big)))
        for client in range(3):
            rows.put(client, row(client, 0))
    assert len(list(big.glob(f"*/{ROWS_FILE}"))) == 2 and (
        runs[0] / "rows" / ROWS_FILE
    ).resolve().is_relative_to(big)
    for dir in (None, str(big), f"{big}/../big"):
        assert (client_store.rows_folder(runs[0], dir) / ROWS_FILE).exists(), (
            "a run that goes on finds its rows"
        )
    runs[0].rename(tmp_path / "moved")
    assert (client_store.rows_folder(tmp_path / "moved", str(big)) / ROWS_FILE).exists()
    with pytest.raises(
        ConfigError,
        match=r"client_state\.dir: the rows of this run are in .*big.*, not in .*elsewhere",
    ):
        client_store.rows_folder(runs[1], str(tmp_path / "elsewhere"))
    (runs[1] / "rows" / ROWS_FILE).unlink()
    assert (
        client_store.rows_folder(runs[1], str(tmp_path / "elsewhere")).resolve().parent
        == tmp_path / "elsewhere"
    )
    assert (
        client_store.rows_folder(runs[1], None) == runs[1] / "rows"
        and client_store.rows_folder(None, str(big)) is None
    )


def test_a_store_dir_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"client_state\.dir: .*file.* cannot be used"):
        client_store.rows_folder(tmp_path, f"{tmp_path}/file")


def test_rows_are_safe_on_disk_before_a_checkpoint_speaks_of_them(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd)
    )
    rows = ClientStateStore(N, 0, tmp_path / "rows")
    for client in range(3):
        rows.put(client, row(client, 0))
    assert synced == []
    for _ in range(2):
        rows.pack()
        assert synced == [str(tmp_path / "rows" / ROWS_FILE), str(tmp_path / "rows")]
    rows.put(3, row(3, 0))
    rows.pack()
    assert len(synced) == 4


# -- damage and full disks -------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0, 11, 12, ROW - 1])
def test_a_damaged_row_is_found_and_named(tmp_path, byte):
    rows = ClientStateStore(N, 0, tmp_path)
    for client in (5, 4, 3):
        rows.put(client, row(client, 0))
    content = bytearray((tmp_path / ROWS_FILE).read_bytes())
    content[ROW + byte] ^= 1
    (tmp_path / ROWS_FILE).write_bytes(content)
    assert_same(rows.get(5), row(5, 0))
    with pytest.raises(
        RaysimError,
        match=rf"row of client 4 in {tmp_path / ROWS_FILE} \(at byte {ROW}\).*wrong checksum",
    ):
        rows.get(4)


def test_a_file_cut_short_is_found(tmp_path):
    rows = ClientStateStore(N, 0, tmp_path)
    for client in range(3):
        rows.put(client, row(client, 0))
    packed = copied(rows.pack())
    client_store.check_rows(packed, tmp_path)
    (tmp_path / ROWS_FILE).write_bytes((tmp_path / ROWS_FILE).read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"has {2 * ROW - 1} bytes, but needs {2 * ROW}"):
        client_store.check_rows(packed, tmp_path)
    assert_same(rows.get(0), row(0, 0))
    with pytest.raises(
        RaysimError, match=rf"row of client 1 .*ends after {ROW - 1} of {ROW} bytes"
    ):
        rows.get(1)


@pytest.mark.ray
def test_a_disk_that_fills_up_in_the_middle_of_a_row(tmp_path):
    """With room for two rows and a half (a limit on file sizes, as on a disk, cuts the write
    short)."""
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from raysim.errors import RaysimError
from raysim.engine.state.client_store import ClientStateStore

resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, resource.RLIM_INFINITY))
rows = ClientStateStore(10, 0, Path(sys.argv[1]))
put = []
try:
    for i in range(10):
        rows.put(i, {"c": np.full(12_500, i, np.float64)})
        put.append(i)
except RaysimError as error:
    print(error)
assert put == [0, 1, 2] and Path(sys.argv[1], "rows.bin").stat().st_size == 250_000
assert all((rows.get(i)["c"] == i).all() for i in put) and rows.get(3) is None
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for i in range(3, 10):
    rows.put(i, {"c": np.full(12_500, i, np.float64)})
assert all((rows.get(i)["c"] == i).all() for i in range(10))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the row of client 2 (0.1 MB) cannot be written")


def test_a_limit_without_a_folder():
    rows = ClientStateStore(N, 0, None)
    rows.put(0, row(0, 0))
    with pytest.raises(RaysimError, match=r"client_state\.memory.*no folder.*run_dir"):
        rows.put(1, row(1, 0))


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("0", 0), ("123", 123), ("1e9", 10**9), ("512MB", 512 * 10**6), ("4GB", 4 * 10**9),
        ("1.5 gb", 1_500_000_000), ("2K", 2000), ("1TB", 10**12), ("1GiB", 2**30), ("'64'", 64),
        ("0.5kib", 512), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(base, given, meant):
    plan = prepare({**base, "rounds": 1, "algorithm": "fedavg"}, [f"client_state.memory={given}"])
    assert plan.config.client_state.memory == meant


@pytest.mark.parametrize(
    "given", ["lots", "2 PB", "-1", "-1GB", "GB", "0.5", "true", "[1]", "1,5GB", "null", ".inf"]
)
def test_what_is_no_size(base, given):
    with pytest.raises(ConfigError, match=r"^client_state\.memory: "):
        prepare({**base, "rounds": 1, "algorithm": "fedavg"}, [f"client_state.memory={given}"])


# -- runs ------------------------------------------------------------------------------------------

WHERE = {"system/client_state_bytes", "system/client_state_bytes_on_disk"}
P = 64 * 4 + 4 + 4 * 10 + 10


@pytest.fixture
def config(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Twelve rounds of clients that keep P floats each. At most two rows fit into memory."""
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    return {
        "rounds": 12,
        "data": "digits",
        "partition": {"name": "iid", "clients": 12},
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": "gradma_w",
        "local": {"steps": 2, "batch_size": 8, "lr": 0.05},
        "schedule": {"cohort": 4},
        "resources": {"executor": "inline", "threads": 1},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 3},
        "client_state": {"memory": 2 * 4 * P},
        "run_dir": str(tmp_path / "run"),
        "tracking": {
            "uri": f"sqlite:///{tmp_path_factory.getbasetemp()}/shared-mlflow.db",
            "experiment": tmp_path.name,
        },
    }


@pytest.fixture
def whole(config: dict[str, Any], tmp_path: Path) -> RunResult:
    """The same run, with all rows in memory and never stopped."""
    return raysim.run(config, run_dir=str(tmp_path / "whole"), **{"client_state.memory": "1GB"})


def history(done: RunResult, but: set[str]) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k not in but} for record in done.history]


def test_a_run_does_not_depend_on_where_rows_lie(config, whole, tmp_path):
    done = raysim.run(config, **{"client_state.dir": str(tmp_path / "big")})
    assert done.config.fingerprint == whole.config.fingerprint
    assert done.state_digest == whole.state_digest and history(done, TIMES | WHERE) == history(
        whole, TIMES | WHERE
    )
    last, kept = done.history[-1], whole.history[-1]["system/client_state_bytes"]
    assert kept > 2 * 4 * P and whole.history[-1]["system/client_state_bytes_on_disk"] == 0
    assert (
        last["system/client_state_bytes"] == 2 * 4 * P
        and last["system/client_state_bytes_on_disk"] == kept - 2 * 4 * P
    )
    assert len(list((tmp_path / "big").glob(f"run-*/{ROWS_FILE}"))) == 1
    assert not (whole.run_dir / "rows").exists()


@pytest.mark.parametrize("memory", [2 * 4 * P, 10**9])
def test_resumed_from_rows_on_disk(config, whole, tmp_path, memory):
    uninterrupted = raysim.run(config, run_dir=str(tmp_path / "uninterrupted"))
    with pytest.raises(KeyboardInterrupt):
        raysim.run(config, progress=stop_at(8))
    assert (tmp_path / "run" / "rows" / ROWS_FILE).stat().st_size >= 4 * P
    (tmp_path / "run").rename(tmp_path / "moved")
    done = resume(tmp_path / "moved", {"client_state.memory": memory})
    assert done.state_digest == whole.state_digest == uninterrupted.state_digest
    if memory == 2 * 4 * P:
        assert history(done, TIMES) == history(uninterrupted, TIMES)
    assert history(done, TIMES | WHERE) == history(whole, TIMES | WHERE)


def test_the_checkpoint_before_has_its_rows_too(config, whole, tmp_path):
    """The newest is damaged: what ran after the one before has not touched that one's rows, and
    goes on anew."""
    with pytest.raises(KeyboardInterrupt):
        raysim.run(config, progress=stop_at(8))
    (tmp_path / "run" / "checkpoints" / "round-000006" / "run.json").write_text("")
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", {"checkpoint.every": 1, "checkpoint.keep": 3}, progress=stop_at(5))
    assert checkpoint_rounds(tmp_path / "run") == [3, 4]
    assert resume(tmp_path / "run").state_digest == whole.state_digest


def test_a_checkpoint_whose_rows_are_gone_is_refused_by_name(config, whole, tmp_path, caplog):
    """The first was written while all rows fitted into memory."""
    config["client_state"] = {"memory": 8 * 4 * P}
    with pytest.raises(KeyboardInterrupt):
        raysim.run(config, {"checkpoint.every": 1, "checkpoint.keep": 9}, progress=stop_at(8))
    (tmp_path / "run" / "rows" / ROWS_FILE).write_bytes(b"")
    _, _, saved = reopen(tmp_path / "run")
    said = [record.getMessage() for record in caplog.records]
    assert saved is not None and saved.facts["round"] == 7 - len(said) >= 2
    assert all(
        ROWS_FILE in text and "has 0 bytes" in text and "trying the one before" in text
        for text in said
    )
    assert "round-000007" in said[0]
    done = resume(tmp_path / "run")
    assert done.state_digest == whole.state_digest
    (tmp_path / "run" / "rows" / ROWS_FILE).unlink()
    with pytest.raises(RaysimError, match=r"none of the \d checkpoints in .* can be used"):
        resume(tmp_path / "run", {"rounds": 13})


def test_stopped_when_a_checkpoint_has_just_been_written(config, whole, tmp_path, monkeypatch):
    """Its rows are there to stay, though the store has not been told of it."""
    real, calls = checkpoint.disk_slots, []

    def interrupted(run_dir: Path) -> list[np.ndarray]:
        calls.append(run_dir)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(run_dir)

    monkeypatch.setattr(checkpoint, "disk_slots", interrupted)
    with pytest.raises(KeyboardInterrupt):
        raysim.run(config)
    assert checkpoint_rounds(tmp_path / "run") == [3]
    assert resume(tmp_path / "run").state_digest == whole.state_digest


def test_a_full_disk_stops_a_run_that_can_go_on(config, whole, tmp_path):
    def fill(record: dict[str, float]) -> None:
        if record["round"] == 7:
            (tmp_path / "run" / "rows" / ROWS_FILE).rename(tmp_path / "aside")
            (tmp_path / "run" / "rows" / ROWS_FILE).symlink_to("/dev/full")

    said = r"row of client \d+ .*No space left.*MB free.*client_state\.memory.*client_state\.dir"
    with pytest.raises(RaysimError, match=rf"(?s){said}.*raysim resume"):
        raysim.run(config, progress=fill)
    (tmp_path / "aside").replace(tmp_path / "run" / "rows" / ROWS_FILE)
    assert resume(tmp_path / "run").state_digest == whole.state_digest


def test_a_run_without_checkpoints_leaves_no_rows(config, tmp_path):
    done = raysim.run(config, {"checkpoint.every": 0})
    assert (
        done.history[-1]["system/client_state_bytes_on_disk"] > 0
        and not (tmp_path / "run" / "rows").exists()
    )


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(
    base: dict[str, Any], tmp_path: Path
):
    (tmp_path / "file").write_text("")
    given = {**base, "rounds": 1, "algorithm": "scaffold", "schedule": {"cohort": 2}}
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            ConfigError, match=r"client_state\.dir: .*file is not a writable folder"
        ):
            prepare({**given, "client_state": {"dir": str(bad)}})
    assert not (tmp_path / "run").exists()
    prepare({**given, "client_state": {"dir": str(tmp_path / "new" / "deep")}})
    assert not (tmp_path / "new").exists()


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    rows = client_store.rows_folder(tmp_path / "run", "~/rows")
    assert rows is not None and rows.resolve().parent == tmp_path / "rows"
