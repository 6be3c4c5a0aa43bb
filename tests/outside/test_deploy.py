"""What `deploy/` holds: checked by linters, schemas and the programs that read it, where they are.

Linters and schemas are in an environment of their own (`make test-outside` makes it). Images
are built nowhere here: no test machine has a builder.
"""

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from os.path import normpath
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from qllm.errors import pip_install
from qllm.ray.settings import config_of, settings_of
from qllm.server.config import ServerConfig, load_config
from qllm.server.ops import probes
from qllm.server.ops.run import GOODBYE_S
from tests.support.files import ROOT

DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".venv" / "deploy" / "bin"
GRACE_S = (
    ServerConfig.model_fields["shutdown_delay_s"].default
    + ServerConfig.model_fields["drain_s"].default
    + GOODBYE_S
)
"""What a server takes to end, from SIGTERM on."""

needs_tools = pytest.mark.skipif(
    not TOOLS.exists(), reason=f"no linters in {TOOLS}: `make test-outside` installs them"
)


def tool(name: str, *args: Any) -> subprocess.CompletedProcess[str]:
    command = [str(TOOLS / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def documents(*files: Path) -> list[dict[str, Any]]:
    return [item for file in files for item in yaml.safe_load_all(file.read_text())]


def stages(text: str) -> dict[str, list[str]]:
    """Lines of a Dockerfile by stage, in order."""
    found: dict[str, list[str]] = {}
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("FROM "):
            name = line.split()[-1]
            found[name] = [line]
        elif line and not line.startswith("#"):
            found[name].append(line)
    return found


DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


@needs_tools
def test_the_dockerfile_has_no_lint(tmp_path: Path) -> None:
    done = tool("hadolint", DEPLOY / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.replace("WORKDIR /src", "RUN cd src"))
    assert "DL3003" in tool("hadolint", worse).stdout


def test_the_image_that_serves_is_small_and_runs_without_privileges() -> None:
    of = stages(DOCKERFILE)
    assert list(of)[-1] == "serve"  # what `docker build` makes without a target
    for name in ("ray", "serve"):
        assert of[name][0] == f"FROM base AS {name}"
    assert "USER 10001" in of["base"]
    assert "slim" in of["base"][0]
    assert "slim" not in of["build"][0]  # it has the compiler
    assert not any(line.startswith("USER") for name in ("ray", "serve") for line in of[name])


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M)
        for source in line.split()[:-1]
    ]
    assert len(copied) > 7
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in kept, source
    for lock in re.findall(r"--requirement (\S+)", DOCKERFILE):
        assert (ROOT / lock).is_file()


def test_the_build_has_what_setup_reads() -> None:
    """An install from the copied files alone would fail late, in a builder that is not here."""
    text = (ROOT / "setup.py").read_text() + (ROOT / "pyproject.toml").read_text()
    copied = (DEPLOY / "Dockerfile.dockerignore").read_text()
    for name in ("README.md", "LICENSE", "policies", "docs"):
        assert name in text
        assert f"!{name}" in copied


