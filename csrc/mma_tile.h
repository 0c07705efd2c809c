// Up to 16 rows of x on CUDA, of large layers up to 8: 16 rows of w are the first operand of the 16x8x16 matrix
// instruction, 8 rows of x the other.
//
// A wave streams its slice through a ring of STAGES stages in shared memory, its own and nobody else's, by asynchronous
// copies of 16 bytes. One step is 32 STEP k of ROWS rows of w and of the rows of x; the copies of the one STAGES - 1 steps on
// begin as soon as all lanes are done with the step before, whose stage they overwrite:
//
//   stage   w  [ROWS][STEP granules]      x  [M][4 STEP chunks of 8 k]       rows swizzled: no two lanes meet in a bank
//
// ldmatrix takes eight rows of one granule and leaves word t of row g in lane (g, t), where the instruction wants it: so it
// multiplies inside one granule, and a sum never meets two groups. The scales and zero points of the whole slice come
// first, in one go.
//
// What becomes of zero points, and of the bias of raw numbers (Raw), where those go into the sums:
//   groups of 32 with zero points
//                     (bias + z) s sum x comes off the totals for four groups at a time, itself a product of small matrices,
//                     rows of w x groups times groups x rows of x
//   32 without them   sums start at -(bias + 8) sum x
//   else, bf16        (bias + z) sum x comes off where a group ends; not with short groups and many rows of x
//   else              there is no bias: every pair becomes q - z, exactly
//
// Where the chip can start a launch before the one before it has ended (sm_90), weights are on their way by then; only x,
// and everything written, waits.
#pragma once

#include "staged_tile.h"

#if !NYBBLE_AMD

namespace nybble {

template <class Type, class Scale, int GROUP, bool ZEROS, int M, int ROWS, int WAVES>
struct MmaTile : StagedTile<Type, Scale, GROUP, ZEROS, M, ROWS> {
  using Staged = StagedTile<Type, Scale, GROUP, ZEROS, M, ROWS>;
  using Staged::add;
  using Staged::add_of_t;
  using Staged::doubled_zero;
  using Staged::EIGHTS;
  using Staged::GROUPS;
  using Staged::in_place;
  using Staged::next_stage;
  using Staged::PER_GROUP;
  using Staged::SCALE_BYTES;
  using Staged::scale_bytes;
  using Staged::scale_of;
  using Staged::scale_place;
  using Staged::SCALE_UNIT;
  using Staged::side_bytes;
  using Staged::STAGE_BYTES;
  using Staged::STAGES;
  using Staged::STEP;
  using Staged::STEP_SCALES;
  using Staged::SYMMETRIC_ZEROS;
  using Staged::take_off;
  using Staged::W_BYTES;
  using Staged::w_place;
  using Staged::x_place;
  using Staged::X_ROW_BYTES;
  using Staged::zero_place;
  using typename Staged::Column;
  static_assert(ROWS % 16 == 0);
  static constexpr int TILES = ROWS / 16;
  static constexpr int X_TILES = (M + 7) / 8;
  static constexpr bool TOGETHER = PER_GROUP == 1 && ZEROS;
  static constexpr bool START = PER_GROUP == 1 && !ZEROS;
  static constexpr bool AFTER = PER_GROUP > 1 && !Type::FINE && X_TILES * GROUPS <= STEP;
  static constexpr int SHARED_BYTES = WAVES * STAGES * STAGE_BYTES;  // and side_bytes() a wave

  static constexpr int COPIED = WAVE / STEP;                    // rows of w that a wave copies at a time
  static constexpr int SWIZZLES = 8 > COPIED ? 8 / COPIED : 1;  // such times until the swizzle comes round

  float total[TILES][X_TILES][4];

