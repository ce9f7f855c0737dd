"""Loads and stores of 64-bit words that another rank writes or reads, with system scope.

Each function has two bodies. With ``PTX`` it is one instruction; otherwise it is plain Triton, which the
interpreter can run: an atomic with the same memory order. Addresses are integers. All threads of a program
execute a scalar access, so in PTX a scalar store is predicated to the first thread.
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
def load_acquire(address, PTX: tl.constexpr):
    """The word at ``address`` (scalar); what was written before the matching release is visible afterwards."""
    if PTX:
        word = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        word = tl.atomic_add(word_pointer(address), address * 0, sem="acquire", scope="sys")
    return word


@triton.jit
def load_acquire_block(addresses, mask, PTX: tl.constexpr):
    """A block of words; 0 where ``mask`` is false."""
    if PTX:
        words = tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s32 wanted, $2, 0;
            mov.b64 $0, 0;
            @wanted ld.acquire.sys.global.b64 $0, [$1];
            }""",
            "=&l,l,r",
            [addresses, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        words = tl.atomic_add(word_pointer(addresses), addresses * 0, mask=mask, sem="acquire", scope="sys")
        words = tl.where(mask, words, 0)
    return words


@triton.jit
def store_release(address, word, PTX: tl.constexpr):
    """Store ``word`` at ``address`` (scalars) after everything the program did before.

    The caller puts ``tl.debug_barrier()`` before it if other threads wrote what it publishes.
    """
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.b64 [$1], $2;
            mov.b64 $0, $2;
            }""",
            "=l,l,l",
            [address, word],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(word_pointer(address), word, sem="release", scope="sys")


@triton.jit
def store_release_block(addresses, words, mask, PTX: tl.constexpr):
    """Store a block of words where ``mask`` is true; several threads may store the same word."""
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s32 wanted, $3, 0;
            @wanted st.release.sys.global.b64 [$1], $2;
            mov.b64 $0, $2;
            }""",
            "=l,l,l,r",
            [addresses, words, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(word_pointer(addresses), words, mask=mask, sem="release", scope="sys")


@triton.jit
def load_relaxed_block(addresses, mask, PTX: tl.constexpr):
    """A block of words, each loaded as a whole and in no order; 0 where ``mask`` is false."""
    if PTX:
        words = tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s32 wanted, $2, 0;
            mov.b64 $0, 0;
            @wanted ld.relaxed.sys.global.b64 $0, [$1];
            }""",
            "=&l,l,r",
            [addresses, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        words = tl.atomic_add(word_pointer(addresses), addresses * 0, mask=mask, sem="relaxed", scope="sys")
        words = tl.where(mask, words, 0)
    return words


@triton.jit
def store_relaxed_block(addresses, words, mask, PTX: tl.constexpr):
    """Store a block of words, each as a whole and in no order, where ``mask`` is true."""
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s32 wanted, $3, 0;
            @wanted st.relaxed.sys.global.b64 [$1], $2;
            mov.b64 $0, $2;
            }""",
            "=l,l,l,r",
            [addresses, words, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(word_pointer(addresses), words, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def now_ns(clock, PTX: tl.constexpr):
    """Nanoseconds: the device's timer, or the word at ``clock``, which a thread of the host keeps up to date."""
    if PTX:
        now = globaltimer()
    else:
        now = load_acquire(clock, False)
    return now
