// Up to 16 rows of x on CUDA: 16 rows of w are the first operand of the 16x8x16 matrix instruction, 8 rows of x the other.
//
// A wave streams its slice through a ring of STAGES stages in shared memory, its own and nobody else's, by asynchronous
// copies of 16 bytes. One step is 128 k of ROWS rows of w and of the rows of x:
//
//   stage   w  [ROWS][4 granules]      x  [M][16 chunks of 8 k]       rows swizzled: no two lanes meet in a bank
//
// ldmatrix takes eight rows of one granule and leaves word t of row g in lane (g, t), where the instruction wants it: so it
// multiplies inside one granule, and a sum never meets two groups. The scales and zero points of the whole slice come
// first, in one go.
//
// Where the chip can start a launch before the one before it has ended (sm_90), weights are on their way by then; only x,
// and everything written, waits.
#pragma once

#include "skinny_w4a16.h"

#if !NYBBLE_AMD

namespace nybble {

NYBBLE_DEV u32 rotate_left(u32 word, int bits) { return __funnelshift_l(word, word, bits); }
NYBBLE_DEV u32 shared_address(const u8* p) { return u32(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory; zeros where `present` is false. Read once: first to leave the L2.
NYBBLE_DEV void copy_once(u32 to, const u8* from, bool present, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(present ? 16 : 0), "l"(policy));
}
NYBBLE_DEV void copy(u32 to, const u8* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0));
}
NYBBLE_DEV void copy_word(u32 to, const u8* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
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

template <class Type, class Scale, int GROUP, bool ZEROS, int M, int ROWS, int WAVES>
struct MmaTile {
  static_assert(ROWS % 16 == 0);
  static constexpr int STEP = NYBBLE_STEP;  // granules: at least the largest group
  static constexpr int STAGES = NYBBLE_STAGES;
  static constexpr int TILES = ROWS / 16, EIGHTS = ROWS / 8;
  static constexpr int X_TILES = (M + 7) / 8;
  // bf16: the raw numbers BIAS + q go into the sum, and (BIAS + z) sum x comes off it where a group ends; sum x is one more
  // matrix instruction for all rows of w. Where groups are short and rows of x many, subtracting from each pair is less.
  static constexpr bool RAW = !Type::FINE && X_TILES * (STEP * GRANULE / GROUP) <= STEP;
  static constexpr int PER_GROUP = GROUP / GRANULE, GROUPS = STEP / PER_GROUP;  // granules of a group, groups of a step
  static constexpr int W_BYTES = ROWS * STEP * GRANULE_BYTES;
  static constexpr int X_ROW_BYTES = STEP * GRANULE * 2;
  static constexpr int STAGE_BYTES = W_BYTES + M * X_ROW_BYTES;
  static constexpr int SCALE_BYTES = sizeof(typename Scale::Bits);
  static constexpr int SHARED_BYTES = WAVES * STAGES * STAGE_BYTES;  // and side_bytes() a wave

  static constexpr int COPIED = WAVE / STEP;                    // rows of w that a wave copies at a time
  static constexpr int SWIZZLES = 8 > COPIED ? 8 / COPIED : 1;  // such times until the swizzle comes round

  float total[TILES][X_TILES][4];

  // Where a granule of w and a chunk of x lie in a stage, bytes: eight rows of a granule, and two rows of four chunks, are
  // 128 bytes in 32 different banks.
  static NYBBLE_METHOD u32 w_place(int row, int granule) {
    return row * (STEP * GRANULE_BYTES) + (granule ^ (row / (8 / STEP) % STEP)) * GRANULE_BYTES;
  }
  static NYBBLE_METHOD u32 x_place(int m, int chunk) { return m * X_ROW_BYTES + (chunk ^ (m % 2 * 4)) * 16; }

  // A wave's scales, then zero points. Rows of scales are an odd number of words: eight of them lie in different banks.
  static NYBBLE_METHOD int scale_row_bytes(int steps) { return ((steps * GROUPS * SCALE_BYTES + 4) / 4 | 1) * 4; }
  static NYBBLE_METHOD int zero_row_bytes(int steps) { return ZEROS ? (steps * GROUPS * 4 + 7) / 8 * 8 : 0; }
  static NYBBLE_METHOD int side_bytes(int steps) {
    return (ROWS * scale_row_bytes(steps) + EIGHTS * zero_row_bytes(steps) + 15) / 16 * 16;
  }

  NYBBLE_METHOD void run(const Problem& p, int row0, Slice slice, u8* shared) {
    const int lane = lane_index(), wave = thread_index() / WAVE;
    const int g = lane / 4, t = lane % 4;
    const int steps = slice.last - slice.first;
    const int most_steps = ((p.granules() + STEP - 1) / STEP + p.splits * WAVES - 1) / (p.splits * WAVES);
    const int granules = p.granules();
    const u32 low_nibbles = LOW_NIBBLES + (u32(p.splits) >> 31);  // not a constant, as far as the compiler can tell
    const u64 policy = read_once_policy();
    u8* const ring = shared + wave * STAGES * STAGE_BYTES;
    u8* const scales = shared + SHARED_BYTES + wave * side_bytes(most_steps);
    const int scale_row = scale_row_bytes(most_steps), zero_row = zero_row_bytes(most_steps);
    u8* const zeros = scales + ROWS * scale_row;
    const u32 ring_address = shared_address(ring);

    let_next_launch_start();

    NYBBLE_UNROLL
    for (int i = 0; i < TILES * X_TILES * 4; i++) total[i / (X_TILES * 4)][i / 4 % X_TILES][i % 4] = 0;

    // w: STEP lanes copy a row of a step, COPIED rows at a time.
    const int copied_granule = lane % STEP, copied_row = lane / STEP;
    const u8* w_row[ROWS / COPIED];
    u32 w_to[SWIZZLES];
    NYBBLE_UNROLL
    for (int i = 0; i < ROWS / COPIED; i++) {
      const int row = i * COPIED + copied_row, n = smaller(row0 + row, p.n - 1);
      w_row[i] = p.w + u64(n) * u32(p.w_stride) + (slice.first * STEP + copied_granule) * GRANULE_BYTES;
      if (i < SWIZZLES) w_to[i] = w_place(row, copied_granule);
    }
    const auto fetch_w = [&](int step) {
      const bool present = (slice.first + step) * STEP + copied_granule < granules;
      const u32 to = ring_address + step % STAGES * STAGE_BYTES;
      NYBBLE_UNROLL
      for (int i = 0; i < ROWS / COPIED; i++) {
        copy_once(to + w_to[i % SWIZZLES] + i / SWIZZLES * (SWIZZLES * COPIED * STEP * GRANULE_BYTES),
                  present ? w_row[i] + step * (STEP * GRANULE_BYTES) : p.w, present, policy);
      }
    };
    // x: chunks of 8 k, one a lane, as many rows at a time as a wave has lanes for. Rows that the call has not are the last.
    constexpr int CHUNKS = STEP * 4, X_COPIED = WAVE / CHUNKS, X_COPIES = (M + X_COPIED - 1) / X_COPIED;
    const int copied_chunk = lane % CHUNKS, copied_m = lane / CHUNKS;
    const u8* const x_base = p.x + u64(slice.first) * X_ROW_BYTES + copied_chunk * 16;
    u32 x_row[X_COPIES];
    NYBBLE_UNROLL
    for (int i = 0; i < X_COPIES; i++) x_row[i] = smaller(i * X_COPIED + copied_m, p.m - 1) * u32(p.x_stride);
    const auto fetch_x = [&](int step) {
      const bool present = (slice.first + step) * (STEP * GRANULE) + copied_chunk * 8 < p.k;
      const u8* const from = present ? x_base + step * X_ROW_BYTES : p.x;
      const u32 to = ring_address + step % STAGES * STAGE_BYTES + W_BYTES;
      NYBBLE_UNROLL
      for (int i = 0; i < X_COPIES; i++) {
        const int m = i * X_COPIED + copied_m;
        if (M % X_COPIED == 0 || m < M) copy(to + x_place(m, copied_chunk), from + x_row[i], present);
      }
    };

    NYBBLE_UNROLL
    for (int step = 0; step < STAGES - 1; step++) {
      if (step < steps) fetch_w(step);
    }
    // Scales and zero points of the whole slice. Scales come in whole words, so a row may begin in the middle of its first.
    const int first_group = slice.first * GROUPS;
    const int groups = smaller(steps * GROUPS, granules / PER_GROUP - first_group);
    u32 scale_at[EIGHTS];  // bytes to this lane's first scale of rows g, g + 8, ...
    NYBBLE_UNROLL
    for (int e = 0; e < EIGHTS; e++) {
      const int row = 8 * e + g;
      const u64 from = u64(p.scales) + u64(smaller(row0 + row, p.n - 1)) * u32(p.s_stride) + first_group * SCALE_BYTES;
      scale_at[e] = row * scale_row + u32(from % 4);
      const u32 to = shared_address(scales) + row * scale_row;
      const int bytes = int(from % 4) + groups * SCALE_BYTES;
      for (int b = 4 * t; b < bytes; b += 16) copy_word(to + b, reinterpret_cast<const u8*>(from / 4 * 4) + b);
    }
    NYBBLE_UNROLL
    for (int e = 0; ZEROS && e < EIGHTS; e++) {
      const u8* from = p.zeros + u64(smaller(row0 + 8 * e, p.n - 1) / 8) * u32(p.z_stride) + first_group * 4;
      const u32 to = shared_address(zeros) + e * zero_row;
      for (int b = 4 * lane; b < groups * 4; b += 4 * WAVE) copy_word(to + b, from + b);
    }

    wait_for_last_launch();
    NYBBLE_UNROLL
    for (int step = 0; step < STAGES - 1; step++) {
      if (step < steps) fetch_x(step);
      end_copies();
    }
    if (groups < steps * GROUPS) {
      // The last step ends past K: there x is 0, and the scale has to be a number too.
      wait_for_copies<STAGES - 2>();
      __syncwarp();
      NYBBLE_UNROLL
      for (int e = 0; e < EIGHTS; e++) {
        for (int group = groups + t; group < steps * GROUPS; group += 4) {
          *reinterpret_cast<typename Scale::Bits*>(scales + scale_at[e] + group * SCALE_BYTES) = 0;
        }
      }
    }

    // ldmatrix: matrices are rows 0-7 and 8-15 of a tile, granule j, then both again, granule j + 1.
    const int matrix_row = lane % 16, matrix_granule = lane / 16;
    for (int step = 0; step < steps; step++) {
      wait_for_copies<STAGES - 2>();
      __syncwarp();
      const u8* stage = ring + step % STAGES * STAGE_BYTES;
      const u32 w_stage = ring_address + step % STAGES * STAGE_BYTES;

      float sum[TILES][X_TILES][4], x_sum[X_TILES][4];
      NYBBLE_UNROLL
      for (int j = 0; j < STEP; j += 2) {
        Quad x[2][X_TILES];
        NYBBLE_UNROLL
        for (int i = 0; i < 2 * X_TILES; i++) {
          const int m = (i / 2 * 8 + g) % M, chunk = 4 * (j + i % 2) + t;
          x[i % 2][i / 2] = *reinterpret_cast<const Quad*>(stage + W_BYTES + x_place(m, chunk));
        }
        float group_x_sum[2][X_TILES][4];  // as far as granule j + i of its group
        NYBBLE_UNROLL
        for (int c = 0; RAW && c < 2 * X_TILES; c++) {
          const int i = c / X_TILES, tile = c % X_TILES;
          float (&s)[4] = x_sum[tile];
          if ((j + i) % PER_GROUP == 0) s[0] = s[1] = s[2] = s[3] = 0;
          add(s, ONES, ONES, x[i][tile]);
          NYBBLE_UNROLL
          for (int v = 0; v < 4; v++) group_x_sum[i][tile][v] = s[v];
        }

        NYBBLE_UNROLL
        for (int tile = 0; tile < TILES; tile++) {
          const Quad w = load_matrices(w_stage + w_place(16 * tile + matrix_row, j + matrix_granule));
          u32 zero[2][2];  // [rows low, high][granule j, j + 1]
          NYBBLE_UNROLL
          for (int h = 0; h < 2; h++) load_zeros(zero[h], zeros + (2 * tile + h) * zero_row, step, j, g);
          NYBBLE_UNROLL
          for (int i = 0; i < 2; i++) {
            const int group = (j + i) / PER_GROUP;
            if ((j + i) % PER_GROUP == 0) {
              NYBBLE_UNROLL
              for (int c = 0; c < X_TILES * 4; c++) sum[tile][c / 4][c % 4] = 0;
            }
            Pair low[4], high[4];
            if constexpr (!RAW) {
              exact_pairs<Type>(w.word[2 * i], doubled_zero(zero[0][i]), low, low_nibbles);
              exact_pairs<Type>(w.word[2 * i + 1], doubled_zero(zero[1][i]), high, low_nibbles);
            } else {
              raw_pairs<Type>(w.word[2 * i], low, low_nibbles);
              raw_pairs<Type>(w.word[2 * i + 1], high, low_nibbles);
            }
            NYBBLE_UNROLL
            for (int c = 0; c < X_TILES; c++) add(sum[tile][c], low, high, x[i][c]);

            if ((j + i) % PER_GROUP != PER_GROUP - 1) continue;
            NYBBLE_UNROLL
            for (int h = 0; h < 2; h++) {
              const float s = scale(scales, scale_at[2 * tile + h], step * GROUPS + group);
              const float excess = as_float((zero[h][i] & 0x000F0000) | 0x43000000);  // 128 + z, with RAW
              NYBBLE_UNROLL
              for (int v = 2 * h; v < 2 * h + (M == 1 ? 1 : 2); v++) {  // of one row of x, only column 0
                NYBBLE_UNROLL
                for (int c = 0; c < X_TILES; c++) {
                  float value = sum[tile][c][v];
                  if constexpr (RAW) value = fmaf(-excess, group_x_sum[i][c][v], value);
                  total[tile][c][v] = fmaf(s, value, total[tile][c][v]);
                }
              }
            }
          }
        }
      }
      __syncwarp();
      if (step + STAGES - 1 < steps) {
        fetch_w(step + STAGES - 1);
        fetch_x(step + STAGES - 1);
      }
      end_copies();
    }
    wait_for_copies<0>();
  }

  // As packed_zero, of bits 16-19. The same number of fp16 in sixteenths: 64 + z = 1024 + z - 960.
  static NYBBLE_METHOD PackedZero doubled_zero(u32 zero) {
    if constexpr (!ZEROS) return packed_zero<Type>(SYMMETRIC_ZERO);
    const u32 one = (zero & 0x000F0000) | (Type::MAGIC & 0xFFFF0000);
    const Pair both = __byte_perm(one, 0, 0x3232);
    if constexpr (Type::FINE) return {both, Type::subtract(both, 0x63806380)};
    return {both, 0};
  }

  // Sum over a granule: low, high are the pairs of rows g and g + 8.
  static NYBBLE_METHOD void add(float (&sum)[4], const Pair (&low)[4], const Pair (&high)[4], const Quad& x) {
    multiply(Type{}, sum, low[0], high[0], low[1], high[1], x.word[0], x.word[1]);
    multiply(Type{}, sum, low[2], high[2], low[3], high[3], x.word[2], x.word[3]);
  }
  static constexpr Pair ONES[4] = {Type::ONES, Type::ONES, Type::ONES, Type::ONES};

  // Zero points of this lane's row for granules j and j + 1 of a step: in bits 16-19, other rows' around them.
  static NYBBLE_METHOD void load_zeros(u32 (&zero)[2], const u8* row, int step, int j, int g) {
    zero[0] = zero[1] = SYMMETRIC_ZERO << 16;
    if constexpr (ZEROS) {
      const u8* at = row + (step * GROUPS + j / PER_GROUP) * 4;
      if constexpr (PER_GROUP == 1) {
        const u64 words = *reinterpret_cast<const u64*>(at);
        zero[0] = rotate_left(u32(words), 16 - 4 * g), zero[1] = rotate_left(u32(words >> 32), 16 - 4 * g);
      } else {
        zero[0] = zero[1] = rotate_left(*reinterpret_cast<const u32*>(at), 16 - 4 * g);
      }
    }
  }

  static NYBBLE_METHOD float scale(const u8* scales, u32 at, int group) {
    return Scale::wide(*reinterpret_cast<const typename Scale::Bits*>(scales + at + group * SCALE_BYTES));
  }

  // Lane (g, t) holds rows g and g + 8 of w for rows 2t and 2t + 1 of x.
  NYBBLE_METHOD void deposit(float* sums) const {
    const int g = lane_index() / 4, t = lane_index() % 4;
    NYBBLE_UNROLL
    for (int i = 0; i < TILES * X_TILES * 4; i++) {
      const int tile = i / (X_TILES * 4), c = i / 4 % X_TILES, v = i % 4;
      const int m = 8 * c + 2 * t + v % 2;
      if (m < M) sums[m * ROWS + 16 * tile + g + v / 2 * 8] = total[tile][c][v];
    }
  }
};

}  // namespace nybble

#endif
