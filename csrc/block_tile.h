// 17 and more rows of x on CUDA, of large layers 9: the waves of a block share x. BlockTile has the instructions of MmaTile;
// WarpgroupTile, on sm_90, those of four waves at a time, which read x from shared memory by themselves and run on beside
// everything else.
//
// x outweighs the weights here, so it is fetched once for all rows of w of a block. A ring of STAGES stages in shared memory
// belongs to the whole block; a step has one barrier:
//
//   wait for the oldest copies -> barrier -> begin the copies of the step AHEAD on -> multiply
//
// The barrier says both that every thread's copies have come and that all are done with the step before, whose stage the new
// ones overwrite; of WarpgroupTile, whose last multiplications of a step still run then, with the step before that one. Waves
// own rows, and TEAMS of them share those rows and cut the granules of a step among themselves:
//
//            one step of K ->
//     rows   | wave 0 | wave 4 |      ROWS = 4 x WAVE_ROWS, 8 waves, 2 teams (BlockTile's plans have 2 or 4 waves)
//            | wave 1 | wave 5 |      x tiles, read from shared memory, serve all TILES of 16 rows of a wave
//            | wave 2 | wave 6 |
//            | wave 3 | wave 7 |      sums [team][m][row] in shared memory -> one number, as for slices elsewhere
//
// Weights become q - z, exactly. Sums of a group are fp32 and the scale comes after them; SCALED, where two sets of sums would
// not fit into the registers or a warpgroup would have to wait for them, the weight takes its scale before, rounded to 16 bits
// as in a dense copy. TOGETHER, raw numbers are multiplied and the zero points of groups of 32 taken off as in MmaTile.
#pragma once

#include "warpgroup.h"

#if !NYBBLE_AMD && defined(NYBBLE_TEAMS)

namespace nybble {

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

template <class Type, class Scale, int GROUP, bool ZEROS, int M, int ROWS, int WAVES, bool WARPGROUPS = false>
struct BlockTile {
  using Staged = StagedTile<Type, Scale, GROUP, ZEROS, M, ROWS>;
  static constexpr int STEP = Staged::STEP, STAGES = Staged::STAGES, TEAMS = NYBBLE_TEAMS;
  static constexpr int THREADS = WAVES * WAVE;
  static constexpr int ROW_WAVES = WAVES / TEAMS, WAVE_ROWS = ROWS / ROW_WAVES, TILES = WAVE_ROWS / 16;
  static constexpr int X_TILES = M / 8;
  static constexpr int PER_GROUP = Staged::PER_GROUP, GROUPS = Staged::GROUPS;
  static constexpr int SCALE_BYTES = Staged::SCALE_BYTES, SCALE_UNIT = Staged::SCALE_UNIT;
  static constexpr int SHARE = STEP / TEAMS;                         // granules of a step that a wave takes
  static constexpr int RUN = PER_GROUP < SHARE ? PER_GROUP : SHARE;  // of them in one group
  static constexpr int PAIR_GROUPS = PER_GROUP == 1 ? 2 : 1;         // groups of two granules
  static constexpr bool SCALED = (WARPGROUPS || X_TILES > 4) && SAME<Type, Scale>;
  static constexpr bool TOGETHER = !WARPGROUPS && !SCALED && PER_GROUP == 1 && ZEROS && SHARE % 4 == 0 &&
                                   TILES * X_TILES <= 8;              // else registers are short
  static constexpr int AHEAD = WARPGROUPS ? STAGES - 2 : STAGES - 1;  // steps whose copies are on their way
  static constexpr int SHARED_BYTES = STAGES * Staged::STAGE_BYTES;   // and side_bytes()
  static constexpr int PITCH = ROWS + 4;                              // of sums: lanes meet in no bank
  static_assert(M % 8 == 0 && ROWS % (16 * ROW_WAVES) == 0 && WAVES % TEAMS == 0 && STEP % (2 * TEAMS) == 0);
  static_assert(!TOGETHER || SHARE <= 8);  // groups that Column can tell apart
  static_assert(!WARPGROUPS || (ROW_WAVES % 4 == 0 && AHEAD > 0 && Staged::STAGE_BYTES % SWIZZLED_BYTES == 0));

