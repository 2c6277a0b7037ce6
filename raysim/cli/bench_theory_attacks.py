"""Commands `bench`, `check-convergence`, `attack` and `privacy-match`.

They measure the speed of a configuration here, check the conditions of a theorem, and attack the
updates of a run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from raysim.cli.base import NONE_GIVEN, Configuration, JsonOption, Overrides, app, print_table
from raysim.cli.completion import complete_configuration, complete_override
from raysim.cli.terminal import Terminal, aside, say
from raysim.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from raysim.attacks.gradient_inversion import AttackCallback
    from raysim.diagnostics.convergence import Condition
    from raysim.engine.plan import Plan


@app.command()
def bench(
    config: Configuration,
    overrides: Annotated[
        list[str],
        typer.Argument(
            help="key=value; keys given here are not varied", autocompletion=complete_override
        ),
    ] = NONE_GIVEN,
    seconds: Annotated[float, typer.Option(min=0.1, help="seconds for each candidate")] = 5.0,
    blocks: Annotated[
        bool,
        typer.Option(
            "--blocks", help="also vary batching.mode and size (changes the last bits of results)"
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure which executor, actors, GPU shares and blocks run a configuration fastest here."""
    from raysim.prepare.early_validation import validate_early

    validate_early(config, overrides)
    from raysim.planning import bench as benches

    console = Terminal(as_json)

    def tell(candidate: benches.Candidate) -> None:
        outcome = (
            candidate.problem
            or f"{candidate.clients_per_second:8.1f} clients/s over {candidate.rounds} rounds"
        )
        console.tell(f"{candidate.text or 'as given':64} {outcome}")

    best = benches.bench(config, overrides, seconds=seconds, blocks=blocks, tell=tell).best
    assert best is not None
    console.tell(f"fastest: {best.text or 'as given'}")
    if as_json:
        say(
            json.dumps(
                {"settings": best.settings, "clients_per_second": round(best.clients_per_second, 3)}
            )
        )


