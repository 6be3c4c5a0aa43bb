"""The kernel that ends an op on ranks: bits of the CPU kernels, races, and what is compiled."""

import ctypes
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu.gathered import (
    Arguments,
    Buffers,
    Case,
    HostBuild,
    expected,
    random_case,
    sharp,
)
from qllm.cuda.gathered_norm import CSRC, RANKS, compile_norm
from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.kernels.cpu.norms import Norm
from tests.support.files import ROOT

assert cpu.MISSING is None, cpu.MISSING


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostBuild:
    return HostBuild(tmp_path_factory.mktemp("gathered"))


def by_cpu_kernels(case: Case) -> tuple[Tensor, Tensor]:
    """Return what the engine computes in one process."""
    y_TD = case.parts_TD
    if case.slots_TKD is not None:
        slots_SD = case.slots_TKD.flatten(0, 1)
        added_TD = cpu.combine(slots_SD, torch.arange(len(slots_SD)), case.gates_TK)
        y_TD = added_TD if y_TD is None else add(added_TD, y_TD, 1.0)
    assert y_TD is not None
    sums_TD = add(case.residual_TD, y_TD, case.scale)
    norm = Norm(case.weight_D, case.eps, "rms_wide" if case.rounds_once else "rms")
    return sums_TD, norm(sums_TD).clone()


def add(x_TD: Tensor, y_TD: Tensor, scale: float) -> Tensor:
    out_TD = torch.empty_like(x_TD)
    addresses = out_TD.data_ptr(), x_TD.data_ptr(), y_TD.contiguous().data_ptr()
    cpu.native.add(*addresses, scale, x_TD.numel())
    return out_TD


def assert_equal(buffers: Buffers, wanted: tuple[Tensor, Tensor]) -> None:
    assert buffers.num_late() == 0
    for rank, found in enumerate(buffers.results()):
        assert all(map(torch.equal, found, wanted)), rank


@pytest.mark.parametrize("is_virtual", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_have_the_bits_of_the_cpu_kernels(
    host: HostBuild, ranks: int, is_virtual: bool
) -> None:
    rng = random.Random(10 * ranks + is_virtual)
    for number in range(12):
        rows, width = rng.choice((1, ranks - 1, ranks, 37)), 8 * rng.randrange(1, 40)
        top_k, has_parts = ((0, True), (1, False), (8, False), (3, True))[number % 4]
        case = random_case(rng, ranks, rows, width, top_k, has_parts=has_parts)
        for given in (case, sharp(case)):
            buffers = Buffers(given, "cpu", blocks=rng.choice((1, 3)))
            for _ in range(2):  # the second finds the words of the first
                host.run(buffers, is_virtual=is_virtual, threads=rng.choice((1, 3)))
            assert_equal(buffers, by_cpu_kernels(given))


def test_both_norms_both_gates_and_both_scales_were_in_the_cases() -> None:
    rng = random.Random(20)
    cases = [random_case(rng, 2, 1, 8, 1) for _ in range(12)]
    for field in ("rounds_once", "scale", "eps"):
        assert len({getattr(case, field) for case in cases}) == 2
    assert len({case.gates_TK.dtype for case in cases}) == 2


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_bits_do_not_depend_on_who_owns_what(host: HostBuild, rows: int) -> None:
    rng = random.Random(rows)
    case = random_case(rng, 8, rows, 128, 4)
    wanted = by_cpu_kernels(case)
    for ranks in RANKS:
        other = random_case(rng, ranks, rows, 128, 4)
        case = case._replace(columns=other.columns, owners_TK=other.owners_TK)
        buffers = Buffers(case, "cpu", blocks=2)
        host.run(buffers)
        assert_equal(buffers, wanted)


def test_the_sums_may_replace_the_residual(host: HostBuild) -> None:
    case = random_case(random.Random(3), 4, 10, 64, 2)
    buffers = Buffers(case, "cpu", blocks=2)
    buffers.arguments.residual = buffers.arguments.sums
    for rank in buffers.memory:
        start = buffers.arguments.sums
        rank[start : start + 2 * 640].view(torch.bfloat16)[:] = case.residual_TD.flatten()
    host.run(buffers)
    assert_equal(buffers, by_cpu_kernels(case))


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC1, 0x8000, 0x0001, 0x7F7F])
def test_values_that_are_no_usual_numbers(host: HostBuild, bits: int) -> None:
    """Infinities, a NaN, a negative zero, the smallest and the largest number.

    Where one result is a NaN the other is, too. Processors write different NaNs: AVX-512 BF16 keeps
    the sign and the last bits, other kernels do not.
    """
    case = random_case(random.Random(4), 2, 4, 40, 0)
    case.residual_TD.view(torch.int16)[1, 7] = bits - (bits >> 15 << 16)
    case.residual_TD[2] = 0
    case.residual_TD[2].view(torch.int16)[3] = bits - (bits >> 15 << 16)
    buffers, wanted = Buffers(case, "cpu", blocks=1), by_cpu_kernels(case)
    host.run(buffers)
    for found in buffers.results():
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            bits_of_both = (torch.where(x.isnan(), 0, x).view(torch.int16) for x in (one, other))
            assert torch.equal(*bits_of_both)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_plain_definition_has_the_bits_of_the_cpu_kernels(ranks: int) -> None:
    """The check on a GPU compares with it: it needs no extension."""
    rng = random.Random(ranks)
    for number in range(20):
        case = random_case(rng, ranks, rng.randrange(1, 60), 8 * rng.randrange(1, 90), number % 3)
        for given in (case, sharp(case)):
            assert all(map(torch.equal, expected(given), by_cpu_kernels(given)))


