"""lm-eval's `local-completions` against our server, beside `model.forward`.

`make test-peers` runs it with `tiny`, `make test-talk` with `talk`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from qllm import QLLMEngine
from qllm.measure.random_moe import cache_dir
from qllm.models.folders import locate
from qllm.models.loader import load
from tests.support.serving import Serving, serving

pytestmark = pytest.mark.peers

VERSION = "0.4.13"
HOME = cache_dir() / "peers" / f"lm-eval-{VERSION}"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
Documents = list[dict[str, Any]]


def as_documents(*asked: tuple[str, list[str], int]) -> Documents:
    return [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in asked]


DOCUMENTS: dict[str, Documents] = {
    "tiny": as_documents(
        ("def add(a, b):\n    return a", [" + b", " whale", " import json"], 0),
        ("import", [" the of", " json", " )))"], 1),
        ("for i in range(", ["purple", "10):", "{}{}"], 1),
        ("The json module", [" is used to encode data", " ate a stone yesterday"], 0),
        ("class Point:\n    def __init__(", ["self", "zebra", "banana, x"], 0),
        ("if x is not", [" yellow", " None:", "ly"], 1),
        ("with open(path) as", [" file:", " whereas", " because of it"], 0),
        ("raise Value", ["able", "Error(", "less"], 1),
    ),
    "talk": as_documents(
        ("The capital of France is", [" Paris", " London", " a kind of bread"], 0),
        ("Water freezes at zero degrees", [" Monday", " Celsius", " loudly"], 1),
        ("The opposite of hot is", [" warm", " seven", " cold"], 2),
        ("A triangle has three", [" wheels", " sides", " parents"], 1),
        ("The sun rises in the", [" east", " west", " refrigerator"], 0),
        ("Two plus two equals", [" nine", " a hundred", " four"], 2),
        ("Bees make", [" honey", " steel", " wool"], 0),
        ("Shakespeare wrote", [" Linux", " Hamlet", " the Constitution of France"], 1),
    ),
}
"""By model, eight questions; which answer is right is our word, what counts is what both sides
compute."""


@pytest.fixture(scope="module")
def python() -> str:
    """Python of an environment with lm-eval; torch and transformers are ours."""
    found, ready = HOME / "bin" / "python", HOME / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        (site,) = HOME.glob("lib/python*/site-packages")
        (ours,) = Path(sys.prefix).glob("lib/python*/site-packages")
        (site / "ours.pth").write_text(f"{ours}\n")
        install = [str(found), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        wanted = ["--constraint", str(CONSTRAINTS), f"lm-eval[api]=={VERSION}"]
        done = subprocess.run(
            [*install, *wanted], capture_output=True, text=True, timeout=1200, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        ready.touch()
    return str(found)


class Asked(NamedTuple):
    """A server, and the model that it serves."""

    model: str
    served: Serving


@pytest.fixture(scope="module", params=["tiny", pytest.param("talk", marks=pytest.mark.talk)])
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    exact: dict[str, Any] = {"dtype": "float32", "kernels": "reference", "conformance": False}
    exact |= {"threads": 1, "max_step_tokens": 16}
    with (
        QLLMEngine.from_pretrained(request.param, **exact) as engine,
        serving(engine, model=request.param) as made,
    ):
        yield Asked(request.param, made)


def likelihoods(model: str) -> list[list[tuple[float, bool]]]:
    """By `model.forward`: per document and choice, the sum of log-probabilities, and greediness."""
    loaded = load(model, dtype="float32")
    tokenizer: Any = loaded.tokenizer
    found = []
    for document in DOCUMENTS[model]:
        found.append([])
        for choice in document["choices"]:
            start = tokenizer(document["question"], add_special_tokens=False)["input_ids"]
            whole = tokenizer(document["question"] + choice, add_special_tokens=False)["input_ids"]
            with torch.inference_mode():
                logits = loaded.model(torch.tensor([whole])).logits[0].float()
            values = torch.log_softmax(logits, -1)
            ends = range(len(start), len(whole))
            total = sum(float(values[i - 1, whole[i]]) for i in ends)
            is_greedy = all(int(values[i - 1].argmax()) == whole[i] for i in ends)
            found[-1].append((total, is_greedy))
    return found


def run(python: str, asked: Asked, folder: Path, *, tokenized: bool) -> tuple[Any, list[Any]]:
    """Results and samples of the task."""
    lines = "".join(json.dumps(document) + "\n" for document in DOCUMENTS[asked.model])
    _, tokenizer = locate(asked.model, weights=False, code=False)
    (folder / "documents.jsonl").write_text(lines)
    task = {
        "task": "ours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(folder / "documents.jsonl")}},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "ours.yaml").write_text(yaml.safe_dump(task))
    model = {
        "model": asked.model,
        "base_url": f"{asked.served.url}/v1/completions",
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": tokenized,
        "num_concurrent": 3 if tokenized else 1,
    }
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            python, "-m", "lm_eval", "run", "--model", "local-completions",
            "--model_args", ",".join(f"{name}={value}" for name, value in model.items()),
            "--tasks", "ours", "--include_path", str(folder), "--batch_size", "4",
            "--output_path", str(folder / "out"), "--log_samples",
        ],
        env=os.environ | variables, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_ours_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"]["ours"], found


@pytest.mark.parametrize("tokenized", [True, False], ids=["ids", "text"])
def test_its_likelihoods_are_those_of_forward(
    python: str, asked: Asked, tmp_path: Path, tokenized: bool
) -> None:
    results, samples = run(python, asked, tmp_path, tokenized=tokenized)
    expected, documents = likelihoods(asked.model), DOCUMENTS[asked.model]
    assert len(samples) == len(documents)
    for sample in samples:
        told = [
            (float(value), is_greedy in (True, "True")) for [[value, is_greedy]] in sample["resps"]
        ]
        known = expected[sample["doc_id"]]
        assert [is_greedy for _, is_greedy in told] == [is_greedy for _, is_greedy in known]
        assert [x for x, _ in told] == pytest.approx([x for x, _ in known], abs=1e-3)
    right = right_normed = 0
    for document, found in zip(documents, expected, strict=True):
        values = [value for value, _ in found]
        per_byte = [v / len(c) for v, c in zip(values, document["choices"], strict=True)]
        right += values.index(max(values)) == document["answer"]
        right_normed += per_byte.index(max(per_byte)) == document["answer"]
    assert results["acc,none"] == right / len(documents)
    assert results["acc_norm,none"] == right_normed / len(documents)
    assert 0 < right < len(documents) or right_normed, "the task tells nothing"
