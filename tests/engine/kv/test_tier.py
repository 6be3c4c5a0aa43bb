# Over 500 lines, because every way in which the file can fail meets the same engine and prompts.
"""Pages in a file change no token and no bit; whatever its disk does, the engine serves."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.engine.kv import tier
from qllm.engine.storage import build as kept
from qllm.engine.storage import file as kv_file
from qllm.engine.storage import pages, reads
from qllm.errors import ConfigError, QllmError
from qllm.grammar import Vocabulary
from qllm.kernels import cpu
from qllm.scheduler.prefix import tag_of
from qllm.types import NS_PER_S, RequestStatus, StructuredOutputs
from tests.support.families import FAMILIES, make_model
from tests.support.inside import loop_of
from tests.support.kv_tier import GREEDY, engine_of, held_back, no_load_is_late, prompt_of, run
from tests.support.serving import tiny_engine
from tests.support.waiting import wait_for

__all__ = ["no_load_is_late"]  # a fixture of all tests here

KINDS = cpu.native.available() if cpu.native is not None else []


def look(engine: QLLMEngine) -> dict[bytes, Any]:
    """The pages in RAM, after a check of everything."""
    prefix = loop_of(engine).prefix

    def look_() -> dict[bytes, Any]:
        prefix.check()
        loop_of(engine).scheduler.check()
        return {name: prefix.store.read(name) for name in prefix.store.names()}

    return dict(engine.call(look_))


def stored(engine: QLLMEngine) -> dict[str, Any]:
    """What is said of the file, once all that is kept lies in it."""
    parts = engine._client._core.kept  # type: ignore[attr-defined]
    for _ in range(1000):
        engine.call(lambda: None)
        parts.mover.settle(30)
        if not engine.call(lambda: parts._tier.is_busy):
            break
    look(engine)
    return dict(engine.stats()["prefix_cache"]["file"])


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3_moe", torch.bfloat16)


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.native.use(request.param)
    yield request.param
    cpu.native.use(cpu.kind())


@pytest.mark.sampled(5)  # every family and kind has a hit in memory, in test_prefix_cache.py
@pytest.mark.parametrize("kernels", KINDS, indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_in_the_file_has_the_tokens_and_the_kv_of_a_cold_run(
    family: str, kernels: str, tmp_path: Path
) -> None:
    model = make_model(family, torch.bfloat16, num_layers=2)
    shared, rng = prompt_of(200), random.Random(family)
    prompts = [shared[: rng.choice((64, 100, 150, 200))] + prompt_of(rng.randrange(1, 90), i)
               for i in range(3)]  # fmt: skip
    cold, cold_pages = [], {}
    with engine_of(model, tmp_path) as engine:
        for ids in prompts:
            cold.append(run(engine, ids, 70))
        cold_pages = look(engine)
    for to in ("LS", "BE"):
        with engine_of(model, tmp_path, max_step_tokens=24) as engine:
            handles = [engine.submit(ids, to, 70, sampling=GREEDY) for ids in prompts]
            warm = [handle.result(300) for handle in handles]
            turn = run(engine, [*prompts[0], *cold[0].token_ids, 5], 4)
            again = look(engine)
        for found, want in zip(warm, cold, strict=True):
            assert found.token_ids == want.token_ids
            whole = (len(found.prompt_token_ids) - 1) // 64 * 64
            assert found.metrics.num_cached_tokens == whole
        assert turn.metrics.num_cached_tokens == (len(prompts[0]) + 69) // 64 * 64
        both = again.keys() & cold_pages.keys()
        assert len(both) >= 3
        for name in both:
            assert all(map(torch.equal, again[name], cold_pages[name]))


def test_long_contexts_come_back_whole_for_best_effort_too(model: Any, tmp_path: Path) -> None:
    """What BE requests find in RAM is bounded, since nothing stops those copies."""
    ids = prompt_of(450)
    with engine_of(model, tmp_path, max_segment_ms=0.001) as engine:
        want = run(engine, ids, 12, "BE").token_ids
    with engine_of(model, tmp_path, max_segment_ms=0.001) as engine:
        again = run(engine, ids, 12, "BE")
        assert again.token_ids == want
        assert again.metrics.num_cached_tokens == 448


def test_nothing_crosses_a_salt_or_an_owner(model: Any, tmp_path: Path) -> None:
    ids, places = prompt_of(150), [("", ""), ("a", ""), ("", "a"), ("b", "a"), ("a", "b")]
    with engine_of(model, tmp_path) as engine:
        for salt, owner in places:
            found = run(engine, ids, cache_salt=salt, cache_owner=owner)
            assert found.metrics.num_cached_tokens == 0
    with engine_of(model, tmp_path) as engine:
        assert run(engine, ids, cache_salt="ab").metrics.num_cached_tokens == 0
        for salt, owner in places:
            found = run(engine, ids, cache_salt=salt, cache_owner=owner)
            assert found.metrics.num_cached_tokens == 128


def test_what_is_deleted_is_in_neither_place(model: Any, tmp_path: Path) -> None:
    ids = prompt_of(150)
    places = [("", "x"), ("a", "x"), ("a", "y"), ("", "")]

    def cached(engine: QLLMEngine) -> list[int]:
        found = [run(engine, ids, cache_salt=s, cache_owner=o) for s, o in places]
        return [r.metrics.num_cached_tokens for r in found]

    with engine_of(model, tmp_path) as engine:
        assert cached(engine) == [0, 0, 0, 0]
        stored(engine)
        assert engine.delete_kv("a", "x") == 2
        assert engine.delete_kv("a", "z") == 0
        stored(engine)
    data = (tmp_path / kv_file.FILE).read_bytes()
    with engine_of(model, tmp_path) as engine:
        prefix = loop_of(engine).prefix
        assert len(prefix.tier.index) == 6
        assert cached(engine) == [128, 0, 128, 128]
        there = look(engine)
        salted = prefix.store.tagged(tag_of(b""))
        assert salted
        for name in salted:
            assert there[name][0].view(torch.uint8).numpy().tobytes() in data
        gone = [n for n in prefix.store.tagged(b"") if n in there and n not in data]
        assert len(gone) == 2, "the two pages that were computed again"
        stored(engine)
        assert engine.delete_kv(None, "x") == 4
    with engine_of(model, tmp_path) as engine:
        assert cached(engine) == [0, 0, 128, 128]
        engine.reset_prefix_cache()
        assert len(look(engine)) == 0
        data = (tmp_path / kv_file.FILE).read_bytes()
        assert not any(data[kv_file.BLOCK :]), "nothing at all is left"
        assert cached(engine) == [0, 0, 0, 0]


def test_requests_in_flight_keep_nothing_after_their_owner_deleted(
    model: Any, tmp_path: Path
) -> None:
    with engine_of(model, tmp_path) as engine:
        handle = engine.submit(prompt_of(150), "BE", 200, sampling=GREEDY, cache_owner="x")
        next(iter(handle))
        engine.delete_kv(cache_owner="x")
        handle.result(300)
        assert look(engine) == {}
        assert stored(engine)["kept_pages"] == 0


def test_who_waits_for_its_pages_keeps_nothing_after_its_owner_deleted(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does not know it yet; who shares no owner with it keeps its own."""
    ids = prompt_of(200)
    with engine_of(model, tmp_path) as engine:
        want = [run(engine, ids, 20, cache_owner=owner).token_ids for owner in "xy"]
    gate = held_back(monkeypatch)
    with engine_of(model, tmp_path) as engine:
        waits = [engine.submit(ids, "BE", 20, sampling=GREEDY, cache_owner=owner) for owner in "xy"]
        held = engine._client._core.loading._held  # type: ignore[attr-defined]
        wait_for(lambda: len(held) == 2)
        assert engine.delete_kv(cache_owner="x") == 3
        assert engine.delete_kv(cache_owner="z") == 0
        gate.set()
        found = [handle.result(300) for handle in waits]
        assert [r.token_ids for r in found] == want
        assert [r.metrics.num_cached_tokens for r in found] == [0, 192]
        run(engine, ids, 20, cache_owner="y")
        assert stored(engine)["kept_pages"] == 3
        assert run(engine, ids, 20, cache_owner="x").metrics.num_cached_tokens == 0
        assert run(engine, ids, 20, cache_owner="x").metrics.num_cached_tokens == 192


