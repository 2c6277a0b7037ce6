"""What must hold of secrets in addresses: none is shown, none is written, and each is taken from
the environment."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

import raysim
from raysim.cli import jobs
from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import (
    SCHEMES,
    absolute_uri,
    encoded_uri,
    mask_secrets,
    redacted_uri,
    restored_uri,
)
from raysim.errors import ConfigError
from raysim.prepare.resolve import read_run_config
from raysim.runs.resume import reopen
from raysim.tracking import spool_sender as tracking
from raysim.tracking.late_sending import replay_spool
from raysim.tracking.mlflow_process.run_client import folder_of_tracked_run
from raysim.tracking.tracker import Tracker

SECRETS = ("pass1", "pass2", "t0ken")

ADDRESSES = {
    "http://u:pass1@h:5000": "http://u:***@h:5000",
    "https://u:pass1@pass2@h/api": "https://u:***@h/api",
    "http://t0ken@h:5000": "http://***@h:5000",
    "http://h:5000/?api_key=t0ken&x=1": "http://h:5000/?api_key=***&x=1",
    "https://h/?aws_secret_access_key=t0ken/+&region=eu": "https://h/?aws_secret_access_key=***&region=eu",
    "postgresql://u:pass1@h/db": "postgresql://u:***@h/db",
    "postgresql://u@h/db": "postgresql://u@h/db",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Du%3BPWD%3Dpass1%3Bx%3D1": (
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Du%3BPWD%3D***%3Bx%3D1"
    ),
    "mysql+pymysql://u:pass1@h/db?ssl_ca=/x&password=pass2": "mysql+pymysql://u:***@h/db?ssl_ca=/x&password=***",
    "databricks://work": "databricks://work",
    "databricks": "databricks",
    "sqlite:////home/me@work/mlflow.db": "sqlite:////home/me@work/mlflow.db",
    "http://h:5000": "http://h:5000",
}


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without credentials, and none in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("URI", "USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name in ("TOKEN", "CONFIG_FILE", "CONFIG_PROFILE"):
        monkeypatch.delenv(f"DATABRICKS_{name}", raising=False)


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_secret_is_shown_or_written(address, monkeypatch):
    """And what is written is the address, once the environment has it."""
    assert redacted_uri(address) == ADDRESSES[address]
    assert redacted_uri(redacted_uri(address)) == redacted_uri(address)
    shown = mask_secrets(f"cannot reach '{address}', or {address}?")
    assert not [secret for secret in SECRETS if secret in shown], shown
    if "***" in redacted_uri(address):
        with pytest.raises(ConfigError, match=r"tracking\.uri: .* needs credentials") as refused:
            restored_uri(redacted_uri(address))
        assert not [secret for secret in SECRETS if secret in str(refused.value)]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert restored_uri(redacted_uri(address)) == address


@pytest.mark.parametrize(
    "address",
    ["http://u:pass1/x@h:5000", "http://u:12/pass1@h", "http://u:pass1#x@h", "http://u:p ass1@h"],
)
def test_an_address_whose_password_cannot_be_told_is_refused(address):
    assert " " in address or "pass1" not in mask_secrets(address)
    with pytest.raises(ConfigError, match="percent-encode") as refused:
        absolute_uri(address)
    assert "pass1" not in str(refused.value)


def test_an_unknown_scheme_is_refused_with_addresses_that_work():
    with pytest.raises(ConfigError, match="knows no 'foo://'; use one of") as refused:
        absolute_uri("foo://bar")
    advised = str(refused.value).partition("use one of ")[2].split(", ")
    schemes = {address.partition("://")[0] for address in advised if absolute_uri(address)}
    assert schemes == SCHEMES - {"file"}


def test_an_at_within_a_password_is_encoded():
    assert encoded_uri("http://u:p@ss@h:5000") == "http://u:p%40ss@h:5000"


@pytest.mark.parametrize("names", [("USERNAME", "PASSWORD"), ("TOKEN",)])
def test_credentials_of_mlflow_stand_in_for_those_of_an_address(names, monkeypatch):
    for name in names:
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "pass1")
    assert restored_uri("http://u:***@h:5000") == "http://h:5000"
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        restored_uri("postgresql://u:***@h/db")


def test_credentials_from_mlflows_own_file(tmp_path):
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\nmlflow_tracking_username = u\n")
    assert restored_uri("http://u:***@h:5000") == "http://h:5000"


def test_a_folder_holds_no_secret_and_is_its_owners(base, tmp_path, monkeypatch):
    """With a server that is dead: whatever is spooled and kept stays in the folder."""
    monkeypatch.setitem(tracking.DRAIN_TIMEOUT_S, "down", 0.1)
    address = "http://alice:pass1@127.0.0.1:9"
    run_dir = tmp_path / "new" / "run"
    config = {
        **base,
        "rounds": 1,
        "algorithm": "fedavg",
        "run_dir": str(run_dir),
        "checkpoint": {"every": 1},
    }
    config["tracking"] = {"uri": address, "required": False}
    raysim.run(config)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "spool.jsonl", "history.csv"} <= {path.name for path in written}
    assert not [path for path in written if b"pass1" in path.read_bytes()]
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD"):
        replay_spool(run_dir)
    plan, *_ = reopen(run_dir, {"rounds": 2})
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD"):
        Tracker(plan.config.tracking, tmp_path / "other")
    plan, *_ = reopen(run_dir, {"rounds": 2, "tracking.uri": address})
    assert plan.config.tracking.uri == address


def test_a_job_is_refused_with_a_password(tmp_path):
    (tmp_path / "run.yaml").write_text("rounds: 1\ndata: digits\nalgorithm: fedavg\n")
    for command in (["run", "run.yaml"], ["resume", "/runs/x"]):
        with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
            jobs.checked_command([*command, "tracking.uri=http://u:pass1@h:5000"], tmp_path)
        assert "pass1" not in str(refused.value)


# -- links and places ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["lock", "spool.jsonl", "spool.sent", "history.csv", "checkpoints", "rows"]
)
def test_a_link_in_a_runs_folder_is_refused(base, tmp_path, name):
    """What it leads to stays as it was."""
    (tmp_path / "run").mkdir()
    victim = tmp_path / "victim"
    if name in ("checkpoints", "rows"):
        victim.mkdir()
    else:
        victim.write_text("precious")
    (tmp_path / "run" / name).symlink_to(victim)
    # A name of what a run replaces is refused before anything looks for links.
    with pytest.raises(ConfigError, match=f"run/{name}(: is a symbolic link| is there)"):
        raysim.run({**base, "rounds": 1, "algorithm": "fedavg"})
    assert list(victim.iterdir()) == [] if victim.is_dir() else victim.read_text() == "precious"
    assert (tmp_path / "run" / name).is_symlink()


@pytest.mark.parametrize("name", ["../../../x", "a/../../b", "..", "", "/", "a\nb"])
def test_an_experiment_cannot_lead_out_of_the_folder_of_runs(base, name):
    with pytest.raises(ConfigError, match=r"tracking\.experiment"):
        raysim.run({**base, "rounds": 1, "algorithm": "fedavg", "tracking": {"experiment": name}})


def test_a_name_of_databricks_is_a_folder_of_runs(base, here):
    """Its names begin with a slash."""
    assert Tracking(experiment="/Users/me/x").folder == "Users/me/x"
    config = {**base, "rounds": 1, "algorithm": "fedavg", "run_dir": None, "name": "../up"}
    done = raysim.run(config, {"tracking.experiment": "/Users/me/x"})
    assert done.run_dir.parent == here / "runs/Users/me/x"
    assert done.run_dir.name.startswith(".._up-")
    assert (
        json.loads((done.run_dir / "spool.jsonl").read_text().splitlines()[0])["experiment"]
        == "/Users/me/x"
    )


@pytest.mark.parametrize("folder", ["100%", "what?", "a#b"])
def test_a_database_in_a_folder_that_is_no_address_is_refused(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    with pytest.raises(ConfigError, match=r"tracking\.uri: the path .* has a"):
        absolute_uri("sqlite:///mlflow.db")


def test_a_database_in_a_folder_with_a_quote_works(base, tmp_path, monkeypatch):
    (tmp_path / 'it\'s "mine"').mkdir()
    monkeypatch.chdir(tmp_path / 'it\'s "mine"')
    config = {**base, "rounds": 1, "algorithm": "fedavg", "run_dir": None}
    done = raysim.run(config, tracking={"uri": "sqlite:///ml'flow.db", "experiment": "it's"})
    assert (
        Path(folder_of_tracked_run(done.run_id, "sqlite:///ml'flow.db")) == done.run_dir.absolute()
    )
    kept = Path("mlartifacts", done.run_id, "artifacts", "history.csv")
    assert kept.is_file()


def test_mlflows_own_variables_count_where_the_configuration_has_nothing(monkeypatch, caplog):
    """As MLflow's users expect; a note says so."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@tracking:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    with caplog.at_level("INFO", logger="raysim.notes"):
        tracking = read_run_config({"rounds": 1})["tracking"]
    assert tracking == {"uri": "http://me:secret@tracking:5000", "experiment": "mine"}
    assert "$MLFLOW_TRACKING_URI" in caplog.text and "secret" not in caplog.text
    given = {"uri": "sqlite:///mine.db"}
    tracking = read_run_config({"rounds": 1, "tracking": given})["tracking"]
    assert tracking == given | {"experiment": "mine"}
    read = read_run_config({"rounds": 1}, ["tracking.experiment=other"])
    assert read["tracking"]["experiment"] == "other"


def test_an_unusable_variable_is_named(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(ConfigError, match=r"is a folder.*\$MLFLOW_TRACKING_URI"):
        read_run_config({"rounds": 1})


def test_an_unusable_variable_stops_no_run_that_is_not_tracked(base, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    config = {**base, "rounds": 1, "algorithm": "fedavg"}
    del config["tracking"]
    assert raysim.run(config, tracking=False).rounds == 1


def test_a_word_within_a_name_hides_no_value():
    shown = "model.n_tokens=64 max_tokens=3 data.tokenizer=bpe secretary=1"
    assert mask_secrets(shown) == shown
    secrets = "mlflow_token=64 password1=64 client_secret_value=64 client.secret_key=64 --api-key=64 credentials=64"
    assert mask_secrets(secrets) == secrets.replace("64", "***")


def test_a_password_before_the_profile_of_databricks_is_not_shown():
    address = "databricks://u:t0ken@work"
    assert redacted_uri(address) == mask_secrets(address) == "databricks://work"
