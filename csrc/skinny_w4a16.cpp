// The translation unit: one specialisation, chosen by macros, behind one C name. See kernels/linear/skinny.py.
//
//   NYBBLE_ENGINE   DotRows, WmmaTile, MmaTile, BlockTile or WarpgroupTile
//   NYBBLE_TYPE     Half or BFloat: x, bias and y        NYBBLE_SCALE  Half, BFloat or Float: scales
//   NYBBLE_GROUP    32, 64 or 128                        NYBBLE_ZEROS  0 or 1: zero points stored
//   NYBBLE_M        most rows of x                       NYBBLE_ROWS   rows of w of a block
//   NYBBLE_WAVES    waves of a block, which share K      NYBBLE_STEP    granules that a wave takes at a time
//   NYBBLE_STAGES   of the ring of CUDA's engines        NYBBLE_GATE   NO_GATE, or SILU or GELU_TANH: see store()
//   NYBBLE_TEAMS    of BlockTile and WarpgroupTile: waves that share their rows
#include "block_tile.h"
#include "dot_rows.h"
#include "mma_tile.h"
#include "wmma_tile.h"

#ifndef NYBBLE_GATE
#define NYBBLE_GATE NO_GATE
#endif

namespace nybble {

using Engine =
    NYBBLE_ENGINE<NYBBLE_TYPE, NYBBLE_SCALE, NYBBLE_GROUP, NYBBLE_ZEROS, NYBBLE_M, NYBBLE_ROWS, NYBBLE_WAVES>;

}  // namespace nybble

NYBBLE_KERNEL(NYBBLE_WAVES * 32)
void nybble_skinny_w4a16(const void* x, const void* w, const void* scales, const void* zeros, const void* bias, void* y,
                         void* partial, void* counters, int m, int n, int k, int x_stride, int w_stride, int s_stride,
                         int z_stride, int splits) {
  using namespace nybble;
  Problem p;
  p.x = static_cast<const u8*>(x);
  p.w = static_cast<const u8*>(w);
  p.scales = static_cast<const u8*>(scales);
  p.zeros = static_cast<const u8*>(zeros);
  p.bias = static_cast<const u16*>(bias);
  p.y = static_cast<u16*>(y);
  p.partial = static_cast<float*>(partial);
  p.counters = static_cast<u32*>(counters);
  p.m = m, p.n = n, p.k = k, p.splits = splits;
  p.x_stride = x_stride, p.w_stride = w_stride, p.s_stride = s_stride, p.z_stride = z_stride;

  NYBBLE_SHARED(shared);  // its size: Plan.shared_bytes in kernels/linear/skinny.py
  float* sums = reinterpret_cast<float*>(shared);

  Engine engine;
#ifdef NYBBLE_TEAMS
  engine.run(p, block_x() * NYBBLE_ROWS, slice_of<1>(p, Engine::STEP, block_y(), 0), shared);
  block_barrier();  // the sums take the place of the ring
  engine.deposit(sums);
  block_barrier();
  u32* const after_sums = reinterpret_cast<u32*>(sums + Engine::TEAMS * NYBBLE_M * Engine::PITCH);
  reduce_and_store_fours<NYBBLE_TYPE, Engine, NYBBLE_M, NYBBLE_ROWS, NYBBLE_GATE>(p, sums, after_sums);
#else
  const int wave = wave_index();
  engine.run(p, block_x() * NYBBLE_ROWS, slice_of<NYBBLE_WAVES>(p, Engine::STEP, block_y(), wave), shared);
  if (Engine::SHARED_BYTES) block_barrier();  // the sums take the place of what the engine kept there
  engine.deposit(sums + wave * NYBBLE_M * NYBBLE_ROWS);
  block_barrier();
  reduce_and_store<NYBBLE_TYPE, NYBBLE_M, NYBBLE_ROWS, NYBBLE_WAVES, NYBBLE_GATE>(p, sums);
#endif
}
