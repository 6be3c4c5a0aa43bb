"""Every command with wrong flags and values: words that say what is wrong, never a traceback."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.cli.app import FAILED

DEAD = "http://127.0.0.1:9"
WRONG = """
run
run no-such-model hi
run tiny hi --set policy=fcfs
run tiny hi --set threads=2
run tiny hi --set policy_settings=5
run tiny hi --set run_in=moon
run tiny hi --set listen=5
run tiny hi --set load_format=none
run tiny hi --set max_segment_ms=nan
run tiny hi --set max_segment_ms
run tiny hi --set =5
run tiny hi --set nonsense=5
run tiny hi --set block_size=7
run tiny hi --set max_kv_tokens=-1
run tiny hi --set max_kv_tokens=1e99
run tiny hi --set record=maybe
run tiny hi --policy nonsense
run tiny hi --dtype float7
run tiny hi --device tpu
run tiny hi --device cuda:x
run tiny hi --threads many
run tiny hi --threads 0
run tiny hi --max-tokens 0
run tiny hi --temperature -1
run tiny hi --temperature nan
run tiny hi --seed -1
run tiny hi --seed 99999999999999999999999
run tiny hi --set policy.nonsense=1
serve
serve tiny --port 99999999
serve tiny --port x
serve tiny --config no-such-file.toml
serve tiny --role moon
serve tiny --listen 5
serve tiny --engine-address x
serve tiny --set policy.nonsense=1
serve tiny --set nonsense=1
serve tiny --set policy=fcfs
serve tiny --set threads=2
serve tiny --server nonsense=1
serve tiny --server max_ls=0
serve tiny --server drain_s=x
serve tiny --server port
serve tiny --api-key-file no-such-file
serve tiny --policy nonsense
serve tiny --host not.a.host.invalid
serve tiny --max-ls 0
serve tiny --max-ls many
serve tiny --max-ls
serve tiny --no-max-ls
serve tiny --access-log perhaps
serve tiny --shutdown-delay-s -1
serve tiny --log-format xml
serve tiny --ssl-certfile no-such-file.pem
serve tiny --ssl-certfile {garbage}
serve tiny --ssl-keyfile {garbage}
serve tiny --ssl-cert-reqs required
serve tiny --ssl-cert-reqs perhaps
serve tiny --cors-origins
serve tiny --api-keys
profile
profile tiny
profile tiny --text no-such-file.txt
profile tiny --text {file} --text {file}
profile tiny --text {file} --tokens 31
profile tiny --text {file} --set policy=fcfs
profile no-such-model --text {file}
docs nonsense
docs ../README
bench
bench tiny
bench tiny --workload S99
bench tiny --workload S2 --scale nonsense=1
bench tiny --workload S2 --scale load=x
bench tiny --workload S2 --scale load=-1
bench tiny --workload S2 --scale load
bench tiny --trace {trace} --scale max_len=5
bench tiny --trace {trace} --scale be_share=x
bench tiny --trace no-such-file.csv
bench tiny --trace {garbage}
bench tiny --workload S2 --seconds 0
bench tiny --workload S2 --seconds nan
bench tiny --workload S2 --warmup -1
bench tiny --workload S2 --slo nonsense
bench tiny --workload S2 --policy qllm2:nonsense=1
bench tiny --workload S2 --policy nonsense
bench tiny --workload S2 --capacity 5
bench tiny --workload S2 --capacity nan,nan
bench tiny --workload S2 --set policy=fcfs
bench tiny --workload S2 --set threads=2
bench tiny --workload S2 --set nonsense=2
bench --url {dead} --workload S2 --seconds 1 --warmup 0
bench tiny --url {dead} --workload S2 --seconds 1 --warmup 0
bench mixtral --url {dead} --workload S2 --seconds 1 --warmup 0
bench --url {dead} --model x --workload S2
bench tiny --url nonsense --workload S2 --seconds 1 --warmup 0
bench tiny --url {dead} --workload S2 --seconds 1 --warmup 0 --by nonsense
bench tiny --url {dead} --workload S2 --seconds 1 --warmup 0 --fixed nonsense
bench tiny --url {dead} --workload S2 --seconds 1 --warmup 0 --ls-body x
bench tiny --url {dead} --workload S2 --seconds 1 --warmup 0 --be-body []
sim
sim --workload S99
sim --workload S2 --preset nonsense
sim --workload S2 --preset h100 --route least
sim --workload S2 --preset h100 --engines 0
sim --workload S2 --preset h100 --engines 2 --route fastest
serve --engine 127.0.0.1:9,127.0.0.1:9
serve --engine 127.0.0.1:9,127.0.0.1:10 --route fastest
serve --engine 127.0.0.1:9 --route least
sim --workload S2 --costs no-such-file.json
sim --workload S2 --costs {garbage}
sim --workload S2 --policies nonsense
sim --workload S2 --seconds 0
sim --workload S2 --seconds nan
sim --workload S2 --load -1
sim --workload S2 --load nan
sim --workload S2 --set policy=fcfs
sim --workload S2 --set threads=2
sim --workload S2 --set max_segment_ms=x
sim --workload S2 --slo nonsense
sim --trace no-such-file.csv
sim --trace {garbage}
sim --trace {trace} --be-share 7
sim --trace {trace} --limit -1
sim --trace {trace} --rate-scale 0
sim --trace {trace} --rate-scale nan
sim --workload S2 --out {file}
plan
plan --slo nonsense --ls-rate 1
plan --slo ttft=500ms --ls-rate 0
plan --slo ttft=500ms --ls-rate nan
plan --slo ttft=500ms --ls-rate 1 --preset nonsense
plan --slo ttft=500ms --ls-rate 1 --workload S99
plan --slo ttft=500ms --ls-rate 1 --policies nonsense
plan --slo ttft=-1ms --ls-rate 1
plan --slo ttft=500ms --preset cpu
plan --slo ttft=500ms --requests no-such-file.csv --preset cpu
plan --slo ttft=500ms --requests {garbage} --preset cpu
plan --slo ttft=500ms --requests {trace} --preset cpu
plan --slo ttft=500ms --requests {trace} --preset cpu --be-share 7
plan --slo ttft=500ms --ls-rate 1 --preset cpu --be-share 0.5
plan --slo ttft=500ms --ls-rate 1 --preset cpu,moon
plan --slo ttft=500ms --ls-rate 1 --preset ,
plan --slo ttft=500ms --ls-rate 1 --preset no-such-file.toml
plan --slo ttft=500ms --ls-rate 1 --preset {file}.toml
calibrate
calibrate no-such-model
calibrate 1m --rounds 0
calibrate 1m --set policy=fcfs
calibrate 1m --set nonsense=1
calibrate 1m --out /no/such/folder/costs.json
trace
trace no-such-file
trace {garbage}
trace {trace}
top nonsense
top {dead}
top {dead} --every 0
doctor --fingerprints no-such-model
policies --compile nonsense
policies nonsense
new-policy
new-policy 5x
new-policy class
new-policy good --kind nonsense
new-policy good --out {file}
demo --size nonsense
demo --seconds 0
demo --seconds nan
demo --exactness nonsense
demo --ls-rate 0
demo --out {file}
models nonsense
nonsense
--nonsense
""".strip().splitlines()
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_answered_in_words(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "garbage.json").write_bytes(bytes(range(256)))
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    names = {"trace": "trace.csv", "garbage": "garbage.json", "file": "file", "dead": DEAD}
    for name, value in names.items():
        line = line.replace(f"{{{name}}}", value)
    result = CliRunner().invoke(app, line.split())
    assert result.exception is None or isinstance(result.exception, SystemExit), line
    assert result.exit_code == FAILED, result.output
    assert "Traceback" not in result.output
    assert result.stderr.strip(), "it says nothing"
