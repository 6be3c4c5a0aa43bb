"""Front ends that come to a loop on the device between two launches, and leave."""

import pytest

from qllm.device.launcher import SERVER
from qllm.device.server import CutOff
from qllm.errors import ConfigError, DeviceError
from qllm.ingress.memory import FrontEndMemory
from tests.support.loop_world import World, engine_of
from tests.support.native_stages import runner_of
from tests.support.pulled import block_of


def test_a_front_end_that_comes_late_and_leaves_is_one_of_the_device_s_copies() -> None:
    world = World("mixtral", "qllm2", [])
    engine = engine_of(world, runner_of("mixtral"), "qllm2", max_front_ends=2)
    server, late = engine.loop.server, block_of(7, 1 << 16)

    def on_device(name: str) -> int:
        return server.memory.head(engine.memory.snapshot(SERVER))[name]

    def turn() -> None:
        server.native.loop_turn(
            *engine.memory.addresses[:2], server.rank_address, engine.memory.addresses[2],
            world.clock(), 1,
        )  # fmt: skip

    engine.memory.write(**engine.loop.words_of_launch())
    engine.memory.write(launch_ns=engine.loop.launch_ns())
    turn()
    assert (on_device("bell_seen"), on_device("num_silent")) == (0, 0)
    engine.attach(late)
    assert (on_device("bell_seen"), on_device("num_silent")) == (-1, 1)
    turn()
    assert engine.gone() == []
    assert engine.serves(7)
    with pytest.raises(ConfigError, match="all 2 front ends are attached"):
        engine.attach(block_of(8, 1 << 16))
    engine.detach(7)
    assert engine.gone() == []
    turn()
    assert engine.gone() == [CutOff(7, "it has left")]
    assert not engine.serves(7)
    assert on_device("num_silent") == 0
    engine.attach(block_of(8, 1 << 16))
    assert on_device("num_silent") == 1
    engine.close()


def test_a_front_end_that_cannot_be_page_locked_is_not_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(World("mixtral", "qllm2", []), runner_of("mixtral"), "qllm2")
    engine.detach(0)
    engine.loop.server.forget(0)

    def fail(memory: memoryview) -> None:
        raise DeviceError("no more memory can be locked")

    monkeypatch.setattr(engine._api, "pin", fail)
    late = FrontEndMemory.create(5, (8192,) * 4)
    for _ in range(2):
        with pytest.raises(DeviceError, match="no more memory"):
            engine.attach(late)
        assert not engine.serves(5)
    monkeypatch.undo()
    engine.attach(late)
    assert engine.serves(5)


def test_what_a_front_end_leaves_stays_locked_until_nothing_runs() -> None:
    """To give it back waits for the loop: the host would neither look nor pause meanwhile."""
    world = World("mixtral", "qllm2", [])
    engine = engine_of(world, runner_of("mixtral"), "qllm2", max_front_ends=2)
    late, api = FrontEndMemory.create(5, (8192,) * 4), engine._api
    locked = list(api.pinned)
    engine.attach(late)
    assert len(api.pinned) == len(locked) + 1
    engine.detach(5)
    engine.memory.write(**engine.loop.words_of_launch())
    engine.memory.write(launch_ns=engine.loop.launch_ns())
    engine.loop.server.native.loop_turn(
        *engine.memory.addresses[:2], engine.loop.server.rank_address, engine.memory.addresses[2],
        world.clock(), 1,
    )  # fmt: skip
    assert [cut.number for cut in engine.gone()] == [5]
    assert len(api.pinned) == len(locked) + 1
    engine.unpin()
    assert api.pinned == locked
    engine.close()
    assert api.pinned == []
