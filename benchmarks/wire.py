"""Bytes between three hosts in FedAvg, with and without aggregation on the hosts.

    python benchmarks/wire.py [--rounds 5] [--delay 0.05] [--rate 100e6] [key=value ...]

Run it as root, on Linux.

Hosts are network namespaces with 50 ms and 100 Mbit/s between them. If the kernel supports it,
`tc netem` delays their packets. Otherwise (or with --relay) TUN devices join them, and a process of
this script forwards the packets with the delay and the rate. Ray runs on each host, as a real
cluster: the driver and the server on the first host, four ClientActors on each of the others. The
script prints the bytes of the interfaces' counters, which include Ray's own messages, and the
metrics `system/network/bytes_up` and `system/network/bytes_down`. It asserts nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTS, ACTORS, PORT = 3, 4, 6379
CONFIG: dict[str, Any] = {
    "data": "mnist",
    "partition": {"name": "virtual", "clients": 10_000, "samples": 20},
    "model": {"name": "mlp", "hidden": [200, 200]},
    "algorithm": "fedavg",
    "local": {"steps": 1, "batch_size": 20, "lr": 0.05},
    "schedule": {"cohort": 64},
    "batching": {"mode": "loop"},
    "resources": {
        "actors": (HOSTS - 1) * ACTORS,
        "cpus": 1,
        "threads": 1,
        "address": f"10.77.0.1:{PORT}",
    },
    "evaluate": {"every": 0},
    "checkpoint": {"every": 0},
}
ENVIRONMENT = {
    **os.environ,
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_AUTH_MODE": "disabled",
}
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
MTU = 9000


def configurations() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Yield image shape and configuration of the run."""
    yield (1, 28, 28), {**CONFIG, "rounds": 5}


def name(host: int) -> str:
    return f"raysim{host}"


