// y[M, N] = x[M, K] @ dequantised(w)[N, K]^T + bias for few rows M: the decode step of a W4A16 layer.
//
// All that this costs is reading w once; everything else has to hide behind that.
//
//   the layout of w          a row of K int4 weights: K/2 bytes (the stride may be larger)
//
//     granule 0        granule 1        granule 2              one granule = 16 bytes = 32 consecutive k of one row:
//     [w0 w1 w2 w3]    [w0 w1 w2 w3]    [ ...                  what one lane loads at once, and never in two groups
//      |
//      `- word: k = 0..7   bits  0-15: v0 v2 v4 v6   16-31: v1 v3 v5 v7   (four bits each, low first)
//         so after a shift by 4p, bits 0-3 and 16-19 are the pair (v[2p], v[2p+1])
//
//   scales [N, K/G]: one per row and group of G. Zero points [N/8, K/G]: a word holds those of eight rows, row n's at
//   bits 4 (n % 8); without them z = 8.   w = (q - z) * scale
//
//   who does what            a block owns ROWS rows of w; its waves, and the blocks that share those rows (splits),
//                            cut K into slices of whole steps
//
//            K ->
//     rows   | wave 0 | wave 1 | ... | wave W-1 |  split 0  -> sums [wave][m][row] in shared memory -> one number
//            | wave 0 | wave 1 | ... | wave W-1 |  split 1  -> likewise -> partial [split][m][n] -> the last block adds
//
// Waves of BlockTile and WarpgroupTile cut the rows instead. x is read once by each block and never kept whole, so K and
// K * M have no limit. Sums are fp32, and every sum has one order: the same call gives the same bits.
//
// A slice is added up by one of five engines, with the same face:
//   DotRows        lanes side by side along K, v_dot2: one or two rows of x                                   dot_rows.h
//   WmmaTile       16x16x16 matrix instructions of RDNA 3 and 4                                              wmma_tile.h
//   MmaTile        16x8x16 matrix instructions of CUDA, weights staged through shared memory                 mma_tile.h
//   BlockTile      the same instructions for 9 to 64 rows: waves share x, and cut the rows instead of K     block_tile.h
//   WarpgroupTile  that with sm_90's instructions of four waves (warpgroup.h)                               block_tile.h
#pragma once

#include "platform.h"

namespace nybble {

constexpr int GRANULE = 32;        // k
constexpr int GRANULE_BYTES = 16;  // of w
constexpr int SYMMETRIC_ZERO = 8;

struct Problem {
  const u8* x;       // [m, k] activations, 2 bytes each, rows x_stride bytes apart
  const u8* w;       // [n, k/2] bytes, rows w_stride bytes apart
  const u8* scales;  // [n, k/G], rows s_stride bytes apart
  const u8* zeros;   // [n/8, k/G] words of 4 bytes, rows z_stride bytes apart, or null
  const u16* bias;   // [n] or null
  u16* y;            // [m, n], or [m, n/2] with a gate
  float* partial;    // [splits, m, n] where splits > 1; of block_tile.h see there
  u32* counters;     // [blocks of rows], 0 between calls
  int m, n, k;
  int x_stride, w_stride, s_stride, z_stride;
  int splits;

