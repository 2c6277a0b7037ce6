"""Former names are refused with what they are called now."""

import re
from pathlib import Path

import pytest
import yaml
from support.command_line import assert_one_message
from torch import nn

import raysim
from raysim.config import explain, renamed
from raysim.config.explain import section_keys
from raysim.config.renamed import refuse_former_command
from raysim.config.schema import Config
from raysim.errors import ConfigError
from raysim.planning.forecast import run_forecast
from raysim.prepare.resolve import prepare
from raysim.reports.claims.claim_section import Figure


def keys_now() -> set[str]:
    """The keys of all sections, with dots, by any name that a section can have."""
    sections = {
        f"schedule.{k}"
        for n in ("sync", "kasync", "buffered")
        for k in section_keys("schedule", n) or ()
    }
    sections |= {f"partition.{k}" for k in section_keys("partition", "dirichlet") or ()}
    sections |= {f"privacy.{k}" for k in section_keys("privacy", "example") or ()}
    for section in ("local", "batching", "evaluate", "record_updates", "client_state"):
        sections |= {f"{section}.{key}" for key in section_keys(section, "") or ()}
    sections |= {f"claims.figure.{key}" for key in Figure.model_fields}
    return sections | set(Config.model_fields)


def test_no_former_key_is_a_key_and_what_replaces_it_is_one():
    known = keys_now()
    for former, new in renamed.KEYS.items():
        if not former.startswith("match."):
            assert former not in known, former
            parts = [name for name in new.replace("(", " ").split() if "." in name or name in known]
            assert parts and all(name in known or "client_dropout." in name for name in parts), new


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["local.batch=10"], ["local.batch is now called local.batch_size"]),
        (["block.graphs=false"], ["block.graphs is now called batching.cuda_graphs"]),
        (["block.mode=loop"], ["block.mode is now called batching.mode"]),
        (["block.convolutions=unfold"], ["block.convolutions is now called batching.convolutions"]),
        (["privacy={clip: 1, sigma: 0}"], [
            "privacy.clip is now called privacy.max_grad_norm", "privacy.sigma is now called privacy.noise_multiplier"]),
        (["schedule.speeds.jitter=0"], ["schedule.speeds.jitter is now called schedule.client_speeds.jitter"]),
        (["schedule={name: kasync, arrivals: 5, dropouts: {rate: 0.1, rejoin: 1}}"], [
            "schedule.arrivals is now called schedule.k (kasync) or schedule.buffer_size (buffered)",
            "schedule.dropouts is now called schedule.client_dropout",
            "schedule.dropouts.rejoin is now called schedule.client_dropout.rejoin_after"]),
        (["algorithm=gradma", "algorithm.preset=reference"],
         ["algorithm.preset=reference is now called algorithm.preset=authors_code"]),
        (["batching.convolutions=unfold"], ["batching.convolutions=unfold is now called batching.convolutions=im2col"]),
    ],
)  # fmt: skip
def test_former_names_in_overrides(given, said):
    with pytest.raises(ConfigError) as refused:
        prepare("quickstart", given)
    assert str(refused.value).splitlines() == said


def test_former_names_in_a_file_and_in_what_it_extends(tmp_path: Path):
    (tmp_path / "below.yaml").write_text("local: {steps: 1, batch: 8}\nstore: {memory: 1MB}\n")
    (tmp_path / "above.yaml").write_text("extends: below.yaml\nrounds: 1\ndata: digits\n")
    with pytest.raises(ConfigError) as refused:
        prepare(tmp_path / "above.yaml")
    below = tmp_path / "below.yaml"
    assert str(refused.value).splitlines() == [
        f"{tmp_path / 'above.yaml'}: extends: {below}: local.batch is now called local.batch_size",
        f"{below}: store is now called client_state",
    ]


def test_a_run_folder_with_former_keys_is_refused_in_one_message(base, raysim_, tmp_path):
    config = {**base, "algorithm": "fedavg", "rounds": 1, "run_dir": str(tmp_path / "run")}
    raysim.run(config)
    path = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(path.read_text())
    content["local"]["batch"] = content["local"].pop("batch_size")
    path.write_text(yaml.safe_dump(content))
    for command in (["resume", path.parent, "rounds=2"], ["resume", path.parent, "--fork"]):
        said = raysim_(*command)
        assert_one_message(said)
        assert "local.batch is now called local.batch_size" in said.err


def test_a_claim_and_costs_with_former_keys_are_refused(tmp_path: Path):
    (tmp_path / "claims.yaml").write_text("claims: [{says: a}, {figure: {spent: bytes}}]\n")
    with pytest.raises(
        ConfigError, match=r"claims\.figure\.spent is now called claims\.figure\.x_axis"
    ):
        raysim.report("claims", config=str(tmp_path / "claims.yaml"))
    (tmp_path / "costs.yaml").write_text("driver: {deal: 1}\n")
    with pytest.raises(
        ConfigError, match=r"costs\.yaml: driver\.deal is now called driver\.dispatch"
    ):
        run_forecast("quickstart", costs=tmp_path / "costs.yaml")


def test_the_tables_name_what_is_refused():
    """No present name is itself a former one: a reader needs one step only."""
    for title, names in renamed.TABLES.items():
        assert names and not set(names) & set(names.values()), title


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("lr=0.1", "lr: unknown key; did you mean local.lr?"),
        ("batch_size=10", "did you mean local.batch_size or evaluate.batch_size?"),
        ("clip=1", "did you mean local.max_grad_norm or privacy.max_grad_norm?"),
        ("round=3", "did you mean 'rounds'?"),
        ("learning_rate=0.1", "learning_rate: unknown key; did you mean local.lr?"),
        ("num_clients=10", "num_clients: unknown key; did you mean partition.clients?"),
        ("groups.slow.shar=0.1", "groups.slow.shar: unknown key; did you mean 'share'?"),
        ("groups.slow.local.step=1", "groups.slow.local.step: unknown key; did you mean 'steps'?"),
    ],
)
def test_a_key_without_its_section_is_told_which_it_may_be(given, said):
    with pytest.raises(ConfigError) as refused:
        prepare("quickstart", [given])
    assert said in str(refused.value)


def test_names_of_other_libraries_lead_to_keys_that_exist():
    for key in explain.COMMON_NAMES.values():
        section, _, name = key.rpartition(".")
        assert key in Config.model_fields or key in explain.keys_with_sections(name), key
        assert not section or section in Config.model_fields


@pytest.mark.parametrize("key", ["loss", "loss_fn", "criterion"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_an_object_under_an_unknown_key_is_told_its_key(key, loss):
    with pytest.raises(ConfigError, match=f"^{key}: unknown key; did you mean task"):
        raysim.run("quickstart", **{key: loss})


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("simulate quickstart", "raysim simulate is now called raysim forecast"),
        ("match mine.yaml", "raysim match is now called raysim privacy-match"),
        ("theory quickstart", "raysim theory is now called raysim check-convergence"),
        ("track replay runs/r", "raysim track replay is now called raysim tracking sync"),
        ("report curves e --spent bytes", "--spent is now called --x-axis"),
        ("report table e --of=seed=0", "--of is now called --relative-to"),
        ("report table e --log", "--log is now called --to-mlflow"),
    ],
)
def test_former_commands_are_refused(line, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        refuse_former_command(line.split())


@pytest.mark.parametrize("line", ["", "run quickstart", "report sweep e --log-x", "run --of"])
def test_present_commands_pass(line):
    refuse_former_command(line.split())
