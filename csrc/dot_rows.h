// One or two rows of x: the lanes of a wave stand side by side along K, each with the same granule of every row.
//
//   step of a wave:  lane 0       lane 1       ...  lane 31
//      row 0         granule 0    granule 1         granule 31        512 consecutive bytes of each row
//      ...
//      row ROWS-1
//
// The raw numbers BIAS + q go into the dot product; what they have too much is taken off where a granule's sum starts:
//   sum (q - z) x  =  sum (BIAS + q) x  -  (BIAS + z) sum x
// and for fp16, whose odd pairs carry 16 q, in a second sum that ends as (sum (BIAS + 16 q) x - BIAS sum x) / 16.
// The relative error of that is 1e-5, far below the rounding of the output.
#pragma once

#include "skinny_w4a16.h"

namespace nybble {

template <class Type, class Scale, int GROUP, bool ZEROS, int M, int ROWS, int WAVES>
struct DotRows {
  static constexpr int STEP = WAVE;  // granules
  static_assert(ROWS % 8 == 0 && NYBBLE_STEP == STEP);
  static constexpr int PAIRS = GRANULE / 2;

  float total[ROWS][M];
  u32 scale[ROWS];  // see Scale::fetch

  struct Rows {
    const u8 *x[M], *w[ROWS], *scale, *zero[ROWS / 8];
    u32 scale_stride;
    int present;  // rows of w that are there
  };

  NYBBLE_METHOD void run(const Problem& p, int row0, Slice slice, u8*) {
    Rows rows;
    rows.scale = p.scales + u64(row0) * u32(p.s_stride);
    rows.scale_stride = p.s_stride;
    rows.present = p.n - row0;
    NYBBLE_UNROLL
    for (int m = 0; m < M; m++) rows.x[m] = scalar_base(p.x + u64(smaller(m, p.m - 1)) * u32(p.x_stride));
    NYBBLE_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const int n = smaller(row0 + r, p.n - 1);
      rows.w[r] = scalar_base(p.w + u64(n) * u32(p.w_stride));
      scale[r] = register_of_zero();
      if (ZEROS && r % 8 == 0) rows.zero[r / 8] = scalar_base(p.zeros + u64(n / 8) * u32(p.z_stride));
      NYBBLE_UNROLL
      for (int m = 0; m < M; m++) total[r][m] = 0;
    }
    const int whole = smaller(slice.last, p.granules() / STEP);
    u32 granule = slice.first * STEP + lane_index();
    for (int step = slice.first; step < whole; step++, granule += STEP) add_step(rows, granule, false);
    if (whole < slice.last) {
      // The last lanes have no granule: they read the last one, and their x is 0.
      const u32 last = p.granules() - 1;
      add_step(rows, smaller(granule, last), granule > last);
    }
  }

  NYBBLE_METHOD void add_step(const Rows& rows, u32 granule, bool absent) {
    const u32 group = granule / (GROUP / GRANULE);
    Pair x[M][PAIRS];
    NYBBLE_UNROLL
    for (int m = 0; m < M; m++) {
      NYBBLE_UNROLL
      for (int i = 0; i < PAIRS; i += 4) {
        const Quad quad = load_quad(rows.x[m] + i * 4, granule * (GRANULE * 2));
        NYBBLE_UNROLL
        for (int j = 0; j < 4; j++) x[m][i + j] = absent ? 0 : quad.word[j];
      }
    }
    Quad w[ROWS];
    u32 zero[ROWS / 8];
    const u8* scale_row = rows.scale;
    NYBBLE_UNROLL
    for (int r = 0; r < ROWS; r++) {
      scale_row = scalar_base_here(scale_row);
      w[r] = load_once(rows.w[r], granule * GRANULE_BYTES);
      scale[r] = Scale::fetch(scale[r], scale_row, group * sizeof(typename Scale::Bits));
      if (r + 1 < rows.present) scale_row += rows.scale_stride;
      if (ZEROS && r % 8 == 0) zero[r / 8] = load<u32>(rows.zero[r / 8], group * 4);
    }
    issue_first();

    float start_even[M], start_odd[M], sum[M];
    NYBBLE_UNROLL
    for (int m = 0; m < M; m++) {
      float even = 0, odd = 0;
      NYBBLE_UNROLL
      for (int i = 0; i < PAIRS; i++) {
        float& part = Type::FINE && i % 2 ? odd : even;
        part = Type::dot(x[m][i], Type::ONES, part);
      }
      sum[m] = Type::FINE ? even + odd : even;
      const float zero_part = ZEROS ? 0 : SYMMETRIC_ZERO;
      start_even[m] = Type::FINE ? -Type::BIAS * even - zero_part * sum[m] : -(Type::BIAS + zero_part) * sum[m];
      start_odd[m] = -Type::BIAS * odd;
    }

    NYBBLE_UNROLL
    for (int r = 0; r < ROWS; r++) {
      float even[M], odd[M];
      NYBBLE_UNROLL
      for (int m = 0; m < M; m++) {
        even[m] = ZEROS ? start_even[m] - zero_of_row(zero[r / 8], r % 8) * sum[m] : start_even[m];
        odd[m] = start_odd[m];
      }
      NYBBLE_UNROLL
      for (int i = 0; i < PAIRS; i += 4) {
        Pair pair[4];
        raw_pairs<Type>(w[r].word[i / 4], pair);
        if (Type::FINE) side_by_side(pair);
        NYBBLE_UNROLL
        for (int m = 0; m < M; m++) {
          NYBBLE_UNROLL
          for (int j = 0; j < 4; j++) {
            float& part = Type::FINE && j % 2 ? odd[m] : even[m];
            part = Type::dot(pair[j], x[m][i + j], part);
          }
        }
      }
      NYBBLE_UNROLL
      for (int m = 0; m < M; m++) {
        total[r][m] += Scale::fetched(scale[r]) * (Type::FINE ? even[m] + odd[m] * 0.0625f : even[m]);
      }
    }
  }

  // Nibble r of the word, by way of a byte: bytes turn into floats in one instruction.
  static NYBBLE_METHOD float zero_of_row(u32 word, int r) {
    const u32 bytes = (r % 2 ? word >> 4 : word) & 0x0F0F0F0F;
    return float(u8(bytes >> (8 * (r / 2))));
  }

  // -> sums [M, ROWS] of this wave
  NYBBLE_METHOD void deposit(float* sums) const {
    NYBBLE_UNROLL
    for (int m = 0; m < M; m++) {
      NYBBLE_UNROLL
      for (int r = 0; r < ROWS; r++) {
        const float value = wave_sum(total[r][m]);
        if (lane_index() == 0) sums[m * ROWS + r] = value;
      }
    }
  }

  static constexpr int SHARED_BYTES = 0;
};

}  // namespace nybble