  // First of the 16 rows of a tile of one wave's. Tiles of a warpgroup have 64.
  static NYBBLE_METHOD int tile_row(int wave, int tile) {
    const int row_wave = wave % ROW_WAVES;
    if constexpr (WARPGROUPS) return row_wave / 4 * (4 * WAVE_ROWS) + 64 * tile + row_wave % 4 * 16;
    return row_wave * WAVE_ROWS + 16 * tile;
  }
  static NYBBLE_METHOD u32 x_place(int m, int chunk) {
    if constexpr (WARPGROUPS) return chunk / 8 * (M * 128) + m * 128 + (chunk % 8 ^ m % 8) * 16;
    return Staged::x_place(m, chunk);
  }

  float total[TILES][X_TILES][4];

  NYBBLE_METHOD void run(const Problem& p, int row0, Slice slice, u8* shared) {
    const int steps = slice.last - slice.first, granules = p.granules();
    const int most_steps = ((granules + STEP - 1) / STEP + p.splits - 1) / p.splits;
    u8* const scales = shared + SHARED_BYTES;
    u8* const zeros = scales + Staged::scale_bytes(most_steps);
    const u32 ring = shared_address(shared);

    let_next_launch_start();

    NYBBLE_UNROLL
    for (int i = 0; i < TILES * X_TILES * 4; i++) total[i / (X_TILES * 4)][i / 4 % X_TILES][i % 4] = 0;

    // w: STEP threads copy a row of a step. Rows that the layer has not are its last.
    constexpr int COPIED = THREADS / STEP, COPIES = (ROWS + COPIED - 1) / COPIED;
    static_assert(COPIED % 8 == 0);  // so all rows of a thread are swizzled alike
    const int copied_granule = thread_index() % STEP, copied_row = thread_index() / STEP;
    const int first_granule = slice.first * STEP + copied_granule;
    const u32 w_to = Staged::w_place(copied_row, copied_granule);
    const u8* w_row[COPIES];
    NYBBLE_UNROLL
    for (int i = 0; i < COPIES; i++) {
      const int n = smaller(row0 + i * COPIED + copied_row, p.n - 1);
      w_row[i] = kept(p.w + u64(n) * u32(p.w_stride) + smaller(first_granule, granules - 1) * GRANULE_BYTES);
    }
    const auto fetch_w = [&](int step, u32 stage) {
      // Past the end of the row, which only a last step can be, zeros are written; the address stays inside.
      const bool present = first_granule + step * STEP < granules;
      const u32 from = present ? step * (STEP * GRANULE_BYTES) : 0;
      NYBBLE_UNROLL
      for (int i = 0; i < COPIES; i++) {
        if (ROWS % COPIED && i * COPIED + copied_row >= ROWS) continue;
        copy_line(stage + w_to + i * (COPIED * STEP * GRANULE_BYTES), w_row[i] + from, present);
      }
    };
    // x: chunks of 8 k, one a thread. Rows that the call has not are zeros: all blocks would ask for its last at once.
    constexpr int CHUNKS = STEP * 4, X_COPIED = THREADS / CHUNKS, X_COPIES = (M + X_COPIED - 1) / X_COPIED;
    static_assert(X_COPIED % (WARPGROUPS ? 8 : 2) == 0);  // so here too
    constexpr int X_PITCH = WARPGROUPS ? 128 : Staged::X_ROW_BYTES;
    const int copied_chunk = thread_index() % CHUNKS, copied_m = thread_index() / CHUNKS;
    const u8* const x_base =
        kept(p.x + copied_m * u64(u32(p.x_stride)) + u64(slice.first) * Staged::X_ROW_BYTES + copied_chunk * 16);
    const u32 x_to = Staged::W_BYTES + x_place(copied_m, copied_chunk);
    const auto fetch_x = [&](int step, u32 stage) {
      const bool present = (slice.first + step) * (STEP * GRANULE) + copied_chunk * 8 < p.k;
      const u8* const from = x_base + step * Staged::X_ROW_BYTES;
      NYBBLE_UNROLL
      for (int i = 0; i < X_COPIES; i++) {
        if (M % X_COPIED && i * X_COPIED + copied_m >= M) continue;
        // Of what is not there no address is looked at.
        copy(stage + x_to + i * (X_COPIED * X_PITCH), from + u64(i * X_COPIED * u32(p.x_stride)),
             present && copied_m < p.m - i * X_COPIED);
      }
    };

    NYBBLE_UNROLL
    for (int step = 0; step < AHEAD; step++) {
      if (step < steps) fetch_w(step, ring + step * Staged::STAGE_BYTES);
    }
    const int first_group = slice.first * GROUPS;
    const int groups = smaller(steps * GROUPS, granules / PER_GROUP - first_group);
    fetch_scales(p, row0, first_group, groups, scales);
    if (ZEROS) fetch_zeros(p, row0, first_group, groups, zeros);
    wait_for_last_launch();
    NYBBLE_UNROLL
    for (int step = 0; step < AHEAD; step++) {
      if (step < steps) fetch_x(step, ring + step * Staged::STAGE_BYTES);
      end_copies();
    }
    if (groups < steps * GROUPS) {
      // The last step ends past K: there x is 0, and scales and zero points have to be numbers too.
      wait_for_copies<AHEAD - 1>();
      block_barrier();
      for (int row = thread_index(); row < ROWS; row += THREADS) {
        for (int group = groups; group < steps * GROUPS; group++) {
          Staged::scale_of(scales, row, group) = 0;
          if (ZEROS && row % 8 == 0) store_zero(zeros, row / 8, group);
        }
      }
    }

    u32 stage = ring, next_stage = ring + AHEAD * Staged::STAGE_BYTES;
    if (steps == 0) return;
    const u32 none = hidden_zero(p);
    const Lane lane(wave_index(), none);
    int step = 0;
    do {
      wait_for_copies<AHEAD - 1>();
      if (WARPGROUPS) show_to_warpgroups();
      block_barrier();
      if (step + AHEAD < steps) {
        fetch_w(step + AHEAD, next_stage);
        fetch_x(step + AHEAD, next_stage);
      }
      end_copies();
      if constexpr (WARPGROUPS) {
        multiply_step_in_warpgroups(lane, stage, step, scales, zeros, none);
      } else {
        multiply_step(lane, stage, step, scales, zeros, none);
      }
      next_stage = Staged::next_stage(next_stage, ring);
      stage = Staged::next_stage(stage, ring);
    } while (++step < steps);
    if constexpr (WARPGROUPS) wait_for_multiplications<0>();
    wait_for_copies<0>();
  }

