// Up to 16 rows of x on RDNA: x is one operand of the 16x16x16 matrix instruction, 16 rows of w the other.
//
//   lane = (half, i)      operand x: row m = i     operand w: row n = i     result: column n = i, rows m by half
//
// RDNA 3 wants all 16 k of a row in both halves; RDNA 4 wants 8 k in each. Either way both halves load the row's whole
// granule (the same bytes: one access) and keep what they need, so a matrix instruction never meets two groups.
#pragma once

#include "skinny_w4a16.h"

#if NYBBLE_AMD

#if defined(__gfx1200__) || defined(__gfx1201__)
#define NYBBLE_RDNA4 1
#else
#define NYBBLE_RDNA4 0
#endif

namespace nybble {

constexpr int HALVES = NYBBLE_RDNA4 ? 2 : 1;  // in which a matrix instruction's 16 k are spread
constexpr int OPERAND_WORDS = 2 / HALVES;     // of w that a lane gives to one matrix instruction

typedef float f32x8 __attribute__((ext_vector_type(8)));
typedef Pair Operand __attribute__((ext_vector_type(8 / HALVES)));

NYBBLE_DEV f32x8 multiply(Half, Operand x, Operand w, f32x8 c) {
#if NYBBLE_RDNA4
  typedef _Float16 V __attribute__((ext_vector_type(8)));
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(__builtin_bit_cast(V, x), __builtin_bit_cast(V, w), c);
#else
  typedef _Float16 V __attribute__((ext_vector_type(16)));
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(V, x), __builtin_bit_cast(V, w), c);
#endif
}

NYBBLE_DEV f32x8 multiply(BFloat, Operand x, Operand w, f32x8 c) {
#if NYBBLE_RDNA4
  typedef short V __attribute__((ext_vector_type(8)));
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(__builtin_bit_cast(V, x), __builtin_bit_cast(V, w), c);
#else
  typedef short V __attribute__((ext_vector_type(16)));
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(V, x), __builtin_bit_cast(V, w), c);
#endif
}

template <class Type, class Scale, int GROUP, bool ZEROS, int M, int ROWS, int WAVES>
struct WmmaTile {
  static_assert(M == 16 && ROWS % 16 == 0);
  static constexpr int STEP = NYBBLE_STEP;  // granules: at least the largest group
  static constexpr int TILES = ROWS / 16;

  f32x8 total[TILES];

  // Bytes from the block's first row to this lane's own, and from x to this lane's row of it.
  struct Offsets {
    u32 x, w[TILES], scale[TILES], zero[TILES];
    int row_in_eight;
  };

  NYBBLE_METHOD void run(const Problem& p, int row0, Slice slice, u8*) {
    const int i = lane_index() % 16;
    Offsets lane;
    lane.x = u32(smaller(i, p.m - 1)) * u32(p.x_stride);
    lane.row_in_eight = i % 8;
    NYBBLE_UNROLL
    for (int t = 0; t < TILES; t++) {
      const u32 row = smaller(16 * t + i, p.n - 1 - row0);
      lane.w[t] = row * u32(p.w_stride);
      lane.scale[t] = row * u32(p.s_stride);
      lane.zero[t] = row / 8 * u32(p.z_stride);
      total[t] = 0;
    }
    Problem block = p;
    block.w += u64(row0) * u32(p.w_stride);
    block.scales += u64(row0) * u32(p.s_stride);
    block.zeros += u64(row0 / 8) * u32(p.z_stride);
    const int whole = smaller(slice.last, p.granules() / STEP);
    for (int step = slice.first; step < whole; step++) add_step(block, lane, step, STEP);
    if (whole < slice.last) add_step(block, lane, whole, p.granules() - whole * STEP);
  }

