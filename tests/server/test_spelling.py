"""A value of a setting is written alike wherever it is text: every setting, spelling and place.

Settings, their types and the policies are taken from the classes: a new one is tried by itself.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import typer
from pydantic import SecretStr

from qllm.cli import app
from qllm.cli.app import engine_settings
from qllm.config import KINDS as ENGINE_KINDS
from qllm.config import EngineConfig, engine_config
from qllm.errors import ConfigError, QllmError
from qllm.measure.variants import parse_variants
from qllm.plugins import installed_policies, load_factory, load_policy
from qllm.ray.settings import RaySettings, settings_of
from qllm.server.config import ENGINE_ROLES, KINDS, ServerConfig, load_config
from qllm.spelling import alternatives

OF_ENGINE = [name for name in ENGINE_KINDS if name not in KINDS]
"""Without `role`, which the server's own setting of that name says."""
COMMAND = typer.main.get_command(app)
REFUSED = "refused"
COMPANIONS: dict[str, dict[str, Any]] = {
    "listen": {"role": "engine"}, "engine_address": {"role": "frontend"},
    "route": {"engine_address": "a:1,b:1"}, "rebalance_s": {"engine_address": "a:1,b:1"},
}  # fmt: skip
"""What a setting does not go without."""


class Spelled(NamedTuple):
    """A text, and the value that it is in Python."""

    text: str
    value: Any


WORDS = {
    True: ("true", "True", "TRUE", "yes", "Yes", "on", "ON", "1", "y", "t", " true "),
    False: ("false", "False", "FALSE", "no", "off", "Off", "0", "n", "f", '"false"'),
    None: ("none", "None", "NONE", "null", "Null"),
}


def spellings(name: str, kind: Any, usual: Any) -> Iterator[Spelled]:
    """Texts for a setting of this type, some of which are out of its range."""
    kinds = alternatives(kind)
    is_secret, has_word = SecretStr in kinds, any(word in kinds for word in WORDS[None])
    for choice in kinds:
        plain = get_origin(choice) or choice
        if plain in (int, float):
            yield from numbers(name, plain, usual)
        elif plain is type(None):
            yield from (Spelled(t, None) for t in WORDS[None] if not (is_secret or has_word))
        else:
            yield from words(choice, plain)


def words(choice: Any, plain: Any) -> Iterator[Spelled]:
    """Texts for what is no number."""
    if isinstance(choice, str):
        for text in (choice, choice.upper(), choice.title(), f'"{choice}"', f"'{choice}'"):
            yield Spelled(text, choice)
    elif plain is bool:
        yield from (Spelled(text, value) for value in (True, False) for text in WORDS[value])
    elif plain is tuple:
        yield from (Spelled(t, ("x", "y")) for t in ("x,y", " x, y", "x,,y", '["x", "y"]'))
        yield from (Spelled(t, REFUSED) for t in ('["x"', "[1]", '{"x": 1}', "[x, y]"))
    elif plain is dict and get_args(choice)[1] is Any:
        yield Spelled("[1]", REFUSED)  # a table: its settings are tried by themselves
    elif plain is dict:
        yield Spelled('{"x": "LS", "y": "be"}', {"x": "LS", "y": "BE"})
        yield Spelled('{"x": "soon"}', REFUSED)
    elif plain is SecretStr:
        yield from (Spelled(text, text) for text in ("s3cret", "'q'", "None"))
    else:
        yield from (Spelled(text, plain("a:1")) for text in ("a:1", " a:1 ", '"a:1"'))


def numbers(name: str, kind: type[Any], usual: Any) -> Iterator[Spelled]:
    for number in (usual if isinstance(usual, int | float) else 7, 4096, 0, -5):
        if kind is float or number == int(number):
            number = kind(number)
            exact = f"{number:_}" if isinstance(number, int) else repr(number)
            yield from (Spelled(text, number) for text in (str(number), exact, f"{number:.12e}"))
    yield from (Spelled(text, kind(100_000)) for text in ("100_000", "1e5", "100000.0", "+100000"))
    units = {
        "_ms": {"10s": 10_000, "5ms": 5, "2min": 120_000, "1 S": 1000},
        "_s": {"10s": 10, "5000ms": 5, "2min": 120, "1h": 3600},
        "_bytes": {"4MiB": 4 << 20, "64k": 64_000, "1mb": 10**6, "2KiB": 2048},
        "_gib": {"4GiB": 4, "2048MiB": 2, "1TiB": REFUSED},
    }
    other = {"64k": 64_000, "8Ki": 8192, "2M": 2_000_000}
    found = next((units[end] for end in units if name.endswith(end)), other)
    yield from (Spelled(text, x if x == REFUSED else kind(x)) for text, x in found.items())
    wrong = ["12 apples", "0x10", "nan", "1,5", "true", "--1", "1__e"]
    wrong += [] if kind is float else ["1.5", "inf", "1e400"]
    wrong += [] if found is other else ["5parsecs"]
    yield from (Spelled(text, REFUSED) for text in wrong)
    if kind is float:
        infinite = ("inf", "Inf", "infinity", "Infinity", "INFINITY")
        yield from (Spelled(text, float("inf")) for text in infinite)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerConfig]:
    """What `qllm serve` with these words would serve."""
    found: list[ServerConfig] = []
    for name in ("qllm.server.serve.serve", "qllm.server.serve.serve_engine"):
        monkeypatch.setattr(name, found.append)
    monkeypatch.setattr("qllm.ray.serve", found.append, raising=False)
    monkeypatch.setattr("qllm.cli.serve.forgo_torch", lambda: None)
    monkeypatch.setattr("qllm.cli.serve.quiet", lambda: None)
    monkeypatch.setattr("qllm.cli.serve.configured", lambda log_format: nullcontext())

    def serve(*words: str) -> ServerConfig:
        found.clear()
        COMMAND.main(["serve", *words], standalone_mode=False)
        if not found:
            raise ConfigError("the command said why and left")
        return found[0]

    return serve