  NYBBLE_METHOD int granules() const { return k / GRANULE; }
};

// Steps [first, last) of one wave.
struct Slice {
  int first, last;
};

// step: granules that a wave takes in one go
template <int WAVES>
NYBBLE_DEV Slice slice_of(const Problem& p, int step, int split, int wave) {
  const int steps = (p.granules() + step - 1) / step;
  const int slices = p.splits * WAVES;
  const int index = split * WAVES + wave;
  return {int(u64(steps) * index / slices), int(u64(steps) * (index + 1) / slices)};
}

// ------------------------------------------------------------------------------------------------------------ unpack

// Zero point of row n from the word of its eight rows.
NYBBLE_DEV u32 zero_of(u32 word, int n) { return (word >> (4 * (n % 8))) & 15; }

constexpr u32 LOW_NIBBLES = 0x000F000F;

// The four pairs of a word as raw magic numbers: BIAS + q; FINE, where the type is: pairs 1 and 3 are BIAS + 16 q.
// low: LOW_NIBBLES, from a register where the compiler would load the constant anew for every use.
template <class Type>
NYBBLE_DEV void raw_pairs(u32 word, Pair (&pair)[4], u32 low = LOW_NIBBLES) {
  if constexpr (Type::FINE) {
    const u32 high = low << 4;
    const u32 upper = word >> 8;
    pair[0] = (word & low) | Type::MAGIC;
    pair[1] = (word & high) | Type::MAGIC;
    pair[2] = (upper & low) | Type::MAGIC;
    pair[3] = (upper & high) | Type::MAGIC;
  } else {
    NYBBLE_UNROLL
    for (int i = 0; i < 4; i++) pair[i] = ((word >> (4 * i)) & low) | Type::MAGIC;
  }
}

// The zero point as `exact_pairs` wants it. fine: BIAS + z and BIAS / 16 + z; else BIAS + z alone. Twice each.
struct PackedZero {
  Pair plain, sixteenth;
};
template <class Type>
NYBBLE_DEV PackedZero packed_zero(u32 z) {
  const u32 both = z * 0x00010001;
  if constexpr (Type::FINE) return {both | Type::MAGIC, (both << 4) | 0x54005400};  // 0x5400 is 64, in steps of 1/16
  return {both | Type::MAGIC, 0};
}

// The four pairs of a word as q - z, exactly.
template <class Type>
NYBBLE_DEV void exact_pairs(u32 word, PackedZero zero, Pair (&pair)[4], u32 low = LOW_NIBBLES) {
  raw_pairs<Type>(word, pair, low);
  NYBBLE_UNROLL
  for (int i = 0; i < 4; i++) {
    if constexpr (Type::FINE) {
      pair[i] = i % 2 ? Type::sixteenth_minus(pair[i], zero.sixteenth) : Type::subtract(pair[i], zero.plain);
    } else {
      pair[i] = Type::subtract(pair[i], zero.plain);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- reduce and store

// Of a gate_up layer whose rows alternate gate and up, y [m, n/2] = GATE(gate) * up instead of the sums themselves.
enum Gate { NO_GATE, SILU, GELU_TANH };

// Both are x times a sigmoid: of x, or (the tanh form of GELU) of twice its inner polynomial.
template <int GATE>
NYBBLE_DEV float activated(float x) {
  const float inner = GATE == SILU ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x / (1.0f + power_of_2(-1.4426950408889634f * inner));
}

// value: the sum for (m, n); up: the one for (m, n + 1), read only with a gate, where n is even.
template <class Type, int GATE>
NYBBLE_DEV void store(const Problem& p, int m, int n, float value, float up) {
  if (p.bias) value += Type::wide(p.bias[n]);
  if constexpr (GATE == NO_GATE) {
    p.y[u64(m) * p.n + n] = Type::narrow(value);
  } else {
    if (p.bias) up += Type::wide(p.bias[n + 1]);
    p.y[u64(m) * (p.n / 2) + n / 2] = Type::narrow(activated<GATE>(value) * up);
  }
}

// sums [WAVES, M, ROWS] -> y, or this split's part of `partial`; the last split to come adds all of them, in order.
template <class Type, int M, int ROWS, int WAVES, int GATE>
NYBBLE_DEV void reduce_and_store(const Problem& p, float* sums) {
  constexpr int THREADS = WAVES * WAVE, TOGETHER = GATE == NO_GATE ? 1 : 2;
  const int row0 = block_x() * ROWS;
  for (int i = thread_index() * TOGETHER; i < M * ROWS; i += THREADS * TOGETHER) {
    const int m = i / ROWS, n = row0 + i % ROWS;
    if (m >= p.m || n >= p.n) continue;
    float value[2] = {0, 0};
    NYBBLE_UNROLL
    for (int wave = 0; wave < WAVES; wave++) {
      NYBBLE_UNROLL
      for (int j = 0; j < TOGETHER; j++) value[j] += sums[wave * M * ROWS + i + j];
    }
    if (p.splits == 1) {
      store<Type, GATE>(p, m, n, value[0], value[1]);
    } else {
      NYBBLE_UNROLL
      for (int j = 0; j < TOGETHER; j++) p.partial[(u64(block_y()) * p.m + m) * p.n + n + j] = value[j];
    }
  }
  if (p.splits == 1) return;

  device_fence();
  block_barrier();
  if (thread_index() == 0) sums[0] = count_up(p.counters + block_x()) == u32(p.splits - 1);
  block_barrier();
  const bool last_to_come = sums[0] != 0;
  if (!last_to_come) return;
  device_fence();
  for (int i = thread_index() * TOGETHER; i < M * ROWS; i += THREADS * TOGETHER) {
    const int m = i / ROWS, n = row0 + i % ROWS;
    if (m >= p.m || n >= p.n) continue;
    float value[2] = {0, 0};
    for (int split = 0; split < p.splits; split++) {
      NYBBLE_UNROLL
      for (int j = 0; j < TOGETHER; j++) {
        value[j] += load_shared_by_blocks(p.partial + (u64(split) * p.m + m) * p.n + n + j);
      }
    }
    store<Type, GATE>(p, m, n, value[0], value[1]);
  }
  if (thread_index() == 0) p.counters[block_x()] = 0;
}

}  // namespace nybble
