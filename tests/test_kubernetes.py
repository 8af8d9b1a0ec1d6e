"""The files for a cluster agree with each other and with Prefect. If `kubernetes-validate` is installed, they are also
checked against the schemas of Kubernetes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.orchestration.local_server import POOLS, prefect_file
from flows.roles.node import places_of

FOLDER = Path(__file__).parents[1] / "docs/kubernetes"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
A_VARIABLE = re.compile(r"\{\{ (\w+) \}\}")


def manifests() -> list[dict[str, Any]]:
    return [it for file in sorted(FOLDER.glob("*.yaml")) for it in yaml.safe_load_all(file.read_text())]


def within(value: Any) -> Iterator[Any]:
    """Yield a value and everything inside it."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for it in inner:
        yield from within(it)


def pod_of(manifest: dict[str, Any]) -> dict[str, Any] | None:
    return manifest.get("spec", {}).get("template", {}).get("spec")


def template(pool: str) -> dict[str, Any]:
    return json.loads((FOLDER / "pools" / f"{pool}.json").read_text())


def filled(pool: str, **variables: Any) -> dict[str, Any]:
    """Return the job that a pool makes with its default variables, without what the worker adds."""
    defaults = {name: it.get("default") for name, it in template(pool)["variables"]["properties"].items()}
    values = {
        **defaults,
        "command": ["prefect", "flow-run", "execute"],
        "env": [{"name": "A", "value": "1"}],
        **variables,
    }

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: fill(it) for name, it in value.items()}
        if isinstance(value, list):
            return [fill(it) for it in value]
        whole = A_VARIABLE.fullmatch(value) if isinstance(value, str) else None
        if whole:
            return values[whole[1]]
        return A_VARIABLE.sub(lambda it: str(values[it[1]]), value) if isinstance(value, str) else value

    return fill(template(pool)["job_configuration"]["job_manifest"])


def test_there_is_a_pool_and_a_worker_for_all_that_is_deployed():
    assert {it.stem for it in (FOLDER / "pools").iterdir()} == set(POOLS)
    deployed = {it["work_pool"]["name"] for it in yaml.safe_load(prefect_file().read_text())["deployments"]}
    assert deployed == set(POOLS)
    commands = [c.get("command", []) for it in manifests() if (pod := pod_of(it)) for c in pod["containers"]]
    assert {c[c.index("--pool") + 1] for c in commands if "--pool" in c} == set(POOLS)
    (setup,) = [it for it in manifests() if it["metadata"].get("generateName") == "setup-"]
    assert f"for pool in {' '.join(POOLS)}; do" in setup["spec"]["template"]["spec"]["containers"][0]["args"][0]


def test_no_manifest_holds_a_secret_and_every_name_in_them_is_defined():
    assert "Secret" not in {it["kind"] for it in manifests()}
    everything = [it for whole in [*manifests(), *map(template, POOLS)] for it in within(whole) if isinstance(it, dict)]
    secrets = {it["secretRef"]["name"] for it in everything if "secretRef" in it}
    secrets |= {it["secretKeyRef"]["name"] for it in everything if "secretKeyRef" in it}
    page = (FOLDER.parent / "kubernetes.md").read_text()
    assert secrets == set(re.findall(r"create secret generic ([\w-]+)", page)) == {"tba-postgres", "tba-store"}
    maps = {it["configMapRef"]["name"] for it in everything if "configMapRef" in it}
    assert maps == {it["metadata"]["name"] for it in manifests() if it["kind"] == "ConfigMap"}
    accounts = {pod["serviceAccountName"] for it in manifests() if "serviceAccountName" in (pod := pod_of(it) or {})}
    assert accounts == {it["metadata"]["name"] for it in manifests() if it["kind"] == "ServiceAccount"}
    hosts = {
        host for it in within(manifests()) if isinstance(it, str) for host in re.findall(r"([\w-]+)\.tba\.svc", it)
    }
    assert hosts == {it["metadata"]["name"] for it in manifests() if it["kind"] == "Service"}


