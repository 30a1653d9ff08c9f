from pathlib import Path

import pytest
from pydantic import ValidationError

from infra.settings import inherited_environment, load_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    for name in ("PREFECT_API_URL", "RAY_ADDRESS", "RLHF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_defaults_are_local(tmp_path):
    settings = load_settings()
    assert settings.prefect_api_url is None
    assert settings.ray_address is None
    assert settings.home == tmp_path.resolve() / ".rlhf"


def test_environment_is_read_at_every_call(monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://server:4200/api")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RLHF_HOME", "deep/../place")
    settings = load_settings()
    assert settings.prefect_api_url == "http://server:4200/api"
    assert settings.ray_address == "10.0.0.1:6379"
    assert settings.home == tmp_path.resolve() / "place"


def test_empty_variables_count_as_unset(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "")
    monkeypatch.setenv("RLHF_HOME", "")
    assert load_settings().prefect_api_url is None
    assert load_settings().home.name == ".rlhf"


def test_home_is_not_the_users_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert load_settings().home == tmp_path.resolve() / ".rlhf"
    monkeypatch.setenv("RLHF_HOME", "~/rlhf")
    assert load_settings().home == Path(tmp_path / "user" / "rlhf").resolve()


def test_frozen():
    with pytest.raises(ValidationError):
        load_settings().ray_address = "x"


def test_inherited_environment_is_a_copy(monkeypatch):
    monkeypatch.setenv("RLHF_TEST_VALUE", "1")
    copy = inherited_environment()
    copy["RLHF_TEST_VALUE"] = "2"
    assert inherited_environment()["RLHF_TEST_VALUE"] == "1"
