"""Mutation testing: break the source in known ways, and see whether the tests notice.

    python tests/mutations.py                 # all mutations, some minutes
    python tests/mutations.py scaffold dp     # those whose description contains a word
    python tests/mutations.py --checkout DIR  # of another checkout

Each mutation replaces one piece of text in a temporary copy of the checkout and runs the named test
files until the first failure. A mutation that no test catches is printed, and the exit code is 1.
Heavy libraries are imported once; each run of pytest is a fork of this process.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

HEAVY = (
    "torch", "torch.func", "sklearn.datasets", "scipy.optimize", "pandas", "pydantic", "pytest",
)  # fmt: skip
COPIED = ("raysim", "algorithms", "configs", "tests", "docs", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Mutation:
    """One change of the source, and the test files that must notice it."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ORACLES = ("tests/rules/test_oracles.py",)
BASELINES = ("tests/rules/test_oracles_baselines.py",)
ASYNCHRONOUS = ("tests/rules/test_oracles_async.py",)
FEDREG = ("tests/rules/test_oracles_fedreg.py",)
SCHEDULE = ("tests/engine/test_schedule.py",)
MEMORY = ("tests/numerics/test_gradient_memory.py",)
FIXED_POINT = ("tests/numerics/test_fixed_point.py",)
EVALUATION = ("tests/engine/test_client_evaluation.py",)

