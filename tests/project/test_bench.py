"""The parts of `bench/` that decide what a number means."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench import common
from bench.common import Table
from bench.engine.drafts import peer_row
from bench.papers import papers as of_papers
from bench.papers import parts as papers
from bench.papers.estimate import estimated, lines
from bench.papers.parts import Tail, _hog_row, hog_claim
from bench.papers.rates import POINT, workload_of
from bench.papers.rows import FULL, World
from bench.papers.servers import CoreTime, core_time
from bench.policies import live, pareto, routing
from qllm.types import NS_PER_MS, Priority
from qllm.workloads import mix
from qllm.workloads.capacity import Capacity
from qllm.workloads.spec import RequestSpec
from tests.support.files import ROOT
from tests.support.waiting import wait_for


def test_a_window_ends_with_the_last_answer_and_its_numbers_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drain is as long as an unfinished request may take, so most of it is idle."""
    ticks: list[float] = []

    def watched(*given: Any, **how: Any) -> Any:
        assert given[2] == 3600.3
        return mix.send(*given, on_tick=note, **how)

    def note(at_s: float) -> None:
        ticks.append(at_s)
        assert len(ticks) < 1000, "all is answered, and the run goes on"

    monkeypatch.setattr(live, "send", watched)
    bench = live.Bench.load("1m")
    requests = [
        RequestSpec(at_s=0.1 * i, priority=Priority.LS, num_prompt_tokens=16, max_tokens=4,
                    name=f"ls-{i}")
        for i in range(3)
    ]  # fmt: skip
    timing = live.Timing(warmup_s=0.1, window_s=0.2, drain_s=3600.0)
    setting = live.Setting("fcfs")
    found = live.run_requests(bench, setting, requests, timing, until_answered=True)
    assert found["classes"]["LS"]["arrived"] == found["classes"]["LS"]["finished"] == 2
    assert timing.window.stop_s == 3600.3


def capacity_of(times: int) -> Capacity:
    return Capacity(prefill_tokens_per_s=times * 1000.0, output_tokens_per_s=times * 100.0)


def test_the_time_of_each_part_follows_from_the_rates() -> None:
    """Half the rate takes twice the time, where the work is given; windows stay."""
    slow, fast = (World(scale=FULL, settings={}, _capacity=capacity_of(by)) for by in (1, 2))
    for part in papers.PARTS:
        least, most = estimated(slow, part) or (0.0, 1.0)
        assert least < most
        assert (estimated(fast, part) is None) == (part == "layered-sim")
    for part, most in (("rates", 2.0), ("rotation", 2.0), ("layered", 2.0), ("streams", 1.0)):
        times = [estimated(world, part) for world in (slow, fast)]
        assert times[0] is not None
        assert times[1] is not None
        assert times[0].least_s / times[1].least_s == pytest.approx(most, rel=0.05)
    found = estimated(slow, "rates")
    assert found is not None
    per_s = {load: workload_of(slow, load)[0].nominal_rates()[Priority.LS] for load in FULL.loads}
    points = [FULL.ls_requests / rate for rate in per_s.values()]
    assert found.least_s > len(POINT) * sum(points)
    shown = lines(slow, ["hogs", "layered-sim"])
    assert "1,000 prompt and 100 output tokens/s" in shown[0]
    assert shown[1].split() == ["hogs", "6", "to", "9", "min"]
    assert "simulated" in shown[2]


def test_an_estimate_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError("a part was measured")

    monkeypatch.setattr(of_papers, "measure", measure)
    monkeypatch.setattr(World, "capacity", capacity_of(1))
    monkeypatch.setattr(sys, "argv", ["papers", "--estimate", "--parts", "hogs,laps"])
    assert of_papers.main() == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["at", "hogs", "laps", "together"]


def test_the_time_of_a_server_counts_all_of_its_threads() -> None:
    """A busy process and its child are one session. Another session does not count."""
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass'])"
    code = f"{child}\nwhile True: pass"
    server = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        wait_for(lambda: core_time(server.pid).ran > 10 * NS_PER_MS)
        before = core_time(server.pid)
        wait_for(lambda: core_time(server.pid).ran > before.ran)
        assert 0 <= core_time(server.pid).waited_since(before) <= 1
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert core_time(server.pid) == (0, 0)
    assert CoreTime(9, 5).waited_since(CoreTime(6, 4)) == 0.25
    assert CoreTime(9, 5).waited_since(CoreTime(9, 5)) == 0


