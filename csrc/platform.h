// What the kernels need from a GPU compiler, and nothing more: hiprtc, clang (-nogpuinc -nogpulib) and nvrtc all provide it
// without a single header of theirs.
//
// A wave is 32 lanes on every chip here. Numbers of 16 bits travel as raw bits, two to a word: `Pair`.
#pragma once

#if defined(__HIP__) || defined(__HIPCC_RTC__)
#define NYBBLE_AMD 1
#else
#define NYBBLE_AMD 0
#endif

#if NYBBLE_AMD
#define NYBBLE_DEV static inline __attribute__((device)) __attribute__((always_inline))
#define NYBBLE_METHOD inline __attribute__((device)) __attribute__((always_inline))
#define NYBBLE_KERNEL(threads) \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define NYBBLE_SHARED(name) extern __attribute__((shared)) u8 name[] __attribute__((aligned(16)))
#else
#define NYBBLE_DEV static __device__ __forceinline__
#define NYBBLE_METHOD __device__ __forceinline__
// At least one block: with no such word the compiler saves registers, and time is lost (7 % over many shapes on an H200).
#define NYBBLE_KERNEL(threads) extern "C" __global__ __launch_bounds__(threads, 1)
#define NYBBLE_SHARED(name) extern __shared__ __align__(1024) u8 name[]  // 1024: see warpgroup.h
#endif
#define NYBBLE_UNROLL _Pragma("unroll")
#define NYBBLE_NO_UNROLL _Pragma("unroll 1")

