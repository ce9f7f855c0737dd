"""Loads and stores of 64-bit words that another rank writes or reads, with system scope.

Each function has two bodies. With ``PTX`` it is one instruction; otherwise it is plain Triton, which the
interpreter can run: an atomic with the same memory order. Addresses are integers, in blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def word_pointer(address):
    """``address`` (int64, scalar or block) as a pointer to 64-bit words."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def load_acquire_block(addresses, mask, PTX: tl.constexpr):
    """A block of words; 0 where ``mask`` is false."""
    return _load_block(addresses, mask, _LOAD_ACQUIRE, "acquire", PTX)


@triton.jit
def load_relaxed_block(addresses, mask, PTX: tl.constexpr):
    """The same, each loaded as a whole and in no order."""
    return _load_block(addresses, mask, _LOAD_RELAXED, "relaxed", PTX)


@triton.jit
def store_release_block(addresses, words, mask, PTX: tl.constexpr):
    """Store a block of words where ``mask`` is true, after everything that the program did before.

    The caller puts ``tl.debug_barrier()`` before it if other threads wrote what it publishes. Several threads may
    store the same word.
    """
    _store_block(addresses, words, mask, _STORE_RELEASE, "release", PTX)


@triton.jit
def store_relaxed_block(addresses, words, mask, PTX: tl.constexpr):
    """The same, each stored as a whole and in no order."""
    _store_block(addresses, words, mask, _STORE_RELAXED, "relaxed", PTX)


def _load_where_wanted(order: str) -> tl.constexpr:
    return tl.constexpr(f"""{{
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        mov.b64 $0, 0;
        @wanted ld.{order}.sys.global.b64 $0, [$1];
        }}""")


def _store_where_wanted(order: str) -> tl.constexpr:
    return tl.constexpr(f"""{{
        .reg .pred wanted;
        setp.ne.s32 wanted, $3, 0;
        @wanted st.{order}.sys.global.b64 [$1], $2;
        mov.b64 $0, $2;
        }}""")


_LOAD_ACQUIRE, _LOAD_RELAXED = _load_where_wanted("acquire"), _load_where_wanted("relaxed")
_STORE_RELEASE, _STORE_RELAXED = _store_where_wanted("release"), _store_where_wanted("relaxed")


@triton.jit
def _load_block(addresses, mask, ASM: tl.constexpr, ORDER: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        words = tl.inline_asm_elementwise(
            ASM, "=&l,l,r", [addresses, mask.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        words = tl.atomic_add(word_pointer(addresses), addresses * 0, mask=mask, sem=ORDER, scope="sys")
        words = tl.where(mask, words, 0)
    return words


@triton.jit
def _store_block(addresses, words, mask, ASM: tl.constexpr, ORDER: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        tl.inline_asm_elementwise(
            ASM, "=l,l,l,r", [addresses, words, mask.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        tl.atomic_xchg(word_pointer(addresses), words, mask=mask, sem=ORDER, scope="sys")


# Looks of a thread for words that are to come before it compares notes with the others: some 50 microseconds.
_SPINS = 64
_PAIRS_PER_THREAD = 4


def _spin_until_equal() -> str:
    return f"""{{
        .reg .pred wanted, again;
        .reg .b32 left;
        setp.ne.s32 wanted, $3, 0;
        mov.b64 $0, 0;
        mov.b32 left, {_SPINS};
        @!wanted bra DONE;
        AGAIN:
        ld.acquire.sys.global.b64 $0, [$1];
        sub.s32 left, left, 1;
        setp.ne.b64 again, $0, $2;
        setp.gt.and.s32 again, left, 0, again;
        @again bra AGAIN;
        DONE:
        }}"""


def _spin_until_flagged() -> str:
    """Pairs of a thread together, so that their loads are on their way at once."""
    each = range(_PAIRS_PER_THREAD)
    first, second, address, flag, wanted = (
        [f"${_PAIRS_PER_THREAD * operand + pair}" for pair in each] for operand in range(5)
    )
    begin = [
        f"setp.ne.s32 wanted{n}, {wanted[n]}, 0; mov.b64 {first[n]}, 0; mov.b64 {second[n]}, 0;" for n in each
    ]
    loads = [f"@wanted{n} ld.relaxed.sys.global.v2.b64 {{{first[n]}, {second[n]}}}, [{address[n]}];" for n in each]
    # The flag is the upper half of either word.
    checks = [
        f"xor.b64 x, {first[n]}, {flag[n]}; xor.b64 y, {second[n]}, {flag[n]}; or.b64 x, x, y;"
        f"@wanted{n} or.b64 missing, missing, x;"
        for n in each
    ]
    return "\n".join(
        (
            "{ .reg .pred wanted<4>, again; .reg .b32 left; .reg .b64 x, y, missing;",
            *begin,
            f"mov.b32 left, {_SPINS};",
            "AGAIN: mov.b64 missing, 0;",
            *loads,
            *checks,
            "sub.s32 left, left, 1; shr.u64 missing, missing, 32;",
            "setp.ne.b64 again, missing, 0; setp.gt.and.s32 again, left, 0, again;",
            "@again bra AGAIN; }",
        )
    )


_SPIN_UNTIL_EQUAL = tl.constexpr(_spin_until_equal())
_SPIN_UNTIL_FLAGGED = tl.constexpr(_spin_until_flagged())
_SPIN_PACK = tl.constexpr(_PAIRS_PER_THREAD)
_SPIN_OPERANDS = tl.constexpr(
    ",".join(["=&l"] * 2 * _PAIRS_PER_THREAD + ["l"] * 2 * _PAIRS_PER_THREAD + ["r"] * _PAIRS_PER_THREAD)
)


@triton.jit
def spin_acquire_block(addresses, expected, mask, PTX: tl.constexpr):
    """A block of words, 0 where ``mask`` is false; each is looked for until it is ``expected``, or for a while."""
    if PTX:
        words = tl.inline_asm_elementwise(
            _SPIN_UNTIL_EQUAL,
            "=&l,l,l,r",
            [addresses, expected, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        words = load_acquire_block(addresses, mask, PTX)
    return words


@triton.jit
def spin_pairs(addresses, flags, mask, PTX: tl.constexpr):
    """The two words of each pair, 0 where ``mask`` is false; looked for until both are flagged, or for a while.

    ``addresses`` are multiples of 16; the upper half of ``flags`` is that of words that have arrived. A block of
    four for every thread.
    """
    if PTX:
        first, second = tl.inline_asm_elementwise(
            _SPIN_UNTIL_FLAGGED,
            _SPIN_OPERANDS,
            [addresses, flags, mask.to(tl.int32)],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=_SPIN_PACK,
        )
    else:
        first = load_relaxed_block(addresses, mask, PTX)
        second = load_relaxed_block(addresses + 8, mask, PTX)
    return first, second


@triton.jit
def now_ns(clock, PTX: tl.constexpr):
    """Nanoseconds: the device's timer, or the word at ``clock``, which a thread of the host keeps up to date."""
    if PTX:
        now = globaltimer()
    else:
        now = tl.atomic_add(word_pointer(clock), clock * 0, sem="acquire", scope="sys")
    return now