def test_a_row_of_hogs_says_how_long_threads_waited_for_a_core() -> None:
    claim, quiet = hog_claim("ours", "<= 1.3"), Tail(100.0, 10.0, 0.02)
    row = _hog_row(claim, quiet, Tail(150.0, 30.0, 0.5), "how")
    assert row.here == (
        "1.50 (100.0 -> 150.0 ms); TPOT 3.00 (10.0 -> 30.0 ms); its threads waited for a core "
        "2% -> 50%"
    )
    assert row.reached is False
    assert "core" not in str(_hog_row(claim, quiet._replace(waited=None), quiet, "how").here)


def points(module: ModuleType, *pairs: tuple[float, float]) -> list[Any]:
    return [module.Point(f"rival:step_tokens={i}", be, ms) for i, (be, ms) in enumerate(pairs)]


def test_the_frontier_has_the_unbeaten_runs() -> None:
    found = pareto.frontier(points(pareto, (10, 100), (20, 90), (30, 300), (25, 400), (30, 310)))
    assert [(p.be_tokens_per_s, p.ls_ttft_p99_ms) for p in found] == [(20, 90), (30, 300)]


@pytest.mark.parametrize(
    ("ours", "rivals", "rival_ms", "how"),
    [
        ((100, 10), [(98, 40), (50, 20)], 40, "measured"),
        ((100, 10), [(102, 40), (50, 20)], 40, "measured"),
        ((100, 10), [(96, 40), (50, 20)], 40, "rival gives BE less"),
        ((100, 10), [(104, 40)], 40, "rival gives BE more"),
        ((100, 10), [(150, 80), (50, 20)], 40, "interpolated"),
        ((100, 10), [(150, 15), (98, 40)], 15, "rival gives BE more"),
    ],
)
def test_the_rival_is_taken_at_our_throughput(
    ours: tuple[float, float],
    rivals: list[tuple[float, float]],
    rival_ms: float,
    how: str,
) -> None:
    found = pareto.match(pareto.Point("ours", *ours), points(pareto, *rivals))
    assert found.how == how
    assert found.rival_ms == pytest.approx(rival_ms)
    assert found.ratio == pytest.approx(rival_ms / 10)


def test_no_rival_is_no_match() -> None:
    assert pareto.match(pareto.Point("ours", 1, 1), []) is None


def test_forced_routing_is_even_or_skewed_and_follows_the_token() -> None:
    x_TD = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts = {}
    for kind in ("uniform", "skewed"):
        ids_TK = routing.choose(x_TD, 3, 24, 4, kind)
        assert ids_TK.shape == (4000, 4)
        assert all(len(set(row)) == 4 for row in ids_TK[:200].tolist())
        assert torch.equal(ids_TK[7:9], routing.choose(x_TD[7:9], 3, 24, 4, kind))
        counts[kind] = torch.bincount(ids_TK.flatten(), minlength=24).sort(descending=True)[0]
    even = 4000 * 4 / 24
    assert counts["uniform"][0] < 1.2 * even
    assert counts["uniform"][-1] > 0.8 * even
    assert counts["skewed"][0] > 3 * even
    assert counts["skewed"][-1] < 0.5 * even


def test_routing_is_forced_inside_the_block_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from qllm.measure.random_moe import make_random_moe

    model = AutoModelForCausalLM.from_pretrained(make_random_moe(tmp_path / "m", size="1m")).eval()
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        before = model(ids).logits
        with routing.forced(model, "uniform"):
            uniform = model(ids).logits
            assert torch.equal(uniform, model(ids).logits)
        assert not torch.equal(uniform, before)
        assert torch.equal(model(ids).logits, before)
    with pytest.raises(ValueError, match="routing 'x' is unknown"), routing.forced(model, "x"):
        pass


def claim_of(target: str, what: str = "TTFT | mean") -> papers.Claim:
    return papers.Claim("Q13", what, "a paper", "2x", target)


