"""The setting `tp`: engines and a server on ranks."""

import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qllm import QLLMEngine, SamplingParams
from qllm.cli.app import app
from qllm.config import NOT_ON_RANKS, EngineConfig
from qllm.cores import held_bytes, shared_out
from qllm.engine import build
from qllm.engine.memory import Claim
from qllm.errors import ConfigError, ModelError, RequestFailedError
from qllm.fleet.members import card_of
from qllm.frontend.handle import Handle
from qllm.kernels import cpu
from tests.support.engines import freeze
from tests.support.families import VOCAB, make_model
from tests.support.hybrids import make_hybrid
from tests.support.replay import SETTINGS, ask_all, ask_until_they_run
from tests.support.serving import serving, tiny_engine
from tests.support.waiting import wait_for

assert cpu.MISSING is None, cpu.MISSING
SOME: dict[str, Any] = {"max_kv_tokens": 4096, "conformance": False, "threads": 1}
KINDS = (
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.3, ignore_eos=True),
)


def prompt_of(n: int, seed: int) -> list[int]:
    rng = random.Random(1000 * n + seed)
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def submit_all(engine: QLLMEngine, num_tokens: int = 24) -> list[Handle]:
    """Submit requests of both classes. LS requests preempt BE requests."""
    return [
        engine.submit(
            prompt_of(5 + 31 * i, i), "LS" if i % 3 == 2 else "BE", num_tokens, sampling=s
        )
        for i, s in enumerate(KINDS * 3)
    ]


def answers_of(handles: list[Handle]) -> list[Any]:
    return [(h.result(120).token_ids, h.result(120).logprobs) for h in handles]


def ranks_of(engine: QLLMEngine) -> list[int]:
    return [rank["pid"] for rank in engine.stats()["ranks"]]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# -- answers


@pytest.mark.parametrize("place", ["process", "thread"])
def test_an_engine_on_ranks_has_the_answers_of_one_process(place: str) -> None:
    found = []
    for tp in (1, 2):
        settings = SOME | {"max_segment_ms": 0.5, "conformance": tp == 2, "run_in": place}
        with QLLMEngine.from_pretrained("tiny", tp=tp, **settings) as engine:
            found.append(answers_of(submit_all(engine)))
            pids, config = ranks_of(engine), engine.config
            assert len(pids) == tp * (tp > 1)
            assert config.tp == tp
        wait_for(lambda pids=pids: not any(is_there(pid) for pid in pids[1:]))
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["auto", "int8", "int4"])
def test_the_start_up_check_runs_on_ranks(how: str) -> None:
    """It compares with the forward of the model, which reads each expert that it uses."""
    settings = SOME | {"conformance": True, "expert_weights": how}
    with QLLMEngine.from_pretrained("tiny", tp=2, run_in="thread", **settings) as engine:
        assert engine.submit("abc", "LS", 4).result(60).token_ids


@pytest.mark.parametrize("how", ["auto", "int8", "int4"])
def test_a_model_in_memory_is_split(how: str) -> None:
    found = []
    for tp in (1, 2):
        model = make_model("qwen3_moe", torch.bfloat16)
        settings = SOME | {"conformance": tp == 2, "expert_weights": how}
        with QLLMEngine.from_model(model, tp=tp, **settings) as engine:
            found.append(answers_of(submit_all(engine)))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def undrafted() -> list[Any]:
    with QLLMEngine.from_pretrained("tiny", **SOME) as engine:
        return answers_of(submit_all(engine))


@pytest.mark.parametrize("draft", ["lookup", "exit:2", "model:tiny"])
def test_drafts_on_ranks_change_no_answer(draft: str, undrafted: list[Any]) -> None:
    with QLLMEngine.from_pretrained("tiny", tp=2, draft=draft, **SOME) as engine:
        assert answers_of(submit_all(engine)) == undrafted
        drafts = engine.stats()["drafts"]
        assert draft == "exit:2" or drafts["BE"]["accepted"] + drafts["LS"]["accepted"] > 0


