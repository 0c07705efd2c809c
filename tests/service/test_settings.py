"""nybble.service.settings: flags over environment over defaults; errors that name the variable."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

import pytest

from nybble.service.engine.protocol import EngineConfig
from nybble.service.errors import ConfigError
from nybble.service.settings import Settings, ignored_variables, load_settings

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_defaults_are_the_engines_own() -> None:
    assert load_settings({"model": "x"}).engine_config("folder") == EngineConfig(model="folder")


def test_every_engine_setting_is_a_knob() -> None:
    for field in dataclasses.fields(EngineConfig):
        assert field.name in Settings.model_fields


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NYBBLE_PORT", "9000")
    monkeypatch.setenv("NYBBLE_DTYPE", "float32")
    settings = load_settings({"model": "x", "port": "9001", "dtype": None})
    assert (settings.port, settings.dtype) == (9001, "float32")


def test_the_model_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NYBBLE_MODEL", "demo")
    assert load_settings({"model": None}).model == "demo"


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("NYBBLE_PORT", "http", "valid integer"),
        ("NYBBLE_PORT", "70000", "65535"),
        ("NYBBLE_DTYPE", "int3", "'auto', 'bfloat16', 'float16' or 'float32'"),
        ("NYBBLE_LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("NYBBLE_MEMORY_FRACTION", "1.5", "less than or equal to 1"),
        ("NYBBLE_DEVICE", "tpu", "auto, cpu, cuda or cuda:N"),
        ("NYBBLE_MAX_QUEUE", "0", "greater than or equal to 1"),
        ("NYBBLE_CORS_ORIGINS", "chat.example", "scheme://host"),
        ("NYBBLE_CORS_ORIGINS", "*, https://chat.example/", "scheme://host"),
        ("NYBBLE_THREADS", "99999999999", "less than or equal to 1024"),
    ],
)
def test_a_bad_variable_is_named_with_what_is_accepted(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, accepted: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        load_settings({"model": "x"})
    message = caught.value.message
    assert message.startswith(f"{variable}={value!r}") and accepted in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NYBBLE_API_KEY", "NYBBLE_API_KEY is no setting and is ignored; is NYBBLE_API_KEYS meant?"),
        ("NYBBLE_XYZZY", "NYBBLE_XYZZY is no setting and is ignored"),
    ],
)
def test_a_variable_that_is_ignored_is_told(name: str, says: str) -> None:
    assert list(ignored_variables(["PATH", "NYBBLE_PORT", name])) == [says]


def test_settings_and_what_deployments_add_are_no_mistakes() -> None:
    settings = [f"NYBBLE_{name.upper()}" for name in Settings.model_fields]
    unit = (DEPLOY / "quadlet/nybble.container").read_text()
    deploy = re.findall(r"\bNYBBLE_[A-Z_]+", unit)
    assert {"NYBBLE_ARCH", "NYBBLE_RENDER_GID"} <= set(deploy)
    kubernetes = ["NYBBLE_SERVICE_HOST", "NYBBLE_SERVICE_PORT_HTTP", "NYBBLE_PORT_8000_TCP_ADDR"]
    assert list(ignored_variables([*settings, *deploy, *kubernetes])) == []


def test_a_bad_flag_is_named_as_a_flag() -> None:
    with pytest.raises(ConfigError, match="--max-queue='many'"):
        load_settings({"model": "x", "max_queue": "many"})


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match="NYBBLE_MODEL is not set"):
        load_settings({})


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [("demo", "", "demo"), ("/a/b/Tiny-1B/", "", "Tiny-1B"), ("org/m", "", "m"), ("demo", "mine", "mine")],
)
def test_the_models_name_in_the_api(model: str, served: str, name: str) -> None:
    assert load_settings({"model": model, "served_model_name": served}).api_model_name() == name


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_knob_has_help(name: str) -> None:
    description = Settings.model_fields[name].description
    assert description and description.endswith(".")


@pytest.mark.parametrize("keys", ["short", "with a space in it", "ümlaut-key-here", "long-enough,short"])
def test_a_bad_key_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    monkeypatch.setenv("NYBBLE_API_KEYS", keys)
    with pytest.raises(ConfigError) as caught:
        load_settings({"model": "x"})
    message = caught.value.message
    assert message.startswith("NYBBLE_API_KEYS is not accepted: ") and "8 or more" in message
    assert not any(key in message for key in keys.split(","))


def test_keys_of_both_places_are_kept_as_digests(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "keys").write_text("key-number-three\n")
    monkeypatch.setenv("NYBBLE_API_KEYS", "key-number-one, key-number-two,")
    settings = load_settings({"model": "x", "api_key_file": str(tmp_path / "keys")})
    wanted = {hashlib.sha256(f"key-number-{n}".encode()).digest() for n in ("one", "two", "three")}
    assert settings.key_digests() == wanted
    assert "key-number" not in repr(settings) + str(settings.model_dump())


@pytest.mark.parametrize("keys", ["", "  ", " , ", ","])
def test_a_variable_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    monkeypatch.setenv("NYBBLE_API_KEYS", keys)
    with pytest.raises(
        ConfigError, match=r"NYBBLE_API_KEYS is not accepted: it is set but has no key in it; give"
    ):
        load_settings({"model": "x"})


def test_without_the_variable_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NYBBLE_API_KEYS", raising=False)
    assert load_settings({"model": "x"}).key_digests() == frozenset()