def test_who_waits_for_its_grammar_keeps_nothing_after_its_owner_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, real = threading.Event(), Vocabulary.matcher

    def matcher(self: Vocabulary, form: Any) -> Any:
        gate.wait()
        return real(self, form)

    monkeypatch.setattr(Vocabulary, "matcher", matcher)
    sampling = SamplingParams(structured_outputs=StructuredOutputs(regex="[a-z]{8}"))
    with tiny_engine(run_in="thread", conformance=False) as engine:
        ids = prompt_of(150)
        waits = engine.submit(ids, "LS", 12, sampling=sampling, cache_owner="x")
        wait_for(lambda: engine._client._core.held)  # type: ignore[attr-defined]
        engine.delete_kv(cache_owner="x")
        gate.set()
        assert waits.result(300).token_ids
        assert look(engine) == {}
        run(engine, ids, cache_owner="x")
        assert len(look(engine)) == 2, "who comes later keeps its own"


def test_unused_kv_is_deleted(model: Any, tmp_path: Path) -> None:
    with engine_of(model, tmp_path, kv_ttl_s=1000) as engine:
        run(engine, prompt_of(150))
        stored(engine)
        prefix = loop_of(engine).prefix
        now, moved = prefix.now_ns, [0]
        engine.call(lambda: setattr(prefix, "now_ns", lambda: now() + moved[0]))
        moved[0] = 900 * NS_PER_S
        run(engine, prompt_of(70))  # uses the first page
        assert len(look(engine)) == 2
        moved[0] = 1100 * NS_PER_S
        engine.call(lambda: None)
        engine.call(lambda: None)
        assert len(look(engine)) == 1
        assert stored(engine)["kept_pages"] == 1
        moved[0] = 3000 * NS_PER_S
        engine.call(lambda: None)
        assert look(engine) == {}
        assert stored(engine)["kept_pages"] == 0
        assert run(engine, prompt_of(150)).metrics.num_cached_tokens == 0


