"""Kernels compiled for three generations of GPUs, without one: what they need is there, and what it costs.

A selection for one of them, or with ``--all-kernels`` every variant for all. ``make kernels`` renews the record
that this is compared with, and is to be run whenever a kernel changes: it compiles and looks at all of them.
"""

from __future__ import annotations

import json
import re

import pytest
import triton

from gfdit.comm.selector import NUM_PROGRAMS
from gfdit.kernels.compiled import Variant, compile_variant, kernel_name, signature
from tools.compile_kernels import (
    CAPABILITIES,
    END,
    PAGE,
    RECORD,
    SMALL_PATHS,
    Compiled,
    compile_all,
    compile_one,
    every_job,
    selected_jobs,
    sources_digest,
    target_of,
    to_table,
    usage_of,
    variants_for,
)
from tools.divergence import unsafe_barriers
from tools.ptx import loaded_ahead

ACQUIRE, RELEASE = "ld.acquire.sys.global.b64", "st.release.sys.global.b64"
LOAD, STORE = "ld.relaxed.sys.global.b64", "st.relaxed.sys.global.b64"
LOAD_PAIRS, STORE_PAIRS = "ld.relaxed.sys.global.v2.b64", "st.relaxed.sys.global.v2.b64"
TWO_WAY = {ACQUIRE, LOAD, STORE, LOAD_PAIRS, STORE_PAIRS}
# What agreement rests on. Kernels that are not named publish with a release and observe with an acquire.
INSTRUCTIONS = {
    "low_latency_exchange": TWO_WAY,
    "low_latency_all_reduce": TWO_WAY,
    "low_latency_push": {ACQUIRE, STORE, STORE_PAIRS},
    "low_latency_pull": {RELEASE, LOAD, LOAD_PAIRS},
}


def missing_instructions(kernel: str, ptx: str) -> set[str]:
    wanted = INSTRUCTIONS.get(kernel, {ACQUIRE, RELEASE})
    return {instruction for instruction in wanted if instruction not in ptx}


def kernel_of(result: Compiled) -> str:
    return result.variant.split("(")[0]


def capabilities(compiled: list[Compiled]) -> set[int]:
    return {result.capability for result in compiled}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> list[Compiled]:
    """The selection by way of Triton's own cache: what has not changed since then is not compiled again."""
    if request.config.getoption("--all-kernels"):
        return list(compile_all(every_job(), num_processes=2))
    return [compile_one(job) for job in selected_jobs()]


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(RECORD.read_text())


