"""Evaluation of versions of the model, on the test set and by probes."""

from __future__ import annotations

from raysim.data import Examples
from raysim.engine import probes
from raysim.engine.plan import EvaluatedModel, Plan
from raysim.engine.process_setup import make_trainer
from raysim.errors import RaysimError, with_users_line
from raysim.models.flat import BoundModel
from raysim.system.signals import reraise_stop
from raysim.training.evaluation import measure
from raysim.training.messages import Broadcast, EvaluationParts


class Evaluator:
    """Evaluates versions of the model.

    The part "test" gives the metrics of the learning task (on request also the accuracy on each
    class) and the mean loss on the whole test set, in eval mode, and the same with prefix val/ on
    held-out examples if there are any. The other parts are names of probes.

    Args:
        plan: the plan of the run.
        device: name of the torch device.
    """

    def __init__(self, plan: Plan, device: str):
        data, held_out = plan.dataset, plan.clients.validation
        self.examples = Examples.of(data, "test", device, plan.dtype)
        self.validation = Examples(
            data.x[held_out],
            data.y[held_out],
            data.scale,
            data.shift,
            device=device,
            dtype=plan.dtype,
        )
        self.name = plan.config.model.name
        self.net, self.size = BoundModel(plan.model(device)), plan.config.evaluate.batch_size
        self.metrics = plan.metrics
        by_class = plan.config.evaluate.per_class or plan.config.has_class_tasks
        self.classes = plan.problem.classes if by_class else 0
        self.probes = probes.evaluations(plan)
        self.trainer = make_trainer(plan, device).trainers[0] if self.probes else None
        self.changes_frozen = plan.server.changes_frozen
        self.models = [self.net.model]
        if self.trainer is not None:
            self.models.append(self.trainer.model)

    def evaluate(self, broadcast: Broadcast, parts: EvaluationParts) -> dict[str, float]:
        """Return the metrics of a version of the model.

        Args:
            broadcast: the version, with parameters [P] and BatchNorm statistics [Q].
            parts: what to measure.

        Returns:
            The metrics by name.

        Raises:
            RaysimError: the net or a probe failed; both may be users' code.
        """
        try:
            if self.changes_frozen:
                for model in self.models:
                    model.set_frozen(broadcast.shared["frozen"])
            values = self._test(broadcast) if "test" in parts.names else {}
            for name, evaluate in self.probes.items():
                if name in parts.names and self.trainer is not None:
                    model = EvaluatedModel(
                        broadcast.shared, broadcast.buffers, parts.rounds_done, self.trainer.model
                    )
                    values |= evaluate(self.trainer, model)
        except RaysimError:
            raise
        except BaseException as error:
            # Not only Exception: a net that calls sys.exit() must not end this process.
            reraise_stop(error)
            raise RaysimError(
                f"the evaluation of model '{self.name}' failed: {with_users_line(error)}"
            ) from error
        return values

    def _test(self, broadcast: Broadcast) -> dict[str, float]:
        self.net.w.copy_(broadcast.global_params)
        buffers = broadcast.buffers.to(self.net.w.device)
        values = measure(
            self.net, buffers, self.examples, self.size, self.metrics, classes=self.classes
        )
        if len(self.validation):
            held_out = measure(self.net, buffers, self.validation, self.size, self.metrics)
            values |= {f"val/{k}": v for k, v in held_out.items()}
        return values