def test_a_row_of_the_papers_has_a_value_or_a_reason() -> None:
    claim = claim_of(">= 2")
    found = [papers.Row.of(claim, 1.9, "quiet"), papers.Row.of(claim, None, "quiet", "no GPU")]
    for wrong in ((None, "quiet", None), (1.9, "quiet", "no GPU")):
        with pytest.raises(ValueError, match="either a value or a reason"):
            papers.Row.of(claim, *wrong)
    part = {"rows": [row._asdict() for row in found], "at": "today", "commit": "abc"}
    from bench.papers.rows import losing, markdown

    assert markdown({"parts": {"one": part}})[2:] == [
        "| TTFT \\| mean | 2x (a paper) | 1.90 | >= 2, **missed** | quiet; today, commit abc |",
        "| TTFT \\| mean | 2x (a paper) | not measured: no GPU | >= 2 | quiet; today, commit abc |",
    ]
    assert losing({"one": part}) == ["TTFT | mean: 1.90 (target >= 2, live)"]
    assert papers.PARTS.keys() == papers.CLAIMS.keys()


@pytest.mark.parametrize(
    ("target", "value", "reached"),
    [(">= 2", 2.0, True), (">= 2", 1.99, False), ("<= 0.5", 0.5, True), ("<= 0.5", 0.51, False),
     ("printed", 7.0, None)],
)  # fmt: skip
def test_a_row_is_held_to_its_target(target: str, value: float, reached: bool | None) -> None:
    from bench.common import Estimate

    assert papers.Row.of(claim_of(target), value, "quiet").reached is reached
    interval = Estimate(value, value - 1, value + 1)
    assert papers.Row.of(claim_of(target), interval, "quiet").reached is reached


def test_a_row_without_a_target_is_refused() -> None:
    for target in ("", "2", "about 2"):
        with pytest.raises(ValueError, match="must be '>= NUMBER', '<= NUMBER' or 'printed'"):
            papers.Row.of(claim_of(target), 1.0, "quiet")
        with pytest.raises(ValueError, match="must be"):
            papers.Row.of(claim_of(target), None, "quiet", "no GPU")
    with pytest.raises(ValueError, match="is no number, and the target is a number"):
        papers.Row.of(claim_of(">= 2"), "1.9", "quiet")


def test_a_part_that_failed_has_a_row_with_a_target() -> None:
    for claim in papers.CLAIMS.values():
        assert papers.Row.of(claim, None, "failed", "an error").target == claim.target


def test_rates_are_judged_by_what_finished() -> None:
    from bench.papers import rates

    def point(ttft: float, met: int, unfinished: int) -> Any:
        run = {
            "classes": {
                "LS": {
                    "arrived": 4,
                    "finished": 4 - unfinished,
                    "prefill_tokens_per_s": 10.0,
                    "output_tokens_per_s": 1.0,
                },
                "BE": {"prefill_tokens_per_s": ttft, "output_tokens_per_s": 0.0},
            },
            "samples": {"ttft_ms": [ttft] * 4, "e2e_ms": {str(i): 2 * ttft for i in range(4)}},
        }
        run["samples"]["met"] = met
        found = rates.Point()
        found.add(run)
        return found

    fcfs, ours = {0.5: (100.0, 4, 0), 1.0: (800.0, 1, 0), 2.0: (9e3, 0, 3)}, (100.0, 4, 0)
    points = {
        load: {"fcfs": point(*of), **{n: point(*ours) for n in (*rates.POINT[1:], rates.ALONE)}}
        for load, of in fcfs.items()
    }
    per_s = {load: 4 * load for load in points}
    rows = list(rates.latency_rows(points, per_s, "quiet"))
    here = {row.claim: row for row in rows}
    ended = here["LS TTFT, mean: fcfs / qllm2 at 4.00 req/s (1 of capacity)"]
    assert (ended.here, ended.target, ended.reached) == (
        "8.00 [8.00, 8.00]", ">= 65.2", False,
    )  # fmt: skip
    saturated = here["LS TTFT, mean: fcfs / qllm2 at 8.00 req/s (2 of capacity)"]
    assert (saturated.here, saturated.target) == ("90.00 [90.00, 90.00]", "printed")
    assert saturated.how.endswith("3 fcfs and 0 qllm2 requests open (lower bounds)")
    assert len(rows) == 4 * 3 * 3  # numbers, loads, arms
    assert sum(row.target != "printed" for row in rows) == 4
    best = {row.claim: row for row in rates.attainment_rows(points, per_s, "quiet", {})}
    what = "part of capacity up to which 99 % of LS meet the SLO"
    assert best[f"{what}, fcfs"].here == "0.50 (2.00/s 100.0%, 4.00/s 25.0%, 8.00/s 0.0%)"
    assert best[f"{what}, qllm2"].reached is True
    assert best[f"{what}, LS alone"].target == ">= 2"
    rates_of = {row.claim: row for row in rates.throughput_rows(points, per_s, "quiet")}
    lost = rates_of["BE tokens/s: qllm2 / fcfs at 4.00 req/s (1 of capacity)"]
    assert (lost.here, lost.reached) == ("0.12 [0.12, 0.12]", False)