def outcome(made: Callable[..., Any], *given: Any) -> Any:
    """What comes of it, or REFUSED."""
    if REFUSED in given:
        return REFUSED
    try:
        return made(*given)
    except QllmError:
        return REFUSED


def as_flags(given: dict[str, Any]) -> list[str]:
    return [word for name, x in given.items() for word in ("--server", f"{name}={x}")]


def flag_of(name: str) -> str | None:
    """The flag of `serve` that takes this setting as a text."""
    serve: Any = COMMAND.commands["serve"]  # type: ignore[attr-defined]
    if name == "engine":  # `--engine` is an address; `--set` takes settings of the engine
        return None
    flag = {"engine_address": "--engine", "api_keys": "--api-key"}.get(name)
    flag = flag or f"--{name.replace('_', '-')}"
    taken = {opt for p in serve.params for opt in p.opts if not getattr(p, "is_flag", False)}
    return flag if flag in taken | serve._names().keys() else None


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def tables(table: str, name: str, beside: dict[str, Any], tmp_path: Path) -> Any:
    """Places for a setting of a table: each makes settings of a server of a text."""

    def environment(text: str) -> ServerConfig:
        environ = {f"QLLM_{table.upper()}": json.dumps({name: text})}
        return load_config(None, environ, beside)

    def file(text: str) -> ServerConfig:
        given = toml(tmp_path, f"[{table}]\n{name} = {json.dumps(text)}")
        return load_config(given, {}, beside)

    return {"environment": environment, "file": file}


@pytest.mark.parametrize("name", ServerConfig.model_fields)
def test_a_setting_of_the_server_is_spelled_alike_everywhere(
    name: str, served: Any, tmp_path: Path
) -> None:
    flag = flag_of(name)
    for text, value in spellings(name, KINDS[name], ServerConfig.model_fields[name].default):
        others = {"model": "tiny", **COMPANIONS.get(name, {}), name: value}
        if others.get("role") in ENGINE_ROLES:
            others.setdefault("listen", "a:1")
        if others.get("role") == "frontend":
            others.setdefault("engine_address", "a:1")
        expected = REFUSED if value is REFUSED else outcome(load_config, None, {}, others)
        del others[name]
        file = toml(tmp_path, f"{name} = {json.dumps(text)}")
        found = {
            "environment": outcome(load_config, None, {f"QLLM_{name.upper()}": text}, others),
            "file": outcome(load_config, file, {}, others),
            "--server": outcome(served, *as_flags({**others, name: text})),
            "flag": outcome(served, *as_flags(others), f"{flag}={text}") if flag else expected,
        }
        assert found == dict.fromkeys(found, expected), (text, value)


@pytest.mark.parametrize("name", OF_ENGINE)
def test_a_setting_of_the_engine_is_spelled_alike_everywhere(
    name: str, served: Any, tmp_path: Path
) -> None:
    def engine(made: Callable[[str], ServerConfig], text: str) -> EngineConfig:
        return engine_config(made(text).engine)

    places = tables("engine", name, {"model": "tiny"}, tmp_path)
    places["--set"] = lambda text: served("tiny", "--set", f"{name}={text}")
    places["--server"] = lambda text: served("tiny", f"--server=engine={json.dumps({name: text})}")
    usual = EngineConfig.__dataclass_fields__[name].default
    for text, value in spellings(name, ENGINE_KINDS[name], usual):
        value = str(value) if isinstance(value, PurePath) else value
        expected = REFUSED if value is REFUSED else outcome(engine_config, {name: value})
        found = {place: outcome(engine, made, text) for place, made in places.items()}
        found["run"] = outcome(
            lambda text: engine_config(engine_settings([text])), f"{name}={text}"
        )
        assert found == dict.fromkeys(found, expected), (text, value)


