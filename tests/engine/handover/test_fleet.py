"""Prefill and decode on different engines behind one door."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qllm import QLLMEngine
from qllm.fleet.router import Router
from qllm.fleet.routes import least
from qllm.ingress.remote.meeting import Address, Meeting
from tests.support.engines import free_port, save_model
from tests.support.handover import SAMPLED, SECRET, SETTINGS, TEXT, same
from tests.support.waiting import wait_for


def test_new_prompts_go_to_prefill_engines_and_begun_ones_to_decode_engines() -> None:
    router = Router(least)
    for name, role in (("p", "prefill"), ("d", "decode"), ("b", "both")):
        router.up(name, role=role)  # type: ignore[arg-type]
    new, begun = (router.view(10, range(9), 5, is_begun=is_begun) for is_begun in (False, True))

    def able(request: object, without: tuple[str, ...] = ()) -> set[str]:
        seen: set[str] = set()
        router.route = lambda _, engines: seen.update(e.name for e in engines) or engines[0]  # type: ignore[func-returns-value,assignment]
        router.choose(request, 0.0, without)  # type: ignore[arg-type]
        return seen

    assert able(new) == {"p", "b"}
    assert able(begun) == {"d", "b"}
    assert able(new, ("p", "b")) == {"d"}, "nobody else is there"
    assert able(begun, ("d", "b")) == {"p"}
    router.down("b")
    router.down("p")
    assert able(new) == able(begun) == {"d"}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_a_fleet_of_prefill_and_decode(stack: ExitStack, tmp_path: Path) -> None:
    model, addresses = save_model(tmp_path / "model"), []
    (tmp_path / "secret").write_bytes(SECRET)
    for role in ("prefill", "decode"):
        meeting = Meeting(Address("127.0.0.1", free_port()), "tcp", SECRET)
        how = {**SETTINGS, "handover_gib": 0.1, "swap_kv_tokens": 2048, "role": role}
        stack.enter_context(QLLMEngine.from_pretrained(model, meeting=meeting, **how))
        addresses.append(str(meeting.address))
    door = stack.enter_context(
        QLLMEngine.connect(",".join(addresses), secret_file=tmp_path / "secret")
    )
    plain = stack.enter_context(QLLMEngine.from_pretrained(model, run_in="thread", **SETTINGS))
    texts = [TEXT[i:] for i in range(3)]
    expected = [plain.submit(text, "LS", 40, sampling=SAMPLED).result(300) for text in texts]
    handles = [door.submit(text, "LS", 40, sampling=SAMPLED) for text in texts]
    found = [handle.result(300) for handle in handles]
    assert all(map(same, found, expected))
    members = door._client.members  # type: ignore[attr-defined]
    prefill, decode = (members[address].client.stats()["handover"] for address in addresses)
    assert prefill["given"] == 3
    assert decode["taken"] + decode["missed"] == 3
    assert decode["taken"] >= 1
    wait_for(lambda: door._client._routing.router.num_open == 0)  # type: ignore[attr-defined]