def test_the_slo_of_the_paper_is_scaled_by_the_decode_step() -> None:
    from bench.papers import rates
    from bench.papers.rows import QUICK, World
    from qllm.workloads.capacity import Capacity

    def of(output_tokens_per_s: float) -> float:
        capacity = Capacity(prefill_tokens_per_s=1e3, output_tokens_per_s=output_tokens_per_s)
        world = World(scale=QUICK, settings={}, _capacity=capacity)
        slo = rates.slo_of(world)
        assert slo.tpot_ms is None
        assert slo.ttft_ms is not None
        text = rates.slo_text(world, slo)
        assert f"({8e3 / output_tokens_per_s:.1f} ms)" in text
        return slo.ttft_ms

    assert of(400.0) == pytest.approx(2 * of(800.0))
    theirs_ms = 3000 * 20 / of(400.0)
    assert 4 < theirs_ms < 40  # Mixtral in 4 bits: 8 rows read about 20 GB at 1.6 TB/s


def test_a_window_has_its_number_of_ls_requests() -> None:
    from bench.papers import rates
    from bench.papers.rows import FULL, World
    from qllm.workloads.capacity import Capacity

    capacity = Capacity(prefill_tokens_per_s=1500, output_tokens_per_s=400)
    world = World(scale=FULL, settings={}, _capacity=capacity)
    for load in FULL.loads:
        mix, timing = rates.workload_of(world, load)
        counted = [
            sum(r.priority == 0 and timing.window.counts(r) for r in mix.requests(seed))
            for seed in FULL.seeds
        ]
        assert sum(counted) >= 0.85 * FULL.ls_requests
        assert max(r.at_s for r in mix.requests(1)) <= timing.window.end_s


def test_later_turns_of_a_chat_count_only_their_new_tokens() -> None:
    from bench.papers import prompts

    requests = prompts.chats(2.0, 40, 1)
    fresh = prompts.new_tokens(requests)
    firsts = [fresh[r.name] for r in requests if r.follows is None]
    later = [fresh[r.name] for r in requests if r.follows is not None]
    assert len(later) == 4 * len(firsts)
    assert max(later) <= prompts.SHORT.longest
    assert 0 < sum(n > prompts.SHORT.longest for n in firsts) < 20


def test_targets_met_count_both_classes() -> None:
    from bench.papers import rotation

    def of(arrived: int, part: float, p50: float) -> dict[str, Any]:
        rates = {"output_tokens_per_s": 1.0, "prefill_tokens_per_s": 2.0}
        return {"arrived": arrived, "slo_attainment": part, "tpot_ms": {"p50": p50}, **rates}

    found = rotation.numbers({"LS": of(1, 1.0, 10.0), "BE": of(3, 0.0, 20.0)})
    assert found == {"met": 0.25, "tpot_p50_ms": 20.0, "tokens_per_s": 6.0}


def assigned(tree: ast.Module) -> set[str]:
    """Names that a module defines or imports at its top."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "bench").rglob("*.py")), ids=lambda p: p.stem)
def test_what_a_bench_imports_of_others_is_there(path: Path) -> None:
    """Imports inside functions too, which fail only when an hour has passed."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("bench"):
            continue
        place = ROOT / str(node.module).replace(".", "/")
        if place.is_dir():
            missing = {a.name for a in node.names if not (place / f"{a.name}.py").exists()}
        else:
            tree = ast.parse(place.with_suffix(".py").read_text())
            missing = {a.name for a in node.names} - assigned(tree)
        assert missing == set(), node.module


@pytest.mark.slow  # the parts of the bench are tested above
def test_the_benchmark_of_kernels_runs() -> None:
    command = [sys.executable, "-m", "bench.kernels.cpu_kernels", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert json.loads(done.stdout.splitlines()[-1])["bench"] == "cpu_kernels"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, in which results are committed."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (results / "rate.json").write_text("{}\n")
    (tmp_path / "engine.py").write_text("x = 1\n")
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "RESULTS", results)
    return tmp_path