@pytest.mark.parametrize("before", [1, 2])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path, before: int) -> None:
    path = tmp_path / "requests"
    new = partial(QLLMEngine.from_pretrained, "tiny", **SOME)
    with new() as engine:
        expected = [token_ids for token_ids, _ in answers_of(submit_all(engine, 200))]
    with new(tp=before) as engine:
        handles = submit_all(engine, 200)
        wait_for(lambda: all(len(handle.token_ids) > 3 for handle in handles))
        engine.checkpoint(path)
    with new(tp=3 - before) as engine:
        restored = engine.restore(path)
        assert len(restored) == len(handles)
        assert sorted(h.result(120).token_ids for h in restored) == sorted(expected)


# -- ranks that fail


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_replays_the_answers_of_ranks_that_fail(rank: int, how: str) -> None:
    new = partial(tiny_engine, tp=2, rank_deadline_s=2, **SETTINGS)
    with serving(new(), new, restart_backoff_s=0) as served:
        expected = [client.answer() for client in ask_all(served)]
        engine = served.front.engine
        clients = ask_until_they_run(served)
        pids = ranks_of(engine)
        if how == "killed":
            os.kill(pids[rank], signal.SIGKILL)
        else:
            freeze(pids[rank])
            if rank == 0:  # the supervisor sees that the engine is silent
                engine.end_if_stuck(2)
        wait_for(lambda: served.front.engine is not engine, 60)
        assert [client.answer() for client in clients] == expected
        assert served.metric("qllm:engine_restarts_total") == 1
        wait_for(lambda: not any(map(is_there, pids)))
        served.front.engine.close()


def test_requests_of_an_engine_without_a_server_end_with_the_reason() -> None:
    with QLLMEngine.from_pretrained("tiny", tp=2, rank_deadline_s=2, **SOME) as engine:
        handles = submit_all(engine, 400)
        wait_for(lambda: handles[0].token_ids)
        os.kill(ranks_of(engine)[1], signal.SIGKILL)
        for handle in handles:
            with pytest.raises(
                RequestFailedError, match="the process of a rank has ended: 2 ranks"
            ):
                handle.result(60)


def test_ranks_keep_no_file_of_the_engine_open() -> None:
    """A client of an engine that was killed sees its end at once, not that of the ranks."""
    with QLLMEngine.from_pretrained("tiny", tp=2, **SOME) as engine:
        _, pid = ranks_of(engine)
        assert {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()} <= {0, 1, 2}


def test_engines_of_a_fleet_may_have_different_numbers_of_ranks() -> None:
    """Their cards are equal: an answer does not depend on ranks."""
    found = []
    for tp in (1, 2):
        with QLLMEngine.from_pretrained("tiny", tp=tp, takes_digest=True, **SOME) as engine:
            client: Any = engine._client
            found.append(card_of("here", client.hello))
    found[0].check(found[1])
    assert found[0].digest == found[1].digest


# -- sizes


def test_the_memory_of_all_ranks_counts_and_shared_pages_count_once() -> None:
    budget, free = 4 << 30, list[int]()
    for tp in (1, 2):
        with QLLMEngine.from_pretrained("tiny", tp=tp, memory=budget, threads=1) as engine:
            free.append(engine.stats()["memory"]["free_bytes"])
            pids = [engine.stats()["pid"], *ranks_of(engine)[1:]]
            held = shared_out(pids)
            assert held is not None
            alone = [found.own for pid in pids if (found := held_bytes(pid)) is not None]
            assert len(alone) == tp
            assert held.own < 1.5 * max(alone), "a rank shares most of its pages with rank 0"
            if tp == 2:
                assert abs(budget - held.own - held.in_files - free[-1]) < 64 << 20


