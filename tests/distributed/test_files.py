"""What must hold of the files that start clusters: schemas, tokens, one version of Ray, and SLURM's
script at work."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import until

from raysim.runs.resume import resume

pytestmark = pytest.mark.ray

FOLDER = Path(__file__).resolve().parents[2] / "cluster"


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def clusters() -> Iterator[dict[str, Any]]:
    """What Kubernetes' Ray clusters are to be."""
    for _, document in documents():
        if document.get("kind") in ("RayCluster", "RayJob"):
            yield document["spec"].get("rayClusterSpec", document["spec"])


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_ray_up_takes_it(name):
    jsonschema, ray = pytest.importorskip("jsonschema"), pytest.importorskip("ray")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    config = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    jsonschema.validate(config, schema)
    assert (
        config["provider"]["type"] == name
        and config["head_node_type"] in config["available_node_types"]
    )
    starts = [
        c
        for key in ("head", "worker")
        for c in config[f"{key}_start_ray_commands"]
        if "ray start" in c
    ]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "/home/ray/.ray/auth_token" in config["file_mounts"]


def test_kubernetes_ray_clusters_ask_for_a_token():
    found = list(clusters())
    assert len(found) == 2 and found[0] == found[1]
    assert all(spec["authOptions"] == {"mode": "token"} for spec in found)
    kinds = [
        document["kind"]
        for name, document in documents()
        if name in ("kuberay.yaml", "rayjob.yaml")
    ]
    assert sorted(kinds) == [
        "Deployment",
        "PersistentVolumeClaim",
        "RayCluster",
        "RayJob",
        "Service",
    ]
    for spec in found:
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
        for group in groups:
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]


def _manifests() -> list[Any]:
    found = [(name, d) for name, d in documents() if name in ("kuberay.yaml", "rayjob.yaml")]
    return [pytest.param(document, id=f"{name}-{document['kind']}") for name, document in found]


@pytest.mark.parametrize("document", _manifests())
def test_kubernetes_takes_it(document):
    """Kubernetes' own kinds, and the pods of Ray's, by Kubernetes' published schema; the rest by
    KubeRay's types."""
    kubernetes, jsonschema = (
        pytest.importorskip("kubernetes_validate"),
        pytest.importorskip("jsonschema"),
    )
    if document["apiVersion"] != "ray.io/v1":
        kubernetes.validate(document, "1.29", strict=True)
        return
    jsonschema.validate(document, json.loads(Path(__file__).with_name("kuberay.json").read_text()))
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    for i, group in enumerate([spec["headGroupSpec"], *spec["workerGroupSpecs"]]):
        about = {"name": f"group-{i}", **group["template"].get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"], "metadata": about}
        kubernetes.validate(pod, "1.29", strict=True)


@pytest.mark.parametrize(
    "where", [("spec",), ("spec", "headGroupSpec"), ("spec", "headGroupSpec", "template", "spec")]
)
def test_kubernetes_does_not_take_an_unknown_field(where):
    pytest.importorskip("kubernetes_validate")
    (document,) = (d for _, d in documents() if d.get("kind") == "RayCluster")
    document = copy.deepcopy(document)
    place = document
    for key in where:
        place = place[key]
    place["replicass"] = 1
    with pytest.raises(Exception, match="replicass"):
        test_kubernetes_takes_it(document)


def test_one_version_of_ray():
    versions = set(
        re.findall(
            r"rayproject/ray:([\d.]+)-",
            "".join(p.read_text() for p in FOLDER.iterdir() if p.suffix != ".png"),
        )
    )
    versions |= {spec["rayVersion"] for spec in clusters()}
    pyproject = (FOLDER.parent / "pyproject.toml").read_text()
    (low,) = re.findall(r'"ray\[[^\]]*\]>=([\d.]+),', pyproject)
    assert len(versions) == 1 and versions.pop().startswith(low)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_sound(path):
    assert os.access(path, os.X_OK)
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    said = subprocess.run(
        [shellcheck or "bash", *([] if shellcheck else ["-n"]), path],
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "RAY_AUTH_MODE=token" in path.read_text()


SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """SLURM's commands, which do everything on this machine, as if it were two nodes."""
    tools = tmp_path / "tools"
    tools.mkdir()
    both = "#!/usr/bin/env bash\nprintf 'here\\nthere\\n'\n"
    for name, text in (("srun", SRUN), ("scontrol", both)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "raysim").write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m raysim "$@"\n')
    (tools / "raysim").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER.parent),
        "RAY_raylet_start_wait_time_s": "180",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "here",
    }


def config(folder: Path, rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "data": "digits",
        "partition": {"name": "iid", "clients": 10},
        "model": {"name": "mlp", "hidden": [8]},
        "algorithm": "fedavg",
        "local": {"steps": 2, "batch_size": 8, "lr": 0.05},
        "schedule": {"cohort": 4},
        "resources": {"executor": "ray", "actors": 1, "cpus": 0.5},
        "run_dir": str(folder / "run"),
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
    }


@pytest.mark.long
def test_slurm_runs_a_command_and_its_time_limit_ends_it_in_order(slurm, tmp_path):
    on_both = {"executor": "ray", "actors": os.cpu_count() + 1, "cpus": 1}
    run = {**config(tmp_path, rounds=100_000), "resources": on_both}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(run))
    with (tmp_path / "said.txt").open("w") as said:
        job = subprocess.Popen(
            [FOLDER / "slurm.sh", "run", "mine.yaml"],
            env=slurm, cwd=tmp_path, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    try:
        until(
            lambda: "round 1" in (tmp_path / "said.txt").read_text() or job.poll() is not None,
            120,
            "nothing begins",
        )
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(100) == 143, (tmp_path / "said.txt").read_text()
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait(30)
    text = (tmp_path / "said.txt").read_text()
    done = int(re.findall(r"continues after round (\d+)", text)[0])
    again = resume(tmp_path / "run", {"rounds": done + 1, "resources.executor": "inline"})
    assert again.rounds == done + 1