  // What a lane's addresses begin with: its first row and granule of its wave's.
  struct Lane {
    int t;
    u32 w, x;                               // in a stage
    int row, group;                         // row g of the wave's first tile
    typename Staged::Column column[SHARE];  // TOGETHER

    NYBBLE_METHOD Lane(int wave, u32 none) {
      const int lane = lane_index(), g = lane / 4, granule0 = TEAMS == 1 ? 0 : wave / ROW_WAVES * SHARE;
      t = lane % 4, row = tile_row(wave, 0) + g, group = granule0 / PER_GROUP;
      if constexpr (WARPGROUPS) {
        w = Staged::w_place(row, granule0);
        x = Staged::W_BYTES + granule0 / 2 * (M * 128);
      } else {
        // Matrices: rows 0-7 and 8-15 of a tile, one granule, then both again, the next one.
        w = Staged::w_place(tile_row(wave, 0) + lane % 16, granule0 + lane / 16);
        x = Staged::W_BYTES + x_place(g, 4 * granule0 + t);
      }
      NYBBLE_UNROLL
      for (int i = 0; i < SHARE && TOGETHER; i++) column[i] = typename Staged::Column(i, none);
    }
  };

  // This wave's share of a step.
  NYBBLE_METHOD void multiply_step(const Lane& lane, u32 stage, u32 step, const u8* scales, const u8* zeros, u32 none) {
    scales += Staged::scale_place(lane.row, step, lane.group);
    zeros += Staged::zero_place(lane.row / 8, step, lane.group);
    const u32 x_at[2] = {stage + lane.x, stage + (lane.x ^ 64)};  // of even granules, of odd ones
    float sum[TILES][X_TILES][4];
    float sum_of_t[X_TILES][4] = {};  // TOGETHER
    Side side[TILES][2];
    NYBBLE_UNROLL
    for (int j = 0; j < SHARE; j += 2) {
      const u32 w_at = stage + (lane.w ^ j * GRANULE_BYTES);
      Quad w[TILES];
      NYBBLE_UNROLL
      for (int tile = 0; tile < TILES; tile++) w[tile] = load_matrices(w_at + tile * (16 * STEP * GRANULE_BYTES));
      NYBBLE_UNROLL
      for (int e = 0; e < 2 * TILES; e++) {
        if (j % RUN == 0 || PER_GROUP == 1) {
          const int group = j / PER_GROUP;
          side[e / 2][e % 2] =
              Side(scales + 8 * e * Staged::SCALE_UNIT + group * SCALE_BYTES, zeros + (e * GROUPS + group) * 4);
        }
      }
      NYBBLE_UNROLL
      for (int i = 0; i < 2; i++) {
        Pair pair[TILES][2][4];  // of rows g and g + 8
        NYBBLE_UNROLL
        for (int h = 0; h < 2 * TILES; h++) {
          const Side& of_rows = side[h / 2][h % 2];
          const u32 word = w[h / 2].word[2 * i + h % 2];
          Pair(&weights)[4] = pair[h / 2][h % 2];
          if constexpr (TOGETHER) {
            Raw<Type>::pairs(word, weights, LOW_NIBBLES + none);
          } else {
            exact_pairs<Type>(word, of_rows.zero(i), weights, LOW_NIBBLES + none);
          }
          NYBBLE_UNROLL
          for (int v = 0; SCALED && v < 4; v++) weights[v] = Type::times(weights[v], of_rows.twice(i));
        }
        float (&into)[TILES][X_TILES][4] = SCALED ? total : sum;
        NYBBLE_UNROLL
        for (int c = 0; c < X_TILES; c++) {
          const Quad x = load_chunk(x_at[i] + j * 64 + c * (8 * Staged::X_ROW_BYTES));
          if constexpr (TOGETHER) Staged::add_of_t(sum_of_t[c], x, lane.column[j + i]);
          NYBBLE_UNROLL
          for (int tile = 0; tile < TILES; tile++) {
            float (&s)[4] = into[tile][c];
            if (!SCALED && (j + i) % RUN == 0) s[0] = s[1] = s[2] = s[3] = 0;
            Staged::add(s, pair[tile][0], pair[tile][1], x);
          }
        }
        if (SCALED || (j + i) % RUN != RUN - 1) continue;
        NYBBLE_UNROLL
        for (int v = 0; v < TILES * X_TILES * 4; v++) {
          const int tile = v / (X_TILES * 4), c = v / 4 % X_TILES;
          float& so_far = total[tile][c][v % 4];
          so_far = fmaf(side[tile][v % 4 / 2].scale(i), sum[tile][c][v % 4], so_far);
        }
      }
      if constexpr (TOGETHER) {
        if (j % 4 == 2) {
          Staged::take_off(total, sum_of_t, j / 4, scales + lane.t * SCALE_BYTES, zeros + lane.t * 4,
                           Raw<Type>::ZERO_MASK + none);
        }
      }
    }
  }

