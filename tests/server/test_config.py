import json
import logging
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.errors import ConfigError
from qllm.logs import log_config
from qllm.server.config import KINDS, ServerConfig, load_config, read_api_keys
from qllm.server.serve import bound_socket
from qllm.spelling import alternatives
from tests.support.files import ROOT, python_files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "qllm.toml"
    path.write_text(
        'model = "tiny"\nport = 1\nmax_ls = 1\nhost = "1.1.1.1"\n'
        "[engine]\nmax_num_seqs = 1\nblock_size = 1\n[policy_settings]\na = 1\n"
    )
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path) -> None:
    environ = {"QLLM_PORT": "2", "QLLM_MAX_LS": "2", "QLLM_ENGINE": '{"max_num_seqs": 2}', "A": "b"}
    config = load_config(file, environ, {"port": 3, "engine": {"max_waiting": 3}})
    assert (config.host, config.max_ls, config.port) == ("1.1.1.1", 2, 3)
    assert config.engine == {"max_num_seqs": 2, "block_size": 1, "max_waiting": 3}
    assert config.policy_settings == {"a": 1}
    assert config.drain_s == ServerConfig().drain_s


def test_every_setting_can_come_from_every_source(tmp_path: Path) -> None:
    examples: dict[str, Any] = {
        "cors_origins": ("https://a.example", "https://b.example"), "engine": {"block_size": 8},
        "policy_settings": {"a": 2}, "trust_remote_code": True, "ls_overflow": "refuse",
        "log_format": "json", "strict_fields": True,
        "max_body_bytes": 2048, "max_file_bytes": 2048, "max_key_bytes": 2048,
        "max_header_bytes": 2048, "max_prompt_bytes": 2048,
        "role": "engine", "listen": "a:1", "engine_address": "a:1",
        "also": ("tiny@2", "b=tiny@3"), "auto": True,
        "lossy": True, "max_disagreement": 0.5, "audit_share": 0.5,
        "profile": "shm", "ssl_cert_reqs": "required", "access_log": False,
        "objectives": {"batch": "BE"}, "ray": {"replicas": 2},
    }  # fmt: skip
    companions: dict[str, dict[str, Any]] = {
        "role": {"listen": "a:1"}, "listen": {"role": "engine"},
        "engine_address": {"role": "frontend"}, "route": {"engine_address": "a:1,b:1"},
        "rebalance_s": {"engine_address": "a:1,b:1"}, "auto": {"also": ["tiny@2"]},
        **{
            name: {"also": ["tiny@2"], "auto": True, **({} if name == "lossy" else {"lossy": True})}
            for name in ("lossy", "max_disagreement", "audit_share", "depth_profile")
        },
    }  # fmt: skip
    for name, field in ServerConfig.model_fields.items():
        value = examples.get(name, 7 if "int" in str(field.annotation) else "7")
        if "float" in str(field.annotation) and name not in examples:
            value = 7.5
        beside = companions.get(name, {})
        expected = load_config(None, {}, {"model": "tiny", name: value, **beside})
        as_text = value
        if isinstance(value, dict):
            as_text = str(value).replace("'", '"')
        elif isinstance(value, tuple):
            as_text = ", ".join(value)
        environ = {"QLLM_MODEL": "tiny", f"QLLM_{name.upper()}": str(as_text)}
        assert load_config(None, environ, beside) == expected, name
        assert getattr(expected, name) != ServerConfig.model_fields[name].default, name