def test_the_next_engine_knows_classes_hints_and_ages(model: Any, tmp_path: Path) -> None:
    """What was kept of chats is displaced last by it too, and what is old is deleted."""
    asks = [("LS", None), ("BE", None), ("BE", 1000)]
    with engine_of(model, tmp_path) as engine:
        for i, (to, ttl_s) in enumerate(asks):
            run(engine, prompt_of(70, i), 2, to, cache_ttl_s=ttl_s)
        stored(engine)
    with engine_of(model, tmp_path, kv_ttl_s=5000) as engine:
        prefix = loop_of(engine).prefix
        index, now = prefix.tier.index, prefix.now_ns
        chat, batch, hinted = engine.call(index.names)
        assert [index.is_ls(name) for name in (chat, batch, hinted)] == [True, False, False]
        left_s = (index.until_ns(hinted) - now()) / NS_PER_S
        assert 0 < left_s <= 1000
        assert index.until_ns(batch) == 0
        before = [prefix.tier.index._pages[name].used_ns for name in (chat, batch, hinted)]
        assert before == sorted(before)
        assert before[-1] <= now()
    with open(tmp_path / kv_file.FILE, "r+b") as data:
        data.seek(kv_file.BLOCK)
        raw = bytearray(data.read(3 * kv_file.ENTRY.itemsize))
        rows = np.frombuffer(raw, kv_file.ENTRY)
        rows[:2]["used_s"] -= 6000
        for slot in range(2):
            own = kv_file._entry_checksum(rows[slot].tobytes(), slot)
            rows[slot : slot + 1]["own_checksum"] = own
        data.seek(kv_file.BLOCK)
        data.write(raw)
    with engine_of(model, tmp_path, kv_ttl_s=5000) as engine:
        engine.call(lambda: None)
        engine.call(lambda: None)
        assert stored(engine)["kept_pages"] == 1


def test_prompt_logprobs_never_read(model: Any, tmp_path: Path) -> None:
    asked = SamplingParams(temperature=0, ignore_eos=True, prompt_logprobs=0)
    with engine_of(model, None) as engine:
        want = run(engine, prompt_of(150), sampling=asked).prompt_logprobs
    for _ in range(2):
        with engine_of(model, tmp_path) as engine:
            found = run(engine, prompt_of(150), sampling=asked)
            assert found.metrics.num_cached_tokens == 0
            assert found.prompt_logprobs == want
            assert stored(engine)["loaded_bytes"] == 0


def test_sessions_keep_their_pages(model: Any, tmp_path: Path) -> None:
    """Those of a conversation survive whatever comes between two turns."""
    settings_ = {"prefix_cache_tokens": 256, "keep_ls_s": 0, "max_kv_tokens": 1024}
    for ttl_s, found in ((None, 0), (1000, 128)):
        with engine_of(model, None, **settings_) as engine:
            run(engine, prompt_of(130), 2, cache_ttl_s=ttl_s)
            for i in range(1, 8):
                run(engine, prompt_of(200, i), 2)
            assert run(engine, prompt_of(130), 2).metrics.num_cached_tokens == found
            look(engine)


