"""Accuracy at equal privacy: the noise at which DP-SGD hides images as well as another method.

    match:
      rival: {algorithm: fedavg, privacy.max_grad_norm: 1}     # the method whose noise is searched
      noise_multiplier: [0.001, 10]                   # search interval of privacy.noise_multiplier
      tolerance: 0.5                                  # dB
      images: 8                                       # number of attacked clients, one image each
      attacked: {local.lr: 0.1}                       # further keys of attacked runs
      attack: {cost: l2, iterations: 500}             # options of `raysim attack`

The rest of the file configures the training of the method to match. Both methods are attacked in
the first round, in which every client makes one step on one image. Noise is keyed, and every attack
begins with the same random images. Two trials therefore differ only in the size of the noise. The
PSNR mostly falls with the noise, so the search bisects the logarithm of the noise multiplier. Both
methods are then trained, the rival with the noise multiplier whose PSNR was nearest.

The setting is that of Xu et al. 2022, appendix B.4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from raysim.attacks.attack_options import AttackOptions
from raysim.attacks.gradient_inversion import attack
from raysim.config import loading
from raysim.config.explain import checked_section
from raysim.config.sections.base import Positive, Section
from raysim.engine.plan import Plan
from raysim.errors import ConfigError, RaysimError
from raysim.prepare import resolve
from raysim.rules.methods import registry
from raysim.runs.run import execute

ATTACK_OVERRIDES = {
    "rounds": 1,
    "local.steps": 1,
    "local.batch_size": 1,
    "record_updates.rounds": [0],
    "evaluate.every": 0,
    "evaluate.forgetting": None,
    "evaluate.probes": (),
    "checkpoint.every": 0,
    "stop": None,
}
"""Keys of the runs that are attacked."""

LogCallback = Callable[[str], None]
"""Function that is called with each line of progress."""


class MatchOptions(Section):
    """Section `match` of a configuration file."""

    rival: dict[str, Any]
    """Keys of the rival method, without privacy.noise_multiplier."""
    noise_multiplier: tuple[Positive, Positive]
    """Lower and upper end of the search interval."""
    tolerance: Positive = 0.5
    """Largest difference of the two PSNRs in dB. Attacks vary by some tenths of a dB."""
    tries: int = Field(default=12, ge=1)
    """Largest number of noise multipliers that are tried between the ends."""
    images: int = Field(default=8, ge=1)
    """Number of attacked clients; each has one image."""
    attacked: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the runs that are attacked."""
    attack: AttackOptions = AttackOptions()
    """Options of the attack."""

    @model_validator(mode="after")
    def _ordered(self) -> MatchOptions:
        if self.noise_multiplier[0] >= self.noise_multiplier[1]:
            raise ValueError("noise_multiplier must be two numbers, the smaller one first")
        if any(key.startswith("privacy.noise_multiplier") for key in self.rival):
            raise ValueError(
                "rival must not name privacy.noise_multiplier, which is searched between the two "
                "values of match.noise_multiplier"
            )
        return self


class _MatchFile(Section):
    """File with the section, so that error messages contain the full key."""

    match: MatchOptions
    """The section."""


@dataclass(frozen=True)
class NoiseTrial:
    """Trial of the search."""

    noise_multiplier: float
    """Noise multiplier of the rival."""
    psnr: float
    """Mean PSNR of the attack in dB."""


@dataclass(frozen=True)
class AttackSummary:
    """Summary of an attack."""

    psnr: float
    """Mean PSNR in dB."""
    folder: str
    """Folder of the attack's picture."""


@dataclass(frozen=True)
class MatchedMethod:
    """Results of a method of the comparison."""

    label: str
    """Label of the method."""
    noise_multiplier: float | None
    """Noise multiplier of the rival; None for the method to match."""
    attacks: dict[str, AttackSummary]
    """Attacks on the method, by attacker."""
    accuracy: float
    """Best accuracy of the training."""
    run_dir: str
    """Folder of the training run."""


@dataclass(frozen=True)
class MatchResult:
    """Result of the search and of both trainings."""

    target: float
    """PSNR to match, in dB."""
    tries: list[NoiseTrial]
    """All trials in order."""
    within: bool
    """True if the two PSNRs differ by at most the tolerance."""
    sides: tuple[MatchedMethod, MatchedMethod]
    """The method to match, and its rival."""


def bisect(
    measure: Callable[[float], float],
    target: float,
    low: float,
    high: float,
    tolerance: float,
    tries: int,
) -> list[NoiseTrial]:
    """Search for the noise multiplier at which the PSNR is `target`, by bisection of its logarithm.

    Args:
        measure: returns the PSNR in dB at a noise multiplier; it falls with the noise.
        target: the PSNR to match, in dB.
        low: lower end of the search interval.
        high: upper end of the search interval.
        tolerance: largest difference to the target in dB.
        tries: largest number of trials between the ends.

    Returns:
        All trials, the ends first. The search stops after the first trial within the tolerance.

    Raises:
        ConfigError: the target is not between the values at the ends; the message contains them.
    """
    tried: list[NoiseTrial] = []

    def near(sigma: float) -> bool:
        tried.append(NoiseTrial(sigma, measure(sigma)))
        return abs(tried[-1].psnr - target) <= tolerance

    if near(low) or near(high):
        return tried
    least, most = tried
    if not most.psnr < target < least.psnr:
        where = "raise its upper end" if most.psnr > target else "lower its lower end"
        raise ConfigError(
            f"match.noise_multiplier: the PSNR to be matched is {target:.2f} dB, but it is "
            f"{least.psnr:.2f} dB at noise multiplier {low:g} and {most.psnr:.2f} dB at noise "
            f"multiplier {high:g}, so the target is not in between; {where}"
        )
    for _ in range(tries):
        middle = math.sqrt(low * high)
        if near(middle):
            break
        low, high = (middle, high) if tried[-1].psnr > target else (low, middle)
    return tried