  // granules: 1 to STEP of them are there.
  NYBBLE_METHOD void add_step(const Problem& block, const Offsets& lane, int step, int granules) {
    constexpr int PER_GROUP = GROUP / GRANULE, GROUPS = STEP / PER_GROUP;
    constexpr int SCALE_BYTES = sizeof(typename Scale::Bits);
    const u8* x_base = scalar_base(block.x + u64(step) * (STEP * GRANULE * 2));
    const u8* w_base = scalar_base(block.w + u64(step) * (STEP * GRANULE_BYTES));
    const u8* scale_base = scalar_base(block.scales + u64(step) * (GROUPS * SCALE_BYTES));
    const u8* zero_base = scalar_base(block.zeros + u64(step) * (GROUPS * 4));
    const u32 half = lane_index() / 16;

    f32x8 sum[TILES], x_sum;
    u32 zero[TILES];
    NYBBLE_UNROLL
    for (int g = 0; g < STEP; g++) {
      if (g >= granules) break;
      const int group = g / PER_GROUP;
      if (g % PER_GROUP == 0) {
        NYBBLE_UNROLL
        for (int t = 0; t < TILES; t++) {
          sum[t] = 0;
          zero[t] = SYMMETRIC_ZERO;
          if (ZEROS) zero[t] = zero_of(load<u32>(zero_base + group * 4, lane.zero[t]), lane.row_in_eight);
        }
        x_sum = 0;
      }

      // Matrix instruction j takes words 2j and 2j + 1 of the granule on RDNA 3, word 2 half + j on RDNA 4.
      Operand x[2];
      NYBBLE_UNROLL
      for (int j = 0; j < 2; j++) {
        NYBBLE_UNROLL
        for (int o = 0; o < OPERAND_WORDS; o++) {
          const u8* base = x_base + g * (GRANULE * 2) + (NYBBLE_RDNA4 ? j : 2 * j + o) * 16;
          const Quad quad = load_quad(base, NYBBLE_RDNA4 ? lane.x + half * 32 : lane.x);
          NYBBLE_UNROLL
          for (int e = 0; e < 4; e++) x[j][4 * o + e] = quad.word[e];
        }
        if constexpr (!Type::FINE) x_sum = multiply(Type{}, x[j], ones(), x_sum);
      }

      NYBBLE_UNROLL
      for (int t = 0; t < TILES; t++) {
        const Quad q = load_once(w_base + g * GRANULE_BYTES, lane.w[t]);
        NYBBLE_UNROLL
        for (int j = 0; j < 2; j++) {
          Operand w;
          NYBBLE_UNROLL
          for (int o = 0; o < OPERAND_WORDS; o++) {
            const u32 word = NYBBLE_RDNA4 ? (q.word[j] & (half - 1)) | (q.word[2 + j] & -half) : q.word[2 * j + o];
            Pair pair[4];
            if constexpr (Type::FINE) {
              exact_pairs<Type>(word, packed_zero<Type>(zero[t]), pair);
            } else {
              raw_pairs<Type>(word, pair);
            }
            NYBBLE_UNROLL
            for (int e = 0; e < 4; e++) w[4 * o + e] = pair[e];
          }
          sum[t] = multiply(Type{}, x[j], w, sum[t]);
        }
      }

      if (g % PER_GROUP != PER_GROUP - 1) continue;
      NYBBLE_UNROLL
      for (int t = 0; t < TILES; t++) {
        const float scale = Scale::wide(load<typename Scale::Bits>(scale_base + group * SCALE_BYTES, lane.scale[t]));
        // Raw numbers went in where the type has no cheap subtraction: take (BIAS + z) sum x off.
        if constexpr (!Type::FINE) sum[t] -= (Type::BIAS + float(zero[t])) * x_sum;
        total[t] += scale * sum[t];
      }
    }
  }

  static NYBBLE_METHOD Operand ones() {
    Operand all;
    NYBBLE_UNROLL
    for (int e = 0; e < 8 / HALVES; e++) all[e] = Type::ONES;
    return all;
  }

  NYBBLE_METHOD void deposit(float* sums) const {
    const int i = lane_index() % 16, half = lane_index() / 16;
    NYBBLE_UNROLL
    for (int t = 0; t < TILES; t++) {
      NYBBLE_UNROLL
      for (int e = 0; e < 8; e++) {
        const int m = NYBBLE_RDNA4 ? e + 8 * half : 2 * e + half;
        sums[m * ROWS + 16 * t + i] = total[t][e];
      }
    }
  }

  static constexpr int SHARED_BYTES = 0;
};

}  // namespace nybble

#endif