@needs_tools
def test_compose_is_of_its_schema(tmp_path: Path) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    done = tool("check-jsonschema", *schema, DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout
    worse = tmp_path / "compose.yaml"
    worse.write_text((DEPLOY / "compose.yaml").read_text().replace("cap_drop", "cap_drops"))
    assert tool("check-jsonschema", *schema, worse).returncode != 0


def test_compose_mounts_what_is_there_and_waits_for_the_drain() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    services = compose["services"]
    mounts = [v.split(":") for s in services.values() for v in s["volumes"]]
    for source, target, *_ in mounts:
        if source.startswith("."):
            assert (DEPLOY / source).is_file(), source
            assert target.startswith("/")
        else:
            assert source in compose["volumes"]
    assert int(services["qllm"]["stop_grace_period"].removesuffix("s")) >= GRACE_S
    load_config(None, {k: "tiny" for k in services["qllm"]["environment"] if "MODEL" in k}, {})
    unknown = set(services["qllm"]["environment"]) - settings_names()
    assert unknown == set()
    assert all(":" in s["image"] for name, s in services.items() if name != "qllm")


def settings_names() -> set[str]:
    return {f"QLLM_{name.upper()}" for name in ServerConfig.model_fields}


def test_prometheus_and_grafana_read_what_compose_gives_them() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    (prometheus,) = documents(DEPLOY / "prometheus.yml")
    inside = {v.split(":")[1] for v in compose["services"]["prometheus"]["volumes"]}
    for rules in prometheus["rule_files"]:
        assert normpath(f"/etc/prometheus/{rules}") in inside
        assert (DEPLOY / rules).is_file()  # in a checkout too, as promtool looks for it
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"qllm:{ServerConfig.model_fields['port'].default}"
    (source,) = documents(DEPLOY / "grafana" / "datasources.yaml")[0]["datasources"]
    assert source["url"].split("/")[2].split(":")[0] in compose["services"]
    (provider,) = documents(DEPLOY / "grafana" / "dashboards.yaml")[0]["providers"]
    folder = provider["options"]["path"]
    inside = {v.split(":")[1] for v in compose["services"]["grafana"]["volumes"]}
    assert any(fnmatch(path, f"{folder}/*.json") for path in inside)
    assert json.loads((ROOT / "docs" / "grafana.json").read_text())["title"] == "qllm"


# -- systemd


def unit() -> dict[str, str]:
    lines = (DEPLOY / "qllm.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_the_unit_is_one(tmp_path: Path) -> None:
    text = (DEPLOY / "qllm.service").read_text()
    here = text.replace("/opt/qllm/bin/qllm", sys.executable)  # it looks whether that can be run
    for name, changed, is_right in (
        ("qllm.service", here, True),
        ("worse.service", here.replace("KillMode=mixed", "KillMode=gently"), False),
    ):
        (tmp_path / name).write_text(changed)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = [line for line in done.stderr.splitlines() if name in line]
        assert (said == []) is is_right, done.stderr


def test_systemd_signals_the_server_alone_and_waits_for_it() -> None:
    found = unit()
    assert found["KillMode"] == "mixed"  # else the engine would end before its requests
    assert int(found["TimeoutStopSec"]) > GRACE_S
    names = {pair.partition("=")[0] for pair in found["Environment"].split()}
    assert {name for name in names if name.startswith("QLLM_")} <= settings_names()


# -- Kubernetes


def built(folder: str) -> list[dict[str, Any]]:
    """Resources of a kustomization: as kubectl builds them, or as they are listed."""
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize", str(DEPLOY / folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return list(yaml.safe_load_all(done.stdout))
    (kustomization,) = documents(DEPLOY / folder / "kustomization.yaml")
    return documents(*(DEPLOY / folder / name for name in kustomization["resources"]))


def validate(resources: list[dict[str, Any]], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "resources.yaml"
    file.write_text(yaml.safe_dump_all(resources))
    return tool("kubernetes-validate", "--strict", file)


@needs_tools
def test_resources_are_of_their_schemas(tmp_path: Path) -> None:
    resources = built("kubernetes")
    assert {"Deployment", "Service", "PersistentVolumeClaim"} <= {r["kind"] for r in resources}
    done = validate(resources, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for resource in resources:
        if resource["kind"] == "Deployment":
            resource["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    assert validate(resources, tmp_path).returncode != 0


def deployment() -> Any:
    return next(r for r in built("kubernetes") if r["kind"] == "Deployment")["spec"]["template"]


def test_probes_ask_for_what_the_server_has() -> None:
    routes = probes.routes(SimpleNamespace(engine=SimpleNamespace(fleet=None))).routes  # type: ignore[arg-type]
    paths = {route.path for route in routes}  # type: ignore[attr-defined]
    (container,) = deployment()["spec"]["containers"]
    asked = {n: container[f"{n}Probe"]["httpGet"] for n in ("startup", "liveness", "readiness")}
    assert {name: get["path"] for name, get in asked.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert {get["path"] for get in asked.values()} <= paths
    (port,) = container["ports"]
    assert {get["port"] for get in asked.values()} == {port["name"]}
    assert port["containerPort"] == ServerConfig.model_fields["port"].default


def test_a_pod_is_left_the_time_to_drain_and_no_rights() -> None:
    pod = deployment()["spec"]
    assert pod["terminationGracePeriodSeconds"] > GRACE_S
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_settings_of_the_pod_are_the_servers() -> None:
    (kustomization,) = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    (config,) = kustomization["configMapGenerator"]
    environ = dict(pair.split("=", 1) for pair in config["literals"])
    assert load_config(None, environ, {}).host == "0.0.0.0"
    (container,) = deployment()["spec"]["containers"]
    assert container["envFrom"][0]["configMapRef"]["name"].startswith(config["name"])


# -- Ray


def ray_service() -> Any:
    (found,) = built("ray")
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    return found["spec"]


def test_both_ways_to_serve_on_ray_say_the_same_and_it_is_taken() -> None:
    (serve,) = documents(DEPLOY / "ray" / "serve.yaml")
    assert yaml.safe_load(ray_service()["serveConfigV2"]) == serve
    (application,) = serve["applications"]
    assert application["import_path"] == "qllm.ray:app"
    settings = settings_of(config_of(application["args"], {}))
    workers = ray_service()["rayClusterConfig"]["workerGroupSpecs"]
    assert settings.max_replicas <= sum(group["maxReplicas"] for group in workers)


def test_the_version_of_ray_is_the_one_that_is_pinned() -> None:
    version = ray_service()["rayClusterConfig"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "locks" / "ray.txt").read_text().splitlines()
    assert f"'ray[data,serve]=={version}'" in pip_install("ray")


@needs_tools
def test_pods_of_ray_are_of_their_schema(tmp_path: Path) -> None:
    """The schema of a RayService itself is on no index that is asked here."""
    cluster = ray_service()["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        for group in groups
    ]
    done = validate(pods, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["spec"].get("volumes", ())}
        known = {r["metadata"]["name"] for r in documents(DEPLOY / "kubernetes" / "models.yaml")}
        assert claims <= known