  // The same with four waves at a time. Their instruction reads x in the order of k, so a lane has pair t of all four words
  // of a granule. A granule's weights are made while those of the last one are multiplied.
  NYBBLE_METHOD void multiply_step_in_warpgroups(const Lane& lane, u32 stage, u32 step, const u8* scales,
                                                 const u8* zeros, u32 none) {
    const u64 x = swizzled(stage + lane.x);
    scales += Staged::scale_place(lane.row, step, lane.group);
    zeros += Staged::zero_place(lane.row / 8, step, lane.group);
    float sum[TILES][X_TILES][4];
    float (&into)[TILES][X_TILES][4] = SCALED ? total : sum;
    Side side[TILES][2];
    NYBBLE_UNROLL
    for (int j = 0; j < SHARE; j++) {
      const u32 w_at = stage + lane.w ^ j * GRANULE_BYTES;
      Pair pair[TILES][2][4];  // of 16 k: words 0 and 1, rows g and g + 8 of each, then words 2 and 3
      NYBBLE_UNROLL
      for (int h = 0; h < 2 * TILES; h++) {
        const int tile = h / 2, rows = 64 * tile + h % 2 * 8;  // from the first
        const Quad w = load_chunk(w_at + rows * (STEP * GRANULE_BYTES));
        if (j % 2 == 0 && j % RUN == 0) {
          const int group = j / PER_GROUP;
          side[tile][h % 2] =
              Side(scales + rows * Staged::SCALE_UNIT + group * SCALE_BYTES, zeros + (rows / 8 * GROUPS + group) * 4);
        }
        const Side& of_rows = side[tile][h % 2];
        NYBBLE_UNROLL
        for (int v = 0; v < 4; v++) {
          Pair& weights = pair[tile][v / 2][v % 2 * 2 + h % 2];
          weights = Type::subtract((w.word[v] >> (4 * lane.t) & (LOW_NIBBLES + none)) | Type::MAGIC,
                                   of_rows.zero(j % 2).plain);
          if constexpr (SCALED) weights = Type::times(weights, of_rows.twice(j % 2));
        }
      }
      begin_multiplications();
      NYBBLE_UNROLL
      for (int i = 0; i < 2 * TILES; i++) {
        multiply_in_warpgroup(Type{}, into[i % TILES], pair[i % TILES][i / TILES],
                              x + (j / 2 * (M * 128) + j % 2 * 64 + i / TILES * 32) / 16,
                              SCALED || j % RUN || i / TILES);
      }
      end_multiplications();
      wait_for_multiplications<1>();
      if (SCALED || j % RUN != RUN - 1) continue;
      wait_for_multiplications<0>();
      NYBBLE_UNROLL
      for (int v = 0; v < TILES * X_TILES * 4; v++) {
        const int tile = v / (X_TILES * 4), c = v / 4 % X_TILES;
        float& so_far = total[tile][c][v % 4];
        so_far = fmaf(side[tile][v % 4 / 2].scale(j % 2), sum[tile][c][v % 4], so_far);
      }
    }
  }

