// What CUDA's engines are made of: its instructions for copies to shared memory and for matrices, and the places of
// things there.
#pragma once

#include "skinny_w4a16.h"

#if !NYBBLE_AMD

namespace nybble {

// 0, but not a constant, as far as the compiler can tell: what is made with it stays in a register of its own.
NYBBLE_DEV u32 hidden_zero(const Problem& p) { return u32(p.splits) >> 31; }

NYBBLE_DEV u32 rotate_left(u32 word, int bits) { return __funnelshift_l(word, word, bits); }
NYBBLE_DEV u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory; zeros where `present` is false. Read once: first to leave the L2.
NYBBLE_DEV void copy_once(u32 to, const u8* from, bool present, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(present ? 16 : 0), "l"(policy));
}
// The same without a wish about the L2: with one, an address that all threads share in part makes ptxas 13.0 encode an
// instruction that the chip refuses.
NYBBLE_DEV void copy_line(u32 to, const u8* from, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0));
}
NYBBLE_DEV void copy(u32 to, const u8* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0));
}
// BYTES to shared memory, of which some are there, the others zeros.
template <int BYTES>
NYBBLE_DEV void copy_some(u32 to, const u8* from, int there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(there));
}
// An address that stays in its registers: the compiler would work it out anew for every copy.
NYBBLE_DEV const u8* kept(const u8* p) {
  asm("" : "+l"(p));
  return p;
}
NYBBLE_DEV u32 kept(u32 offset) {
  asm("" : "+r"(offset));
  return offset;
}
NYBBLE_DEV void end_copies() { asm volatile("cp.async.commit_group;"); }
template <int YOUNGEST>
NYBBLE_DEV void wait_for_copies() {  // all but the youngest groups
  asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGEST) : "memory");
}
NYBBLE_DEV u64 read_once_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Programmatic dependent launch: without it both do nothing.
NYBBLE_DEV void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
NYBBLE_DEV void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Four 8x8 matrices of 16 bits: lanes 8i .. 8i+7 point at the rows of matrix i, lane (g, t) gets word t of its row g.
NYBBLE_DEV Quad load_matrices(u32 row) {
  Quad q;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.word[0]), "=r"(q.word[1]), "=r"(q.word[2]), "=r"(q.word[3])
               : "r"(row));
  return q;
}

NYBBLE_DEV Quad load_chunk(u32 at) {
  Quad q;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.word[0]), "=r"(q.word[1]), "=r"(q.word[2]), "=r"(q.word[3])
               : "r"(at));
  return q;
}

// c[16 rows of w, 8 rows of x] += a b; a: rows g and g + 8 (low, high), two pairs of k each.
NYBBLE_DEV void multiply(Half, float (&c)[4], Pair low0, Pair high0, Pair low1, Pair high1, Pair b0, Pair b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(low0), "r"(high0), "r"(low1), "r"(high1), "r"(b0), "r"(b1));
}
NYBBLE_DEV void multiply(BFloat, float (&c)[4], Pair low0, Pair high0, Pair low1, Pair high1, Pair b0, Pair b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(low0), "r"(high0), "r"(low1), "r"(high1), "r"(b0), "r"(b1));
}

// c += a b with a [16, 8], b [8, 8] of fp32, of which the chip looks at the first 11 bits. Lane (g, t) has columns t and t + 4
// of rows g and g + 8 of a, rows t and t + 4 of column g of b.
NYBBLE_DEV void multiply_tf32(float (&c)[4], float low0, float high0, float low1, float high1, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(low0)), "r"(__float_as_uint(high0)), "r"(__float_as_uint(low1)),
        "r"(__float_as_uint(high1)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// The same with the first four columns of a and rows of b alone.
NYBBLE_DEV void multiply_tf32(float (&c)[4], float low, float high, float b) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(low)), "r"(__float_as_uint(high)), "r"(__float_as_uint(b)));
}

// Raw numbers of one small bias: 128 + q of bf16; 64 + q of fp16, which is 0x5400 | q << 4.
template <class Type>
struct Raw {
  static constexpr int AT = Type::FINE ? 4 : 0;  // bit of q
  static constexpr u32 MAGIC = Type::FINE ? 0x54005400 : Type::MAGIC;
  static constexpr Pair START = (MAGIC | 0x80008000) + (SYMMETRIC_ZERO << AT) * 0x00010001;  // -(bias + 8)