def sh(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def inside(host: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", name(host), *command]


def enter(namespace: int) -> None:
    """Move this thread into a network namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def tun(host: int) -> int:
    """Create a TUN device in a host's namespace; return its file descriptor here."""
    back = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{name(host)}", os.O_RDONLY)
    enter(there)
    try:
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", b"wire", IFF_TUN | IFF_NO_PI))
    finally:
        enter(back)
        os.close(there)
        os.close(back)
    return file


def relay(files: list[int], delay: float, rate: float) -> None:
    """Forward packets without end.

    Each waits for the link of its host, which carries `rate` bits per second, then for `delay`
    seconds.
    """
    free, late, number = [0.0] * len(files), [], 0
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else 1.0
        for file in select.select(files, [], [], wait)[0]:
            host = files.index(file)
            try:
                packet = os.read(file, 65536)
            except BlockingIOError:
                continue
            # The last byte of an IPv4 destination.
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if 0 <= target < len(files):
                free[host] = max(free[host], time.monotonic()) + 8 * len(packet) / rate
                heapq.heappush(late, (free[host] + delay, number := number + 1, target, packet))
        now = time.monotonic()
        while late and late[0][0] <= now:
            *_, target, packet = heapq.heappop(late)
            os.write(files[target], packet)


def make_hosts(delay: float, rate: float, by_relay: bool) -> int | None:
    """Create and join the namespaces; return the process id of the relay, None without one."""
    for host in range(HOSTS):
        sh("ip", "netns", "add", name(host))
        sh(*inside(host, "ip", "link", "set", "lo", "up"))
    process = None
    if by_relay:
        files = [tun(host) for host in range(HOSTS)]
        if not (process := os.fork()):
            relay(files, delay, rate)
        for file in files:
            os.close(file)
    else:
        sh("ip", "link", "add", "raysim", "type", "bridge")
        sh("ip", "link", "set", "raysim", "up")
        for host in range(HOSTS):
            sh(
                "ip",
                "link",
                "add",
                f"rs{host}",
                "type",
                "veth",
                "peer",
                "name",
                "wire",
                "netns",
                name(host),
            )
            sh("ip", "link", "set", f"rs{host}", "master", "raysim", "up")
            how = ["delay", f"{delay * 1e3:g}ms", "rate", f"{rate:g}bit", "limit", "100000"]
            sh(*inside(host, "tc", "qdisc", "add", "dev", "wire", "root", "netem", *how))
    for host in range(HOSTS):
        sh(*inside(host, "ip", "link", "set", "wire", "mtu", str(MTU), "up"))
        sh(*inside(host, "ip", "address", "add", f"10.77.0.{host + 1}/24", "dev", "wire"))
    return process


def has_netem() -> bool:
    """Return whether the kernel supports `tc netem`."""
    sh("ip", "link", "add", "rsprobe", "type", "veth", "peer", "name", "rsprobe2")
    try:
        tried = subprocess.run(
            ["tc", "qdisc", "add", "dev", "rsprobe", "root", "netem"],
            capture_output=True,
            text=True,
        )
        if tried.returncode:
            print(
                f"tc netem is refused: {tried.stderr.strip()}; packets go through a relay of this "
                "script's instead"
            )
        return not tried.returncode
    finally:
        sh("ip", "link", "delete", "rsprobe")


def counted(host: int) -> tuple[int, int]:
    """Return the bytes that a host has received and sent."""
    read = sh(*inside(host, "cat", "/proc/net/dev")).partition("wire:")[2].split()
    return int(read[0]), int(read[8])


DRIVER = """
import json, os, sys
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
from raysim.engine.loop import Engine
from raysim.prepare.resolve import prepare
from raysim.distributed.ray_executor import RayExecutor
from raysim.distributed.worker_pool import WorkerPool

def counted():
    read = open("/proc/net/dev").read().partition("wire:")[2].split()
    return int(read[0]), int(read[8])

class Counted(WorkerPool):
    def aggregates_on_node(self, node, uploads):
        return sys.argv[2] == "added" and super().aggregates_on_node(node, uploads)

say = lambda text: print(text, file=sys.stderr)
executor = RayExecutor(say, Counted(say))
plan = prepare(json.loads(sys.argv[1]))
executor.open(plan)
before = counted()
records = [record for record in Engine(plan, executor).rounds() if record["round"]]
after = counted()
executor.close()
print(json.dumps([records, [b - a for a, b in zip(before, after)]]))
"""


def run(how: str, config: dict[str, Any]) -> tuple[list[dict[str, float]], list[int]]:
    """Run on the hosts; return the records, and the bytes that the first host received and sent."""
    command = inside(0, sys.executable, "-c", DRIVER, json.dumps(config), how)
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--rate", type=float, default=100e6, help="bits a second")
    parser.add_argument("--relay", action="store_true")
    given = parser.parse_args()
    by_relay = given.relay or not has_netem()
    started: list[subprocess.Popen] = []
    process = None
    try:
        process = make_hosts(given.delay, given.rate, by_relay)
        print(
            sh(*inside(0, "ping", "-c", "3", "-q", "10.77.0.2")).splitlines()[-1]
            if Path("/bin/ping").exists()
            else ""
        )
        with tempfile.TemporaryDirectory(prefix="rs") as folder:
            for host in range(HOSTS):
                what = ["--head", f"--port={PORT}", "--include-dashboard=false"] if not host else []
                what += [f"--address=10.77.0.1:{PORT}"] if host else []
                cpus = ACTORS if host else 0
                command = [
                    "ray",
                    "start",
                    "--block",
                    f"--node-ip-address=10.77.0.{host + 1}",
                    f"--num-cpus={cpus}",
                ]
                command += [f"--node-name=host{host}", "--object-store-memory=500000000", *what]
                command += [f"--temp-dir={folder}"] if not host else []
                started.append(
                    subprocess.Popen(
                        inside(host, *command),
                        env=ENVIRONMENT,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
                time.sleep(15)
            config = {**CONFIG, "rounds": given.rounds}
            print(
                f"{HOSTS} hosts, {given.delay * 1e3:g} ms and {given.rate / 1e6:g} Mbit/s; "
                "a round, on average:"
            )
            print(
                "                     s a round   MB to the server  (sums: MB)   MB from it"
                "  (models: MB)"
            )
            rounds = given.rounds
            for how in ("alone", "added"):
                records, (came, went) = run(how, config)
                seconds = sum(record["system/round_seconds"] for record in records) / rounds
                up = sum(record["system/network/bytes_up"] for record in records) / rounds
                down = sum(record["system/network/bytes_down"] for record in records) / rounds
                print(
                    f"sums {'added up' if how == 'added' else 'alone':10s} {seconds:14.2f} "
                    f"{came / rounds / 1e6:18.2f} "
                    f"{up / 1e6:12.2f} {went / rounds / 1e6:12.2f} {down / 1e6:12.2f}"
                )
    finally:
        for one in started:
            os.killpg(one.pid, signal.SIGTERM)
        for one in started:
            one.wait(60)
        if process:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for host in range(HOSTS):
            subprocess.run(["ip", "netns", "delete", name(host)], capture_output=True)
            subprocess.run(["ip", "link", "delete", f"rs{host}"], capture_output=True)
        subprocess.run(["ip", "link", "delete", "raysim"], capture_output=True)


if __name__ == "__main__":
    main()
