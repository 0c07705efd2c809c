// The least that hiprtc, nvrtc and clang -nogpuinc need to read the same kernel.
#pragma once
#if defined(__HIP__) && !defined(__HIPCC_RTC__)
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif

#if defined(__HIP__)
#define LANE __builtin_amdgcn_workitem_id_x()
#else
#define LANE threadIdx.x
#endif
