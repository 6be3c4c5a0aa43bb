"""Drafts on and off: tokens per second, latency beside a batch, preemption, and vLLM's n-grams.

    python -m bench drafts                          the rows of one process, 2 threads
    python -m bench drafts --vllm VENV/bin/python   also: vLLM's `ngram` on the same prompts
    python -m bench drafts --llama VENV/bin/python  also: llama.cpp's `ngram-simple` on the same
    python -m bench drafts --quick                  few tokens: to debug

One engine serves all arms of a row in turns, so a row compares runs of the same weights in the same
minutes. The model is the seeded MoE of 300M parameters. Its own answers are random. So the answers
of the rows `lookup` are held by a grammar to a text, token by token: the acceptance is that of a
model that edits without mistakes, and the time is that of the 300M model. The texts are chosen by
seed before any drafter runs. Each row prints the share of the answer's tokens whose last three
tokens came before in the prompt or the answer.

- oracle: a drafter that knows the answer; the ceiling is what the cost of a verify row allows
- wrong: a drafter that is always wrong
- lookup: an edited file, with the file before the edit as `prediction`
- none: the same with answers that repeat nothing
- grammar: 20 JSON schemas, on the model `tiny`, which was trained on text
- mixed: LS requests with right drafts beside a BE flood
- preempt: LS arrivals stop BE rows of 9 tokens, or of one
- exit: draft rows through 1 of 12 layers, of a model whose other layers change little
- exit tiny: the same through 1 layer of `tiny`, where it does not pay, so nothing should be drafted
- model: the same model, and its first layer with its head as a draft model in a folder of its own;
  then LS arrivals stop BE requests with it and without
- mtp: a GLM-4.5 of 12 layers and a further one that drafts, both of the same size as the 300M model

The last line of stdout is one JSON document.
"""

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import (
    Table,
    load_model,
    machine,
    make_jobs,
    paired,
    percentiles,
    plain,
    quantile,
    result_file,
    without_paths,
)
from bench.energy import Meter, Run, answered_tokens, metered
from bench.engine.mixed import GREEDY, Flood
from bench.engine.mtp_model import save_mtp_model
from qllm import QLLMEngine, SamplingParams
from qllm.drafters.choose import load_drafter
from qllm.drafters.exit import Exit
from qllm.drafters.protocol import DraftRequest, MakeDrafter
from qllm.measure.bench import corpus_of
from qllm.measure.random_moe import make_random_moe
from qllm.measure.variants import KV_SIZES
from qllm.record import trace
from qllm.types import StructuredOutputs

MOST = 4
"""Drafted tokens of the single-stream rows."""
REACH = {
    "oracle": 0.75, "wrong": 0.95, "lookup": 1.2, "none": 0.97, "grammar": 1.3,
    "tpot": 1.15, "ttft": 1.05, "be": 0.97, "preempt": 1.1, "exit": 1.3, "exit tiny": 0.97,
    "model": 1.0, "model preempt": 1.2, "mtp": 1.1,
}  # fmt: skip
LLAMA = Path(__file__).parent.parent / "serving" / "llama_drafts.py"
PEER = """
import json, sys, time
asked = json.loads(sys.stdin.read())
from vllm import LLM, SamplingParams
more = {}
if asked["drafts"]:
    more["speculative_config"] = {
        "method": "ngram", "num_speculative_tokens": asked["drafts"],
        "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }
llm = LLM(asked["model"], dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False,
          gpu_memory_utilization=0.4, **more)
how = SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True)
prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
llm.generate(prompts[:1], how)
times, tokens = [], []
for prompt in prompts:
    begin = time.perf_counter()
    found = llm.generate([prompt], how, use_tqdm=False)
    times.append(time.perf_counter() - begin)
    tokens.append(list(found[0].outputs[0].token_ids))
print(json.dumps({"times": times, "tokens": tokens}))
"""


Answers = dict[tuple[int, ...], Sequence[int]]
"""Tokens of answers, by the tokens of their prompts."""


class Case(NamedTuple):
    """A request of a single-stream row."""

    prompt: Any
    new: int
    sampling: SamplingParams