  // Of a row, scales and zero points of two granules.
  struct Side {
    u32 scales[PAIR_GROUPS * SCALE_BYTES > 4 ? 2 : 1];
    u32 zeros[PAIR_GROUPS];

    NYBBLE_METHOD Side() {}
    // of_scales: this lane's row's; of_zeros: those of its eight rows
    NYBBLE_METHOD Side(const u8* of_scales, const u8* of_zeros) {
      if constexpr (PAIR_GROUPS * SCALE_BYTES == 2) {
        scales[0] = load<u16>(of_scales, 0);
      } else if constexpr (PAIR_GROUPS * SCALE_BYTES == 4) {
        scales[0] = load<u32>(of_scales, 0);
      } else {
        const u64 both = load<u64>(of_scales, 0);
        scales[0] = u32(both), scales[1] = u32(both >> 32);
      }
      NYBBLE_UNROLL
      for (int i = 0; i < PAIR_GROUPS; i++) {
        const u32 word = ZEROS ? load<u32>(of_zeros, i * 4) : 0;
        zeros[i] = Staged::in_place(word, lane_index() / 4);
      }
    }
    NYBBLE_METHOD float scale(int i) const { return Scale::wide_of(scales, i % PAIR_GROUPS); }
    NYBBLE_METHOD Pair twice(int i) const { return __byte_perm(scales[0], 0, i % PAIR_GROUPS ? 0x3232 : 0x1010); }
    NYBBLE_METHOD PackedZero zero(int i) const { return Staged::doubled_zero(zeros[i % PAIR_GROUPS]); }
  };

