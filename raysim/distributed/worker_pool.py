"""Pool of the Ray actors of a run: start them on nodes and GPUs, and replace those that fail.

The pool replaces a ClientActor or EvalActor that fails (`actor_health` says when), and the caller
repeats its work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.config.sections.schedule import Sync
from raysim.distributed.actor_health import ActorSupervisor
from raysim.distributed.actors import ClientActor, EvalActor, NodeAggregator, ServerActor
from raysim.distributed.block_scheduler import WorkerSpeeds
from raysim.distributed.cluster import connection, nodes
from raysim.distributed.cluster.autoscaling import await_resources
from raysim.distributed.cluster.versions import check_source_code, source_code
from raysim.distributed.local_transport import LocalTransport
from raysim.distributed.node_traffic import ClusterTopology
from raysim.distributed.transport.actor_calls import Actor, Reference
from raysim.distributed.waiting import POLL_INTERVAL_S, PROGRESS_INTERVAL_S, first_line
from raysim.engine.failure_policy import ActorDied, Decision, FailurePolicy, Work
from raysim.engine.plan import Plan
from raysim.errors import ConfigError, WorkersLost
from raysim.rules.uploads import sums
from raysim.system import processes, startup_stages

RECOVERIES = ("system/actors_failed", "system/blocks_retried", "system/server_restarts")
"""Metrics that count the failures that a run has recovered from."""


@dataclass
class Worker:
    """ClientActor that is ready for work."""

    actor: Actor
    """Ray handle of the actor."""

    node: str
    """Id of the node that the actor runs on."""

    gpus: list[str]
    """Ids of the GPUs that the actor has a share of."""


class WorkerPool:
    """Actors of a run: ClientActors, one ServerActor, NodeAggregators and perhaps one EvalActor.

    Args:
        log: called with one line of text for each actor that fails.
    """

    def __init__(self, log: Callable[[str], None]):
        self.log = log
        self._server: Actor | None = None
        self.supervisor = ActorSupervisor(log)
        """Supervisor of all actors below."""
        self.wanted = 0
        """Number of ClientActors that the configuration asks for."""
        self.ours = False
        """Whether this process started Ray, and therefore shuts it down."""
        self.recoveries: Counter[str] = Counter(dict.fromkeys(RECOVERIES, 0))
        """Number of failed actors, of blocks trained again and of server restarts in this run."""
        self.workers: dict[int, Worker] = {}
        """ClientActors that are ready, by worker number."""
        self.joining: dict[int, tuple[Actor, Reference]] = {}
        """ClientActors that are starting, by worker number: handle, and reference to its place."""
        self.eval: Actor | None = None
        """The EvalActor; None in a run without evaluation."""
        self.aggregators: dict[str, Actor] = {}
        """NodeAggregators by node id."""
        self.speeds = WorkerSpeeds()
        """Measured speed of each worker, which the block schedulers of all rounds share."""
        self.local = LocalTransport(self.supervisor, log)
        """Shared buffers and sockets; none if actors are on several nodes."""

    @property
    def server(self) -> Actor:
        """The ServerActor; only after `start`."""
        assert self._server is not None
        return self._server

    def start(self, plan: Plan) -> None:
        """Connect to the cluster and start all actors.

        Args:
            plan: the run. Actors read it from the object store.

        Raises:
            ConfigError: the cluster has fewer resources than the configuration asks for.
            RaysimError: an actor does not start in time.
        """
        resources = plan.config.resources
        self.resources = resources
        self.failure_policy = FailurePolicy(plan.config.faults.on_client_error)
        self.timeout = resources.timeout
        self.sends_sums = bool(sums(plan.server.uploads) or plan.initial[1].numel())
        startup_stages.begin("joining the Ray cluster" if resources.address else "starting Ray")
        self._connect(plan)
        self.supervisor.start(resources.timeout, resources.call_timeout)
        n_actors = resources.actors
        startup_stages.begin(f"starting {n_actors} actor{'s'[: n_actors != 1]}")
        self.plan = ray.put(plan)
        self.wanted = resources.actors
        self._server = self._start_server()
        self._start_workers()
        # Without a share of a GPU the evaluator takes nothing from the ClientActors, so it can
        # start now. With one it starts after them, so that they get theirs first.
        if plan.evaluates and not resources.server_share:
            self.eval = self._start_evaluator()
        used_nodes = self._await_first_actors()
        # An asynchronous run has several versions and rounds in flight at a time.
        if isinstance(plan.config.schedule, Sync) and used_nodes == {self.home}:
            self.local.create_buffers(plan)
            self.local.open(self.server, first=True)
        self._await_workers(self.supervisor.monitor.start_s)
        if plan.evaluates and resources.server_share:
            self.eval = self._start_evaluator()
        self._start_aggregators()
        # The utilization of the first round does not count the start of the actors.
        self.topology.mark = time.monotonic()

    def _start_aggregators(self) -> None:
        """Start the NodeAggregators of the nodes on which several workers run."""
        for node, n_workers in Counter(worker.node for worker in self.workers.values()).items():
            if self.aggregates_on_node(node, n_workers):
                self.aggregator(node)

    def _await_first_actors(self) -> set[str]:
        """Wait for server and ClientActors, check their source code, and return their nodes."""
        awaited: dict[str, Reference] = {"the ServerActor": self.server.call("where")[0]}
        for number, (_, place) in self.joining.items():
            awaited[f"ClientActor {number}"] = place
        places = self.supervisor.wait_for_start(awaited)
        for name, place in zip(awaited, places, strict=True):
            check_source_code(name, place.code, source_code())
        self._set_server_node(places[0].node)
        return {place.node for place in places}

    def _connect(self, plan: Plan) -> None:
        """Connect to the cluster, await its resources and choose the server's node."""
        resources = plan.config.resources
        n_cpus = resources.actors * resources.cpus
        self.ours = connection.connect(resources.address, n_cpus, self.log)
        server = {"GPU": resources.server_share}
        client = {"CPU": resources.cpus, "GPU": resources.gpus}
        await_resources(
            [*[client] * resources.actors, server, server],
            lambda: nodes.check_cluster_resources(resources, nodes.alive_nodes()),
            resources.timeout,
        )
        alive = nodes.alive_nodes()
        if (idle := nodes.idle_gpus(resources, alive)) > 0 and resources.gpus < 1:
            self.log(
                f"resources.gpus: {resources.actors} actors with {resources.gpus:g} GPUs each "
                f"leave {idle} GPUs idle"
            )
        self.home = ray.get_runtime_context().get_node_id()
        self.server_node = self.home
        if resources.server_node is not None:
            self.server_node = nodes.find_node(resources.server_node, alive).id
        self.topology = ClusterTopology({node.id: node.names[0] for node in alive})

    # Starting actors.

    def _start(self, kind: Any, *arguments: Any, **more: Any) -> Any:
        """Start an actor of class `kind` and return its handle; `more` are Ray options.

        With shared buffers the actor runs on the driver's node. Inside a placement group Ray places
        the actors that reserve CPUs or GPUs.
        """
        # The pool replaces actors itself; a server that Ray restarts would have its initial state.
        options = {"num_cpus": 0, "num_gpus": 0, "max_restarts": 0, **more}
        if self.local.buffers:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.home, soft=False)
        elif ray.util.get_current_placement_group() is not None and (
            options["num_cpus"] or options["num_gpus"]
        ):
            options.pop("scheduling_strategy", None)
        heartbeat = self.supervisor.monitor.add()
        starter = cast(Any, ray.remote(kind)).options(**options)
        actor = Actor(starter.remote(heartbeat, *arguments), kind)
        self.supervisor.add(actor, heartbeat, f"the {kind.__name__}")
        return actor

    def _start_server(self) -> Actor:
        """Start a ServerActor: on its node if that is alive and has the GPUs, else anywhere."""
        gpus = self.resources.server_share
        options = {}
        if (node := self._node_for_server()) is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return self._start(ServerActor, self.plan, num_gpus=gpus, **options)

    def _node_for_server(self) -> str | None:
        """Return the node on which the server has to start; None if Ray may choose one."""
        able = [n.id for n in nodes.alive_nodes() if n.can_serve(self.resources)]
        if self.server_node in able:
            return self.server_node
        if self.resources.server_on_gpu and not self.resources.server_share and able:
            return able[0]  # Ray does not know that this actor needs a GPU
        return None

    def _set_server_node(self, node: str) -> None:
        """Record the node of the server that has started."""
        self.topology.server = node
        self.supervisor.rename(self.server, f"the ServerActor on node {self.topology.name(node)}")

    def _start_evaluator(self) -> Actor:
        """Start an EvalActor: on the server's node, or on any node if it needs a GPU."""
        gpus = self.resources.server_share
        options = {}
        if not gpus:
            node = self._node_for_server() or self.server_node
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        return self._start(EvalActor, self.plan, num_gpus=gpus, **options)

    def _start_client(self, number: int) -> Actor:
        """Start ClientActor `number`; Ray spreads the ClientActors over the nodes."""
        resources = self.resources
        return self._start(
            ClientActor,
            self.plan,
            f"client {number}",
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            scheduling_strategy="SPREAD",
        )

    def aggregates_on_node(self, node: str, uploads: int) -> bool:
        """Return whether a node aggregates the sums of its workers before they are sent.

        Args:
            node: id of the node.
            uploads: number of workers on the node that upload sums.
        """
        return self.sends_sums and uploads > 1 and node != self.topology.server

    def aggregator(self, node: str) -> Actor:
        """Return the NodeAggregator of `node`; start it if the node has none.

        Args:
            node: id of the node.
        """
        if node not in self.aggregators:
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            self.aggregators[node] = self._start(
                NodeAggregator, self.plan, scheduling_strategy=on_node
            )
        return self.aggregators[node]

    def remove_aggregator(self, node: str, why: str) -> None:
        """End the NodeAggregator of `node` because it or its inputs failed; log `why`.

        Args:
            node: id of the node.
            why: the reason, for the log.
        """
        if (aggregator := self.aggregators.pop(node, None)) is not None:
            self._end_failed(
                aggregator,
                f"the NodeAggregator of node {self.topology.name(node)} failed ({why}); "
                "its blocks are trained again",
            )

    def _start_workers(self) -> None:
        """Start ClientActors until `wanted` of them are ready or starting."""
        for number in set(range(self.wanted)) - set(self.workers) - set(self.joining):
            actor = self._start_client(number)
            self.joining[number] = actor, actor.call("where")[0]

    def _await_workers(self, timeout: float = 0.0, least: int | None = None) -> None:
        """Move starting ClientActors that are ready to `workers`, and drop those that failed.

        Wait up to `timeout` seconds for `least` of them; None means all.
        """
        if not self.joining:
            return
        numbers = {place: number for number, (_, place) in self.joining.items()}
        for ready in ray.wait(list(numbers), num_returns=least or len(numbers), timeout=timeout)[0]:
            number = numbers[ready]
            actor, _ = self.joining.pop(number)
            try:
                place = ray.get(ready, timeout=self.timeout)
                check_source_code(f"ClientActor {number}", place.code, source_code())
                self.local.open(actor)
            except (RayError, ActorDied, ConfigError) as error:
                why = first_line(error)
                self._end_failed(actor, f"ClientActor {number} failed to start: {why}")
                continue
            self.workers[number] = Worker(actor, place.node, place.gpus)
        for number, (actor, _) in list(self.joining.items()):
            # One that has not started may wait for free resources, which is no failure.
            if self.supervisor.has_started(actor) and (why := self.supervisor.failure(actor)):
                del self.joining[number]
                self._end_failed(actor, f"ClientActor {number} failed to start: {why}")

    def _end_failed(self, actor: Actor, message: str) -> None:
        """End an actor that has failed, count it, and log the message."""
        self.supervisor.end(actor)
        self.recoveries["system/actors_failed"] += 1
        self.log(message)

    def available_workers(self) -> dict[int, Worker]:
        """Return the workers that are ready, by number; wait until there is at least one.

        New ClientActors start in place of failed ones and join when they are ready.

        Raises:
            WorkersLost: no worker is left and none starts in time.
            RaysimError: Ray itself has failed.
        """
        if len(self.workers) < self.wanted:
            self._start_workers()
            self._await_workers()
        limit = self.supervisor.monitor.start_s
        began = last_line = time.monotonic()
        while not self.workers:
            self._start_workers()
            self._await_workers(POLL_INTERVAL_S, least=1)
            self.supervisor.monitor.check()
            now = time.monotonic()
            if now - began > limit:
                raise WorkersLost(
                    f"waited {limit:g} s for a new ClientActor to replace the last one, which "
                    "failed. No node has room for one: a node is lost, or the others lack the "
                    "memory or the resources of an actor. `raysim resume` continues the run"
                )
            if not self.workers and now - last_line >= PROGRESS_INTERVAL_S:
                self.log(
                    "no ClientActor is left; waiting for a node with room for one, "
                    f"{now - began:.0f} of at most {limit:g} s"
                )
                last_line = now
        return self.workers

    def remove_worker(self, number: int, why: str, actor: Actor | None = None) -> None:
        """End a ClientActor that has failed or cannot be reached; log `why`.

        Args:
            number: number of the ClientActor.
            why: the reason, for the log.
            actor: the actor itself; if another one has its number now, do nothing. None: the actor
                with that number.
        """
        worker = self.workers.get(number)
        if worker is not None and (actor is None or actor is worker.actor):
            del self.workers[number]
            self.speeds.forget(number)
            self._end_failed(
                worker.actor,
                f"ClientActor {number} failed ({why}); {len(self.workers)} are left, "
                "a new one starts",
            )

    # Replacing the server and the evaluator.

    def restart_server(self) -> None:
        """Replace the server with a new one in its initial state.

        Ray may place the new server on a node whose failure it has not noticed yet, so a failed
        start is retried.

        Raises:
            ActorDied: no new server started in time, or within the attempts of the policy.
        """
        deadline = time.monotonic() + self.supervisor.monitor.start_s
        for attempt in count(1):
            self.recoveries["system/server_restarts"] += 1
            self.supervisor.end(self.server)
            self._server = self._start_server()
            try:
                place = self.supervisor.wait(
                    self.server.call("where")[0], "the start of a new server", self.server
                )
                check_source_code("the ServerActor", place.code, source_code())
                self._set_server_node(place.node)
                self.local.open(self.server)
                return
            except ActorDied as died:
                decision = self.failure_policy.decide(died, Work.SERVER_START, attempt)
                if decision is Decision.RAISE or time.monotonic() > deadline:
                    raise
                self.log(f"{died}; trying again")
                time.sleep(3 * POLL_INTERVAL_S)

    def restart_evaluator(self, old: Actor, why: str) -> Actor:
        """Replace the EvalActor, unless it has been replaced already, and return the new one.

        Args:
            old: the EvalActor that failed.
            why: why it failed, for the log.

        Returns:
            The EvalActor to use from now on.
        """
        if self.eval is None or old is self.eval:
            self._end_failed(old, f"the EvalActor failed ({why}); a new one starts")
            self.eval = self._start_evaluator()
        return self.eval

    def close(self) -> None:
        """End the actors, and Ray if this process started it. Every step has a time limit."""
        if not ray.is_initialized():
            return
        # The monitor stops first: its requests would start another Ray after the shutdown.
        broken = self.supervisor.ray_is_broken
        self.supervisor.stop()
        actors = list(self.aggregators.values())
        actors += [worker.actor for worker in self.workers.values()]
        actors += [actor for actor, _ in self.joining.values()]
        actors += [actor for actor in (self._server, self.eval) if actor is not None]
        for actor in actors:
            actor.close()
        if not broken:
            broken = not processes.limited(
                lambda: [ray.kill(actor.handle) for actor in actors],
                connection.SHUTDOWN_TIMEOUT_S,
            )
        self.local.close()
        self.aggregators = {}
        if self.ours:
            connection.leave_cluster(broken)