class Guess:
    """A drafter that knows the answers, and proposes them or always another token.

    Args:
        request: Request of the drafter.
        answers: Tokens of each answer, by the tokens of its prompt. Other answers get no drafts.
        shift: Number that is added to each token: 0 is right.
    """

    def __init__(self, request: DraftRequest, answers: Answers, shift: int) -> None:
        self._num, self._answers, self._shift = request.num_prompt_tokens, answers, shift

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """See `qllm.drafters.protocol.Drafter`."""
        answer = self._answers.get(tuple(token_ids[: self._num]), ())
        at = len(token_ids) - self._num
        return [i + self._shift for i in answer[at : at + most]]


def guessing(answers: Answers, *, right: bool) -> MakeDrafter:
    """Return the maker of `Guess` drafters."""
    return partial(Guess, answers=answers, shift=0 if right else 1)


def known(engine: QLLMEngine, cases: Sequence[Case]) -> Answers:
    """Return the answers to cases, alone and as the engine is."""
    return {
        tuple(c.prompt): engine.submit(c.prompt, "LS", c.new, sampling=GREEDY).result(600).token_ids
        for c in cases
    }


def use(
    engine: QLLMEngine, make: MakeDrafter | Exit | None, most: int, *, weighs: bool = True
) -> None:
    """Draft with a drafter from now on, or not at all."""
    loop = engine._client.loop

    def change() -> None:
        loop.drafts = None
        if make is not None:
            loop.draft_with(make, most, warn=print, weighs=weighs)

    engine.call(change)


def decode_s(result: Any) -> float:
    """Return the seconds between the first and the last token."""
    metrics = result.metrics
    return (metrics.e2e_ms - metrics.ttft_ms) / 1000


class Arms(NamedTuple):
    """The results of both arms of a row."""

    ratios: list[float]
    """Tokens per second with drafts over without, per round."""
    accepted: int
    rejected: int
    num_different: int
    """Answers that drafts changed."""
    tokens: int
    energy: list[Run]
    """Energy of the rounds with drafts."""


def compare(
    engine: QLLMEngine,
    cases: Sequence[Case],
    rounds: int,
    make: MakeDrafter | Exit,
    most: int = MOST,
    *,
    weighs: bool = True,
) -> Arms:
    """Answer all cases one by one, with and without drafts in turns."""
    ratios, accepted, rejected, different, tokens = [], 0, 0, 0, 0
    energy: list[Run] = []
    for n in range(rounds + 1):
        spent, told = {}, {}
        for arm in (True, False) if n % 2 else (False, True):
            use(engine, make if arm else None, most, weighs=weighs)
            with metered(energy if arm and n else []) as computed:
                found = [
                    engine.submit(case.prompt, "LS", case.new, sampling=case.sampling).result(600)
                    for case in cases
                ]
                computed.append(answered_tokens(found))
            spent[arm], told[arm] = sum(map(decode_s, found)), [r.token_ids for r in found]
            if arm and n:
                accepted += sum(r.metrics.num_accepted_drafts for r in found)
                rejected += sum(r.metrics.num_rejected_drafts for r in found)
                tokens += sum(len(r.token_ids) for r in found)
        different += sum(a != b for a, b in zip(told[True], told[False], strict=True))
        if n:  # the first round warms up
            ratios.append(spent[False] / spent[True])
    use(engine, None, 0)
    return Arms(ratios, accepted, rejected, different, tokens, energy)