@pytest.mark.parametrize(
    ("text", "environ", "flags", "says"),
    [
        ("", {}, {}, "no model"),
        ('model = "tiny"\nprot = 1', {}, {}, r"'prot' in the file .*did you mean port"),
        ("port =", {}, {}, "is not TOML"),
        ('model = "tiny"\nport = 70000', {}, {}, "port=70000.*65535"),
        ("", {"QLLM_MODLE": "x"}, {}, "QLLM_MODLE in the environment.*did you mean model"),
        ("", {"QLLM_PORT": "tcp://10.0.0.1:80"}, {}, "port='tcp://10.0.0.1:80'"),
        ("", {"QLLM_ENGINE": "{"}, {}, r"engine='{' is not JSON: .*\(in the environment\)"),
        ("", {}, {"model": "tiny", "colour": 1}, "'colour' in the flags"),
        ("", {}, {"model": "tiny", "ls_overflow": "drop"}, "must be one of demote, refuse"),
        ("", {}, {"model": "tiny", "drain_s": -1}, "drain_s=-1"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, text: str, environ: dict[str, str], flags: dict[str, Any], says: str
) -> None:
    path = tmp_path / "file.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(path, environ, flags)


def test_a_key_is_not_shown() -> None:
    config = load_config(None, {"QLLM_API_KEYS": "hush,quiet"}, {"model": "tiny"})
    assert read_api_keys(config) == ("hush", "quiet")
    assert "hush" not in repr(config)


def test_a_key_file_without_keys_is_no_open_door(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        read_api_keys(load_config(None, {}, {"model": "tiny", "api_key_file": path}))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve"], "no model"),
        (["serve", "tiny", "--set", "max_waitin=1"], "did you mean max_waiting"),
        (["serve", "tiny", "--set", "policy.nothing=1"], "nothing"),
        (["serve", "tiny", "--server", "max_ls=0"], "max_ls=0"),
        (["serve", "tiny", "--policy", "none"], "none"),
        (["serve", "tiny", "--config", "/nothing.toml"], "nothing.toml"),
        (["serve", "tiny", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1:0"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--port", "0"])
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.splitlines()) == 1


def test_a_taken_port_is_named() -> None:
    with bound_socket("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            bound_socket("127.0.0.1", port)


def test_logs_as_json_are_one_object_per_line() -> None:
    formatter = log_config("json")["formatters"]["ours"]["()"]()
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("qllm.x").makeRecord(
            "qllm.x", logging.WARNING, "f", 1, "it is %s", ("wrong",), sys.exc_info()
        )
    text = formatter.format(record)
    found = json.loads(text)
    assert "\n" not in text
    assert (found["level"], found["logger"], found["message"]) == (
        "warning", "qllm.x", "it is wrong",
    )  # fmt: skip
    assert "ValueError: two" in found["traceback"]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_every_line_of_a_server_is_a_line_of_its_log(
    log_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first, a warning, to the last, which says why it ended."""

    def broken(*_: object, **__: object) -> None:
        logging.getLogger("qllm.engine").error("the engine crashed", exc_info=OSError("two\nlines"))
        logging.getLogger("uvicorn.error").info("Started")
        logging.getLogger("a.library").warning("and\nthis")
        raise ConfigError("no model")

    monkeypatch.setattr("qllm.server.serve.make_engine", broken)
    words = ["serve", "tiny", "--host", "0.0.0.0", "--port", "0", "--log-format", log_format]
    before = logging.getLogger().handlers[:]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert logging.getLogger().handlers == before
    lines = done.stderr.splitlines()
    if log_format == "json":
        found = [json.loads(line) for line in lines]
        assert [(x["level"], x["logger"]) for x in found] == [
            ("warning", "qllm"), ("error", "qllm.engine"), ("info", "uvicorn"),
            ("warning", "a.library"), ("error", "qllm"),
        ]  # fmt: skip
        assert found[-1]["message"] == "no model"
    else:
        assert lines[0].split()[2:4] == ["WARNING", "qllm:"]
        assert lines[-1].endswith("ERROR qllm: no model")
        assert "uvicorn.error" not in done.stderr


@pytest.mark.parametrize("path", python_files("qllm/server", "qllm/engine", "qllm/ray"))
def test_what_a_server_says_goes_through_its_log(path: str) -> None:
    assert not re.search(r"sys\.std(err|out)|\bprint\(|print_exc", (ROOT / path).read_text())


NAMED = [name for name, kind in KINDS.items() if Path in alternatives(kind)]


@pytest.mark.parametrize("name", [*NAMED, "config"])
def test_a_file_that_cannot_be_used_is_named_with_its_setting(name: str, tmp_path: Path) -> None:
    gone = str(Path("/proc/nothing/here") if name == "state_dir" else tmp_path / "gone")
    words = ["serve", "tiny", "--port", "0", f"--{name.replace('_', '-')}", gone]
    if name == "secret_file":
        words += ["--role", "engine", "--listen", "127.0.0.1:0"]
    if name in ("ssl_keyfile", "ssl_ca_certs"):
        words += ["--ssl-certfile", gone]
    if name == "depth_profile":
        words += ["--lossy", "true", "--auto", "true", "--also", "tiny@2"]
    with patch("qllm.server.serve.QLLMEngine.from_pretrained", lambda *_, **__: MagicMock()):
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert f"{name}='{gone}'" in done.stderr


@pytest.mark.parametrize("name", ["policy", "policy_settings", "dtype", "device", "threads"])
def test_what_has_a_flag_of_its_own_is_no_engine_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is none of the engine's own settings; use --"):
        load_config(None, {}, {"model": "tiny", "engine": {name: 1}})