def test_claims_count_what_every_rank_has_taken(tmp_path: Path) -> None:
    claim, other = Claim("cpu", tmp_path), Claim("cpu", tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", "x = b'x' * (100 << 20); print(1, flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    with claim.others():
        claim.tell(1 << 30)
    told = json.loads(claim._file.read_text())
    claim._file.write_text(json.dumps(told | {"ranks": [child.pid]}))
    with other.others() as found:
        assert found.num_bytes < (1 << 30) - (80 << 20)
    child.kill()
    child.communicate()
    for one in (claim, other):
        one.close()


def test_a_check_at_start_leaves_each_rank_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads weights in 4 bits into memory, with all threads of the engine."""
    given, real = list[int](), cpu.set_threads

    def set_threads(num: int) -> None:
        given.append(num)
        real(num)

    monkeypatch.setattr(cpu, "set_threads", set_threads)
    settings = SOME | {"conformance": True, "expert_weights": "int4", "threads": 2}
    with QLLMEngine.from_pretrained("tiny", tp=2, run_in="thread", **settings):
        assert 2 in given
        assert given[-1] == 1


def test_threads_are_shared_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def made(model: Any, tp: int, **settings: Any) -> Any:
        given.append((tp, settings["threads"]))
        raise ConfigError("enough")

    monkeypatch.setattr("qllm.sharded.runner.sharded_runner", made)
    monkeypatch.setattr(build, "usable_cores", lambda: 8)
    for tp, threads in ((2, 6), (3, 8), (4, 2)):
        with pytest.raises(ConfigError, match="enough"):
            QLLMEngine.from_model(
                make_model("mixtral", torch.bfloat16), tp=tp, threads=threads, **SOME_SIZES
            )
    assert given == [(2, 3), (3, 2), (4, 1)]


SOME_SIZES = {"max_kv_tokens": 4096, "conformance": False}


# -- what is refused


@pytest.mark.parametrize("tp", [0, -1, 65, True, 2.0, "2", None])
def test_a_number_of_ranks_that_is_none_is_refused(tp: Any) -> None:
    with pytest.raises(ConfigError, match=r"tp=.* must be an integer in \[1, 64\]"):
        EngineConfig(tp=tp)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "3"])
def test_a_deadline_that_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"rank_deadline_s=.* must be a number in \(0, "):
        EngineConfig(rank_deadline_s=seconds)


OTHERS = {
    "kernels": "reference",
    "kv_dir": "/kv",
    "handover_gib": 1.0,
    "role": "prefill",
    "max_expert_bytes": 1 << 30,
}


def test_every_setting_that_ranks_do_not_support_has_a_case() -> None:
    assert OTHERS.keys() == NOT_ON_RANKS.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_settings_that_ranks_do_not_support_are_refused_by_name(name: str) -> None:
    more = {"expert_dir": "/experts"} if name == "max_expert_bytes" else {}
    EngineConfig(**{name: OTHERS[name]}, **more)
    with pytest.raises(ConfigError, match=rf"^{name}=.* needs tp=1, and tp=2: .*; leave {name} at"):
        EngineConfig(tp=2, **{name: OTHERS[name]}, **more)


def test_a_loop_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp=2 needs loop='host', and loop='conditional'"):
        EngineConfig(tp=2, loop="conditional")


def test_more_ranks_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    model = make_model("mixtral", torch.bfloat16)
    with pytest.raises(ConfigError, match="tp=3 is too many ranks: this process may use 2 cores"):
        QLLMEngine.from_model(model, tp=3, **SOME)


def test_models_that_cannot_be_split_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="carries a state"):
        QLLMEngine.from_model(make_hybrid("qwen3_next"), tp=2, **SOME)
    with pytest.raises(ModelError, match="float32"):
        QLLMEngine.from_model(make_model("mixtral"), tp=2, **SOME)


def test_the_flag_of_the_command_line_is_the_setting() -> None:
    found = CliRunner().invoke(app, ["serve", "tiny", "--tp", "0"])
    assert found.exit_code != 0
    assert "tp=0 must be an integer in [1, 64]" in found.output