def match(
    source: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    say: LogCallback = lambda line: None,
) -> MatchResult:
    """Find the noise at which a rival is as hard to attack as a method, and train both.

    Every attacked run and every training has its own folder and MLflow run. Attacked runs are in
    the experiment with "-attacked" after its name.

    Args:
        source: path or name of a configuration with a section `match`.
        overrides: "key=value" with dots, or a mapping, also of keys such as `match.tolerance`.
        say: called with each line of progress.

    Returns:
        The result, which is also written to match.json in the folder of the matched method's run.

    Raises:
        ConfigError: the configuration is invalid, or the PSNR to match is not between those at the
            ends.
    """
    raw = loading.read_config(source, overrides, resolve.keys, registry.algorithm_defaults)
    if "match" not in raw:
        raise ConfigError(
            f"match: {source} has no such section; see configs/fedreg/match_mnist.yaml for one"
        )
    section = checked_section(_MatchFile, {"match": raw.pop("match")}).match
    methods = MethodComparison(raw, section)
    first = section.attack.attacker
    second = {"adaptive": "oblivious", "oblivious": "adaptive"}[first]
    folder = methods.watched(None)
    own_attacks = {attacker: methods.attacked(folder, attacker) for attacker in (first, second)}
    target = own_attacks[first].psnr
    say(
        f"to be matched: {target:.2f} dB ({first} attacker; "
        f"{second}: {own_attacks[second].psnr:.2f} dB)"
    )
    folders: dict[float, Path] = {}
    attacks: dict[float, AttackSummary] = {}

    def measure(sigma: float) -> float:
        folders[sigma] = methods.watched(sigma)
        attacks[sigma] = methods.attacked(folders[sigma], first)
        say(f"noise multiplier {sigma:.4g}: {attacks[sigma].psnr:.2f} dB")
        return attacks[sigma].psnr

    tries = bisect(measure, target, *section.noise_multiplier, section.tolerance, section.tries)
    sigma = min(attacks, key=lambda candidate: abs(attacks[candidate].psnr - target))
    rival = {first: attacks[sigma], second: methods.attacked(folders[sigma], second)}
    say(
        f"noise multiplier {sigma:.4g} it is ({second} attacker: {rival[second].psnr:.2f} dB); "
        "both are trained now"
    )
    sides = methods.trained(None, own_attacks), methods.trained(sigma, rival)
    matched = MatchResult(
        target, tries, abs(attacks[sigma].psnr - target) <= section.tolerance, sides
    )
    (Path(sides[0].run_dir) / "match.json").write_text(json.dumps(asdict(matched), indent=1) + "\n")
    return matched


class MethodComparison:
    """Runs of the two methods; `sigma` is the rival's noise multiplier, None the other method."""

    def __init__(self, raw: Mapping[str, Any], asked: MatchOptions):
        """Check the configurations of both methods, as attacked and as trained.

        Args:
            raw: the configuration without its section `match`.
            asked: the section `match`.

        Raises:
            ConfigError: one of them is invalid; nothing has run.
        """
        self.raw, self.asked = raw, asked
        seen = {"schedule.cohort": asked.images, "record_updates.clients": asked.images}
        self.looked_on = {**ATTACK_OVERRIDES, **seen, **asked.attacked}
        for sigma in (None, asked.noise_multiplier[0]):
            experiment = resolve.prepare(raw, self._who(sigma)).config.tracking.experiment
            self.looked_on["tracking.experiment"] = f"{experiment}-attacked"
            self._watched_plan(sigma)

    def _who(self, sigma: float | None) -> dict[str, Any]:
        """Return the keys of a method."""
        return {} if sigma is None else {**self.asked.rival, "privacy.noise_multiplier": sigma}

    def _watched_plan(self, sigma: float | None) -> Plan:
        """Return the plan of an attacked run."""
        return resolve.prepare(self.raw, {**self._who(sigma), **self.looked_on})

    def watched(self, sigma: float | None) -> Path:
        """Execute a run that records its updates for the attack; return its folder.

        Args:
            sigma: noise multiplier of the rival; None: the run is that of the method to match.

        Raises:
            RaysimError: the run failed.
        """
        return execute(self._watched_plan(sigma)).run_dir

    def attacked(self, run_dir: Path, attacker: str) -> AttackSummary:
        """Attack a run and return the summary.

        Args:
            run_dir: the folder of a run from `watched`.
            attacker: "oblivious" or "adaptive".

        Raises:
            RaysimError: no recovered image has a finite PSNR.
        """
        result, folder = attack(run_dir, {**self.asked.attack.model_dump(), "attacker": attacker})
        if not math.isfinite(result.psnr):
            raise RaysimError(
                f"match: no image of {run_dir} has a finite PSNR; change match.attack, say its lr"
            )
        return AttackSummary(result.psnr, str(folder))

    def trained(self, sigma: float | None, attacks: dict[str, AttackSummary]) -> MatchedMethod:
        """Train a method and return its results.

        Args:
            sigma: noise multiplier of the rival; None: the method to match is trained.
            attacks: summaries of the attacks on the method, by attacker; they enter the result.

        Raises:
            RaysimError: the run failed.
        """
        ready = resolve.prepare(self.raw, self._who(sigma))
        done = execute(ready)
        accuracy = done.metrics.get("accuracy", {"best": math.nan})["best"]
        return MatchedMethod(ready.label, sigma, attacks, accuracy, str(done.run_dir))