@app.command(name="check-convergence")
def check_convergence(
    config: Configuration,
    overrides: Annotated[
        list[str],
        typer.Argument(
            help="key=value of the configuration; L=1.5: the smoothness constant, if known",
            autocompletion=complete_override,
        ),
    ] = NONE_GIVEN,
    sample: Annotated[
        int | None,
        typer.Option(min=1, help="number of clients to estimate L from, drawn by the seed"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a configuration against the conditions of GradMA's Theorem 1 (Luo 2023).

    Nothing is trained.
    """
    from raysim.prepare.early_validation import validate_early

    console = Terminal(as_json)
    constants, changes = _split_overrides(overrides)
    if constants and sample:
        raise ConfigError("--sample: L is given, so it is not estimated; leave out one of the two")
    validate_early(config, changes)
    from raysim.diagnostics import convergence as theorems
    from raysim.prepare.resolve import prepare

    plan = prepare(config, changes)
    if why := theorems.why_not(plan):
        raise ConfigError(f"Theorem 1 does not apply to this run: {why}")
    if constants:
        L = _parse_number(constants[-1])
        source = "given"
    else:
        L, source = _smoothness(plan, sample, console)
    s = theorems.theorem_inputs(plan)
    console.tell(f"{plan.label} on {plan.config.data.name}: "
                  f"N {s.clients}, S {s.cohort}, I {s.steps}, T {s.rounds}, "
                  f"beta1 {s.beta1:g}, L {L:.4g} ({source})")  # fmt: skip
    departures = theorems.departures(plan)
    for departure in departures:
        console.tell(f"differs from the theorem: {departure}")
    conditions = theorems.conditions(s, L)
    _print_conditions(conditions, console)
    lr, server_lr = theorems.largest_lr(s, L), theorems.largest_server_lr(s, L)
    alone = f"{server_lr:.3g}" if server_lr else "none: local.lr is too large by itself"
    console.tell(f"largest local.lr with server lr {s.server_lr:g}   {lr:.3g}")
    console.tell(f"largest server lr with local.lr {s.lr:g}   {alone}")
    steps = theorems.corollary(s, L)
    console.tell(
        f"Corollary 1 for T = {s.rounds}   local.lr {steps[0]:.4g}, server lr {steps[1]:.4g}"
    )
    if as_json:
        facts = {
            **vars(s),
            "L": L,
            "L_source": source,
            "conditions": [{**vars(c), "share": c.share, "holds": c.holds} for c in conditions],
            "largest_lr": lr,
            "departures": departures,
            "largest_server_lr": server_lr,
            "corollary": {"lr": steps[0], "server_lr": steps[1]},
        }
        say(json.dumps(_finite(facts)))


def _split_overrides(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the values of L, and the overrides of the configuration."""
    constants: list[str] = []
    changes: list[str] = []
    for text in overrides:
        if text.startswith("L="):
            constants.append(text.removeprefix("L="))
        else:
            changes.append(text)
    return constants, changes


def _print_conditions(conditions: Iterable[Condition], console: Terminal) -> None:
    """Print a row for each condition of the theorem."""
    table = Table("condition of Theorem 1", "is", "at most", "share of the limit", "", box=None)
    for c in conditions:
        table.add_row(
            f"{c.name} {c.text}",
            f"{c.value:.3g}",
            f"{c.limit:.3g}",
            f"{c.share:.3g}",
            "holds" if c.holds else "FAILS",
        )
    print_table(table, console)


def _smoothness(plan: Plan, sample: int | None, console: Terminal) -> tuple[float, str]:
    """Return L and its source: configured, or estimated by the power method at x_0."""
    from raysim.diagnostics import full_gradients
    from raysim.engine.process_setup import configure_process, make_trainer

    theory = plan.config.evaluate.theory
    if theory and theory.L:
        return theory.L, "evaluate.theory.L"
    sample = sample or (theory.sample if theory else None)
    passes = full_gradients.MAX_POWER_ITERATIONS * full_gradients.CURVATURE_FORWARD_PASSES
    device = "cuda:0" if plan.config.resources.gpus else "cpu"
    model = plan.model()
    cost = full_gradients.compute_cost(plan.config, plan.clients, model, sample, passes)
    if cost.too_much(full_gradients.MAX_OPERATIONS_PER_RUN, vectors=2):
        fits = cost.fits(full_gradients.MAX_OPERATIONS_PER_RUN, vectors=2)
        raise ConfigError(
            f"L: an estimate would pass {full_gradients.MAX_POWER_ITERATIONS} times over "
            f"{cost.what}: {cost.operations:.1e} floating-point operations and "
            f"{2 * cost.room / 1e9:.1f} GB; give L=…, or --sample {fits} (clients)"
        )
    if why := full_gradients.why_no_curvature(model):
        raise ConfigError(
            f"L: cannot be estimated for model '{plan.config.model.name}' ({why}); give L=…"
        )
    configure_process(plan.config.resources, on_gpu=device != "cpu")
    ids = full_gradients.chosen_clients(plan.clients.sizes, sample, plan.config.seed)
    trainer = make_trainer(plan, device).trainers[0]
    gradients = full_gradients.FullGradients(trainer, ids, plan.server.weights)
    with console.status(f"estimating L from {len(ids)} clients"):
        L = gradients.largest_curvature(*plan.initial)
    if not L:
        raise ConfigError(
            "L: no client's loss is curved at x_0, so L cannot be estimated there; give L=…"
        )
    return L, f"power method at x_0, the largest of {len(ids)} clients; no less than this"


def _parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"L: '{text}' is not a positive number; give one, or leave L out to estimate it"
        )
    return value


def _finite(facts: Any) -> Any:
    """Return facts with null in place of infinite numbers, which JSON does not have."""
    return json.loads(json.dumps(facts), parse_constant=lambda _: None)


@app.command()
def attack(
    run_dir: Annotated[
        str,
        typer.Argument(
            help="folder of a run with recorded updates, e.g. of record_updates.rounds=[0]"
        ),
    ],
    overrides: Annotated[
        list[str],
        typer.Argument(help="key=value: cost=l2 attacker=adaptive iterations=2000 restarts=1 ..."),
    ] = NONE_GIVEN,
    as_json: JsonOption = False,
) -> None:
    """Try to recover clients' images from recorded updates (gradient inversion)."""
    from raysim.attacks import gradient_inversion as attacks

    console = Terminal(as_json)
    with _attack_progress(console) as progress:
        result, folder = attacks.attack(run_dir, overrides, progress)
    table = Table("client", "label", "cost", "PSNR (dB)", box=None)
    for client in result.clients:
        labels = " ".join(map(str, client.labels))
        quality = " ".join(f"{p:.2f}" for p in client.psnr)
        table.add_row(str(client.client), labels, f"{client.cost:.4g}", quality)
    print_table(table, console)
    exact = f", {result.exact} recovered exactly (not counted)" if result.exact else ""
    console.tell(
        f"mean PSNR      {result.psnr:.2f} dB{exact}, median {result.median:.2f}, in "
        f"{result.seconds:.1f} s"
    )
    console.tell(f"images         {folder / 'attack.png'}")
    if result.failed:
        clients = ", ".join(map(str, result.failed))
        aside(f"the cost is not finite for client {clients}; lower lr, or try another seed")
    if as_json:
        say(json.dumps({**result.as_object(), "folder": str(folder.absolute())}))


@app.command(name="privacy-match")
def privacy_match(
    config: Annotated[
        str,
        typer.Argument(
            help="a YAML file with a section 'match', or the name of a shipped one",
            autocompletion=complete_configuration,
        ),
    ],
    overrides: Overrides = NONE_GIVEN,
    as_json: JsonOption = False,
) -> None:
    """Find the noise at which DP-SGD hides images as well as another method, and train both."""
    from raysim.attacks import noise_matching as matches

    console = Terminal(as_json)
    comparison = matches.match(config, overrides, console.tell)
    attackers = list(comparison.sides[0].attacks)
    table = Table(
        "method",
        "noise multiplier",
        *(f"{attacker}, dB" for attacker in attackers),
        "best accuracy",
        box=None,
    )
    for side in comparison.sides:
        noise = "" if side.noise_multiplier is None else f"{side.noise_multiplier:.4g}"
        table.add_row(
            side.label,
            noise,
            *(f"{side.attacks[attacker].psnr:.2f}" for attacker in attackers),
            f"{side.accuracy:.4f}",
        )
    print_table(table, console)
    for side in comparison.sides:
        for attack_result in side.attacks.values():
            console.tell(f"images         {Path(attack_result.folder) / 'attack.png'}")
    if not comparison.within:
        aside("no noise multiplier that was tried is within match.tolerance; this is the nearest "
              "one. Increase match.tries or match.images")  # fmt: skip
    if as_json:
        say(json.dumps(asdict(comparison)))


@contextmanager
def _attack_progress(console: Terminal) -> Iterator[AttackCallback]:
    """Yield a callback that shows iterations: live on a terminal, else a line every few seconds."""
    interval_s = 0.5 if console.is_terminal else 5
    began = last = time.monotonic()

    def show(done: int, total: int, costs: Tensor) -> None:
        nonlocal began, last
        now = time.monotonic()
        if done == 1:  # time before the first iteration does not count
            began = now
        if now - last < interval_s and done not in (1, total):
            return
        last, seconds_left = now, (now - began) / max(done - 1, 1) * (total - done)
        line = f"iteration {done}/{total}  mean cost {float(costs.mean()):.4g}"
        line += f"  {seconds_left:.0f} s left" if 1 < done < total else ""
        status.update(line)
        if not console.is_terminal:
            console.tell(line)

    # It shows nothing where the output is not a terminal.
    with console.status("reading the run") as status:
        yield show
