"""Trace files: the public formats, our own, classes by rule, and errors with a line number."""

import json
from pathlib import Path

import pytest

from qllm.types import Priority, Slo
from qllm.workloads.files import WorkloadFileError, read_requests, write_requests
from qllm.workloads.generators import named_workload
from qllm.workloads.spec import RequestSpec

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2353]}
"""
LOADGEN = json.dumps(
    {
        "meta": {"duration": 5},
        "requests": [
            {"id": "BE-0", "cls": "BE", "t": 0.5, "prompt_tokens": 9, "max_tokens": 3},
            {"id": "LS-1", "cls": "LS", "t": 0.75, "prompt_tokens": 4, "max_tokens": 2},
        ],
    }
)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    found = read_requests(write(tmp_path, AZURE_2023))
    assert [(r.num_prompt_tokens, r.max_tokens) for r in found] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert [round(r.at_s, 3) for r in found] == [0.0, 4.315, 4.542]
    assert {r.priority for r in found} == {Priority.LS}
    found = read_requests(write(tmp_path, AZURE_2024))
    assert [round(r.at_s, 3) for r in found] == [0.0, 1.007]


def test_burstgpt_leaves_out_what_failed(tmp_path: Path) -> None:
    found = read_requests(write(tmp_path, BURSTGPT), be_where="Log Type=API log")
    assert [(r.at_s, r.num_prompt_tokens, r.max_tokens) for r in found] == [
        (0.0, 472, 18),
        (113.0, 417, 276),
    ]
    assert [r.priority for r in found] == [Priority.LS, Priority.BE]


def test_mooncake_counts_in_milliseconds(tmp_path: Path) -> None:
    found = read_requests(write(tmp_path, MOONCAKE))
    assert [(round(r.at_s, 3), r.num_prompt_tokens) for r in found] == [(0.0, 6955), (3.053, 6472)]


def test_a_file_of_the_load_generator(tmp_path: Path) -> None:
    found = read_requests(write(tmp_path, LOADGEN))
    assert [(r.name, r.at_s, r.priority, r.num_prompt_tokens) for r in found] == [
        ("BE-0", 0.0, Priority.BE, 9),
        ("LS-1", 0.25, Priority.LS, 4),
    ]


def test_our_own_round_trip(tmp_path: Path) -> None:
    requests = named_workload("S2", seed=1, seconds=30.0, ls_slo=Slo(500.0, None))
    requests[0] = RequestSpec(
        at_s=0.0, priority=3, num_prompt_tokens=5, max_tokens=7, name="third class"
    )
    write_requests(tmp_path / "own.jsonl", requests)
    assert read_requests(tmp_path / "own.jsonl") == requests


@pytest.mark.parametrize("name", ["S13", "S15"])
def test_what_no_line_holds_is_refused_and_not_left_out(tmp_path: Path, name: str) -> None:
    requests = named_workload(name, seconds=60.0)
    with pytest.raises(WorkloadFileError, match="write requests that arrive whole and by themselv"):
        write_requests(tmp_path / "own.jsonl", requests)


def test_classes_are_drawn_by_share(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},m,10,5,15,x" for i in range(2000))
    path = write(tmp_path, "Timestamp,Model,Request tokens,Response tokens,Total,Log Type\n" + rows)
    found = read_requests(path, be_share=0.8, seed=1)
    assert found == read_requests(path, be_share=0.8, seed=1)
    assert found != read_requests(path, be_share=0.8, seed=2)
    assert 1500 < sum(r.priority == Priority.BE for r in found) < 1700


def test_a_part_of_a_file_at_another_rate(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},10,5" for i in range(100, 200))
    path = write(tmp_path, "Timestamp,Request tokens,Response tokens\n" + rows)
    found = read_requests(path, start_s=10.0, seconds=20.0, rate_scale=2.0)
    assert [r.at_s for r in found] == [i / 2 for i in range(20)]
    assert len(read_requests(path, limit=7)) == 7
    with pytest.raises(WorkloadFileError, match="no request is left"):
        read_requests(path, start_s=1000.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests in it"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests in it"),
        (
            "when,how,many\n1,2,3\n",
            "trace:2: columns when, how, many are of no known format .*azure",
        ),
        (AZURE_2023 + "not a time,1,1\n", "trace:5: Invalid isoformat"),
        (AZURE_2023 + "2023-11-16 18:15:51,x,1\n", "trace:5: could not convert .*'x'"),
        (AZURE_2023 + "2023-11-16 18:15:51,0,1\n", "trace:5: ContextTokens='0' must be an int"),
        (AZURE_2023 + "2023-11-16 18:15:51,1.5,1\n", "trace:5: ContextTokens='1.5' must be"),
        (AZURE_2023 + "2023-11-16 18:15:51,7\n", "trace:5: no value in column GeneratedTokens"),
        (MOONCAKE + "{]\n", "trace:3: not JSON"),
        (MOONCAKE + "7\n", "trace:3: 7 must be a JSON object"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5}\n', "trace:3: no 'output_length'"),
        (
            '{"at_s": 0, "num_prompt_tokens": 1, "max_tokens": 1, "priority": "high"}',
            "trace:1: priority 'high' must be LS, BE or an integer",
        ),
        ('{"at_s": NaN, "num_prompt_tokens": 1, "max_tokens": 1}', "trace:1: time nan must be"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(WorkloadFileError, match=message):
        read_requests(write(tmp_path, text))


def test_rules_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path, BURSTGPT)
    with pytest.raises(WorkloadFileError, match="be_share=2 must be in"):
        read_requests(path, be_share=2)
    with pytest.raises(WorkloadFileError, match="must be COLUMN=VALUE"):
        read_requests(path, be_where="Model")
    with pytest.raises(WorkloadFileError, match="trace:2: no column 'Tier'; there are Timestamp"):
        read_requests(path, be_where="Tier=x")
    with pytest.raises(WorkloadFileError, match="rate_scale=0 must be > 0"):
        read_requests(path, rate_scale=0)