MUTATIONS = (
    # Rules
    Mutation(
        "fedprox: the pull has the wrong sign",
        "algorithms/fedprox.py",
        '(state["w"] - shared["x"]).mul_',
        '(shared["x"] - state["w"]).mul_',
        ORACLES,
    ),
    Mutation(
        "fedavgm: the step is damped",
        "algorithms/fedavgm.py",
        'self.beta1 * state["m"] + reports.mean("delta")',
        'self.beta1 * state["m"] + (1 - self.beta1) * reports.mean("delta")',
        ORACLES,
    ),
    Mutation(
        "gradma: the server's momentum is that of the step before the projection",
        "algorithms/gradma.py",
        'return {"x": x, "m": m, **_prefixed(D)}',
        'return {"x": x, "m": p, **_prefixed(D)}',
        ORACLES,
    ),
    Mutation(
        "gradma: the previous local model is the received one",
        "algorithms/gradma.py",
        '"y_prev": y,',
        '"y_prev": x,',
        ORACLES,
    ),
    Mutation(
        "scaffold: control variates with exchanged signs",
        "algorithms/scaffold.py",
        '.sub_(state["c_i"]).add_(shared["c"])',
        '.add_(state["c_i"]).sub_(shared["c"])',
        BASELINES,
    ),
    Mutation(
        "scaffold: c is the mean of the cohort, not of all clients",
        "algorithms/scaffold.py",
        'reports.sum("delta_c") / reports.n_clients',
        'reports.sum("delta_c") / len(reports.ids)',
        BASELINES,
    ),
    Mutation(
        "scaffold: option II does not count the steps",
        "algorithms/scaffold.py",
        "delta / (task.steps * task.lr)",
        "delta / task.lr",
        BASELINES,
    ),
    Mutation(
        "feddyn: lambda grows in the other direction",
        "algorithms/feddyn.py",
        'client_state["lambda"] - delta',
        'client_state["lambda"] + delta',
        BASELINES,
    ),
    Mutation(
        "fednova: one local step too many is counted",
        "algorithms/fednova.py",
        "for k in range(task.steps))",
        "for k in range(task.steps + 1))",
        BASELINES,
    ),
    Mutation(
        "mifa: with `wait`, x moves before all clients have been seen",
        "algorithms/mifa.py",
        "return state if self.wait and missing else self.move(state)",
        "return state if self.wait and missing < 0 else self.move(state)",
        BASELINES,
    ),
    # Trainer
    Mutation(
        "trainer: step size of round 0 in every round",
        "raysim/training/client_start.py",
        "lr=local.step_sizes.mean(t, n_updates)",
        "lr=local.step_sizes.mean(0, n_updates)",
        ORACLES,
    ),
    Mutation(
        "batches: a single sample that is left joins the batch before on every net",
        "raysim/training/batches/batch_order.py",
        "joins = needs_two and",
        "joins =",
        ORACLES,
    ),
    Mutation(
        "batches: a client repeats its first batches in every round",
        "raysim/training/batches/batch_order.py",
        "for i in range(cursor, cursor + steps):",
        "for i in range(steps):",
        (
            "tests/data/test_partitions.py",
            "tests/training/test_streams.py",
            "tests/runs/test_digests.py",
        ),
    ),
    Mutation(
        "lanes: what clients receive is copied in the first round only",
        "raysim/training/trainers/lane.py",
        "if known is not None and known[0] is value and known[1] == value._version:",
        "if known is not None:",
        ("tests/training/test_lanes.py",),
    ),
    Mutation(
        "lanes: a captured step finds the net where it was at the capture",
        "raysim/training/trainers/lane.py",
        "        task.forget()\n        task.optimizer_state",
        "        task.optimizer_state",
        ("tests/training/test_lanes.py",),
    ),
    Mutation(
        "accumulate: an incomplete step is divided by the size of a full one",
        "raysim/training/trainers/local_steps.py",
        "self.accumulated / place.number",
        "self.accumulated / self.config.local.accumulate",
        ("tests/training/test_optimizers.py",),
    ),
    Mutation(
        "adam: no correction of the second moment",
        "raysim/training/tasks/optimizers.py",
        "correction2 = (1 - beta2**step).sqrt().to(direction.dtype)",
        "correction2 = (1 - 0 * beta2**step).sqrt().to(direction.dtype)",
        ("tests/training/test_optimizers.py",),
    ),
    Mutation(
        "pooled: clients weigh by their examples",
        "raysim/training/trainers/pooled.py",
        "np.array(pool.weights) / denominators",
        "np.array(pool.weights) / np.mean(pool.sizes)",
        ("tests/training/test_fast_paths.py",),
    ),
    # Uploads
    Mutation(
        "uploads: a plain sum is weighted",
        "raysim/training/uploads/upload_sum.py",
        '"sum": 1.0, "difference": task.share',
        '"sum": task.weight, "difference": task.share',
        BASELINES,
    ),
    Mutation(
        "uploads: the change since the last upload is the whole upload",
        "raysim/training/uploads/upload_sum.py",
        "row.double() - _sent_last(u.task, key, row)",
        "row.double() - 0 * _sent_last(u.task, key, row)",
        BASELINES,
    ),
    Mutation(
        "uploads: all clients draw the same numbers for compression",
        "raysim/training/uploads/upload_chain.py",
        'generator(self._seed, "upload", task.base, task.client, i)',
        'generator(self._seed, "upload", task.base, 0, i)',
        ("tests/training/test_upload_stages.py",),
    ),
    # Server
    Mutation(
        "server: weights of dropped clients still count in means",
        "raysim/server/central_server.py",
        "return weight_in_sums / sum(reports.weights)",
        "return 1.0",
        ("tests/rules/test_battery.py",),
    ),
    Mutation(
        "server: staleness is one too large",
        "raysim/server/round_cohort.py",
        "staleness=[self.t - self.bases[i] for i in positions]",
        "staleness=[self.t - self.bases[i] + 1 for i in positions]",
        ASYNCHRONOUS,
    ),
    Mutation(
        "server: a resumed run admits its cohort twice",
        "raysim/server/central_server.py",
        "for k, v in self.updated.items()}",
        "for k, v in self.state.items()}",
        ("tests/engine/test_schedule.py", "tests/runs/test_run.py"),
    ),
    Mutation(
        "server: personal parameters are exchanged for shared ones",
        "raysim/server/update_steps.py",
        'torch.where(self._mask, before["x"], updated["x"])',
        'torch.where(self._mask, updated["x"], before["x"])',
        ("tests/rules/test_personalisation.py",),
    ),
    # Schedule
    Mutation(
        "schedule: a task that ends at the deadline misses it",
        "raysim/schedule/stragglers.py",
        "duration > self.deadline",
        "duration >= self.deadline",
        SCHEDULE,
    ),
    Mutation(
        "schedule: the largest staleness is already too stale",
        "raysim/schedule/stragglers.py",
        "staleness > self.max_staleness",
        "staleness >= self.max_staleness",
        SCHEDULE,
    ),
    Mutation(
        "schedule: jitter changes the mean duration",
        "raysim/schedule/client_times.py",
        "math.exp(self._jitter * z - self._jitter**2 / 2)",
        "math.exp(self._jitter * z)",
        SCHEDULE,
    ),
    Mutation(
        "schedule: arrived clients of K-async give their places to others",
        "raysim/schedule/asynchronous.py",
        "free -= len(self._arrived)",
        "free -= 0",
        SCHEDULE,
    ),
    # Checkpoint
    Mutation(
        "checkpoint: a damaged one is read",
        "raysim/engine/state/checkpoint.py",
        "    if damaged:\n",
        "    if not damaged and sums is None:\n",
        ("tests/runs/test_damaged_files.py",),
    ),
    Mutation(
        "objects: what a run has changed counts",
        "raysim/config/objects/description.py",
        "            if content != known:",
        "            if content == known:",
        ("tests/runs/test_objects_given_again.py",),
    ),
    Mutation(
        "metrics: one order of the targets decides what is paired",
        "raysim/rules/tasks/function_metric.py",
        "FEW, ORDERS = 64, 8",
        "FEW, ORDERS = 64, 1",
        ("tests/engine/test_function_metrics.py",),
    ),
    Mutation(
        "images: a net that computes something else in channels_last gets it",
        "raysim/models/memory_format.py",
        "SAME = 1e-3",
        "SAME = 1e9",
        ("tests/models/test_memory_format.py",),
    ),
    Mutation(
        "checkpoint: the oldest are kept, not the newest",
        "raysim/engine/state/checkpoint.py",
        "set([*available.values()][-keep:])",
        "set([*available.values()][:keep])",
        ("tests/runs/test_run.py",),
    ),
    Mutation(
        "checkpoint: those of the resumed round are removed too",
        "raysim/engine/state/checkpoint.py",
        "if number > round:",
        "if number >= round:",
        ("tests/runs/test_run.py", "tests/engine/test_client_store.py"),
    ),
    Mutation(
        "checkpoint: the record of its round may be missing",
        "raysim/engine/loop.py",
        'if self.state.history[-1]["round"] < done:',
        'if self.state.history[-1]["round"] < 0:',
        ("tests/engine/test_probes.py",),
    ),
    Mutation(
        "identity: how that is measured by which a run stops does not count",
        "raysim/config/schema.py",
        "if section is not None and section is getattr(evaluate, name):",
        "if section is not None and section is None:",
        ("tests/config/test_config.py",),
    ),
    Mutation(
        "objects: imports inside functions do not count",
        "raysim/config/objects/description.py",
        "values |= _imports(function)",
        "values |= {}",
        ("tests/runs/test_python_parts.py",),
    ),
    Mutation(
        "fedrep: a single step trains the body alone",
        "algorithms/personalised/fedrep.py",
        "body = ~head if steps > 1 else torch.ones_like(head)",
        "body = ~head",
        ("tests/rules/test_personalisation.py",),
    ),
    Mutation(
        "evaluation of clients: excluded groups count",
        "raysim/engine/evaluation/client_evaluation.py",
        "np.isin(self.groups, asked.exclude)",
        "np.isin(self.groups, [])",
        EVALUATION,
    ),
    Mutation(
        "evaluation of clients: the net of a client has the server's statistics",
        "raysim/training/client_evaluator.py",
        "state_dict(w.detach(), buffers.detach())",
        "state_dict(w.detach(), broadcast.buffers)",
        EVALUATION,
    ),
    # Numerics
    Mutation(
        "gradient memory: rows do not decay",
        "raysim/numerics/gradient_memory.py",
        "np.maximum(scale * beta2,",
        "np.maximum(scale * beta2**0,",
        MEMORY,
    ),
    Mutation(
        "gradient memory: only the oldest row's Gram column is fresh",
        "raysim/numerics/gradient_memory.py",
        "Q[:, :, slots] = new.transpose(0, 2, 1)",
        "Q[:, :, slots[:1]] = new.transpose(0, 2, 1)[:, :, :1]",
        MEMORY,
    ),
    Mutation(
        "fixed point: an overflow is noticed one bit late",
        "raysim/numerics/fixed_point.py",
        "    if bound >= MAX_LIMB_SUM:",
        "    if bound >= 2 * MAX_LIMB_SUM:",
        FIXED_POINT,
    ),
    Mutation(
        "fixed point: what a limb leaves is not passed on",
        "raysim/numerics/fixed_point.py",
        "rest.sub_(whole.sub_(shift), alpha=unit)",
        "rest.sub_(whole.sub_(shift), alpha=0)",
        FIXED_POINT,
    ),
    Mutation(
        "fixed point: a small block's unit is too coarse",
        "raysim/numerics/fixed_point.py",
        "SMALL_BLOCK_BITS = 29",
        "SMALL_BLOCK_BITS = 19",
        FIXED_POINT,
    ),
    # Differential privacy
    Mutation(
        "dp: short gradients are scaled up to the clip norm",
        "raysim/training/tasks/dp_sgd.py",
        "torch.clamp(clip / norms.clamp(min=1e-30), max=1.0)",
        "clip / norms.clamp(min=1e-30)",
        ("tests/training/test_privacy.py", *FEDREG),
    ),
    Mutation(
        "dp: epsilon of one use fewer",
        "raysim/training/tasks/dp_sgd.py",
        "compose(GaussianDpEvent(sigma), uses)",
        "compose(GaussianDpEvent(sigma), max(uses - 1, 1))",
        ("tests/training/test_privacy.py",),
    ),
    Mutation(
        "dp: replacing a client counts as adding one",
        "raysim/training/uploads/client_level_dp.py",
        "GaussianDpEvent(noise_multiplier / 2)",
        "GaussianDpEvent(noise_multiplier)",
        ("tests/training/test_client_privacy.py",),
    ),
    # Client evaluation
    Mutation(
        "client evaluation: the worst clients by a loss are the best ones",
        "raysim/engine/evaluation/client_evaluation.py",
        "np.sort(values)[::-1]",
        "np.sort(values)[::1]",
        EVALUATION,
    ),
    Mutation(
        "client evaluation: the weighted mean ignores the number of examples",
        "raysim/engine/evaluation/client_evaluation.py",
        "np.average(values, weights=weights)",
        "np.average(values)",
        EVALUATION,
    ),
    Mutation(
        "client evaluation: clients with their own models are measured at the global one",
        "raysim/training/client_evaluator.py",
        "if not self.has_own_models:",
        "if self.has_own_models or not self.has_own_models:",
        (*EVALUATION, "tests/rules/test_personalisation.py"),
    ),
)


