"""deploy/compose.yaml: by the Compose Specification's schema, and by what it may and may not ask of a host."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from nybble.service.settings import ENV_PREFIX, Settings

pytestmark = pytest.mark.deploy

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TEXT = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NYBBLE = ("nybble", "nybble-cpu")
# What `nybble doctor --env` writes.
OF_THE_HOST = {"COMPOSE_PROFILES", "NYBBLE_ARCH", "NYBBLE_RENDER_GID", "NYBBLE_VIDEO_GID"}
OF_COMPOSE = {"COMPOSE_PROFILES", "NYBBLE_MODELS", "NYBBLE_PUBLISH", "HF_TOKEN"}
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-([^}]*))?\}")


def example() -> dict[str, str]:
    """What .env.example sets, or shows as a comment."""
    text = (DEPLOY / ".env.example").read_text(encoding="utf-8")
    return dict(re.findall(r"^#?([A-Z][A-Z_]+)=(.*)$", text, re.MULTILINE))


def without_env_file() -> dict[str, Any]:
    """COMPOSE with the defaults of its variables."""
    text = VARIABLE.sub(lambda match: match[2] or "", TEXT)
    compose: dict[str, Any] = yaml.safe_load(text)
    return compose


def errors(compose: dict[str, Any]) -> list[str]:
    from check_jsonschema import builtin_schemas
    from jsonschema.validators import validator_for

    schema = json.loads((files(builtin_schemas) / "vendor/compose-spec.json").read_text(encoding="utf-8"))
    return [
        f"{error.json_path}: {error.message}" for error in validator_for(schema)(schema).iter_errors(compose)
    ]


def test_the_schema_accepts_it() -> None:
    assert errors(COMPOSE) == []
    assert errors(without_env_file()) == []


def test_the_schema_would_find_a_wrong_key() -> None:
    nybble = SERVICES["nybble"] | {"cap_dropped": ["ALL"]}
    assert errors(COMPOSE | {"services": SERVICES | {"nybble": nybble}})


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_few_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    forbidden = {"privileged", "network_mode", "pid", "ipc", "userns_mode", "cap_add", "user"}
    assert not forbidden & service.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_this_hosts_alone_unless_env_says_otherwise(name: str) -> None:
    (port,) = without_env_file()["services"][name]["ports"]
    assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_is_read_only_or_a_named_volume(name: str) -> None:
    for mount in without_env_file()["services"][name]["volumes"]:
        source, _, *options = mount.split(":")
        assert "ro" in ",".join(options).split(",") or source in COMPOSE["volumes"], mount


@pytest.mark.parametrize("name", SERVICES)
def test_folders_that_are_mounted_are_there(name: str) -> None:
    for mount in SERVICES[name]["volumes"]:
        if mount.startswith("./"):
            assert (DEPLOY / mount.partition(":")[0]).is_dir(), mount
            assert mount.endswith(",z"), "closed to containers where there is SELinux"


def test_prometheus_scrapes_and_grafana_reads_what_is_here() -> None:
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["prometheus"]["volumes"])
    assert "--config.file=" + mounts["./prometheus"] + "/prometheus.yml" in SERVICES["prometheus"]["command"]
    configuration = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    targets = [t for job in configuration["scrape_configs"] for t in job["static_configs"][0]["targets"]]
    assert targets == ["nybble:8000"]
    (source,) = (DEPLOY / "grafana/provisioning/datasources").iterdir()
    assert (
        yaml.safe_load(source.read_text(encoding="utf-8"))["datasources"][0]["url"]
        == "http://prometheus:9090"
    )
    (provider,) = (DEPLOY / "grafana/provisioning/dashboards").iterdir()
    path = yaml.safe_load(provider.read_text(encoding="utf-8"))["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{path}:ro,z" in SERVICES["grafana"]["volumes"]


def test_grafana_changes_nothing_that_its_image_brings() -> None:
    """A plugin that it wants to replace is stopped first, and then cannot be."""
    assert SERVICES["grafana"]["read_only"] is True
    assert SERVICES["grafana"]["environment"]["GF_PLUGINS_PREINSTALL_AUTO_UPDATE"] == "false"


def test_profiles_choose_the_variant_and_both_have_the_same_name() -> None:
    assert SERVICES["nybble"]["profiles"] == ["gpu"]
    assert SERVICES["nybble-cpu"]["profiles"] == ["cpu"]
    for name in NYBBLE:
        # Prometheus scrapes nybble:8000.
        assert SERVICES[name]["networks"]["default"]["aliases"] == ["nybble"]
    assert not {n for n in SERVICES if "profiles" in SERVICES[n]} - set(NYBBLE)


def test_the_gpu_variant_gets_the_devices_and_groups_by_number() -> None:
    service = SERVICES["nybble"]
    assert service["devices"] == ["/dev/kfd", "/dev/dri"]
    assert service["group_add"] == ["${NYBBLE_RENDER_GID:-65534}", "${NYBBLE_VIDEO_GID:-65533}"]
    assert not {"devices", "group_add"} & SERVICES["nybble-cpu"].keys()
    assert SERVICES["nybble-cpu"]["build"]["args"] == {"NYBBLE_ARCH": "cpu"}


@pytest.mark.parametrize("name", NYBBLE)
def test_build_arguments_are_the_dockerfiles(name: str) -> None:
    build = SERVICES[name]["build"]
    dockerfile = (DEPLOY / build["context"] / build["dockerfile"]).resolve().read_text(encoding="utf-8")
    declared = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    assert build["args"].keys() <= declared


@pytest.mark.parametrize("name", NYBBLE)
def test_health_is_asked_as_in_the_image(name: str) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", dockerfile, re.MULTILINE)
    assert SERVICES[name]["healthcheck"]["test"] == ["CMD", *json.loads(command)]
    # Its user reads it, whatever the mode of the file in the checkout.
    assert "COPY --chmod=0644 deploy/healthcheck.py /opt/nybble/healthcheck.py\n" in dockerfile


@pytest.mark.parametrize("name", ("prometheus", "grafana"))
def test_other_peoples_images_are_pinned(name: str) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"])


def test_every_variable_is_explained_in_the_example() -> None:
    used = {match[1] for match in VARIABLE.finditer(TEXT)}
    assert used | OF_THE_HOST <= example().keys()


def test_the_example_has_no_variable_without_a_meaning() -> None:
    settings = {ENV_PREFIX + field.upper() for field in Settings.model_fields}
    used = {match[1] for match in VARIABLE.finditer(TEXT)}
    assert example().keys() <= settings | used | OF_THE_HOST | OF_COMPOSE


def test_what_is_filled_in_is_not_committed() -> None:
    """It has keys in it."""
    assert "deploy/.env" in (DEPLOY.parent / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_settings_that_compose_sets_are_settings() -> None:
    settings = {ENV_PREFIX + field.upper() for field in Settings.model_fields}
    for name in NYBBLE:
        assert SERVICES[name]["environment"].keys() <= settings
