"""No test reads a data set, a cache or a setting of the machine where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from support.idx_files import write_idx
from support.isolation import FOREIGN_FOLDERS

TESTS = Path(__file__).parent
MACHINE_DEPENDENT = """
import os
import sqlite3
from pathlib import Path

import pytest

HOME = Path(r"{home}")


def test_that_opens_a_file_of_the_home():
    open(HOME / "notes.txt").close()


def test_that_lists_the_home():
    os.listdir(HOME)


def test_that_opens_a_data_base_of_the_home():
    with pytest.raises(sqlite3.OperationalError):
        sqlite3.connect(HOME / "no" / "folder.db")


def test_that_opens_a_run_of_the_checkout():
    with pytest.raises(FileNotFoundError):
        open(Path(r"{checkout}") / "runs" / "no such run" / "config.yaml")


def test_that_finds_the_home():
    assert Path("~/notes.txt").expanduser().read_text()


def test_that_reads_a_setting():
    assert os.environ["MLFLOW_TRACKING_URI"]


@pytest.mark.parametrize("root", [None, r"{home}/.cache/raysim"])
def test_that_loads_a_data_set(root):
    from raysim.config.sections.data import Data
    from raysim.data import load_dataset

    assert len(load_dataset(Data(name="mnist", root=root)).y) == 20


def test_that_uses_its_own_folders(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    Path("~/notes.txt").expanduser().write_text("mine")
    Path(r"{checkout}/pyproject.toml").read_text()
    assert tmp_path.joinpath("notes.txt").read_text() == "mine"
"""


def write_mnist(folder: Path) -> None:
    """Write twenty images for training and twenty for testing in the format of MNIST."""
    for half in ("train", "t10k"):
        write_idx(folder / f"{half}-images-idx3-ubyte", np.zeros((20, 28, 28)))
        write_idx(folder / f"{half}-labels-idx1-ubyte", np.arange(20) % 10)


def test_tests_that_depend_on_the_machine_fail_on_it(tmp_path: Path):
    """Here the home holds what they look for, so that they would pass."""
    home, tests = tmp_path / "home", tmp_path / "tests"
    write_mnist(home / ".cache" / "raysim" / "MNIST" / "raw")
    (home / "notes.txt").write_text("of the machine")
    tests.mkdir()
    code = MACHINE_DEPENDENT.format(home=home, checkout=TESTS.parent)
    (tests / "test_machine_dependent.py").write_text(code)
    environment = {k: v for k, v in os.environ.items() if k != FOREIGN_FOLDERS} | {
        "HOME": str(home),
        "RAYSIM_DATA": str(home / ".cache" / "raysim"),
        "MLFLOW_TRACKING_URI": "sqlite:////of/the/machine.db",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }

    def outcomes(*plugins: str) -> tuple[int, int]:
        """Return the numbers of tests that pass, and of those that fail in whatever phase."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugins]
        said = subprocess.run(
            [*command, "--junit-xml=found.xml", "."],
            cwd=tests,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert said.returncode in (0, 1), said.stdout + said.stderr
        cases = ElementTree.parse(tests / "found.xml").iter("testcase")
        failed = [len(case) > 0 for case in cases]
        return failed.count(False), failed.count(True)

    assert outcomes() == (9, 0)
    assert outcomes("-p", "support.isolation") == (1, 8)
