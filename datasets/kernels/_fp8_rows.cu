// Rounds the rows of a bf16 matrix to fp8 (e4m3), each scaled to its largest magnitude. One block a
// row. `vectors` are the row's groups of eight values, `stride` those from one row to the next. A NaN
// counts as infinitely large: the scale and the row's products show it. Instructions of compute
// capability 8.9, as products of fp8 need.
//
// Defined by the caller: KEPT (groups that a thread keeps in registers; those of a longer row beyond
// them are read twice), NAME.
typedef unsigned int u32;
typedef unsigned short u16;
#define DEV __device__ __forceinline__
DEV float low(u32 v) { return __uint_as_float(v << 16); }
DEV float high(u32 v) { return __uint_as_float(v & 0xffff0000); }
DEV float magnitude(float v) { return v == v ? fabsf(v) : __int_as_float(0x7f800000); }
DEV float largest_of(uint4 v, float found) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  #pragma unroll
  for (int j = 0; j < 4; j++) found = fmaxf(found, fmaxf(magnitude(low(w[j])), magnitude(high(w[j]))));
  return found;
}
DEV u32 fp8(u32 v, float inverse) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high(v)*inverse), "f"(low(v)*inverse));
  return r;
}
DEV uint2 rounded(uint4 v, float inverse) {
  return make_uint2(fp8(v.x, inverse) | fp8(v.y, inverse) << 16, fp8(v.z, inverse) | fp8(v.w, inverse) << 16);
}

extern "C" __global__ void __launch_bounds__(1024) NAME(
    const uint4* __restrict__ x, uint2* __restrict__ values, float* __restrict__ scales, int vectors, int stride) {
  __shared__ float found[32];
  const uint4* row = x + (size_t)blockIdx.x*stride;
  uint2* out = values + (size_t)blockIdx.x*vectors;
  const int rest = threadIdx.x + KEPT*blockDim.x;
  uint4 kept[KEPT];
  float largest = 0.f;
  #pragma unroll
  for (int j = 0; j < KEPT; j++) {
    const int i = threadIdx.x + j*blockDim.x;
    kept[j] = i < vectors ? row[i] : make_uint4(0, 0, 0, 0);
  }
  #pragma unroll
  for (int j = 0; j < KEPT; j++) largest = largest_of(kept[j], largest);
  for (int i = rest; i < vectors; i += blockDim.x) largest = largest_of(row[i], largest);
  #pragma unroll
  for (int d = 16; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  if ((threadIdx.x & 31) == 0) found[threadIdx.x >> 5] = largest;
  __syncthreads();
  for (int w = 0; w < blockDim.x >> 5; w++) largest = fmaxf(largest, found[w]);
  const float scale = fmaxf(largest/448.f, 1e-12f), inverse = 1.f/scale;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  #pragma unroll
  for (int j = 0; j < KEPT; j++) {
    const int i = threadIdx.x + j*blockDim.x;
    if (i < vectors) out[i] = rounded(kept[j], inverse);
  }
  for (int i = rest; i < vectors; i += blockDim.x) out[i] = rounded(row[i], inverse);
}
