"""Engines over a model whose experts are in a file: the tokens of an engine with all in memory."""

import errno
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qllm import QLLMEngine, SamplingParams
from qllm.cli import app
from qllm.config import EngineConfig
from qllm.engine.storage.identity import weights_digest
from qllm.errors import ConfigError
from qllm.frontend.handle import Handle
from qllm.kernels import cpu
from qllm.models.loader import load
from qllm.models.weights import experts_in_file
from qllm.models.weights.quantised_linears import weight_bytes
from qllm.server.config import ServerConfig
from qllm.server.ops.banner import experts_line
from qllm.sim.calibrate import calibrate
from qllm.sim.presets import preset
from qllm.sim.run import SimulatedEngine
from qllm_policies.fcfs import Fcfs
from tests.support.experts_in_file import errors_of, loaded, saved
from tests.support.families import VOCAB

assert cpu.MISSING is None, cpu.MISSING
SETTINGS: dict[str, Any] = {
    "conformance": False,
    "threads": 1,
    "max_kv_tokens": 2048,
    "exactness": "batch-invariant",
}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def prompt_of(n: int, seed: int) -> list[int]:
    rng = random.Random(1000 * n + seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def with_slots(folder: Path, num_slots: int) -> Any:
    slot_bytes = max(layer.expert_bytes for layer in loaded(folder)[1].layers)
    return loaded(folder, max_bytes=num_slots * slot_bytes)[0]


def submit_all(engine: QLLMEngine) -> list[Handle]:
    """Requests of both classes, in one go."""
    found: list[Handle] = engine.call(
        lambda: [
            engine.submit(prompt_of(5 + 4 * i, i), "LS" if i % 3 == 0 else "BE", 6, sampling=GREEDY)
            for i in range(9)
        ]
    )
    return found


@pytest.mark.parametrize("how", ["tight", "many blocks", "preempted"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_requests_of_both_classes_have_their_tokens(tmp_path: Path, family: str, how: str) -> None:
    folder = saved(tmp_path, family)
    more = {"max_segment_ms": 0.1} if how == "preempted" else {}
    answers = []
    for model in (
        load(folder, dtype="bfloat16").model,
        with_slots(folder, 4 + 4 * (how != "tight")),
    ):
        with QLLMEngine.from_model(model, **SETTINGS, **more) as engine:
            handles = submit_all(engine)
            if how == "preempted":
                next(iter(handles[1]))
                handles.append(engine.submit(prompt_of(3, 99), "LS", 6, sampling=GREEDY))
            answers.append([handle.result(300).token_ids for handle in handles])
    assert answers[0] == answers[1]


def test_a_damaged_expert_ends_its_requests_and_no_others(tmp_path: Path) -> None:
    """One expert of each layer is damaged, which some requests need and some do not."""
    folder = saved(tmp_path, "qwen3_moe")
    file = loaded(folder)[1]
    with QLLMEngine.from_model(with_slots(folder, 5), **SETTINGS) as engine:
        prompts = [prompt_of(1, i) for i in range(12)]
        wanted = [engine.submit(p, "LS", 1, sampling=GREEDY).result(300).token_ids for p in prompts]
        whole = file.path.read_bytes()
        with file.path.open("r+b") as out:
            for layer in range(len(file.layers)):
                place = file.layers[layer].place(3)
                out.seek(place)
                out.write(bytes([whole[place] ^ 1]))
        handles = [engine.submit(p, "BE", 1, sampling=GREEDY) for p in prompts]
        errors = errors_of(handles, wanted)
        assert 0 < len(errors) < len(prompts)
        assert all("expert 3 of " in text and "is damaged" in text for text in errors)
        with file.path.open("r+b") as out:
            out.write(whole)
        again = [engine.submit(p, "LS", 1, sampling=GREEDY).result(300).token_ids for p in prompts]
        assert again == wanted


def test_the_start_up_check_says_what_it_does_not_compare(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, file = loaded(saved(tmp_path, "qwen3_moe"))
    with QLLMEngine.from_model(model, **SETTINGS | {"conformance": True}):
        pass
    assert f"not with model.forward, because the experts are in {file.path}" in caplog.text


# -- settings


def from_folder(folder: Path, experts: Path, **more: Any) -> QLLMEngine:
    how = {"run_in": "thread", "dtype": "bfloat16", "expert_dir": experts} | SETTINGS | more
    return QLLMEngine.from_pretrained(str(folder), **how)


def sizes_of(folder: Path) -> tuple[int, int]:
    """Bytes of the largest expert, and of all."""
    file = loaded(folder)[1]
    return max(layer.expert_bytes for layer in file.layers), file.num_bytes


def test_settings_put_experts_into_a_folder(tmp_path: Path) -> None:
    folder, experts = saved(tmp_path / "model", "qwen3_moe"), tmp_path / "new" / "experts"
    slot, total = sizes_of(folder)
    with QLLMEngine.from_model(load(folder, dtype="bfloat16").model, **SETTINGS) as engine:
        wanted = [handle.result(300).token_ids for handle in submit_all(engine)]
    for run_in, size in (("thread", f"{9 * slot / 1024:g}KiB"), ("process", 10 * slot)):
        with from_folder(folder, experts, max_expert_bytes=size, run_in=run_in) as engine:
            handles = [
                engine.submit(
                    prompt_of(5 + 4 * i, i), "LS" if i % 3 == 0 else "BE", 6, sampling=GREEDY
                )
                for i in range(9)
            ]
            assert [handle.result(300).token_ids for handle in handles] == wanted
            stats = engine.stats()["experts"]
            assert stats["slots"] == (9 if run_in == "thread" else 10)
            assert stats["LS"]["loads"] > 0
            assert stats["slot_bytes"] == stats["slots"] * slot
            assert (stats["file_bytes"], Path(stats["file"]).parent) == (total, experts)
            assert engine.watch()["experts"].keys() == stats.keys()
            assert experts_line(engine.stats()).startswith(f"room for {stats['slots']} of 16 at")
    names = [path.name for path in experts.iterdir() if path.suffix != ".lock"]
    assert len(names) == 1, "the second engine reads the file of the first"
    assert names[0].endswith(".experts")
    assert experts.stat().st_mode & 0o777 == 0o700
    with from_folder(folder, tmp_path / "none", max_expert_bytes=total) as engine:
        assert [handle.result(300).token_ids for handle in submit_all(engine)] == wanted
        assert engine.stats()["experts"] == {}
    assert not (tmp_path / "none").exists(), "all experts fit, so there is no file"


def test_too_little_memory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe")
    slot, total = sizes_of(folder)
    wanted = (
        rf"max_expert_bytes={4 * slot - 1} has room for 3 experts, and a token uses 4 .* give at "
        rf"least {4 * slot}, or {total} for all"
    )
    with pytest.raises(ConfigError, match=wanted):
        from_folder(folder, tmp_path / "experts", max_expert_bytes=4 * slot - 1)
    assert not (tmp_path / "experts").exists()


def test_too_little_memory_to_pack_an_expert_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """Later loads, which find the file, need no more than the experts of one token."""
    folder = saved(tmp_path / "model", "qwen3_moe")
    slot, _ = sizes_of(folder)
    least = {"max_expert_bytes": 4 * slot}
    wanted = r"no room for an expert, which takes (\d+) bytes while it is packed"
    with pytest.raises(ConfigError, match=wanted) as caught:
        from_folder(folder, tmp_path / "experts", **least)
    assert not (tmp_path / "experts").exists()
    (enough,) = map(int, re.findall(wanted, str(caught.value)))
    from_folder(folder, tmp_path / "experts", max_expert_bytes=enough).close()
    with from_folder(folder, tmp_path / "experts", **least) as engine:
        assert engine.stats()["experts"]["slots"] == 4


def test_a_cut_model_has_a_file_of_its_own_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_in_file, "SCRATCH_BYTES", 0)  # five experts are enough to pack one
    folder, experts = saved(tmp_path / "model", "qwen3_moe"), tmp_path / "experts"
    slot, total = sizes_of(folder)
    for depth, num_layers in ((None, 2), (2, 1), (3, 2), (None, 2)):  # the first layer is dense
        with from_folder(folder, experts, max_expert_bytes=5 * slot, depth=depth) as engine:
            assert engine.stats()["experts"]["file_bytes"] * 2 == total * num_layers
    assert len(list(experts.glob("*.experts"))) == 2, "all three layers are the whole model"


def test_experts_that_block_are_counted(tmp_path: Path) -> None:
    """A policy of whole steps knows no parked frames, so the engine itself reads experts."""
    folder = saved(tmp_path / "model", "qwen3_moe")
    slot, _ = sizes_of(folder)
    with from_folder(
        folder, tmp_path / "experts", max_expert_bytes=9 * slot, policy="mlfq"
    ) as engine:
        engine.submit(prompt_of(9, 1), "LS", 3, sampling=GREEDY).result(300)
        stats = engine.stats()["experts"]
        assert stats["blocking"]["loads"] > 0
        assert stats["blocking"]["bytes"] == slot * stats["blocking"]["loads"]
        assert stats["resident"] == stats["slots"] == 9
        assert "LS" not in stats


def test_qllm_serve_and_run_take_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr("qllm.server.serve.serve", served.append)
    flags = ["--max-expert-bytes", "4MiB", "--expert-dir", str(tmp_path / "x")]
    done = CliRunner().invoke(app, ["serve", "tiny", *flags])
    assert done.exit_code == 0, done.output
    assert served[0].engine == {"max_expert_bytes": 4 << 20, "expert_dir": str(tmp_path / "x")}
    more = ["--raw", "--max-tokens", "4", "--temperature", "0", "--set", "conformance=false"]
    said = [
        CliRunner().invoke(app, ["run", "tiny", "To be", *more, *given]).stdout
        for given in (flags, ())
    ]
    assert said[0] == said[1] != ""
    assert len(list((tmp_path / "x").glob("*.experts"))) == 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe")
    slot, _ = sizes_of(folder)
    (tmp_path / "file").write_text("")
    wanted = r"the file of experts '.*\.experts' cannot be used .* may be written as expert_dir"
    with pytest.raises(ConfigError, match=wanted):
        from_folder(folder, tmp_path / "file" / "inside", max_expert_bytes=9 * slot)


def test_a_full_disk_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe")
    slot, _ = sizes_of(folder)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"No space left .* they take \d+ bytes, and \d+ bytes"):
        from_folder(folder, tmp_path / "experts", max_expert_bytes=9 * slot)
    assert [p.suffix for p in (tmp_path / "experts").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"max_expert_bytes": 0, "expert_dir": "x"}, "max_expert_bytes=0 must be .* in \\[1, "),
        ({"max_expert_bytes": -5, "expert_dir": "x"}, "max_expert_bytes=-5 must be"),
        ({"max_expert_bytes": True, "expert_dir": "x"}, "max_expert_bytes=True must be"),
        ({"max_expert_bytes": "many", "expert_dir": "x"}, "max_expert_bytes='many' must be"),
        ({"expert_dir": "x"}, "expert_dir='x' needs max_expert_bytes, too"),
        ({"max_expert_bytes": "1GiB", "expert_dir": ""}, "expert_dir='' must be None or the path"),
        (
            {"max_expert_bytes": 9, "expert_dir": "x", "loop": "conditional"},
            "max_expert_bytes=9 needs loop='host'",
        ),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        EngineConfig(**settings)


def test_settings_that_need_a_load_or_a_cpu_are_refused(tmp_path: Path) -> None:
    own = {"max_expert_bytes": 1 << 20, "expert_dir": "x"}
    model = loaded(saved(tmp_path))[0]
    with pytest.raises(ConfigError, match="is for a model that the engine loads; use from_pre"):
        QLLMEngine.from_model(model, **SETTINGS, **own)
    wanted = "max_expert_bytes=1048576: a .* has all experts in memory; leave it"
    with pytest.raises(ConfigError, match=wanted):
        calibrate("1m", config=EngineConfig(**own))
    with pytest.raises(ConfigError, match=wanted):
        SimulatedEngine(Fcfs(), preset("h100", "qwen3-moe"), EngineConfig(**own))


# -- digests


def test_files_of_other_experts_have_other_digests(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "other"):
        folder = saved(tmp_path / name)
        model = load(folder).model
        model.model.layers[1].mlp.experts.down_proj.data[3, 2, 1] += name == "other"
        model.save_pretrained(folder)
        digests |= {weights_digest(loaded(folder)[0]) for _ in range(2)}
    assert len(digests) == 2


def test_the_memory_of_weights_has_the_budget_of_experts(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    whole, file = weight_bytes(load(folder, dtype="bfloat16").model), loaded(folder)[1]
    rest = whole - sum(
        layer.num_experts * sum(p.num_bytes for p in layer.parts) for layer in file.layers
    )
    slots = 5 * max(layer.expert_bytes for layer in file.layers)
    assert weight_bytes(with_slots(folder, 5)) == rest + slots
    assert weight_bytes(loaded(folder)[0]) == rest + file.num_bytes