namespace nybble {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using Pair = u32;  // two 16-bit values, the one with the lower k in the low half

constexpr int WAVE = 32;

// ------------------------------------------------------------------------------------------------ where a thread is

#if NYBBLE_AMD
NYBBLE_DEV int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
NYBBLE_DEV int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
NYBBLE_DEV int block_y() { return __builtin_amdgcn_workgroup_id_y(); }
// All lanes of a wave agree on `value`: say so, and it lives in a scalar register.
NYBBLE_DEV int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }
#else
NYBBLE_DEV int thread_index() { return threadIdx.x; }
NYBBLE_DEV int block_x() { return blockIdx.x; }
NYBBLE_DEV int block_y() { return blockIdx.y; }
NYBBLE_DEV int uniform(int value) { return __shfl_sync(~0u, value, 0); }
#endif
#if NYBBLE_AMD
NYBBLE_DEV float power_of_2(float x) { return __builtin_amdgcn_exp2f(x); }
#else
NYBBLE_DEV float power_of_2(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
NYBBLE_DEV int lane_index() { return thread_index() % WAVE; }
NYBBLE_DEV int wave_index() { return uniform(thread_index() / WAVE); }

template <class T>
NYBBLE_DEV T smaller(T a, T b) {
  return a < b ? a : b;
}

// ------------------------------------------------------------------------------------------------------------ memory

// 16 bytes: 32 weights, or 8 activations.
struct alignas(16) Quad {
  u32 word[4];
};

#if NYBBLE_AMD
typedef u32 u32x4 __attribute__((ext_vector_type(4)));

// A generic pointer into device memory, told to the compiler as such.
template <class T>
NYBBLE_DEV auto device(const u8* p) {
  return reinterpret_cast<const __attribute__((address_space(1))) T*>(reinterpret_cast<u64>(p));
}

// A base that the whole wave shares, plus bytes that differ by lane: a scalar address and one 32-bit vector offset. The
// compiler would rather add them up in 64-bit vector registers, for every row anew; it cannot where it sees no sum.
NYBBLE_DEV const u8* scalar_base(const u8* p) {
  u64 address = reinterpret_cast<u64>(p);
  asm("" : "+s"(address));
  return reinterpret_cast<const u8*>(address);
}

// The same, worked out anew each time it is passed: there are not scalar registers for all the rows of a step.
NYBBLE_DEV const u8* scalar_base_here(const u8* p) {
  u64 address = reinterpret_cast<u64>(p);
  asm volatile("" : "+s"(address));
  return reinterpret_cast<const u8*>(address);
}

NYBBLE_DEV Quad load_quad(const u8* base, u32 offset) {
  return __builtin_bit_cast(Quad, *device<u32x4>(base + offset));
}
NYBBLE_DEV Quad load_once(const u8* base, u32 offset) {  // read once in a step of the model: leave the caches to others
  return __builtin_bit_cast(Quad, __builtin_nontemporal_load(device<u32x4>(base + offset)));
}
template <class T>
NYBBLE_DEV T load(const u8* base, u32 offset) {
  return *device<T>(base + offset);
}

// Four registers in a row. RDNA issues two dot products at once where their operands come from different register banks.
NYBBLE_DEV void side_by_side(Pair (&pair)[4]) {
  u32x4 all = {pair[0], pair[1], pair[2], pair[3]};
  asm("" : "+v"(all));
  NYBBLE_UNROLL
  for (int i = 0; i < 4; i++) pair[i] = all[i];
}

// Everything above is issued before anything below: loads first, all in flight together.
NYBBLE_DEV void issue_first() { __builtin_amdgcn_sched_barrier(0); }

NYBBLE_DEV void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// What this thread wrote is visible to every block before anything it does next, and the other way round.
NYBBLE_DEV void device_fence() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent"); }
NYBBLE_DEV u32 count_up(u32* counter) {
  return __hip_atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
NYBBLE_DEV float load_shared_by_blocks(const float* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
#else
NYBBLE_DEV Quad load_once(const u8* base, u32 offset) {
  Quad q;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.word[0]), "=r"(q.word[1]), "=r"(q.word[2]), "=r"(q.word[3])
               : "l"(base + offset));
  return q;
}
NYBBLE_DEV Quad load_quad(const u8* base, u32 offset) { return *reinterpret_cast<const Quad*>(base + offset); }
template <class T>
NYBBLE_DEV T load(const u8* base, u32 offset) {
  return *reinterpret_cast<const T*>(base + offset);
}
NYBBLE_DEV const u8* scalar_base(const u8* p) { return p; }
NYBBLE_DEV const u8* scalar_base_here(const u8* p) { return p; }
NYBBLE_DEV void side_by_side(Pair (&)[4]) {}
NYBBLE_DEV void issue_first() {}

NYBBLE_DEV void block_barrier() { __syncthreads(); }
NYBBLE_DEV void device_fence() { __threadfence(); }
NYBBLE_DEV u32 count_up(u32* counter) { return atomicAdd(counter, 1u); }
NYBBLE_DEV float load_shared_by_blocks(const float* p) { return *reinterpret_cast<const volatile float*>(p); }
#endif

// ----------------------------------------------------------------------------------------------------------- numbers

#if NYBBLE_AMD
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef short s16x2 __attribute__((ext_vector_type(2)));
#endif

NYBBLE_DEV float as_float(u32 bits) {
#if NYBBLE_AMD
  return __builtin_bit_cast(float, bits);
#else
  return __uint_as_float(bits);
#endif
}

// A 0 that the compiler takes for any number.
NYBBLE_DEV u32 register_of_zero() {
  u32 zero = 0;
#if NYBBLE_AMD
  asm("" : "+v"(zero));
#endif
  return zero;
}

// fp16: 1024 + q is the bit pattern 0x6400 | q, and 1024 + 16 q is 0x6400 | q << 4: two nibbles need no shift.
struct Half {
  using Bits = u16;
  static constexpr bool FINE = true;
  static constexpr u32 MAGIC = 0x64006400;
  static constexpr float BIAS = 1024.0f;
  static constexpr Pair ONES = 0x3C003C00;

  // A scale on its way from memory: what `fetched` makes a float of. `last` is what the same variable held before, at
  // first register_of_zero().
  static NYBBLE_METHOD u32 fetch(u32 last, const u8* base, u32 offset) { return load<u16>(base, offset); }
  static NYBBLE_METHOD float fetched(u32 bits) { return wide(u16(bits)); }
  // Number i of those side by side in words.
  static NYBBLE_METHOD float wide_of(const u32* words, int i) { return wide(u16(words[i / 2] >> (i % 2 * 16))); }

#if NYBBLE_AMD
  static NYBBLE_METHOD float wide(u16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }
  static NYBBLE_METHOD u16 narrow(float value) { return __builtin_bit_cast(u16, (_Float16)value); }
  static NYBBLE_METHOD float dot(Pair a, Pair b, float c) {
    return __builtin_amdgcn_fdot2(__builtin_bit_cast(f16x2, a), __builtin_bit_cast(f16x2, b), c, false);
  }
  static NYBBLE_METHOD Pair subtract(Pair a, Pair b) {
    return __builtin_bit_cast(Pair, __builtin_bit_cast(f16x2, a) - __builtin_bit_cast(f16x2, b));
  }
  // a / 16 - b
  static NYBBLE_METHOD Pair sixteenth_minus(Pair a, Pair b) {
    const f16x2 sixteenth = {(_Float16)0.0625f, (_Float16)0.0625f};
    return __builtin_bit_cast(
        Pair, __builtin_elementwise_fma(__builtin_bit_cast(f16x2, a), sixteenth, -__builtin_bit_cast(f16x2, b)));
  }
#else
  static NYBBLE_METHOD float wide(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static NYBBLE_METHOD u16 narrow(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  static NYBBLE_METHOD float dot(Pair a, Pair b, float c) {
    c = fmaf(wide(u16(a)), wide(u16(b)), c);
    return fmaf(wide(u16(a >> 16)), wide(u16(b >> 16)), c);
  }
  static NYBBLE_METHOD Pair subtract(Pair a, Pair b) {
    Pair d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static NYBBLE_METHOD Pair sixteenth_minus(Pair a, Pair b) {
    Pair d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x2C002C00), "r"(b ^ 0x80008000));
    return d;
  }
  static NYBBLE_METHOD Pair times(Pair a, Pair b) {
    Pair d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000));
    return d;
  }
#endif
};