@pytest.mark.parametrize("pool", POOLS)
def test_a_pools_template_names_what_it_declares_and_runs_a_job_once(pool: str):
    whole = template(pool)
    used = set(A_VARIABLE.findall(json.dumps(whole["job_configuration"])))
    assert used == set(whole["variables"]["properties"])
    job = filled(pool)["spec"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (None if pool == "tba" else "1")
    images = {it["image"] for it in within([*manifests(), filled(pool)]) if isinstance(it, dict) and "image" in it}
    targets = {f"REGISTRY/tba:{name}" for name in re.findall(r"^FROM base AS (\w+)", DOCKERFILE, re.MULTILINE)}
    assert images <= targets | {"postgres:15"}


def test_each_pod_of_the_trainer_starts_its_own_ranks_and_as_many_as_it_has_gpus():
    (job,) = [it["spec"] for it in manifests() if it["metadata"].get("generateName") == "trainer-"]
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
    (container,) = job["template"]["spec"]["containers"]
    python, isolated, m, module, run, *options = container["command"]
    assert [python, isolated, m, module] == ["python", "-P", "-m", "flows.roles.node"] and run.startswith("s3://")
    given = {
        name: value.replace("$(JOB_COMPLETION_INDEX)", "1") for name, _, value in (it.partition("=") for it in options)
    }
    assert int(given["--nodes"]) == job["completions"] == job["parallelism"]
    assert given["--ranks"] == container["resources"]["limits"]["nvidia.com/gpu"]
    ranks = int(given["--ranks"])
    places = places_of(int(given["--node"]), int(given["--nodes"]), ranks)
    assert [place["RANK"] for place in places] == [str(ranks + it) for it in range(ranks)]


def test_pods_that_share_the_cache_of_a_node_find_the_folder_that_is_made_for_them():
    (made,) = [pod for it in manifests() if it["kind"] == "DaemonSet" and (pod := pod_of(it))]
    ((volume,), (making,)) = made["volumes"], made["initContainers"]
    (mount,) = making["volumeMounts"]
    (trainer,) = [pod for it in manifests() if it["metadata"].get("generateName") == "trainer-" and (pod := pod_of(it))]
    (cache,) = [it for it in trainer["volumes"] if it["name"] == "cache"]
    assert cache["hostPath"] == {"path": volume["hostPath"]["path"], "type": "Directory"}
    assert making["command"] == ["chown", str(trainer["securityContext"]["runAsUser"]), mount["mountPath"]]
    page = (FOLDER.parent / "kubernetes.md").read_text()
    assert json.dumps(cache) in page
    shared = [filled(pool, cache=cache)["spec"]["template"]["spec"] for pool in POOLS]
    assert all(cache in pod["volumes"] for pod in shared)


def test_an_image_gets_what_its_commands_need():
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    for name in copied:
        assert (FOLDER.parents[1] / name).exists() and f"!{name}" in ignored
    for name in re.findall(r"-[rc] (\S+)", DOCKERFILE):
        assert any(name == it or name.startswith(f"{it}/") for it in copied)
    assert str(prefect_file().name) in copied


def test_kubernetes_takes_every_manifest_and_the_job_of_each_pool():
    """This test runs only after `pip install kubernetes-validate`, which installs 100 MB of schemas."""
    validator = pytest.importorskip("kubernetes_validate")
    jobs = list(map(filled, POOLS))
    for job in jobs:  # prefect-kubernetes requires these names here, and Kubernetes ignores them
        assert {job["spec"]["template"]["spec"].pop(name) for name in ("completions", "parallelism")} == {1}
    for manifest in [*manifests(), *jobs]:
        named = {**manifest, "metadata": {"name": "x", **manifest["metadata"]}}
        for version in ("1.25", "1.37"):
            validator.validate(named, version, strict=True)