def repeated(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of an answer's tokens whose last three tokens came before."""
    ids, seen, num = [*prompt, *answer], set(), 0
    for at in range(3, len(ids) + 1):
        gram = tuple(ids[at - 3 : at])
        num += at > len(prompt) and gram in seen
        seen.add(gram)
    return num / max(1, len(answer))


# -- the rows


def steps_ns(engine: QLLMEngine, case: Case, make: MakeDrafter | None) -> float:
    """Return the median time of the decode steps of an answer."""
    use(engine, make, MOST, weighs=False)
    begin = len(engine.trace.events)
    engine.submit(case.prompt, "LS", case.new, sampling=case.sampling).result(600)
    sizes, times = {}, defaultdict(list)
    for event in engine.trace.events[begin:]:
        if isinstance(event, trace.Planned):
            sizes[event.frame_id] = sum(row.num_tokens for row in event.rows)
        elif isinstance(event, trace.Ran) and event.why == "done":
            times[sizes[event.frame_id]].append(event.at_ns - event.start_ns)
    use(engine, None, 0)
    return statistics.median(times[1 if make is None else 1 + MOST])


def single_rows(model: Any, args: argparse.Namespace, table: Table, result: dict[str, Any]) -> None:
    """Measure one stream: oracle, wrong, lookup, and text that repeats nothing."""
    corpus, rng = corpus_of(args.tokenizer), random.Random(args.seed)
    new, rounds = args.new, args.rounds
    with QLLMEngine.from_model(
        model, args.tokenizer, threads=args.threads, conformance=False, record=True,
        draft="lookup", **KV_SIZES,
    ) as engine:  # fmt: skip
        use(engine, None, 0)
        starts = [rng.randrange(len(corpus) - 400) for _ in range(4)]
        cases = [Case(list(corpus[at : at + 200]), new, GREEDY) for at in starts]
        answers = known(engine, cases)
        right = guessing(answers, right=True)
        one, many = steps_ns(engine, cases[0], None), steps_ns(engine, cases[0], right)
        ceiling = (1 + MOST) * one / many
        result["verify_cost"] = round(many / one, 3)
        row(
            table,
            result,
            "oracle",
            compare(engine, cases, rounds, right, weighs=False),
            REACH["oracle"] * ceiling,
            f"ceiling {ceiling:.2f}",
        )
        wrong = guessing(answers, right=False)
        row(table, result, "wrong", compare(engine, cases, rounds, wrong), REACH["wrong"])
        share = statistics.mean(repeated(*pair) for pair in answers.items())
        lookup = load_drafter("lookup")
        row(
            table,
            result,
            "none",
            compare(engine, cases, rounds, lookup),
            REACH["none"],
            f"repeats {share:.0%}",
        )
        edits = [edit(corpus, rng, new) for _ in range(4)]
        share = statistics.mean(
            repeated([*case.sampling.prediction_ids, *case.prompt], target)
            for case, target in edits
        )
        found = compare(engine, [case for case, _ in edits], rounds, lookup, 8)
        row(table, result, "lookup", found, REACH["lookup"], f"repeats {share:.0%}")


def edit(corpus: Sequence[int], rng: random.Random, new: int) -> tuple[Case, list[int]]:
    """Return a request for an edited text, and the text: one token of 25 is another one."""
    at = rng.randrange(len(corpus) - new)
    old = list(corpus[at : at + new])
    target = [rng.choice(corpus) if rng.random() < 0.04 else i for i in old]
    rule = "start: " + " ".join(f"<[{i}]>" for i in target)
    sampling = SamplingParams(
        temperature=0, prediction=tuple(old), structured_outputs=StructuredOutputs(grammar=rule)
    )
    return Case(list(corpus[at - 100 : at]) or [5], new, sampling), target


def row(
    table: Table,
    result: dict[str, Any],
    name: str,
    arms: Arms,
    target: float,
    note: str = "",
) -> None:
    """Add the row of a comparison. It fails if no draft was ever verified."""
    found = paired(arms.ratios)
    each = arms.accepted + arms.rejected
    result[name] = plain({**arms._asdict(), "ratio": found, "note": note})
    text = f"{name}, tokens/s with drafts over without ({arms.accepted} of {each} drafts"
    table.add(
        f"{text}{', ' + note if note else ''})",
        found.text(),
        f">= {target:.2f}",
        found.value >= target and (each > 0 or name == "none"),
        energy=arms.energy,
    )
    table.add(f"{name}: answers that drafts changed", str(arms.num_different), "0",
              arms.num_different == 0)  # fmt: skip


EXIT_LAYER = 1
"""Layers of the draft rows of the row `exit`. The model has 12."""
QUIET = 0.005
"""Factor of what the layers above add, in the row `exit`."""


def quieten(model: Any) -> None:
    """Let the layers from `EXIT_LAYER` on add little to the residual stream."""
    for layer in model.model.layers[EXIT_LAYER:]:
        layer.self_attn.o_proj.weight.data.mul_(QUIET)
        layer.mlp.experts.down_proj.data.mul_(QUIET)


def exit_rows(model: Any, args: argparse.Namespace, table: Table, result: dict[str, Any]) -> None:
    """Measure draft rows where most drafts are right, and where they do not pay."""
    corpus, rng = corpus_of(args.tokenizer), random.Random(args.seed)
    starts = [rng.randrange(len(corpus) - 400) for _ in range(4)]
    cases = [Case(list(corpus[at : at + 200]), args.new, GREEDY) for at in starts]
    quieten(model)
    with QLLMEngine.from_model(
        model, threads=args.threads, conformance=False, **KV_SIZES
    ) as engine:
        found = compare(engine, cases, args.rounds, Exit(EXIT_LAYER), 8)
    note = f"{EXIT_LAYER} of {len(model.model.layers)} layers"
    row(table, result, "exit", found, REACH["exit"], note)
    cases = [Case(f"Item {n}: ", args.new, GREEDY) for n in range(4)]
    with QLLMEngine.from_pretrained(
        "tiny", threads=args.threads, conformance=False, run_in="thread", **KV_SIZES
    ) as engine:
        found = compare(engine, cases, args.rounds, Exit(1), MOST)
    row(table, result, "exit tiny", found, REACH["exit tiny"], "1 layer")


def first_layers(model: Any, tokenizer: Any, folder: str) -> None:
    """Save the first `EXIT_LAYER` layers of a model, with its norm and head, as a model."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = EXIT_LAYER
    small = type(model)(config).to(model.dtype)
    small.load_state_dict(model.state_dict(), strict=False)
    small.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_rows(model: Any, args: argparse.Namespace, table: Table, result: dict[str, Any]) -> None:
    """Measure a draft model: one stream, and the stops of LS arrivals."""
    corpus, rng = corpus_of(args.tokenizer), random.Random(args.seed)
    starts = [rng.randrange(len(corpus) - 400) for _ in range(4)]
    cases = [Case(list(corpus[at : at + 200]), args.new, GREEDY) for at in starts]
    quieten(model)
    with tempfile.TemporaryDirectory() as folder:
        first_layers(model, args.tokenizer, folder)
        with QLLMEngine.from_model(
            model, args.tokenizer, threads=args.threads, conformance=False, policy="qllm2",
            draft=f"model:{folder}", **KV_SIZES,
        ) as engine:  # fmt: skip
            make = engine._client.loop.drafts._model
            found = compare(engine, cases, args.rounds, make, 8)
            note = f"{EXIT_LAYER} of {len(model.model.layers)} layers"
            row(table, result, "model", found, REACH["model"], note)
            waits = stops(engine, args, make, lambda: make.stats()["stop_latencies_ms"])
    stop_row(table, result, args, "model preempt", waits, "with a draft model over without")


def mtp_row(args: argparse.Namespace, table: Table, result: dict[str, Any]) -> None:
    """Measure the further layer of a checkpoint: one stream."""
    corpus, rng = corpus_of(args.tokenizer), random.Random(args.seed)
    starts = [rng.randrange(len(corpus) - 400) for _ in range(4)]
    cases = [Case(list(corpus[at : at + 200]), args.new, GREEDY) for at in starts]
    with tempfile.TemporaryDirectory() as folder:
        save_mtp_model(Path(folder), args.seed)
        with QLLMEngine.from_pretrained(
            folder, threads=args.threads, conformance=False, run_in="thread", draft="mtp",
            **KV_SIZES,
        ) as engine:  # fmt: skip
            make = engine._client.loop.drafts._model
            found = compare(engine, cases, args.rounds, make, 8)
    row(table, result, "mtp", found, REACH["mtp"], "a 13th layer")


NAMES = ("name", "description", "category", "created_at", "is_available", "identifier", "quantity")
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 12},
    {"type": "integer", "minimum": 0, "maximum": 9999},
    {"type": "boolean"},
    {"enum": ["pending", "shipped", "delivered"]},
)


def schema(rng: random.Random) -> dict[str, Any]:
    """Return a schema of an object with four to seven members.

    White space is fixed, as in forced calls of tools.
    """
    names = rng.sample(NAMES, rng.randrange(4, 8))
    members = {name: rng.choice(KINDS) for name in names}
    return {
        "type": "object",
        "properties": members,
        "required": names,
        "additionalProperties": False,
        "x-guidance": {
            "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
        },
    }  # fmt: skip


def form(wanted: dict[str, Any]) -> StructuredOutputs:
    """Return the constraint of JSON with fixed white space."""
    return StructuredOutputs(grammar=f"start: %json {json.dumps(wanted)}")


def grammar_row(args: argparse.Namespace, table: Table, result: dict[str, Any]) -> None:
    """Measure 20 JSON schemas on the model `tiny`."""
    rng = random.Random(args.seed)
    cases = [
        Case(
            f"Item {n}: ",
            200,
            SamplingParams(temperature=0, structured_outputs=form(schema(rng))),
        )
        for n in range(4 if args.quick else 20)
    ]
    with QLLMEngine.from_pretrained(
        "tiny", threads=args.threads, conformance=False, run_in="thread", **KV_SIZES
    ) as engine:
        found = compare(engine, cases, args.rounds, load_drafter("grammar"), 8)
    per_step = found.tokens / max(1, found.tokens - found.accepted)
    row(table, result, "grammar", found, REACH["grammar"], f"{per_step:.2f} tokens per step")


class Mixed(NamedTuple):
    """The results of a window of LS requests beside a flood."""

    tpot: list[float]
    ttft: list[float]
    be_per_s: float
    accepted: int
    energy: list[Run]


def window(engine: QLLMEngine, ls: Sequence[Case], seed: int, gap_s: float, depth: int) -> Mixed:
    """Send LS requests at fixed gaps beside a flood of decoding BE requests."""
    flood = Flood(engine, make_jobs(seed, 4000, (64, 256), (64, 256)), depth)
    flood.top_up()
    time.sleep(1)
    meter = Meter()
    begin, before, handles = time.monotonic(), flood.num_tokens, []
    for n, case in enumerate(ls):
        while time.monotonic() < begin + n * gap_s:
            flood.top_up()
            time.sleep(0.01)
        handles.append(engine.submit(case.prompt, "LS", case.new, sampling=case.sampling))
    while any(h.finish_reason is None for h in handles):
        flood.top_up()
        time.sleep(0.01)
    made, joules = flood.num_tokens - before, meter.joules()
    be_per_s = made / (time.monotonic() - begin)
    flood.cancel()
    results = [h.result(600) for h in handles]
    found, tokens = [r.metrics for r in results], made + answered_tokens(results)
    return Mixed(
        [m.tpot_ms for m in found if m.tpot_ms is not None],
        [m.ttft_ms for m in found],
        be_per_s,
        sum(m.num_accepted_drafts for m in found),
        [{"joules": joules, "computed_tokens": tokens}],
    )


def mixed_rows(model: Any, args: argparse.Namespace, table: Table, result: dict[str, Any]) -> None:
    """Measure LS with right drafts beside a flood."""
    jobs = make_jobs(args.seed, 6 if args.quick else 24, (64, 128), (48, 48))
    ls = [Case(job.token_ids, job.max_tokens, GREEDY) for job in jobs]
    arms: dict[bool, list[Mixed]] = {True: [], False: []}
    with QLLMEngine.from_model(
        model, threads=args.threads, conformance=False, policy="qllm2", **KV_SIZES
    ) as engine:
        right = guessing(known(engine, ls), right=True)
        for n in range(args.rounds):
            for arm in (True, False) if n % 2 else (False, True):
                use(engine, right if arm else None, MOST)
                arms[arm].append(window(engine, ls, args.seed + n, 0.5, 6))
        use(engine, None, 0)
    pairs = list(zip(arms[True], arms[False], strict=True))
    tpot = paired([statistics.median(b.tpot) / statistics.median(a.tpot) for a, b in pairs])
    ttft = paired([quantile(99)(np.array(a.ttft)) / quantile(99)(np.array(b.ttft))
                   for a, b in pairs])  # fmt: skip
    rate = paired([a.be_per_s / b.be_per_s for a, b in pairs])
    accepted = sum(a.accepted for a, _ in pairs)
    result["mixed"] = plain({
        "tpot": tpot, "ttft": ttft, "be": rate, "accepted": accepted,
        "tpot_ms": [percentiles([x for m in arms[arm] for x in m.tpot]) for arm in (True, False)],
        "ttft_ms": [percentiles([x for m in arms[arm] for x in m.ttft]) for arm in (True, False)],
    })  # fmt: skip
    name = f"mixed, LS TPOT p50 without drafts over with ({accepted} accepted)"
    table.add(
        name, tpot.text(), f">= {REACH['tpot']}", accepted > 0 and tpot.value >= REACH["tpot"]
    )
    table.add("mixed, LS TTFT p99 with drafts over without", ttft.text(), f"<= {REACH['ttft']}",
              ttft.value <= REACH["ttft"])  # fmt: skip
    table.add("mixed, BE tokens/s with drafts over without", rate.text(), f">= {REACH['be']}",
              rate.value >= REACH["be"],
              energy=[run for a, _ in pairs for run in a.energy])  # fmt: skip


def preempt_row(model: Any, args: argparse.Namespace, table: Table, result: dict[str, Any]) -> None:
    """Measure how long LS arrivals wait for BE rows of nine tokens, over rows of one."""
    with QLLMEngine.from_model(
        model, threads=args.threads, conformance=False, policy="qllm2", **KV_SIZES
    ) as engine:
        right = guessing(known(engine, waiting_jobs(args.seed)), right=True)
        waits = stops(engine, args, right, lambda: [])
    stop_row(table, result, args, "preempt", waits, "rows of 9 over rows of 1")


def waiting_jobs(seed: int) -> list[Case]:
    """Return the BE requests that LS arrivals stop."""
    jobs = make_jobs(seed + 1, 4, (64, 64), (400, 400))
    return [Case(job.token_ids, job.max_tokens, GREEDY) for job in jobs]


def stops(
    engine: QLLMEngine,
    args: argparse.Namespace,
    make: MakeDrafter,
    others_ms: Callable[[], Sequence[float]],
) -> dict[bool, list[float]]:
    """Return how long LS arrivals waited for BE requests to stop, in ms, with drafts and without.

    Args:
        engine: Engine.
        args: Arguments of the bench.
        make: Maker of drafters.
        others_ms: Function that returns further waits so far: those for a draft model.
    """
    short = [Case(job.token_ids, 1, GREEDY) for job in make_jobs(9, 40, (8, 8), (1, 1))]
    waits: dict[bool, list[float]] = {True: [], False: []}
    for n in range(2 * args.rounds):
        for arm in (True, False) if n % 2 else (False, True):
            use(engine, make if arm else None, 8, weighs=False)
            before, before_others = len(engine.stats()["preempt_latencies_ms"]), len(others_ms())
            handles = [
                engine.submit(j.prompt, "BE", j.new, sampling=GREEDY)
                for j in waiting_jobs(args.seed)
            ]
            for case in short:
                time.sleep(0.02)
                engine.submit(case.prompt, "LS", 1, sampling=GREEDY).result(60)
            for handle in handles:
                handle.cancel()
                handle.result(60)
            waits[arm] += engine.stats()["preempt_latencies_ms"][before:]
            waits[arm] += others_ms()[before_others:]
    use(engine, None, 0)
    return waits


def stop_row(
    table: Table,
    result: dict[str, Any],
    args: argparse.Namespace,
    name: str,
    waits: dict[bool, list[float]],
    arms: str,
) -> None:
    """Add the row of the waits for stops."""
    p99 = {arm: quantile(99)(np.array(found)) for arm, found in waits.items()}
    ratio = p99[True] / p99[False]
    result[name] = {
        "ratio": round(ratio, 3),
        "ms": [percentiles(waits[arm]) for arm in (True, False)],
        "counts": [len(waits[arm]) for arm in (True, False)],
    }
    enough = min(len(found) for found in waits.values()) >= (5 if args.quick else 50)
    table.add(
        f"{name} latency p99, {arms} ({len(waits[True])}, {len(waits[False])})",
        f"{ratio:.2f}", f"<= {REACH[name]}", enough and ratio <= REACH[name],
    )  # fmt: skip


def peer_rows(folder: Path, args: argparse.Namespace, table: Table, result: dict[str, Any]) -> None:
    """Ask other engines for the same answers, with their n-gram drafts and without."""
    corpus, rng = corpus_of(args.tokenizer), random.Random(args.seed)
    starts = [rng.randrange(len(corpus) - 400) for _ in range(8)]
    prompts = [list(corpus[at : at + 200]) for at in starts]
    asked = {
        "model": str(folder), "new": args.new, "prompts": prompts, "threads": args.threads,
    }  # fmt: skip
    peers = (
        ("vllm", "vLLM ngram", args.vllm, ["-c", PEER]),
        ("llama", "llama.cpp ngram-simple", args.llama, [str(LLAMA)]),
    )
    for key, name, python, script in peers:
        if python:
            result[key] = peer_row(name, [python, *script], asked, table)


def peer_row(
    name: str, command: list[str], asked: dict[str, Any], table: Table
) -> dict[str, Any] | None:
    """Add the rows of another engine, or of why it did not run; return its numbers.

    Args:
        name: Name of the engine and its drafts.
        command: Program that reads a question as JSON, and prints JSON: `times` and `tokens` of all
            answers, and perhaps numbers of `drafted` and `accepted` tokens.
        asked: The question, without the number of `drafts`.
        table: Table that gets the rows.
    """
    found, energy = {}, list[Run]()
    for drafts in (0, MOST):
        try:
            with metered(energy if drafts else []) as computed:  # the load of its model too
                done = subprocess.run(
                    command, input=json.dumps({**asked, "drafts": drafts}), capture_output=True,
                    text=True, check=False, timeout=1200,
                    env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                )  # fmt: skip
                computed.append(sum(len(ids) + asked["new"] for ids in asked["prompts"]))
        except subprocess.TimeoutExpired as error:
            table.add(name, f"did not run: no answer in {error.timeout:.0f} s")
            return None
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            why = without_paths(lines[-1]) if lines else f"it ended with {done.returncode}"
            table.add(name, f"did not run: {why:.200}")
            return None
        found[drafts] = json.loads(done.stdout.strip().splitlines()[-1])
    without, drafted = found[0], found[MOST]
    speed = statistics.median(
        a / b for a, b in zip(without["times"], drafted["times"], strict=True)
    )
    pairs = zip(without["tokens"], drafted["tokens"], strict=True)
    same = statistics.mean(a == b for a, b in pairs)
    numbers: dict[str, Any] = {"speed": round(speed, 3), "same": same}
    told = ""
    if "drafted" in drafted:
        numbers |= {what: sum(drafted[what]) for what in ("drafted", "accepted")}
        told = f" ({numbers['accepted']} of {numbers['drafted']} drafts)"
    table.add(f"{name}: tokens/s with drafts over without{told}", f"{speed:.2f}", energy=energy)
    table.add(f"{name}: answers equal to its own without drafts", f"{same:.0%}", "printed")
    return numbers


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of arms")
    parser.add_argument("--new", type=int, default=200, help="tokens per answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="single,exit,model,mtp,grammar,mixed,preempt")
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--llama", help="Python of an environment with xllamacpp and gguf")
    parser.add_argument("--quick", action="store_true", help="few tokens: to debug")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.new = 1, 60
    from transformers import AutoTokenizer

    folder = make_random_moe(size="300m")
    args.tokenizer = AutoTokenizer.from_pretrained(folder)
    table, rows = Table(), [name for name in args.rows.split(",") if name]
    result: dict[str, Any] = {
        "bench": "drafts",
        "machine": machine(),
        "settings": {
            name: getattr(args, name) for name in ("rounds", "new", "seed", "threads", "quick")
        },
    }
    made = {
        "single": single_rows,
        "exit": exit_rows,
        "model": model_rows,
        "mixed": mixed_rows,
        "preempt": preempt_row,
    }
    for name in rows:
        if name in ("grammar", "mtp"):
            (grammar_row if name == "grammar" else mtp_row)(args, table, result)
        else:
            made[name](load_model(folder), args, table, result)
    peer_rows(folder, args, table, result)
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
