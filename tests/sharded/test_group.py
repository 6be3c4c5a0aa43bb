"""Threads of a group: gathers in the order of ranks, errors, deadlines, and forms of rows."""

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from qllm.errors import DeviceError
from qllm.sharded.group import Form, Group, Member, joined


def test_parts_are_gathered_in_the_order_of_the_ranks() -> None:
    def work(member: Member) -> list[int]:
        found: list[int] = []
        for turn in range(50):
            if (member.rank + turn) % 3 == 0:
                time.sleep(0.0005)
            found += member.gather(10 * turn + member.rank, list)
        return found

    expected = [10 * turn + rank for turn in range(50) for rank in range(3)]
    assert Group(3).run(work) == [expected] * 3


def test_a_part_is_read_by_all_before_its_rank_continues() -> None:
    """Each rank overwrites its part at once; one rank reads slowly."""

    def work(member: Member) -> list[float]:
        part = torch.full((1, 1), float(member.rank))

        def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            if member.rank == 1:
                time.sleep(0.02)
            return torch.cat(list(parts))

        found: list[float] = member.gather(part, join).flatten().tolist()
        part.fill_(-1.0)
        return found

    assert Group(3).run(work) == [[0.0, 1.0, 2.0]] * 3


def test_the_error_of_a_rank_ends_the_others_and_is_raised() -> None:
    """The deadline is an hour, so it ends no rank here."""
    ended: list[str] = []
    raised: list[BaseException] = []

    def work(member: Member) -> None:
        if member.rank == 1:
            raise ZeroDivisionError("rank 1")
        try:
            member.gather(0, list)
        except DeviceError as error:
            ended.append(str(error))
            raise

    def run() -> None:
        try:
            Group(3, deadline_s=3600).run(work)
        except ZeroDivisionError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert [str(error) for error in raised] == ["rank 1"]
    assert len(ended) == 2
    assert all("of 3 waited for the others, and one of them failed with Zero" in x for x in ended)


def test_a_rank_that_does_not_come_ends_the_others_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave, deadlines, wait = threading.Event(), [], threading.Barrier.wait

    def recorded(self: threading.Barrier, timeout: float | None = None) -> int:
        deadlines.append(timeout)
        return wait(self, timeout)

    def work(member: Member) -> None:
        if member.rank == 0:
            leave.wait(30)
            return
        try:
            member.gather(0, list)
        finally:
            leave.set()

    monkeypatch.setattr(threading.Barrier, "wait", recorded)
    with pytest.raises(DeviceError, match=r"not all came within 0\.05 s; start all ranks again"):
        Group(2, deadline_s=0.05).run(work)
    assert deadlines == [0.05]


@pytest.mark.parametrize("num", [3, 4, 7, 64, 100])
def test_split_rows_are_owned_once_and_put_together_again(num: int) -> None:
    whole = torch.arange(num * 6).view(num, 6)

    def work(member: Member) -> tuple[range, torch.Tensor, torch.Tensor]:
        form = Form(member, num, split=True)
        part = whole[:, 2 * member.rank : 2 * member.rank + 2]
        own = form.all_columns(part)
        return form.own, own, form.all_rows(own)

    found = Group(3).run(work)
    assert [i for own, _, _ in found for i in own] == list(range(num))
    for own, rows, again in found:
        assert len(own) >= 1
        assert torch.equal(rows, whole[own.start : own.stop])
        assert torch.equal(again, whole)


def test_whole_rows_are_gathered_by_columns_alone() -> None:
    whole = torch.arange(30).view(5, 6)

    def work(member: Member) -> bool:
        form = Form(member, 5, split=False)
        own = form.all_columns(whole[:, 3 * member.rank : 3 * member.rank + 3])
        return form.own == range(5) and torch.equal(own, whole) and form.all_rows(own) is own

    assert Group(2).run(work) == [True, True]


def test_tensors_are_joined_along_a_dimension() -> None:
    def work(member: Member) -> list[list[int]]:
        found: list[list[int]] = joined(member, torch.full((1, 2), member.rank), 1).tolist()
        return found

    assert Group(2).run(work) == [[[0, 0, 1, 1]]] * 2