def test_every_kernel_is_compiled(compiled, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--all-kernels"):
        assert capabilities(compiled) == {*CAPABILITIES}
    for capability in capabilities(compiled):
        kernels = {kernel_name(variant.kernel) for variant in variants_for(capability)}
        assert kernels >= {*SMALL_PATHS, "push_exchange", "ulysses_exchange"}
        assert {kernel_of(result) for result in compiled if result.capability == capability} == kernels


def test_the_memory_order_is_in_the_code(compiled) -> None:
    for result in compiled:
        assert not missing_instructions(kernel_of(result), result.ptx), (result.variant, result.capability)
        # Those are of the bodies for the interpreter.
        assert not re.search(r"atom[.\w]*\.sys", result.ptx), result.variant
        # Programs of a launch agree on who is last, and on who failed first.
        assert re.search(r"atom[.\w]*acq_rel[.\w]*cas", result.ptx), result.variant
        if kernel_of(result) != "barrier":
            assert re.search(r"atom[.\w]*acq_rel[.\w]*add", result.ptx), result.variant


def test_a_missing_release_would_be_seen(compiled) -> None:
    result = next(result for result in compiled if kernel_of(result) == "barrier")
    assert missing_instructions("barrier", result.ptx.replace("st.release.sys", "st.weak")) == {RELEASE}


def test_nothing_spills(compiled) -> None:
    spilling = [result for result in compiled if result.figures.stack_bytes]
    assert not spilling, [(result.variant, result.capability, result.figures) for result in spilling]


# Bytes that have to be on their way at a time: what a link of 450 GB/s a direction takes in two microseconds,
# about as long as a load and the store of what it brought.
LINK_FLIGHT_BYTES = 900_000


def test_large_paths_keep_a_link_busy(compiled) -> None:
    for result in compiled:
        if "WIDTH=16," in result.variant:
            in_flight = NUM_PROGRAMS[-1] * result.figures.flight_bytes
            assert in_flight >= LINK_FLIGHT_BYTES, (result.variant, result.capability, in_flight)


def test_a_program_that_waits_for_every_load_would_be_seen() -> None:
    """As heads once were: 8 KiB a turn."""
    variant = next(v for v in variants_for(90) if kernel_name(v.kernel) == "ulysses_exchange")
    narrow = Variant.of(
        variant.kernel, num_warps=4, tuples=variant.tuples, **{**dict(variant.constants), "BLOCK": 8192}
    )
    in_flight = 32 * 4 * loaded_ahead(compile_variant(narrow, target_of(90)).asm["ptx"])
    assert 8192 <= in_flight < LINK_FLIGHT_BYTES / NUM_PROGRAMS[-1]


def test_threads_of_a_program_meet_at_the_same_barriers(compiled) -> None:
    """A warp that is late between two looks at a word, and sees another value, goes the same way as the rest."""
    for result in compiled:
        if "num_warps=1" not in result.variant:
            assert not unsafe_barriers(result.ptx), (result.variant, result.capability)


@pytest.mark.parametrize("kernel", ["push_exchange", "recv", "low_latency_exchange", "low_latency_all_reduce"])
def test_a_warp_that_branched_on_what_it_saw_alone_would_be_seen(kernel: str) -> None:
    """With an element for each lane instead of each thread, every warp looks for itself."""
    candidates = (v for v in variants_for(90) if kernel_name(v.kernel) == kernel)
    variant = next(v for v in candidates if dict(v.constants)["WIDTH"] != 1)
    assert not unsafe_barriers(compile_variant(variant, target_of(90)).asm["ptx"])
    alone = Variant.of(
        variant.kernel, num_warps=4, tuples=variant.tuples, **{**dict(variant.constants), "GROUP": 32}
    )
    assert unsafe_barriers(compile_variant(alone, target_of(90)).asm["ptx"])


def test_spilled_registers_would_be_seen() -> None:
    variant = next(v for v in variants_for(90) if str(v).startswith("low_latency_exchange("))
    source = triton.compiler.ASTSource(variant.kernel, signature(variant), dict(variant.constants))
    cramped = triton.compile(source, target=target_of(90), options={"num_warps": 4, "maxnreg": 32})
    registers, stack_bytes = usage_of(cramped.asm["cubin"])
    assert registers <= 32 and stack_bytes > 0


def test_the_selection_has_every_kernel() -> None:
    variants = variants_for(90)
    selected = {kernel_name(variants[number].kernel) for _, number in selected_jobs()}
    assert selected == {kernel_name(variant.kernel) for variant in variants}


def test_the_record_is_complete_and_true(compiled, record) -> None:
    """It has what is compiled here, hence every kernel; figures are compared if the compiler is the same."""
    for result in compiled:
        figures = record["variants"].get(result.variant, {}).get(str(result.capability))
        assert figures, f"{result.variant} for {result.capability} is not recorded: run make kernels"
        registers, stack_bytes, shared_bytes, flight_bytes, turn_instructions = figures
        if record["triton"] == triton.__version__:
            assert abs(result.figures.registers - registers) <= 8, result.variant
            assert result.figures.stack_bytes <= stack_bytes + 64, result.variant
            assert result.figures.shared_bytes <= shared_bytes + 1024, result.variant
            assert result.figures.flight_bytes == flight_bytes, result.variant
            assert abs(result.figures.turn_instructions - turn_instructions) <= 32, result.variant


def test_the_record_is_of_these_kernels(record) -> None:
    """So what the selection leaves out has been compiled as it is now."""
    assert record["sources"] == sources_digest(), "kernels have changed since all were compiled: run make kernels"


def test_nothing_of_the_record_spills(record) -> None:
    for name, rows in record["variants"].items():
        assert all(stack_bytes == 0 for _, stack_bytes, *_ in rows.values()), name


def test_the_table_on_the_page_is_that_of_the_record(record) -> None:
    assert f"{to_table(record)}\n{END}" in PAGE.read_text()