  // The four pairs of a word. low: LOW_NIBBLES
  static NYBBLE_METHOD void pairs(u32 word, Pair (&pair)[4], u32 low) {
    NYBBLE_UNROLL
    for (int i = 0; i < 4; i++) {
      const u32 in_place = 4 * i < AT ? word << (AT - 4 * i) : word >> (4 * i - AT);
      pair[i] = (in_place & low << AT) | MAGIC;
    }
  }

  // -(bias + z) as a float, of a z at ZERO_AT with anything around it: there its bits are a float's for 1, 2, 4 and 8.
  static constexpr int ZERO_AT = Type::FINE ? 17 : 16;
  static constexpr u32 ZERO_MASK = 0xFu << ZERO_AT;
  static NYBBLE_METHOD float minus_biased(u32 zero, u32 mask) {
    return as_float((zero & mask) | (Type::FINE ? 0xC2800000 : 0xC3000000));
  }
};

// A float as the sum of two of which multiply_tf32 sees nearly all: 22 bits. The low one has the sign of the float, or, where
// the high one is rounded, either.
struct Halves {
  float high, low;
  NYBBLE_METHOD explicit Halves(float value, bool rounded = false) {
    high = as_float((__float_as_uint(value) + (rounded ? 0x1000 : 0)) & 0xFFFFE000);
    low = value - high;
  }
};

// What a block, or a wave of its own, keeps in shared memory for ROWS rows of w: a ring of stages, and the scales and zero
// points of its whole slice.
template <class Type, class Scale, int GROUP, bool ZEROS, int M, int ROWS>
struct StagedTile {
  static constexpr int STEP = NYBBLE_STEP;  // granules: at least the largest group
  static constexpr int STAGES = NYBBLE_STAGES;
  static constexpr int EIGHTS = ROWS / 8;
  static constexpr int PER_GROUP = GROUP / GRANULE, GROUPS = STEP / PER_GROUP;  // granules of a group, groups of a step
  static constexpr int W_BYTES = ROWS * STEP * GRANULE_BYTES;
  static constexpr int X_ROW_BYTES = STEP * GRANULE * 2;
  static constexpr int STAGE_BYTES = W_BYTES + M * X_ROW_BYTES;
  static constexpr int SCALE_BYTES = sizeof(typename Scale::Bits);

  // Where a granule of w and a chunk of x lie in a stage, bytes: eight rows of a granule, and two rows of four chunks, are
  // 128 bytes in 32 different banks.
  static NYBBLE_METHOD u32 w_place(int row, int granule) {
    constexpr int NEIGHBOURS = STEP < 8 ? STEP : 8;  // granules of a row inside 128 bytes
    return row * (STEP * GRANULE_BYTES) + (granule ^ (row / (8 / NEIGHBOURS) % NEIGHBOURS)) * GRANULE_BYTES;
  }
  static NYBBLE_METHOD u32 x_place(int m, int chunk) { return m * X_ROW_BYTES + (chunk ^ (m % 2 * 4)) * 16; }
  // A step's stage comes after the last one's, the first one's after the end.
  static NYBBLE_METHOD u32 next_stage(u32 stage, u32 ring) {
    stage += STAGE_BYTES;
    return stage == ring + STAGES * STAGE_BYTES ? ring : stage;
  }

  // A slice's scales, then zero points, step by step: of each, all rows' side by side. A row's scales of a step are read at
  // once; where that is less than a word, a word has two steps.
  static constexpr int STEP_SCALES = GROUPS * SCALE_BYTES, SCALE_UNIT = STEP_SCALES < 4 ? 4 : STEP_SCALES;
  static NYBBLE_METHOD u32 scale_place(int row, u32 step, u32 group) {
    const u32 byte = group * SCALE_BYTES;
    if constexpr (STEP_SCALES == 2) return step / 2 * (ROWS * 4) + row * 4 + step % 2 * 2 + byte;
    return (step * ROWS + row) * STEP_SCALES + byte;
  }
  static NYBBLE_METHOD u32 zero_place(int eight, u32 step, u32 group) {
    return ((step * EIGHTS + eight) * GROUPS + group) * 4;
  }
  static NYBBLE_METHOD int scale_bytes(int steps) {
    return (steps * STEP_SCALES + SCALE_UNIT - 1) / SCALE_UNIT * (ROWS * SCALE_UNIT);
  }
  static NYBBLE_METHOD int side_bytes(int steps) {
    return (scale_bytes(steps) + (ZEROS ? steps * GROUPS * EIGHTS * 4 : 0) + 15) / 16 * 16;
  }

