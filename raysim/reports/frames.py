"""Reports on tracked runs: `raysim.report`, which the command `raysim report` writes as text.

    frame = raysim.report("table", "gradma-mnist", target=0.9)
    frame = raysim.report("curves", ["gradma-mnist", "gradma-femnist"], x_axis="bytes")

Each kind of report is a function with the kind's options, which returns a report with a data frame
and, for the command, a text or a plot. Numbers are not rounded. Accuracies and other shares are
fractions of 1, not percentages.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from raysim.errors import ConfigError
from raysim.reports.claims import claim_section
from raysim.reports.report_kinds import PLOTTED_KINDS, Report, claims_report
from raysim.reports.runs import RunSource
from raysim.reports.table_report import KeyNames, split_keys, table_report
from raysim.reports.tables.results_table import ResultsTable
from raysim.spelling import did_you_mean

logger = logging.getLogger("raysim")


REPORT_KINDS: dict[str, Callable[..., Report | ResultsTable]] = {
    "table": table_report,
    **PLOTTED_KINDS,
    "claims": claims_report,
}
"""Function of each kind of report."""


def report(
    kind: str,
    runs: KeyNames | None = None,
    *,
    uri: str | None = None,
    ledger: str | Path | Sequence[str | Path] | None = None,
    where: str | Sequence[str] | Mapping[str, Any] = (),
    **options: Any,
) -> pd.DataFrame:
    """Return a report of tracked runs as a data frame.

    Each kind and option corresponds to `raysim report KIND --OPTION` on the command line. Omitted
    runs (unfinished runs, seeds without a value) are logged as warnings.

    Args:
        kind: "table", "curves", "sweep", "sensitivity", "speedup" or "claims". The function in
            `REPORT_KINDS` (`table_report`, `curves_report`, …) lists its options and columns.
        runs: Names of experiments, or ids of runs: a list, or one comma-separated string. The id of
            a sweep stands for its trials. Required except for "claims", which defaults to the
            experiment of its configuration, and with a ledger, of which all rows are used.
        uri: Address of the tracking store; default sqlite:///mlflow.db.
        ledger: One or several ledgers to read in place of the tracking store.
        where: Values of the runs to report, not for "claims": a mapping such as
            {"local.lr": [0.01, 0.1], "partition.alpha": 0.1}, or the texts of the command line,
            ["local.lr=0.01,0.1", "partition.alpha=0.1"].
        **options: Options of the kind.

    Returns:
        A frame with one row for each table row, curve point, parameter group or claim.

    Raises:
        ConfigError: The kind, an option, a run, the metric or a parameter does not exist.
        RaysimError: The tracking store cannot be read.
    """
    if kind not in REPORT_KINDS:
        raise ConfigError(
            f"kind: unknown kind of report '{kind}'{did_you_mean(kind, REPORT_KINDS)}"
        )
    if kind == "claims" and where:
        options["where"] = where
    options = _checked_options(kind, options)
    ledgers = [ledger] if isinstance(ledger, str | Path) else list(ledger or ())
    names = split_keys(runs) or ()
    if kind == "claims":
        source = claim_section.runs_of_claims(options["config"], names, uri, ledgers)
    else:
        source = RunSource(names, uri, ledgers, _where_texts(where))
    return REPORT_KINDS[kind](source, partial(logger.warning, "%s"), **options).frame


def _checked_options(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a kind of report, those of one text as such.

    Raises:
        ConfigError: the kind lacks an option, or does not have one, or it is no text.
    """
    parameters = inspect.signature(REPORT_KINDS[kind]).parameters.values()
    known = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    names = [parameter.name for parameter in known]
    for name in options:
        if name not in names:
            # The runs of claims are chosen by the configuration, not by `where`.
            common = ["uri", "ledger"] if kind == "claims" else ["uri", "ledger", "where"]
            hint = did_you_mean(name, [*names, *common])
            raise ConfigError(f"{name}: unknown option of report '{kind}'{hint}")
    checked = dict(options)
    for parameter in known:
        if parameter.default is inspect.Parameter.empty and parameter.name not in options:
            raise ConfigError(
                f"{parameter.name}: report '{kind}' requires this option; pass {parameter.name}=…"
            )
        value = options.get(parameter.name)
        if isinstance(value, Mapping) and len(value) == 1:
            (value,) = _where_texts(value)
            checked[parameter.name] = value
        if parameter.annotation == "str | None" and not isinstance(value, str | None):
            raise ConfigError(f"{parameter.name}: give one text (given: {value!r})")
    return checked


def _where_texts(where: str | Sequence[str] | Mapping[str, Any]) -> Sequence[str]:
    """Return the values of the runs to report as texts KEY=VALUE,VALUE."""
    if isinstance(where, str):
        return [where]
    if not isinstance(where, Mapping):
        return where
    try:
        texts = claim_section.value_texts(where)
    except ValueError as error:
        raise ConfigError(f"where: {error}") from None
    return [f"{key}={','.join(values)}" for key, values in texts.items()]
