// Neighbouring lanes exchange their values and add NYBBLE_STEP.
#include "platform.h"

extern "C" __global__ void swap(float* values) {
  __shared__ float held[64];
  held[LANE] = values[LANE];
  values[LANE] = held[LANE ^ 1] + NYBBLE_STEP;
}