  // Scales of the whole slice, four threads a row, as many bytes at a time as the addresses of rows allow.
  static NYBBLE_METHOD void fetch_scales(const Problem& p, int row0, int first_group, int groups, u8* scales) {
    const u32 address = u32(u64(p.scales)) | u32(p.s_stride) | u32(first_group * SCALE_BYTES);
    const auto from = [&](int row) {
      return p.scales + u64(smaller(row0 + row, p.n - 1)) * u32(p.s_stride) + first_group * SCALE_BYTES;
    };
    if (address % smaller(SCALE_UNIT, 16) == 0) {
      copy_scales<SCALE_UNIT>(scales, from, groups * SCALE_BYTES);
    } else if (address % 4 == 0) {
      copy_scales<4>(scales, from, groups * SCALE_BYTES);
    } else {
      for (int row = thread_index() / 4; row < ROWS; row += THREADS / 4) {
        NYBBLE_NO_UNROLL
        for (int i = thread_index() % 4; i < groups; i += 4) {
          Staged::scale_of(scales, row, i) = load<typename Scale::Bits>(from(row), i * SCALE_BYTES);
        }
      }
    }
  }
  template <int UNIT, class From>
  static NYBBLE_METHOD void copy_scales(u8* scales, From from, int bytes) {
    constexpr int AT_ONCE = UNIT > 16 ? 16 : UNIT;
    for (int row = thread_index() / 4; row < ROWS; row += THREADS / 4) {
      const u8* const source = from(row);
      NYBBLE_NO_UNROLL
      for (int b = AT_ONCE * (thread_index() % 4); b < bytes; b += 4 * AT_ONCE) {
        const u32 to = shared_address(&Staged::scale_of(scales, row, b / SCALE_BYTES));
        copy_some<AT_ONCE>(to, source + b, smaller(AT_ONCE, bytes - b));
      }
    }
  }
  static NYBBLE_METHOD void fetch_zeros(const Problem& p, int row0, int first_group, int groups, u8* zeros) {
    for (int eight = wave_index(); eight < ROWS / 8; eight += WAVES) {
      const u8* from = p.zeros + u64(smaller(row0 + 8 * eight, p.n - 1) / 8) * u32(p.z_stride) + first_group * 4;
      NYBBLE_NO_UNROLL
      for (u32 i = lane_index(); i < groups; i += WAVE) {
        copy_some<4>(shared_address(zeros) + Staged::zero_place(eight, i / GROUPS, i % GROUPS), from + 4 * i, 4);
      }
    }
  }
  static NYBBLE_METHOD void store_zero(u8* zeros, int eight, u32 group) {
    *reinterpret_cast<u32*>(zeros + Staged::zero_place(eight, group / GROUPS, group % GROUPS)) = 0;
  }