  // group: of the slice
  static NYBBLE_METHOD typename Scale::Bits& scale_of(u8* scales, int row, u32 group) {
    return *reinterpret_cast<typename Scale::Bits*>(scales + scale_place(row, group / GROUPS, group % GROUPS));
  }

  // As packed_zero, of bits 16-19. The same number of fp16 in sixteenths: 64 + z = 1024 + z - 960.
  static NYBBLE_METHOD PackedZero doubled_zero(u32 zero) {
    if constexpr (!ZEROS) return packed_zero<Type>(SYMMETRIC_ZERO);
    const u32 one = (zero & 0x000F0000) | (Type::MAGIC & 0xFFFF0000);
    const Pair both = __byte_perm(one, 0, 0x3232);
    if constexpr (Type::FINE) return {both, Type::subtract(both, 0x63806380)};
    return {both, 0};
  }

  static constexpr u32 SYMMETRIC_ZEROS = 0x88888888;

  // Of the zero points of eight rows, row g's from bit `at` on, others' around it.
  static NYBBLE_METHOD u32 in_place(u32 word, int g, int at = 16) {
    return ZEROS ? rotate_left(word, at - 4 * g) : word;
  }

  // Zero points of short groups, of which raw numbers are multiplied: (bias + z) s sum x comes off the totals for four groups
  // at a time, itself a product of small matrices, rows of w x groups times groups x rows of x.

  // Sums over x of single groups: in sum_of_t lane (g, t) has row g's over group t in two parts, 0 and 2, and over group t + 4
  // in 1 and 3. Here x is the first operand: words 0 and 2 of row g as its row g, words 1 and 3 as its row g + 8; the other
  // has ones in the column of w that lanes (., t) have as their first, or second, for that group.
  // Of up to eight groups. The two words of the other operand are equal, yet two: one register would be copied to a pair of
  // them each time.
  struct Column {
    Pair b0, b1;

    NYBBLE_METHOD Column() {}
    // none: the hidden zero
    NYBBLE_METHOD Column(int group, u32 none) {
      const Pair ones = lane_index() / 4 == group % 4 * 2 + group / 4 ? Type::ONES : 0;
      b0 = kept(ones), b1 = kept(ones + none);
    }
  };
  static NYBBLE_METHOD void add_of_t(float (&sum_of_t)[4], const Quad& x, const Column& column) {
    multiply(Type{}, sum_of_t, x.word[0], x.word[1], x.word[2], x.word[3], column.b0, column.b1);
  }
  // scales, zeros: of row g of the first tile and of its eight rows, for the first of the groups 4 four + t
  template <int TILES, int X_TILES>
  static NYBBLE_METHOD void take_off(float (&total)[TILES][X_TILES][4], const float (&sum_of_t)[X_TILES][4], int four,
                                     const u8* scales, const u8* zeros, u32 zero_mask) {
    NYBBLE_UNROLL
    for (int tile = 0; tile < TILES; tile++) {
      float zs[2];  // rows g and g + 8: less than 0
      NYBBLE_UNROLL
      for (int h = 0; h < 2; h++) {
        const int eight = 2 * tile + h, group = 4 * four;
        const u32 eight_zeros = load<u32>(zeros, (eight * GROUPS + group) * 4);
        const u32 zero = in_place(eight_zeros, lane_index() / 4, Raw<Type>::ZERO_AT);
        zs[h] = Raw<Type>::minus_biased(zero, zero_mask) *
                Scale::wide(load<typename Scale::Bits>(scales, eight * 8 * SCALE_UNIT + group * SCALE_BYTES));
      }
      const Halves low(zs[0]), high(zs[1]);
      NYBBLE_UNROLL
      for (int c = 0; c < X_TILES; c++) {
        // Left out is low times low, 2^-22 of the product. Of x it has either sign, so that over groups whose sums differ this
        // adds up to nothing.
        const Halves x(sum_of_t[c][four] + sum_of_t[c][2 + four], true);
        multiply_tf32(total[tile][c], low.high, high.high, low.low, high.low, x.high, x.high);
        multiply_tf32(total[tile][c], low.high, high.high, x.low);
      }
    }
  }

  // Sum over a granule: low, high are the pairs of rows g and g + 8.
  static NYBBLE_METHOD void add(float (&sum)[4], const Pair (&low)[4], const Pair (&high)[4], const Quad& x) {
    multiply(Type{}, sum, low[0], high[0], low[1], high[1], x.word[0], x.word[1]);
    multiply(Type{}, sum, low[2], high[2], low[3], high[3], x.word[2], x.word[3]);
  }
};

}  // namespace nybble

#endif