def run_tests(copy: Path, tests: tuple[str, ...]) -> int:
    """Run test files of a copy in a fork, and return pytest's exit code."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(copy.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, file in enumerate((null, log, log)):
            os.dup2(file, number)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        import pytest

        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        code = 70
        try:
            code = int(pytest.main([*options, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def caught(mutation: Mutation, checkout: Path, copy: Path) -> bool:
    """Return whether the tests fail with the mutation; exit if they cannot be run."""
    source = (checkout / mutation.file).read_text()
    if source.count(mutation.old) != 1:
        sys.exit(
            f"{mutation.what}: {mutation.file} has {source.count(mutation.old)} times {mutation.old!r}"
        )
    (copy / mutation.file).write_text(source.replace(mutation.old, mutation.new))
    try:
        tests = tuple(test for test in mutation.tests if (copy / test).exists())
        code = run_tests(copy, tests)
    finally:
        (copy / mutation.file).write_text(source)
    if code not in (0, 1):
        sys.exit(f"{mutation.what}: pytest ended with {code}\n{(copy.parent / 'log').read_text()}")
    return code == 1


def main() -> int:
    """Try the mutations, and return the exit code."""
    parser = argparse.ArgumentParser(description="Break the source, and see whether tests notice.")
    parser.add_argument(
        "words", nargs="*", help="only mutations whose description has one of these"
    )
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(w in m.what for w in options.words)]
    for module in HEAVY:
        importlib.import_module(module)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        copy.mkdir()
        for name in COPIED:
            place = options.checkout / name
            if place.is_dir():
                shutil.copytree(place, copy / name, symlinks=True)
            else:
                shutil.copy(place, copy / name)
        for mutation in chosen:
            began = time.perf_counter()
            is_caught = caught(mutation, options.checkout, copy)
            missed += not is_caught
            seconds = time.perf_counter() - began
            print(
                f"{'caught    ' if is_caught else 'NOT CAUGHT'} {mutation.what} ({seconds:.0f} s)",
                flush=True,
            )
    print(f"{len(chosen) - missed} of {len(chosen)} mutations are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