def change_code(tree: Path) -> None:
    (tree / "engine.py").write_text("x = 2\n")


def stage_code(tree: Path) -> None:
    change_code(tree)
    subprocess.run(["git", "-C", tree, "add", "engine.py"], check=True)


def add_code(tree: Path) -> None:
    (tree / "bench" / "new bench.py").write_text("")


def remove_code(tree: Path) -> None:
    (tree / "engine.py").unlink()


@pytest.mark.parametrize("change", [change_code, stage_code, add_code, remove_code])
def test_a_tree_that_no_commit_has_writes_no_committed_result(
    tree: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree)
    committed = tree / "bench" / "results" / "rate.json"
    name = "new bench.py" if change is add_code else "engine.py"
    says = rf"rate\.json is a committed result, and 1 files differ .*{name}.*commit first, or give"
    for path in (committed, tree / "bench" / ".." / "bench" / "results" / "new.json"):
        with pytest.raises(common.UncommittedError, match="commit first, or give --out"):
            common.write_result(path, "{}")
    with pytest.raises(common.UncommittedError, match=says):
        Table().finish({"bench": "rate"}, committed)
    told = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", told.pop("at"))
    assert told == {"bench": "rate", "lines": [], "losing": []}
    assert committed.read_text() == "{}\n"
    assert os.listdir(committed.parent) == ["rate.json"]
    common.write_result(tree / "out" / "rate.json", "elsewhere")
    assert (tree / "out" / "rate.json").read_text() == "elsewhere\n"
    assert str(common.machine()["commit"]).endswith("-dirty")


def test_a_committed_tree_writes_one_result_after_another(tree: Path) -> None:
    for name in ("rate.json", "new.json"):
        common.write_result(common.RESULTS / name, "{}")
        assert (common.RESULTS / name).read_text() == "{}\n"
        assert not str(common.machine()["commit"]).endswith("-dirty")


def test_without_a_repository_there_is_no_committed_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "bench" / "results")
    with pytest.raises(common.UncommittedError, match="git names no commit of this tree"):
        common.write_result(common.RESULTS / "rate.json", "{}")
    assert common.machine()["commit"] is None


OPTIONS = ("'--out'", "'--update'")
OTHER_WRITERS = (ROOT / "bench" / "common.py", ROOT / "bench" / "gpu" / "check.py")
"""The one that refuses, and `make gpu-check`, whose folder is `$OUT`."""
RUN = sorted(path for folder in ("bench", "tests/long") for path in (ROOT / folder).rglob("*.py"))


ANSWERS = """
import json, sys
asked = json.loads(sys.stdin.read())
n = len(asked["prompts"])
print("words of a library")
print(json.dumps({"times": [asked["threads"] / (1 + asked["drafts"])] * n,
                  "tokens": [asked["drafts"] * (k == 0) for k in range(n)],
                  "drafted": [3 * asked["drafts"]] * n, "accepted": [asked["drafts"]] * n}))
"""


def test_answers_of_another_engine_are_compared_with_its_own() -> None:
    table, asked = Table(), {"prompts": [[1], [2], [3], [4]], "new": 2, "threads": 10}
    found = peer_row("theirs", [sys.executable, "-c", ANSWERS], asked, table)
    assert found == {"speed": 5.0, "same": 0.75, "drafted": 48, "accepted": 16}
    assert [(line.name, line.value) for line in table.lines] == [
        ("theirs: tokens/s with drafts over without (16 of 48 drafts)", "5.00"),
        ("theirs: answers equal to its own without drafts", "75%"),
    ]
    wrong = Table()
    assert peer_row("theirs", [sys.executable, "-c", "import none_such"], asked, wrong) is None
    (line,) = wrong.lines
    assert "did not run: ModuleNotFoundError" in line.value


def test_every_bench_refuses_such_a_result_before_it_measures() -> None:
    """Every `--out` has the type that refuses, and only that module writes where it says."""
    seen = 0
    for path in RUN:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            if name.endswith("add_argument") and ast.unparse(call.args[0]) in OPTIONS:
                how = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert how.get("type") == "result_file", path
                assert how.get("default") in {None, "FILE", "str(FILE)"}, path
                seen += 1
            if path not in OTHER_WRITERS and name.endswith("write_text"):
                assert not re.search(r"\b(out|FILE|RESULTS|path)\b", name), (path, name)
    assert seen > 20
