"""Token equality of the engine and `generate` on the device, and a storm of preemptions."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.gpu.check import ROOT
from bench.gpu.part import Part
from qllm import QLLMEngine, SamplingParams

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
LAYERS = {"mixtral": 16, "qwen3_moe": 16}
"""Layers of families whose steps have stages between which a step stops; others have the tests'."""
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
REFERENCE = """
import json, sys, torch
from tests.support.families import make_model
families, layers, device, prompts, new = json.loads(sys.argv[1])
torch.backends.cuda.matmul.allow_tf32 = False
for family in families:
    model, out = make_model(family, num_layers=layers.get(family)).to(device), []
    model.set_experts_implementation("batched_mm")  # `generate` changes grouped_mm by itself
    for ids in prompts:
        found = model.generate(torch.tensor([ids], device=device), max_new_tokens=new,
                               do_sample=False, eos_token_id=None)
        out.append(found[0, len(ids):].tolist())
    assert "qllm" not in sys.modules
    print(json.dumps([family, out]), flush=True)
"""
"""Source of one process for all families; it runs while the engine's kernels compile."""


def exact(part: Part) -> None:
    """Compare tokens of the engine with `generate` without qllm: four families, fp32."""
    from tests.support.families import VOCAB

    families = FAMILIES[:1] if part.dry else FAMILIES
    rng, new = random.Random(4), 8 if part.dry else 16
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (40, 7, 90, 23)]
    ask = json.dumps([families, LAYERS, part.device, prompts, new])
    command = [sys.executable, "-W", "ignore", "-c", REFERENCE, ask]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        wanted: dict[str, list[list[int]]] = {}

        def of(family: str) -> list[list[int]]:
            while family not in wanted:
                line = process.stdout.readline() if process.stdout else ""
                if not line:
                    errors.seek(0)
                    raise RuntimeError(f"the reference ended: {errors.read()[-800:]}")
                name, tokens = json.loads(line)
                wanted[name] = tokens
            return wanted[family]

        for family in families:
            part.section(
                f"tokens_{family}",
                lambda family=family: equal_tokens(part, family, prompts, new, of),
            )
        process.kill()
        process.wait()
        process.stdout.close()


def equal_tokens(
    part: Part,
    family: str,
    prompts: list[list[int]],
    new: int,
    reference: Callable[[str], list[list[int]]],
) -> dict[str, Any]:
    """Compare runs alone, and in a storm where LS requests stop BE requests, with `generate`."""
    from tests.support.families import make_model

    rng = random.Random(4)
    model = make_model(family, num_layers=LAYERS.get(family)).to(part.device)
    with QLLMEngine.from_model(
        model, max_kv_tokens=4096, policy="qllm2", preempt_at="layer"
    ) as engine:
        alone = [
            list(engine.submit(p, "LS", new, sampling=GREEDY).result(60).token_ids) for p in prompts
        ]
        handles = []
        for p in prompts * 12:
            handles.append(engine.submit(p, "BE", new, sampling=GREEDY))
            handles.append(engine.submit(p, "LS", new, sampling=GREEDY))
            time.sleep(rng.random() * 0.01)
        storm = [list(handle.result(120).token_ids) for handle in handles]
        stats = engine.stats()
    wanted = reference(family)
    same = sum(storm[i] == wanted[i // 2 % len(prompts)] for i in range(len(storm)))
    if alone != wanted or same < len(storm):
        raise AssertionError(f"alone equal: {alone == wanted}; storm: {same} of {len(storm)} equal")
    if family in LAYERS and not stats["num_preemptions"] and not part.dry:
        raise AssertionError("nothing was stopped in the storm")
    return {
        "streams": len(storm) + len(alone), "preemptions": stats["num_preemptions"],
        "distinct_tokens": [len(set(tokens)) for tokens in wanted],
    }  # fmt: skip
