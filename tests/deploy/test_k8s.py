"""deploy/k8s as kubectl renders it: by Kubernetes' own schemas, and by what the pieces have to agree on."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from nybble.service.metrics import METRICS, PREFIX

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy/k8s"
GPU_OVERLAYS = ("gfx1151", "gfx1100", "gfx1201")
OVERLAYS = (*GPU_OVERLAYS, "cpu")
# The oldest that is still supported somewhere, and a late one.
KUBERNETES = ("1.31", "1.35")
NAME = {"app.kubernetes.io/name": "nybble"}
SCHEMA_OF_OPERATOR = {"ServiceMonitor"}

Object = dict[str, Any]


def kubectl_kustomize(folder: Path) -> list[Object]:
    command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def rendered(overlay: str) -> dict[str, Object]:
    """The objects of an overlay by kind, of which there is one each."""
    objects = kubectl_kustomize(K8S / "overlays" / overlay)
    by_kind = {o["kind"]: o for o in objects}
    assert len(by_kind) == len(objects)
    return by_kind


def pod(overlay: str) -> Object:
    spec: Object = rendered(overlay)["Deployment"]["spec"]["template"]["spec"]
    return spec


def container(overlay: str) -> Object:
    (only,) = pod(overlay)["containers"]
    return only


def test_every_overlay_is_tested() -> None:
    assert {p.name for p in (K8S / "overlays").iterdir()} == set(OVERLAYS)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_knows_every_field(overlay: str, version: str) -> None:
    import kubernetes_validate

    for kind, manifest in rendered(overlay).items():
        if kind not in SCHEMA_OF_OPERATOR:
            assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_schemas_would_find_a_wrong_field(overlay: str) -> None:
    import kubernetes_validate

    wrong = rendered(overlay)["Deployment"] | {
        "spec": {**rendered(overlay)["Deployment"]["spec"], "replica": 1}
    }
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pod_is_what_the_restricted_standard_asks_for(overlay: str) -> None:
    spec, own = pod(overlay), container(overlay)["securityContext"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert {next(iter(v.keys() - {"name"})) for v in spec["volumes"]} <= {"emptyDir", "persistentVolumeClaim"}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert own["readOnlyRootFilesystem"] is True
    assert "privileged" not in own


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pod_runs_as_the_user_of_the_image(overlay: str) -> None:
    (user,) = (
        line.split()[1]
        for line in (ROOT / "deploy/Dockerfile").read_text("utf-8").splitlines()
        if line.startswith("USER ")
    )
    security = pod(overlay)["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    # Its volumes begin empty and root's.
    assert security["fsGroup"] == security["runAsGroup"]
    assert {m["mountPath"] for m in container(overlay)["volumeMounts"]} == {"/cache", "/tmp"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_routes_that_the_service_has(overlay: str) -> None:
    from nybble.service.app import ROUTES

    routes = {path for method, path, *_ in ROUTES if method == "GET"}
    own = container(overlay)
    (port,) = own["ports"]
    for probe in ("startupProbe", "livenessProbe"):
        assert own[probe]["httpGet"] == {"path": "/livez", "port": port["name"]}
    assert own["readinessProbe"]["exec"]["command"][-1] == "/readyz"
    assert {"/livez", "/readyz", "/metrics"} <= routes


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_selects_the_same_pods(overlay: str) -> None:
    objects = rendered(overlay)
    assert objects["Deployment"]["spec"]["template"]["metadata"]["labels"] == NAME
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == NAME
    assert objects["Service"]["spec"]["selector"] == NAME
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == NAME
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == NAME


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_service_monitor_scrapes_the_service(overlay: str) -> None:
    monitor, service = rendered(overlay)["ServiceMonitor"], rendered(overlay)["Service"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "endpoints"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    assert endpoint == {"port": port["name"], "path": "/metrics", "interval": "15s"}
    # A scrape has no API key.
    assert {"name": "NYBBLE_METRICS_WITHOUT_KEY", "value": "true"} in container(overlay)["env"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_autoscaler_reads_a_metric_that_the_adapter_offers(overlay: str) -> None:
    autoscaler = rendered(overlay)["HorizontalPodAutoscaler"]["spec"]
    deployment = rendered(overlay)["Deployment"]
    target = autoscaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    # Applying the manifests again must not undo what the autoscaler did.
    assert "replicas" not in deployment["spec"]
    (metric,) = autoscaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    rules = yaml.safe_load((K8S / "components/metrics/prometheus-adapter.yaml").read_text("utf-8"))
    (rule,) = rules["rules"]["custom"]
    assert rule["seriesQuery"].startswith(name + "{")
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    assert name in {PREFIX + m.name for m in METRICS if m.kind == "gauge"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_network_policy_lets_requests_and_scrapes_in(overlay: str) -> None:
    policy = rendered(overlay)["NetworkPolicy"]["spec"]
    (ingress,) = policy["ingress"]
    (port,) = container(overlay)["ports"]
    assert ingress["ports"] == [{"port": port["name"], "protocol": "TCP"}]
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_network_policy_lets_names_be_found_and_models_be_fetched(overlay: str) -> None:
    rules = rendered(overlay)["NetworkPolicy"]["spec"]["egress"]
    assert not [rule for rule in rules if "to" in rule], "from anywhere: nodes have DNS caches of their own"
    ports = {(port["protocol"], port["port"]) for rule in rules for port in rule["ports"]}
    assert ports == {("UDP", 53), ("TCP", 53), ("TCP", 443)}


@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_a_gpu_overlay_asks_for_one_gpu_of_its_chip(overlay: str) -> None:
    assert container(overlay)["resources"]["limits"] == {"amd.com/gpu": 1}
    assert pod(overlay)["nodeSelector"] == {"nybble/arch": overlay}
    assert container(overlay)["image"].endswith(f"/nybble:{overlay}")
    assert all(gid > 0 for gid in pod(overlay)["securityContext"]["supplementalGroups"])
    # A node's only GPU is free once the old pod is gone.
    assert rendered(overlay)["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 0,
        "maxUnavailable": 1,
    }


def test_the_cpu_overlay_asks_for_no_gpu() -> None:
    assert "amd.com/gpu" not in container("cpu")["resources"]["limits"]
    assert "nodeSelector" not in pod("cpu")
    assert container("cpu")["image"].endswith("/nybble:cpu")


def test_every_chip_of_the_dockerfile_has_an_overlay() -> None:
    assert f"{'|'.join(sorted(GPU_OVERLAYS))})" in (ROOT / "deploy/Dockerfile").read_text("utf-8")


def test_the_cache_claim_replaces_the_empty_cache(tmp_path: Path) -> None:
    # kustomize takes folders by relative path alone.
    up = Path(*[".."] * (len(tmp_path.resolve().parts) - 1), *K8S.parts[1:])
    kustomization = {
        "resources": [str(up / "overlays/gfx1151")],
        "components": [str(up / "components/cache-claim")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    objects = {o["kind"]: o for o in kubectl_kustomize(tmp_path)}
    claim = objects["PersistentVolumeClaim"]["metadata"]["name"]
    volumes = objects["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": claim}} in volumes