def parameters() -> Iterator[tuple[str, Any, Any]]:
    """Each installed policy's own settings: its name, the field and its type."""
    for policy, point in installed_policies().items():
        factory = load_factory(point)
        kinds = get_type_hints(factory) if is_dataclass(factory) else {}
        for field in fields(factory) if is_dataclass(factory) else ():
            if field.init and not field.metadata.get("fixed"):
                yield policy, field, kinds[field.name]


def test_a_setting_of_a_policy_is_spelled_alike_everywhere(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = installed_policies()  # which takes as long as all the rest of a try
    monkeypatch.setattr("qllm.plugins.installed_policies", lambda: installed)
    tried = 0
    for policy, field, kind in parameters():
        name = field.name

        def parameter(made: Callable[..., Any], *given: Any, name: str = name) -> Any:
            return getattr(made(*given), name)

        def loaded(made: Any, text: str, policy: str = policy) -> Any:
            return load_policy(policy, made(text).policy_settings)

        def by_flag(text: str, policy: str = policy, name: str = name) -> ServerConfig:
            words = ("tiny", "--policy", policy, "--set", f"policy.{name}={text}")
            return served(*words)  # type: ignore[no-any-return]

        beside = {"model": "tiny", "policy": policy}
        places = tables("policy_settings", name, beside, tmp_path) | {"--set": by_flag}
        for text, value in spellings(name, kind, field.default):
            expected = REFUSED
            if value is not REFUSED:
                expected = outcome(parameter, load_policy, policy, {name: value})
            found = {
                place: outcome(parameter, loaded, made, text) for place, made in places.items()
            }
            if not set(text) & set(",:/"):
                variant = f"{policy}:{name}={text}"
                found["bench"] = outcome(parameter, lambda v: parse_variants(v)[0].make(), variant)
            assert found == dict.fromkeys(found, expected), (policy, name, text)
            tried += 1
    assert tried > 100


@pytest.mark.parametrize("name", RaySettings.model_fields)
def test_a_setting_of_ray_is_spelled_alike_everywhere(
    name: str, served: Any, tmp_path: Path
) -> None:
    places = tables("ray", name, {"model": "tiny"}, tmp_path)
    places["--set"] = lambda text: served("tiny", "--ray", "--set", f"ray.{name}={text}")
    field = RaySettings.model_fields[name]
    for text, value in spellings(name, field.annotation, field.default):
        given = {"model": "tiny", "ray": {name: value}}
        expected = REFUSED
        if value is not REFUSED:
            expected = outcome(lambda given: settings_of(load_config(None, {}, given)), given)
        found = {
            place: outcome(lambda made, text: settings_of(made(text)), made, text)
            for place, made in places.items()
        }
        assert found == dict.fromkeys(found, expected), (text, value)


@pytest.mark.parametrize("name", [*KINDS, *OF_ENGINE])
def test_an_empty_text_says_nothing(name: str, served: Any, tmp_path: Path) -> None:
    """What a lower source says stays, in every place: Compose writes `${NAME:-}`."""
    beside = {"model": "tiny"}
    if name in KINDS:
        usual = load_config(None, {}, beside)
        for empty in ("", "  "):
            given = {} if name == "model" else beside
            environ = {f"QLLM_{name.upper()}": empty}
            if name == "model":
                with pytest.raises(ConfigError, match="no model"):
                    load_config(None, environ, given)
                continue
            assert load_config(None, environ, given) == usual
            file = toml(tmp_path, f"{name} = {json.dumps(empty)}")
            assert load_config(file, {}, given) == usual
            assert served("tiny", "--server", f"{name}={empty}") == usual
            if (flag := flag_of(name)) is not None:
                assert served("tiny", f"{flag}={empty}") == usual
        return
    default = str(EngineConfig.__dataclass_fields__[name].default)
    file = toml(tmp_path, f"[engine]\n{name} = {json.dumps(default)}")
    usual = load_config(file, {}, beside)
    assert load_config(file, {"QLLM_ENGINE": json.dumps({name: ""})}, beside) == usual
    assert served("tiny", "--config", str(file), "--set", f"{name}=") == usual


@pytest.mark.parametrize("name", OF_ENGINE)
def test_what_a_message_allows_can_be_typed(name: str) -> None:
    """A refusal names values; each is taken in a shell, and in a table of the environment."""
    with pytest.raises(ConfigError) as said:
        engine_config({name: object()})
    if "one of " not in str(said.value):
        return
    for word in str(said.value).rpartition("one of ")[2].split(", "):
        found = load_config(None, {"QLLM_ENGINE": json.dumps({name: word})}, {"model": "tiny"})
        assert repr(found.engine[name]).strip("'") == word
