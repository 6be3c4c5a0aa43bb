"""Engines over a model whose experts are in a file: the tokens of an engine with all in memory."""

import random
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.engine.storage.identity import weights_digest
from qllm.errors import ConfigError, RequestFailedError
from qllm.frontend.handle import Handle
from qllm.kernels import cpu
from qllm.models.loader import load
from qllm.models.weights.quantised_linears import weight_bytes
from tests.support.experts_in_file import loaded, saved
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
        errors = list[str]()
        for handle, tokens in zip(handles, wanted, strict=True):
            try:
                assert handle.result(300).token_ids == tokens
            except RequestFailedError as error:
                errors.append(str(error))
        assert 0 < len(errors) < len(prompts)
        assert all("expert 3 of " in text and "is damaged" in text for text in errors)
        with file.path.open("r+b") as out:
            out.write(whole)
        again = [engine.submit(p, "LS", 1, sampling=GREEDY).result(300).token_ids for p in prompts]
        assert again == wanted


def test_the_start_up_check_is_refused(tmp_path: Path) -> None:
    model, file = loaded(saved(tmp_path))
    with pytest.raises(ConfigError, match=rf"they are in {file.path}; set conformance=False"):
        QLLMEngine.from_model(model, **SETTINGS | {"conformance": True})


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
