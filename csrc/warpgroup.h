// sm_90's matrix instructions of four waves: c[64 rows of w, N rows of x] += a b, with a in registers, each wave's as for the
// instruction of one wave, and b in shared memory. They run on while the waves go on.
//
// x lies there in pieces of 64 k: [N][128 bytes], chunk c of 16 bytes of row m at c ^ m % 8.
#pragma once

#include "staged_tile.h"

#if !NYBBLE_AMD

namespace nybble {

constexpr int SWIZZLED_BYTES = 1024;  // eight rows; a piece begins at a multiple of this

// What an instruction is told of 16 k of a piece (PTX ISA, matrix descriptor): where, in units of 16 bytes; from bit 32 the
// distance of eight rows, likewise; 1 from bit 62: swizzled in 128 bytes. What bit 16 begins is not looked at then.
NYBBLE_DEV u64 swizzled(u32 address) {
  return u64(address / 16) | u64(1) << 16 | u64(SWIZZLED_BYTES / 16) << 32 | u64(1) << 62;
}

// What copies brought is there for other waves after a barrier; for these instructions, only if this came first.
NYBBLE_DEV void show_to_warpgroups() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Registers that were written before are read after.
NYBBLE_DEV void begin_multiplications() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
NYBBLE_DEV void end_multiplications() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int YOUNGEST>
NYBBLE_DEV void wait_for_multiplications() {  // all but the youngest groups
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(YOUNGEST) : "memory");
}

// more: add to c, else c begins here. The names of operands: of c, of a, of b, of `more`.
#define NYBBLE_MULTIPLY_IN_WARPGROUP(type, type_name, n, c_names, a_names, b_name, more_name, ...)                     \
  NYBBLE_DEV void multiply_in_warpgroup(type, float (&c)[n / 8][4], const Pair(&a)[4], u64 b, bool more) {             \
    asm volatile("{\n.reg .pred %%p_more;\nsetp.ne.b32 %%p_more, " more_name                                           \
                 ", 0;\n"                                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type_name "." type_name " {" c_names "}, {" a_names \
                 "}, " b_name ", %%p_more, 1, 1, 0;\n}"                                                                \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(more)));                                \
  }
#define NYBBLE_C(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define NYBBLE_C_16 NYBBLE_C(0), NYBBLE_C(1)
#define NYBBLE_C_32 NYBBLE_C_16, NYBBLE_C(2), NYBBLE_C(3)
#define NYBBLE_C_64 NYBBLE_C_32, NYBBLE_C(4), NYBBLE_C(5), NYBBLE_C(6), NYBBLE_C(7)
#define NYBBLE_NAMES_8 "%0, %1, %2, %3"
#define NYBBLE_NAMES_16 NYBBLE_NAMES_8 ", %4, %5, %6, %7"
#define NYBBLE_NAMES_32 NYBBLE_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NYBBLE_NAMES_64 \
  NYBBLE_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NYBBLE_EVERY_N(type, name)                                                                               \
  NYBBLE_MULTIPLY_IN_WARPGROUP(type, name, 8, NYBBLE_NAMES_8, "%4, %5, %6, %7", "%8", "%9", NYBBLE_C(0))         \
  NYBBLE_MULTIPLY_IN_WARPGROUP(type, name, 16, NYBBLE_NAMES_16, "%8, %9, %10, %11", "%12", "%13", NYBBLE_C_16)   \
  NYBBLE_MULTIPLY_IN_WARPGROUP(type, name, 32, NYBBLE_NAMES_32, "%16, %17, %18, %19", "%20", "%21", NYBBLE_C_32) \
  NYBBLE_MULTIPLY_IN_WARPGROUP(type, name, 64, NYBBLE_NAMES_64, "%32, %33, %34, %35", "%36", "%37", NYBBLE_C_64)
NYBBLE_EVERY_N(Half, "f16")
NYBBLE_EVERY_N(BFloat, "bf16")

}  // namespace nybble

#endif