  // sums [TEAMS][M][PITCH]: lane (g, t) holds rows g and g + 8 of w for rows 2t and 2t + 1 of x.
  NYBBLE_METHOD void deposit(float* sums) const {
    const int g = lane_index() / 4, t = lane_index() % 4, wave = wave_index();
    float* const mine = sums + wave / ROW_WAVES * (M * PITCH) + g;
    NYBBLE_UNROLL
    for (int i = 0; i < TILES * X_TILES * 4; i++) {
      const int tile = i / (X_TILES * 4), c = i / 4 % X_TILES, v = i % 4;
      mine[(8 * c + 2 * t + v % 2) * PITCH + tile_row(wave, tile) + v / 2 * 8] = total[tile][c][v];
    }
  }
};

template <class Type, class Scale, int GROUP, bool ZEROS, int M, int ROWS, int WAVES>
using WarpgroupTile = BlockTile<Type, Scale, GROUP, ZEROS, M, ROWS, WAVES, true>;

// Four rows of w in a row, of one row of x.
struct alignas(16) Four {
  float value[4];
  NYBBLE_METHOD void add(const Four& other) {
    NYBBLE_UNROLL
    for (int i = 0; i < 4; i++) value[i] += other.value[i];
  }
};
NYBBLE_DEV Four load_four_shared_by_blocks(const Four* p) {
  Four f;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(f.value[0]), "=f"(f.value[1]), "=f"(f.value[2]), "=f"(f.value[3])
               : "l"(p));
  return f;
}

template <class Type, int GATE>
NYBBLE_DEV void store_four(const Problem& p, int m, int n, const Four& sums) {
  constexpr int TOGETHER = GATE == NO_GATE ? 1 : 2;
  NYBBLE_UNROLL
  for (int i = 0; i < 4; i += TOGETHER) {
    if (n + i < p.n) store<Type, GATE>(p, m, n + i, sums.value[i], sums.value[i + TOGETHER - 1]);
  }
}

// As reduce_and_store; partial is [block][split][M][ROWS] here, and of it many loads are in flight at a time.
template <class Type, class Engine, int M, int ROWS, int GATE>
NYBBLE_DEV void reduce_and_store_fours(const Problem& p, const float* sums, u32* last_to_come) {
  constexpr int FOURS = M * ROWS / 4, THREADS = Engine::THREADS, AT_ONCE = 4;
  const int row0 = block_x() * ROWS;
  Four* const partial = reinterpret_cast<Four*>(p.partial) + u64(block_x()) * p.splits * FOURS;
  for (int i = thread_index(); i < FOURS; i += THREADS) {
    const int m = i / (ROWS / 4), row = i % (ROWS / 4) * 4;
    if (m >= p.m) break;
    Four all = {};
    NYBBLE_UNROLL
    for (int team = 0; team < Engine::TEAMS; team++) {
      all.add(*reinterpret_cast<const Four*>(sums + (team * M + m) * Engine::PITCH + row));
    }
    if (p.splits == 1) {
      store_four<Type, GATE>(p, m, row0 + row, all);
    } else {
      partial[block_y() * FOURS + i] = all;
    }
  }
  if (p.splits == 1) return;

  device_fence();
  block_barrier();
  if (thread_index() == 0) *last_to_come = count_up(p.counters + block_x()) == u32(p.splits - 1);
  block_barrier();
  if (!*last_to_come) return;
  device_fence();
  for (int first = thread_index(); first < FOURS; first += AT_ONCE * THREADS) {
    Four all[AT_ONCE] = {};
#pragma unroll 4
    for (int split = 0; split < p.splits; split++) {
      NYBBLE_UNROLL
      for (int j = 0; j < AT_ONCE; j++) {
        const int i = first + j * THREADS;
        if (i / (ROWS / 4) < smaller(p.m, M)) all[j].add(load_four_shared_by_blocks(partial + split * FOURS + i));
      }
    }
    NYBBLE_UNROLL
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = first + j * THREADS, m = i / (ROWS / 4);
      if (m < smaller(p.m, M)) store_four<Type, GATE>(p, m, row0 + i % (ROWS / 4) * 4, all[j]);
    }
  }
  if (thread_index() == 0) p.counters[block_x()] = 0;
}

}  // namespace nybble

#endif
