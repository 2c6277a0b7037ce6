"""Ray started by a run on this machine listens on 127.0.0.1 only, has a token that only its owner can
read, has two minutes to start, few processes, and is not in the process group of the run."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from ray._private import ray_constants, services

from raysim.distributed.cluster import connection, loopback
from raysim.errors import ConfigError, RaysimError

pytestmark = pytest.mark.ray

LISTENING = """
    import sys
    from pathlib import Path
    from raysim.distributed.cluster import loopback
    from raysim.distributed.cluster import connection

    def listening(pids):
        '''The local addresses, in hexadecimal, of the sockets on which these processes listen.'''
        links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
        held = {target[8:-1] for link in links if (target := read(link)).startswith("socket:")}
        rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").open()]
        return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in held}

    def read(link):
        try:
            return str(link.readlink())
        except OSError:
            return ""

    def family(pid):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        below = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        return [pid, *(one for child in below for one in family(child))]

    connection.connect(None, 1, print)
    import os, ray
    vital = connection.vital_processes()
    assert {*vital} == {"raylet", "GCS"} and all(process.alive for process in vital.values())
    # Without dashboard and monitors, for which the start and the end of a run would wait.
    assert {*ray._private.worker._global_node.all_processes} == {"raylet", "gcs_server"}
    assert os.getpgid(0) not in {os.getpgid(process.pid) for process in connection.started_here()}
    ray.get(ray.remote(lambda: 0).remote())
    port = ray._private.worker._global_node.dashboard_agent_listen_port
    secure = loopback.reached_from_outside(), loopback.asks_for_token()
    print(*listening(family(os.getpid())), *secure, port)
    ray.shutdown()
"""


def test_a_local_ray_listens_on_loopback_and_its_token_is_private(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LISTENING)],
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    *addresses, outside, token, port = ran.stdout.split()
    assert addresses and {*addresses} <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert (outside, token) == ("False", "True")
    assert int(port) != 52365, "which several Rays of one machine would want"
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_a_token_that_others_can_read_is_seen_and_closed(tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("x")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    assert loopback.token_is_open()
    with loopback.private_token():
        pass
    assert not loopback.token_is_open() and token.stat().st_mode & 0o777 == 0o600


def test_a_node_that_is_slow_to_register_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, None, {"state": "ALIVE"}])

    def get_node(address: str, node: str) -> dict[str, str]:
        if (answer := next(answers)) is None:
            raise RuntimeError("no such node")
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    with loopback.patient_start():
        assert services.get_node("address", "node") == {"state": "ALIVE"}
    assert services.get_node is get_node
    monkeypatch.setattr(loopback, "START_TIMEOUT_S", -1.0)
    answers = iter([None])
    with loopback.patient_start(), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("address", "node")


@pytest.mark.parametrize("address", ["local", ""])
def test_an_address_that_means_this_machine_starts_the_same_ray(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Ray's own start would listen on all interfaces."""
    started: dict[str, Any] = {}

    def init(**options: Any) -> None:
        started.update(options, only_here=not ray_constants.ENABLE_RAY_CLUSTER)

    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection.ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", address)
    for given in (None, "local"):
        assert connection.connect(given, 1, print)
        assert started["address"] == "local" and started["only_here"], started
        assert started["include_dashboard"] is False


FORK = """
    import os, sys, ray
    from pathlib import Path
    from raysim.distributed.cluster import connection
    import raysim

    connection.connect(None, 1, print)
    child = os.fork()
    if not child:
        try:
            raysim.run({"data": "digits", "algorithm": "fedavg", "rounds": 1,
                        "resources": {"actors": 1}, "run_dir": sys.argv[1]}, tracking=False)
        except raysim.ConfigError as error:
            print(error, flush=True)
            os._exit(2)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert connection.connect(None, 1, print) is False, "the parent still uses its Ray"
    ray.get(ray.remote(lambda: 0).remote(), timeout=60)
    connection.leave_cluster()
"""


def test_a_fork_of_a_process_that_uses_ray_is_refused(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK), str(tmp_path / "run")],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    error, code = ran.stdout.splitlines()
    assert "fork" in error and "spawn" in error and "executor=inline" in error
    assert code == "2"


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("http://head:8265", "raysim submit"),
        ("ray://head:10001", "Ray Client"),
        ("head", "HOST:PORT"),
        ("127.0.0.1:1", "RAY_ADDRESS=local"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, address: str, advice: str
) -> None:
    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection.ray, "init", lambda **options: pytest.fail("Ray would wait"))
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS: .*{advice}"):
        connection.connect(None, 1, print)
    with pytest.raises(ConfigError, match=r"^resources\.address: "):
        connection.connect(address, 1, print)


def test_a_deep_folder_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise OSError("AF_UNIX path length cannot exceed 107 bytes: /tmp/…")

    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection.ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RaysimError, match=r"TMPDIR.*RAY_TMPDIR=/tmp"):
        connection.connect(None, 1, print)


def test_a_start_that_takes_too_long_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection.ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RaysimError, match=r"timed out .*`raysim doctor` .*executor=inline$"):
        connection.connect(None, 1, print)


def test_a_temporary_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connection.ray, "init", lambda **options: pytest.fail("Ray is started"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"its temporary folder .*/file/ray cannot .*RAY_TMPDIR"):
        connection.connect(None, 1, print)

    def allocate(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "full"))
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(ConfigError, match=r"full/ray cannot be written: No space .* MB free there"):
        connection.connect(None, 1, print)


def test_the_folder_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    loopback.check_temporary_folder()
    assert not list((tmp_path / "ray").iterdir())


@pytest.mark.parametrize(
    ("call", "is_shown"),
    [
        ("ray::ClientActor.train()", False),
        ("ray::NodeAggregator.add()", False),
        ("ray::Mine.train()", True),
    ],
)
def test_unread_results_of_abandoned_rounds_are_not_printed(call, is_shown):
    text = f"Unhandled error (suppress with 'VARIABLE=1'): \x1b[36m{call}\x1b[39m (pid=1)\n  why"
    record = logging.LogRecord("ray._private.worker", logging.ERROR, "", 0, text, (), None)
    assert connection._is_read(record) is is_shown