def test_sessions_take_at_most_half(model: Any) -> None:
    with engine_of(model, None, prefix_cache_tokens=256) as engine:
        for i in range(5):
            run(engine, prompt_of(130, i), 2, cache_ttl_s=1000)
        run(engine, prompt_of(130, 9), 2)
        assert run(engine, prompt_of(130, 9), 2).metrics.num_cached_tokens == 128
        look(engine)


# -- disks


def broken(code: int, after: int) -> type[kv_file.Blocks]:
    """Blocks that fail from some call on."""
    left = [after]

    class Broken(kv_file.Blocks):
        def _check(self) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))

        def write(self, data: memoryview, at: int) -> None:
            self._check()
            super().write(data, at)

        def read(self, data: memoryview, at: int) -> bool:
            self._check()
            return super().read(data, at)

    return Broken


@pytest.mark.sampled
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("after", [1, 2, 3, 5, 8])
def test_a_disk_that_fails_is_left_alone_and_said_once(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, after: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    prompts = [prompt_of(200, i) for i in range(3)]
    with engine_of(model, tmp_path) as engine:
        want = [run(engine, ids, 70).token_ids for ids in prompts[:2]]
    with engine_of(model, None) as engine:
        want.append(run(engine, prompts[2], 70).token_ids)
    blocks = broken(code, after)
    monkeypatch.setattr(kv_file.open_file, "__defaults__", (blocks,))
    with engine_of(model, tmp_path) as engine:
        for _ in range(2):
            handles = [engine.submit(ids, "BE", 70, sampling=GREEDY) for ids in prompts]
            assert [h.result(300).token_ids for h in handles] == want
        off = stored(engine)["off"]
        assert os.strerror(code) in off
        with pytest.raises(QllmError, match="not from the file"):
            engine.delete_kv()
        assert run(engine, prompts[0]).token_ids == want[0][:8]
    assert [r.message for r in caplog.records if "its file failed" in r.message] != []
    assert len([r for r in caplog.records if "its file failed" in r.message]) == 1


def test_a_disk_that_stalls_blocks_no_request(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt_of(200)
    with engine_of(model, tmp_path) as engine:
        want = run(engine, ids, 20).token_ids
    gate, stands = threading.Event(), threading.Event()

    class Stuck(kv_file.Blocks):
        def read(self, data: memoryview, at: int) -> bool:
            if threading.current_thread().name == "qllm-kv-read":
                stands.set()
                gate.wait()
            return super().read(data, at)

    monkeypatch.setattr(kv_file.open_file, "__defaults__", (Stuck,))
    monkeypatch.setattr(reads, "CLOSE_S", 0.2)
    with engine_of(model, tmp_path) as engine:
        waits = engine.submit(ids, "LS", 20, sampling=GREEDY)
        assert stands.wait(60)
        assert run(engine, prompt_of(90, 3), 20).token_ids, "others go by"
        assert waits.finish_reason is None
        monkeypatch.setattr(tier, "SLACK_NS", 0)
        held = engine._client._core.loading._held  # type: ignore[attr-defined]
        engine.call(lambda: [setattr(s.load, "late_ns", 0) for _, s in held.values()])
        assert waits.result(300).token_ids == want, "it computes"
        assert engine.stats()["prefix_cache"]["file"]["late_requests"] == 1
        gone = engine.submit(prompt_of(200), "LS", 20, sampling=GREEDY)
        assert gone.result(300).token_ids == want
    gate.set()


@pytest.mark.parametrize("is_late", [False, True])
def test_best_effort_waits_for_its_pages_while_chats_go_by(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Chats are served meanwhile; if the pages come too late it computes, beside chats too."""
    ids, chat = prompt_of(200), prompt_of(90, 3)
    with engine_of(model, tmp_path) as engine:
        want, said = run(engine, ids, 20, "BE").token_ids, run(engine, chat, 20).token_ids
    gate = held_back(monkeypatch)
    with engine_of(model, tmp_path, prefix_cache_tokens=4096) as engine:
        tier_ = engine._client._core.kept._tier  # type: ignore[attr-defined]
        held = engine._client._core.loading._held  # type: ignore[attr-defined]
        waits = engine.submit(ids, "BE", 20, sampling=GREEDY)
        for _ in range(3):
            assert run(engine, chat, 20, cache_salt="x").token_ids == said
        assert waits.finish_reason is None
        assert not waits.token_ids
        if is_late:
            engine.call(lambda: [setattr(s.load, "late_ns", 0) for _, s in held.values()])
        else:
            gate.set()
        while waits.finish_reason is None:
            assert run(engine, chat, 20, cache_salt="x").token_ids == said
        found = waits.result(300)
        assert found.token_ids == want
        assert found.metrics.num_cached_tokens == (0 if is_late else 192)
        assert tier_.counts.late == is_late
        gate.set()
        wait_for(lambda: not tier_._loads)  # what comes now is nobody's
        again = run(engine, ids, 20, "BE")
        assert (again.token_ids, again.metrics.num_cached_tokens) == (want, 192)
        look(engine)


def test_a_write_that_stalls_blocks_no_request(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(model, None) as engine:
        want = [run(engine, prompt_of(200, i), 20).token_ids for i in range(3)]
    gate, stands = threading.Event(), threading.Event()

    class Stuck(kv_file.Blocks):
        def write(self, data: memoryview, at: int) -> None:
            stands.set()
            gate.wait()
            super().write(data, at)

    monkeypatch.setattr(kv_file.open_file, "__defaults__", (Stuck,))
    monkeypatch.setattr(reads, "CLOSE_S", 0.2)
    monkeypatch.setattr(kept, "CLOSE_S", 0.2)
    with engine_of(model, tmp_path) as engine:
        for _ in range(2):
            found = [run(engine, prompt_of(200, i), 20).token_ids for i in range(3)]
            assert found == want
        assert stands.wait(60)
        look(engine)
    gate.set()


def test_kv_that_has_no_room_is_computed(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the request's trouble: the file goes on."""
    ids = prompt_of(200)
    with engine_of(model, tmp_path) as engine:
        want = run(engine, ids, 20).token_ids
    real = pages.SlabTarget.put

    def put(self: Any, number: int, page: Any) -> None:
        if number == 1:
            raise MemoryError
        real(self, number, page)

    with engine_of(model, tmp_path) as engine:
        monkeypatch.setattr(pages.SlabTarget, "put", put)
        assert run(engine, ids, 20).token_ids == want
        monkeypatch.setattr(pages.SlabTarget, "put", real)
        engine.call(loop_of(engine).prefix.store.reset)
        assert run(engine, ids, 20).metrics.num_cached_tokens == 192
        assert stored(engine)["off"] is None


def test_who_waits_may_be_cancelled_and_time_out(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt_of(200)
    with engine_of(model, tmp_path) as engine:
        run(engine, ids, 20)
    gate = held_back(monkeypatch)
    with engine_of(model, tmp_path) as engine:
        handle = engine.submit(ids, "LS", 20, sampling=GREEDY)
        late = engine.submit(ids, "BE", 20, sampling=GREEDY, timeout_s=0.05)
        left = engine.submit(ids, "BE", 20, sampling=GREEDY)
        assert late.result(300).finish_reason.value == "timeout"
        handle.cancel()
        assert handle.result(300).finish_reason.value == "cancelled"
        gate.set()
        assert left.result(300).metrics.num_cached_tokens == 192
        assert stored(engine)["late_requests"] == 0, "none of them computes instead"


def test_who_waits_may_be_paused_and_change_its_class(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt_of(200)
    with engine_of(model, tmp_path) as engine:
        want = run(engine, ids, 20).token_ids
    gate = held_back(monkeypatch)
    with engine_of(model, tmp_path) as engine:
        paused, urgent, ended = (engine.submit(ids, "BE", 20, sampling=GREEDY) for _ in range(3))
        paused.pause()
        ended.pause()
        urgent.update(priority="LS")
        engine.call(lambda: None)  # all that was asked is taken
        ended.cancel()
        assert ended.result(300).finish_reason.value == "cancelled"
        gate.set()
        result = urgent.result(300)
        assert result.token_ids == want
        assert result.metrics.priority == 0
        wait_for(lambda: paused.status is RequestStatus.PAUSED)
        assert not paused.token_ids
        paused.resume()
        assert paused.result(300).token_ids == want
        look(engine)


def test_a_damaged_page_is_computed_and_written_again(model: Any, tmp_path: Path) -> None:
    ids = prompt_of(200)
    with engine_of(model, tmp_path) as engine:
        want = run(engine, ids, 20).token_ids
    with engine_of(model, tmp_path) as engine:
        file = engine._client._core.kept._file  # type: ignore[attr-defined]
        entries = file.scan()
        second = file._at(sorted(e.slot for e in entries)[1])
    with (tmp_path / kv_file.FILE).open("r+b") as data:
        data.seek(second + 100)
        data.write(b"\0" * 8)
    with engine_of(model, tmp_path) as engine:
        found = run(engine, ids, 20)
        assert found.token_ids == want
        assert found.metrics.num_cached_tokens in (0, 64, 128)
        assert stored(engine)["damaged_pages"] == 1
        assert stored(engine)["kept_pages"] == 3
    with engine_of(model, tmp_path) as engine:
        assert run(engine, ids, 20).metrics.num_cached_tokens == 192
    whole = (tmp_path / kv_file.FILE).read_bytes()
    data = bytearray(whole)
    for at in range(kv_file.BLOCK, len(data), 101):  # entries, keys and values of all pages
        data[at] ^= 1
    (tmp_path / kv_file.FILE).write_bytes(data)
    with engine_of(model, tmp_path) as engine:
        found = run(engine, ids, 20)
        assert (found.token_ids, found.metrics.num_cached_tokens) == (want, 0)


def test_a_folder_serves_one_engine_and_one_model(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_model("mixtral", torch.bfloat16)
    with engine_of(model, tmp_path) as engine:
        want = run(engine, prompt_of(150)).token_ids
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            engine_of(other, tmp_path)
    with pytest.raises(ConfigError, match="kv_dir_reset=True"):
        engine_of(other, tmp_path)
    with pytest.raises(ConfigError, match="pages"):
        engine_of(model, tmp_path, kv_dir_gib=0.02)
    # weights that no sample of them shows
    with torch.no_grad():
        weight = next(p for n, p in model.named_parameters() if n.endswith("q_proj.weight"))
        before = weight[3, 7].item()
        weight[3, 7] += 1
    with pytest.raises(ConfigError, match="its weights is"):
        engine_of(model, tmp_path)
    with torch.no_grad():
        weight[3, 7] = before
    with pytest.raises(ConfigError, match="its model and settings is"):
        engine_of(model, tmp_path, exactness="batch-invariant")
    with monkeypatch.context() as patched:
        patched.setattr("qllm.engine.storage.build.software", lambda: "qllm 0, kernels 0, torch 0")
        with pytest.raises(ConfigError, match="its software is"):
            engine_of(model, tmp_path)
    with engine_of(model, tmp_path, kv_dir_reset=True) as engine:
        again = run(engine, prompt_of(150))
        assert (again.token_ids, again.metrics.num_cached_tokens) == (want, 128)
    with engine_of(other, tmp_path, kv_dir_reset=True) as engine:
        assert run(engine, prompt_of(150)).metrics.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_dir": 5}, "path of a folder"),
        ({"kv_dir": ""}, "path of a folder"),
        ({"kv_dir_gib": 0}, "kv_dir_gib"),
        ({"kv_dir_gib": float("nan")}, "kv_dir_gib"),
        ({"kv_dir_gib": 1e-6}, "no room for a page"),
        ({"kv_dir_gib": 900_000}, "with 900000 GiB of room"),
        ({"kv_dir": "/proc/none"}, "cannot be used"),
        ({"kv_ttl_s": 0}, "kv_ttl_s"),
        ({"kv_ttl_s": "1"}, "kv_ttl_s"),
        ({"kv_dir_reset": 1}, "kv_dir_reset"),
        ({"prefix_cache": False}, "prefix_cache"),
        ({"prefix_cache_tokens": 63}, "no room for a page of 64 tokens"),
        ({"prefix_cache_tokens": 2**31 - 1}, "bytes of memory; give at most"),
        ({"swap_kv_tokens": 2**31 - 1}, "bytes of memory; give at most"),
        ({"prefix_cache": "approximate"}, "only exact ones"),
        ({"kernels": "reference"}, "needs the prefix cache"),
        ({"loop": "conditional"}, "kv_dir"),
    ],
)
def test_bad_settings(model: Any, tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_of(model, tmp_path, **wrong)
    with engine_of(model, tmp_path) as engine:
        assert run(engine, [1, 2]).token_ids


@pytest.mark.parametrize("ttl_s", [-1, False, "1", float("nan"), 10**12])
def test_bad_hints(model: Any, ttl_s: Any) -> None:
    with engine_of(model, None) as engine, pytest.raises(QllmError, match="cache_ttl_s"):
        run(engine, [1], cache_ttl_s=ttl_s)