def test_the_order_of_additions_shows_in_the_bits() -> None:
    """Usual values hide it: results have 8 bits."""
    case = sharp(random_case(random.Random(7), 2, 3, 320, 4, has_parts=False))
    assert case.slots_TKD is not None
    other = case._replace(slots_TKD=case.slots_TKD.flip(1))
    assert not torch.equal(expected(case)[0], expected(other)[0])
    case = sharp(random_case(random.Random(7), 2, 1, 320, 0))
    turn = torch.randperm(320)  # other chains
    assert case.parts_TD is not None
    moved = case.residual_TD[:, turn], case.parts_TD[:, turn], case.weight_D[turn]
    other = case._replace(residual_TD=moved[0], parts_TD=moved[1], weight_D=moved[2])
    assert not torch.equal(expected(case)[1][:, turn], expected(other)[1])


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_ends_the_call_of_the_others(
    host: HostBuild, missing: int
) -> None:
    case = random_case(random.Random(5), 2, 6, 16, 1)
    buffers = Buffers(case, "cpu", blocks=2, deadline_ns=1_000_000)
    host.run(buffers, missing=missing)
    assert buffers.num_late() == 1
    late = buffers.memory[:, buffers.arguments.late].tolist()
    assert late == [int(rank != missing) for rank in range(2)]


def test_the_arguments_have_the_size_of_the_kernels(host: HostBuild) -> None:
    assert host.library.qllm_size() == ctypes.sizeof(Arguments)


def test_threads_as_ranks_have_no_race(tmp_path: Path) -> None:
    """`scripts/sanitize-kernels` runs the same driver, with more sanitizers."""
    program = tmp_path / "sanitized"
    flags = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", "-fsanitize=thread"]
    source = ROOT / "scripts" / "sanitize_gathered.cpp"
    command = ["g++", *flags, f"-I{CSRC}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 shapes" in done.stdout


# -- compiled for devices, of which none is here


def instructions(ptx: str) -> list[str]:
    """Return the names of the instructions, without comments."""
    found = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:[.:]+\w+)*)[\s;]", ptx, re.MULTILINE)
    assert len(found) > 200
    return found


@pytest.mark.parametrize("arch", ["sm_90", "sm_100a"])
def test_the_exact_kernel_stores_by_multicast_and_adds_nothing_on_the_way(arch: str) -> None:
    made = compile_norm("Multimem", 8, arch)
    assert f".target {arch}" in made.ptx
    assert made.cubin.startswith(b"\x7fELF")
    found = instructions(made.ptx)
    fabric = [name for name in found if name.startswith("multimem")]
    assert set(fabric) == {"multimem.st.relaxed.sys.global.v4.bf16x2"}
    assert not [name for name in found if name.startswith(("st.global", "st.v", "red", "atom"))]
    assert "fence.proxy.alias" in found
    assert {"st.release.sys.global.u32", "ld.acquire.sys.global.u32"} <= set(found)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100a"])
def test_the_lossy_kernel_adds_by_multicast(arch: str) -> None:
    found = instructions(compile_norm("Multimem", 8, arch, "lossy-fused").ptx)
    assert {name for name in found if name.startswith("multimem")} == {
        "multimem.st.relaxed.sys.global.v4.bf16x2",
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
    }


@pytest.mark.parametrize("net", ["Virtual", "Loads"])
@pytest.mark.parametrize("ranks", RANKS)
def test_other_kernels_need_no_fabric(net: str, ranks: int) -> None:
    found = instructions(compile_norm(net, ranks, "sm_90").ptx)
    assert not [name for name in found if name.startswith(("multimem", "red", "atom"))]
    stores = [name for name in found if re.fullmatch(r"st(\.global)?\.v4\.u32", name)]
    assert len(stores) == 2 * ranks, "a sum and a normed row, on each rank"


@pytest.mark.parametrize("overlap", ["exact", "lossy-fused"])
def test_arithmetic_is_that_of_the_host(overlap: str) -> None:
    """Nothing is approximated, contracted or flushed to zero."""
    ptx = compile_norm("Multimem", 2, "sm_90", overlap).ptx
    found = {name for name in instructions(ptx) if name.endswith(".f32") and "." in name}
    arithmetic = {n for n in found if not n.startswith(("ld", "st", "mov", "setp", "selp", "cvt"))}
    assert arithmetic <= {f"{name}.rn.f32" for name in ("add", "mul", "div", "rcp", "sqrt")}
    assert {"add.rn.f32", "mul.rn.f32", "sqrt.rn.f32"} < arithmetic
    assert ".local" not in ptx


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("Fabric", 2, "sm_90"), "net='Fabric' must be one of Virtual, Loads, Multimem"),
        (("Loads", 3, "sm_90"), "ranks=3 must be one of 2, 4, 8"),
        (("Loads", 2, "sm_90", "on"), "overlap='on' must be one of exact, lossy-fused"),
        (("Loads", 2, "sm_90", "lossy-fused"), "needs net='Multimem'"),
        (("Virtual", 2, "sm_90", "lossy-fused"), "use overlap='exact'"),
        (("Multimem", 2, "sm_80"), "arch='sm_80' has no multicast addresses"),
        (("Loads", 2, "90"), "arch='90' must be like 'sm_90' or 'sm_100a'"),
        (("Loads", 2, "sm_77"), "arch='sm_77': NVRTC reports NVRTC_ERROR_INVALID_OPTION"),
    ],
)
def test_what_cannot_be_compiled_is_refused(asked: tuple[str, int, str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        compile_norm(*asked)
    assert said in str(error.value)


def test_without_the_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing(*_: object) -> None:
        raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", missing)
    with pytest.raises(ConfigError, match=r"needs NVRTC \(no libnvrtc\); pip install numba"):
        compile_norm("Loads", 2, "sm_90")