  NYBBLE_METHOD void run(const Problem& p, int row0, Slice slice, u8* shared) {
    const int lane = lane_index(), wave = thread_index() / WAVE;
    const int g = lane / 4, t = lane % 4;
    const int steps = slice.last - slice.first;
    const int most_steps = ((p.granules() + STEP - 1) / STEP + p.splits * WAVES - 1) / (p.splits * WAVES);
    const int granules = p.granules();
    const u32 none = hidden_zero(p);
    const u32 low_nibbles = LOW_NIBBLES + none, zero_mask = Raw<Type>::ZERO_MASK + none;
    const u64 policy = read_once_policy();
    u8* const ring = shared + wave * STAGES * STAGE_BYTES;
    u8* const scales = shared + SHARED_BYTES + wave * side_bytes(most_steps);
    u8* const zeros = scales + scale_bytes(most_steps);
    const u32 ring_address = shared_address(ring);

    let_next_launch_start();

    NYBBLE_UNROLL
    for (int i = 0; i < TILES * X_TILES * 4; i++) total[i / (X_TILES * 4)][i / 4 % X_TILES][i % 4] = 0;

    // w: STEP lanes copy a row of a step, COPIED rows at a time.
    const int copied_granule = lane % STEP, copied_row = lane / STEP;
    const int first_granule = slice.first * STEP + copied_granule;
    const u8* w_row[ROWS / COPIED];
    u32 w_to[SWIZZLES];
    NYBBLE_UNROLL
    for (int i = 0; i < ROWS / COPIED; i++) {
      const int row = i * COPIED + copied_row, n = smaller(row0 + row, p.n - 1);
      w_row[i] = kept(p.w + u64(n) * u32(p.w_stride) + smaller(first_granule, granules - 1) * GRANULE_BYTES);
      if (i < SWIZZLES) w_to[i] = w_place(row, copied_granule);
    }
    const auto fetch_w = [&](int step, u32 stage) {
      // Past the end of the row, which only a last step can be, zeros are written; the address stays inside.
      const bool present = first_granule + step * STEP < granules;
      const u32 from = present ? step * (STEP * GRANULE_BYTES) : 0;
      NYBBLE_UNROLL
      for (int i = 0; i < ROWS / COPIED; i++) {
        copy_once(stage + w_to[i % SWIZZLES] + i / SWIZZLES * (SWIZZLES * COPIED * STEP * GRANULE_BYTES),
                  w_row[i] + from, present, policy);
      }
    };
    // x: chunks of 8 k, one a lane, as many rows at a time as a wave has lanes for. Rows that the call has not are the last.
    constexpr int CHUNKS = STEP * 4, X_COPIED = WAVE / CHUNKS, X_COPIES = (M + X_COPIED - 1) / X_COPIED;
    const int copied_chunk = lane % CHUNKS, copied_m = lane / CHUNKS;
    const u8* const x_base = p.x + u64(slice.first) * X_ROW_BYTES + copied_chunk * 16;
    u32 x_row[X_COPIES], x_to[2];  // copies i and i + 2 are to rows of one parity
    NYBBLE_UNROLL
    for (int i = 0; i < 2; i++) x_to[i] = W_BYTES + x_place(i * X_COPIED + copied_m, copied_chunk);
    NYBBLE_UNROLL
    for (int i = 0; i < X_COPIES; i++) x_row[i] = kept(smaller(i * X_COPIED + copied_m, p.m - 1) * u32(p.x_stride));
    const auto fetch_x = [&](int step, u32 stage) {
      const bool present = (slice.first + step) * (STEP * GRANULE) + copied_chunk * 8 < p.k;
      const u8* const from = present ? x_base + step * X_ROW_BYTES : p.x;
      NYBBLE_UNROLL
      for (int i = 0; i < X_COPIES; i++) {
        const u32 to = stage + x_to[i % 2] + i / 2 * (2 * X_COPIED * X_ROW_BYTES);
        if (M % X_COPIED == 0 || i * X_COPIED + copied_m < M) copy(to, from + x_row[i], present);
      }
    };

    NYBBLE_UNROLL
    for (int step = 0; step < STAGES - 1; step++) {
      if (step < steps) fetch_w(step, ring_address + step * STAGE_BYTES);
    }
    // Scales and zero points of the whole slice, as many bytes at a time as the addresses of rows allow.
    const int first_group = slice.first * GROUPS;
    const int groups = smaller(steps * GROUPS, granules / PER_GROUP - first_group);
    const u8* s_row[EIGHTS];
    NYBBLE_UNROLL
    for (int e = 0; e < EIGHTS; e++) {
      s_row[e] = p.scales + u64(smaller(row0 + 8 * e + g, p.n - 1)) * u32(p.s_stride) + first_group * SCALE_BYTES;
    }
    const u32 s_address = u32(u64(p.scales)) | u32(p.s_stride) | u32(first_group * SCALE_BYTES);
    if (s_address % smaller(SCALE_UNIT, 16) == 0) {
      copy_scales<SCALE_UNIT>(scales, s_row, groups * SCALE_BYTES);
    } else if (s_address % 4 == 0) {
      copy_scales<4>(scales, s_row, groups * SCALE_BYTES);
    } else {
      NYBBLE_NO_UNROLL
      for (int i = t; i < groups; i += 4) {
        NYBBLE_UNROLL
        for (int e = 0; e < EIGHTS; e++) {
          scale_of(scales, 8 * e + g, i) = load<typename Scale::Bits>(s_row[e], i * SCALE_BYTES);
        }
      }
    }
    NYBBLE_UNROLL
    for (int e = 0; ZEROS && e < EIGHTS; e++) {
      const u8* from = p.zeros + u64(smaller(row0 + 8 * e, p.n - 1) / 8) * u32(p.z_stride) + first_group * 4;
      NYBBLE_NO_UNROLL
      for (u32 i = lane; i < groups; i += WAVE) {
        copy_some<4>(shared_address(zeros) + zero_place(e, i / GROUPS, i % GROUPS), from + 4 * i, 4);
      }
    }

    wait_for_last_launch();
    NYBBLE_UNROLL
    for (int step = 0; step < STAGES - 1; step++) {
      if (step < steps) fetch_x(step, ring_address + step * STAGE_BYTES);
      end_copies();
    }
    if (groups < steps * GROUPS) {
      // The last step ends past K: there x is 0, and scales and zero points have to be numbers too.
      wait_for_copies<STAGES - 2>();
      __syncwarp();
      NYBBLE_UNROLL
      for (int e = 0; e < EIGHTS; e++) {
        for (int group = groups + t; group < steps * GROUPS; group += 4) {
          scale_of(scales, 8 * e + g, group) = 0;
          if (ZEROS) *reinterpret_cast<u32*>(zeros + zero_place(e, u32(group) / GROUPS, u32(group) % GROUPS)) = 0;
        }
      }
    }

    // Where a lane reads in a stage. ldmatrix: matrices are rows 0-7 and 8-15 of a tile, granule j, then both again, granule
    // j + 1. x: rows of one parity have the chunks of granules j and j + 1 in the other order.
    const int x_row0 = g % (M < 8 ? M : 8);
    u32 w_at[STEP / 2], x_at[2];
    NYBBLE_UNROLL
    for (int j = 0; j < STEP; j += 2) w_at[j / 2] = w_place(lane % 16, j + lane / 16);
    NYBBLE_UNROLL
    for (int i = 0; i < 2; i++) x_at[i] = W_BYTES + x_place(x_row0, 4 * i + t);
    Column column[GROUPS];
    NYBBLE_UNROLL
    for (int group = 0; group < GROUPS && TOGETHER; group++) column[group] = Column(group, none);
    u32 stage = ring_address, last_stage = ring_address + (STAGES - 1) * STAGE_BYTES;
    for (int step = 0; step < steps; step++) {
      wait_for_copies<STAGES - 2>();
      __syncwarp();

      float sum[TILES][X_TILES][4];
      float x_sum[X_TILES][4];     // AFTER: of the group so far, for the rows of x that `sum` is of
      float sum_of_t[X_TILES][4];  // TOGETHER
      NYBBLE_UNROLL
      for (int i = 0; i < X_TILES * 4; i++) sum_of_t[i / 4][i % 4] = 0;
      StepScales step_scales[EIGHTS];
      Quad x[2][X_TILES], w[TILES];
      NYBBLE_UNROLL
      for (int j = 0; j < STEP; j += 2) {
        NYBBLE_UNROLL
        for (int i = 0; i < 2 * X_TILES; i++) {
          x[i % 2][i / 2] = load_chunk(stage + x_at[i % 2] + j * 64 + i / 2 * (8 * X_ROW_BYTES));
        }
        NYBBLE_UNROLL
        for (int tile = 0; tile < TILES; tile++) {
          w[tile] = load_matrices(stage + w_at[j / 2] + tile * (16 * STEP * GRANULE_BYTES));
        }
        if (j == 0) {
          NYBBLE_UNROLL
          for (int e = 0; e < EIGHTS; e++) step_scales[e] = StepScales(scales + scale_place(8 * e + g, step, 0));
          // All lanes are done with the step before: its stage is free.
          if (step + STAGES - 1 < steps) {
            fetch_w(step + STAGES - 1, last_stage);
            fetch_x(step + STAGES - 1, last_stage);
          }
          end_copies();
          last_stage = stage;
        }
        float of_x[2][X_TILES][4];  // what the sums of granule j + i start at; AFTER: x_sum as far as that
        NYBBLE_UNROLL
        for (int c = 0; c < 2 * X_TILES; c++) {
          const int i = c / X_TILES, tile = c % X_TILES;
          float (&s)[4] = of_x[i][tile];
          if constexpr (START) {
            s[0] = s[1] = s[2] = s[3] = 0;
            add(s, START_AT, START_AT, x[i][tile]);
          }
          if constexpr (TOGETHER) add_of_t(sum_of_t[tile], x[i][tile], column[j + i]);
          if constexpr (AFTER) {
            float (&so_far)[4] = x_sum[tile];
            if ((j + i) % PER_GROUP == 0) so_far[0] = so_far[1] = so_far[2] = so_far[3] = 0;
            add(so_far, ONES, ONES, x[i][tile]);
            NYBBLE_UNROLL
            for (int v = 0; v < 4; v++) s[v] = so_far[v];
          }
        }

        NYBBLE_UNROLL
        for (int tile = 0; tile < TILES; tile++) {
          u32 zero[2];  // of rows low and high, for both granules
          NYBBLE_UNROLL
          for (int h = 0; h < 2 && PER_GROUP > 1; h++) {
            const u32 at = zero_place(2 * tile + h, step, j / PER_GROUP);
            zero[h] = in_place(ZEROS ? load<u32>(zeros, at) : SYMMETRIC_ZEROS, g);
          }
          NYBBLE_UNROLL
          for (int i = 0; i < 2; i++) {
            const int group = (j + i) / PER_GROUP;
            if ((j + i) % PER_GROUP == 0) {
              NYBBLE_UNROLL
              for (int c = 0; c < X_TILES * 4; c++) sum[tile][c / 4][c % 4] = START ? of_x[i][c / 4][c % 4] : 0;
            }
            Pair low[4], high[4];
            const u32(&word)[4] = w[tile].word;
            if constexpr (!START && !AFTER && !TOGETHER) {
              exact_pairs<Type>(word[2 * i], doubled_zero(zero[0]), low, low_nibbles);
              exact_pairs<Type>(word[2 * i + 1], doubled_zero(zero[1]), high, low_nibbles);
            } else {
              Raw<Type>::pairs(word[2 * i], low, low_nibbles);
              Raw<Type>::pairs(word[2 * i + 1], high, low_nibbles);
            }
            NYBBLE_UNROLL
            for (int c = 0; c < X_TILES; c++) add(sum[tile][c], low, high, x[i][c]);

            if ((j + i) % PER_GROUP != PER_GROUP - 1) continue;
            NYBBLE_UNROLL
            for (int h = 0; h < 2; h++) {
              const float s = Scale::wide_of(step_scales[2 * tile + h].word, group);
              NYBBLE_UNROLL
              for (int v = 2 * h; v < 2 * h + (M == 1 ? 1 : 2); v++) {  // of one row of x, only column 0
                NYBBLE_UNROLL
                for (int c = 0; c < X_TILES; c++) {
                  float value = sum[tile][c][v];
                  if constexpr (AFTER) value = fmaf(Raw<Type>::minus_biased(zero[h], zero_mask), of_x[i][c][v], value);
                  total[tile][c][v] = fmaf(s, value, total[tile][c][v]);
                }
              }
            }
          }
        }
      }
      if constexpr (TOGETHER) {
        NYBBLE_UNROLL
        for (int four = 0; four < GROUPS / 4; four++) {
          take_off(total, sum_of_t, four, scales + scale_place(g, step, t), zeros + zero_place(0, step, t), zero_mask);
        }
      }
      stage = next_stage(stage, ring_address);
    }
    wait_for_copies<0>();
  }

