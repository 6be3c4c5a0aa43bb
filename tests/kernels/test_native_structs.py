"""The structs that Python fills are those that the CPU kernels read: names, order, sizes, kinds."""

import ast
import ctypes
import subprocess
from pathlib import Path

import pytest

from qllm.kernels import cpu
from qllm.kernels.cpu import attention, course, deltas, experts, norms, quantised, routers, sampling
from qllm.runner import sweep
from qllm.runner.layers import linears
from qllm.sharded import group, head, host_memory, hosts, layer, rank
from qllm.sharded import sweep as ranks_sweep

FOLDER = Path(cpu.__file__).resolve().parent
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "Format": quantised.FormatStruct,
    "Matrix": cpu.MatrixStruct,
    "Norm": norms.NormStruct,
    "Heads": attention._Heads,
    "Attention": attention._Attention,
    "Latents": attention._Latents,
    "Part": attention.PartStruct,
    "DeltaNet": deltas.DeltaStruct,
    "Codes": quantised.CodesStruct,
    "Router": routers._Router,
    "Experts": experts._Experts,
    "Mlp": experts._Mlp,
    "SampleRow": sampling.SampleStruct,
    "Place": course.PlaceStruct,
    "Layer": sweep.LayerStruct,
    "LayerOp": sweep.LayerOpStruct,
    "Sweep": sweep.SweepStruct,
    "HeadBlocks": linears.HeadBlocks,
    "Share": layer.ShareStruct,
    "Piece": rank.PieceStruct,
    "Rank": rank.RankStruct,
    "GroupHead": group.GroupStruct,
    "SweepCall": ranks_sweep.SweepCall,
    "HeadCall": head.HeadCall,
    "EmbedCall": head.EmbedCall,
    "Region": host_memory.RegionStruct,
    "FetchCall": host_memory.FetchStruct,
    "Link": hosts.LinkStruct,
}
INTEGERS = {"Span": 6, "Unit": 3, "Slot": 2, "DeltaSpan": deltas.SPAN_BYTES // 8}
"""Structs that are arrays of so many 64-bit integers in Python."""
KINDS = {
    ctypes.c_int64: "std::is_integral_v<{}> || std::is_enum_v<{}>",
    ctypes.c_void_p: "std::is_pointer_v<{}>",
    ctypes.c_float: "std::is_same_v<{}, float>",
    ctypes.c_double: "std::is_same_v<{}, double>",
}


def assertions(name: str, struct: type[ctypes.Structure]) -> list[str]:
    """What C++ must agree to: size, and offset, size and kind of each field."""
    wanted = [f"sizeof({name}) == {ctypes.sizeof(struct)}"]
    for field, kind, *_ in struct._fields_:
        place = getattr(struct, field)
        wanted.append(f"offsetof({name}, {field}) == {place.offset}")
        wanted.append(f"sizeof({name}::{field}) == {place.size}")
        if issubclass(kind, ctypes.Structure):
            other = next(n for n, s in STRUCTS.items() if s is kind)
            wanted.append(f"std::is_same_v<decltype({name}::{field}), {other}>")
        else:
            wanted.append(KINDS[kind].replace("{}", f"decltype({name}::{field})"))
    return wanted


def compiled(lines: list[str], folder: Path) -> str:
    """What the compiler has against these assertions; nothing if they hold."""
    source = folder / "structs.cpp"
    head = ["#include <stddef.h>", "#include <type_traits>", '#include "ranks.h"']
    body = [f'static_assert({line}, "{line}");' for line in lines]
    source.write_text("\n".join([*head, "using namespace qllm;", *body, ""]))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{FOLDER}"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    return done.stderr


def test_every_struct_is_checked() -> None:
    """Those of rings and of the device are not of ctypes: `ingress/structs.py` writes their C++."""
    there = {
        node.name
        for path in (FOLDER.parent.parent).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and {"Structure", "Union"} & {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    }
    assert there == {struct.__name__ for struct in STRUCTS.values()}


def test_the_structs_are_those_of_the_kernels(tmp_path: Path) -> None:
    lines = [line for name, struct in STRUCTS.items() for line in assertions(name, struct)]
    lines += [f"sizeof({name}) == {8 * num}" for name, num in INTEGERS.items()]
    assert len(lines) > 300
    assert compiled(lines, tmp_path) == ""


@pytest.mark.parametrize("driver", ["sanitize_kernels", "sanitize_ranks"])
def test_a_driver_of_the_sanitizers_is_of_these_structs(driver: str) -> None:
    """It fills them by position, and runs by hand alone."""
    source = Path(__file__).parents[2] / "scripts" / f"{driver}.cpp"
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", f"-I{FOLDER}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def swapped(struct: type[ctypes.Structure]) -> list[tuple[str, type]]:
    fields = [(name, kind) for name, kind, *_ in struct._fields_]
    return [fields[1], fields[0], *fields[2:]]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Part", swapped(attention.PartStruct)),
        ("Part", [*attention.PartStruct._fields_, ("more", ctypes.c_int64)]),
        ("Part", [*attention.PartStruct._fields_[:-1], ("last", ctypes.c_double)]),
        ("Norm", [*norms.NormStruct._fields_[:-1], ("eps", ctypes.c_double)]),
    ],
)
def test_a_difference_is_seen(name: str, fields: list[tuple[str, type]], tmp_path: Path) -> None:
    wrong = type("Wrong", (ctypes.Structure,), {"_fields_": fields})
    assert compiled(assertions(name, wrong), tmp_path) != ""