// bf16: 128 + q is 0x4300 | q; with 7 bits of mantissa every nibble has to come down to bits 0-3 first.
struct BFloat {
  using Bits = u16;
  static constexpr bool FINE = false;
  static constexpr u32 MAGIC = 0x43004300;
  static constexpr float BIAS = 128.0f;
  static constexpr Pair ONES = 0x3F803F80;

  // Into the upper half, where it is a float already; the lower half stays 0. One shift less for every row.
  static NYBBLE_METHOD u32 fetch(u32 last, const u8* base, u32 offset) {
#if NYBBLE_AMD
    s16x2 halves = __builtin_bit_cast(s16x2, last);
    halves[1] = load<short>(base, offset);
    return __builtin_bit_cast(u32, halves);
#else
    return u32(load<u16>(base, offset)) << 16;
#endif
  }
  static NYBBLE_METHOD float fetched(u32 bits) { return as_float(bits); }
  static NYBBLE_METHOD float wide_of(const u32* words, int i) {
    return as_float(i % 2 ? words[i / 2] & 0xFFFF0000 : words[i / 2] << 16);
  }

#if NYBBLE_AMD
  static NYBBLE_METHOD float wide(u16 bits) { return as_float(u32(bits) << 16); }
  static NYBBLE_METHOD u16 narrow(float value) { return __builtin_bit_cast(u16, (__bf16)value); }
  static NYBBLE_METHOD float dot(Pair a, Pair b, float c) {
    return __builtin_amdgcn_fdot2_f32_bf16(__builtin_bit_cast(s16x2, a), __builtin_bit_cast(s16x2, b), c, false);
  }
#else
  static NYBBLE_METHOD float wide(u16 bits) { return as_float(u32(bits) << 16); }
  static NYBBLE_METHOD u16 narrow(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  static NYBBLE_METHOD float dot(Pair a, Pair b, float c) {
    c = fmaf(wide(u16(a)), wide(u16(b)), c);
    return fmaf(wide(u16(a >> 16)), wide(u16(b >> 16)), c);
  }
  static NYBBLE_METHOD Pair subtract(Pair a, Pair b) {
    Pair d;  // sub.bf16x2 is newer than sm_80: a * 1 - b
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(ONES), "r"(b ^ 0x80008000));
    return d;
  }
  static NYBBLE_METHOD Pair times(Pair a, Pair b) {
    Pair d;  // nor is mul.bf16x2: a * b - 0
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000));
    return d;
  }
#endif
};

struct Float {  // of scales alone
  using Bits = float;
  static NYBBLE_METHOD float wide(float value) { return value; }
  static NYBBLE_METHOD u32 fetch(u32 last, const u8* base, u32 offset) { return load<u32>(base, offset); }
  static NYBBLE_METHOD float fetched(u32 bits) { return as_float(bits); }
  static NYBBLE_METHOD float wide_of(const u32* words, int i) { return as_float(words[i]); }
};

#if NYBBLE_AMD
// v + v of the lane whose number differs in the bits of MASK (1, 2, 4 or 8).
template <int MASK>
NYBBLE_DEV float plus_neighbour(float v) {
  const int other = __builtin_amdgcn_mov_dpp(__builtin_bit_cast(int, v), 0x160 + MASK, 0xf, 0xf, true);  // row_xmask
  return v + __builtin_bit_cast(float, other);
}
#endif

// The sum over a wave, in every lane; always in the same order.
NYBBLE_DEV float wave_sum(float v) {
#if NYBBLE_AMD
  v = plus_neighbour<8>(plus_neighbour<4>(plus_neighbour<2>(plus_neighbour<1>(v))));
  const int other = __builtin_amdgcn_permlanex16(0, __builtin_bit_cast(int, v), 0x76543210, 0xfedcba98, false, false);
  return v + __builtin_bit_cast(float, other);
#else
  NYBBLE_UNROLL
  for (int apart = 1; apart < WAVE; apart *= 2) v += __shfl_xor_sync(~0u, v, apart);
  return v;
#endif
}

}  // namespace nybble