  static constexpr Pair ONES[4] = {Type::ONES, Type::ONES, Type::ONES, Type::ONES};
  static constexpr Pair AT = Raw<Type>::START, START_AT[4] = {AT, AT, AT, AT};

  // A row's scales of one step, side by side as in memory.
  struct StepScales {
    u32 word[SCALE_UNIT / 4];

    NYBBLE_METHOD StepScales() {}
    NYBBLE_METHOD explicit StepScales(const u8* at) {
      if constexpr (STEP_SCALES == 2) {
        word[0] = load<u16>(at, 0);
      } else if constexpr (STEP_SCALES == 4) {
        word[0] = load<u32>(at, 0);
      } else if constexpr (STEP_SCALES == 8) {
        const u64 both = load<u64>(at, 0);
        word[0] = u32(both), word[1] = u32(both >> 32);
      } else {
        NYBBLE_UNROLL
        for (int i = 0; i < SCALE_UNIT / 4; i++) word[i] = load_quad(at, i / 4 * 16).word[i % 4];
      }
    }
  };
  // A slice's scales, UNIT bytes of a row at a time, and at most 16; those past the end are zeros.
  template <int UNIT>
  static NYBBLE_METHOD void copy_scales(u8* scales, const u8* const (&s_row)[EIGHTS], int bytes) {
    constexpr int AT_ONCE = UNIT > 16 ? 16 : UNIT;
    const int g = lane_index() / 4, t = lane_index() % 4;
    NYBBLE_NO_UNROLL
    for (int b = AT_ONCE * t; b < bytes; b += 4 * AT_ONCE) {
      NYBBLE_UNROLL
      for (int e = 0; e < EIGHTS; e++) {
        const u32 to = shared_address(&scale_of(scales, 8 * e + g, b / SCALE_BYTES));
        copy_some<AT_ONCE>(to, s_row[e] + b, smaller(AT_ONCE, bytes - b));
      }
    }
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
