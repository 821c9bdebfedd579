// Rounds the rows of a bf16 matrix to fp8 (e4m3), each scaled to its largest magnitude. One block a
// row, which reads it twice, the second time from L1 or L2. `vectors` are the row's groups of eight
// values, `stride` those from one row to the next. A NaN counts as infinitely large: the scale and
// the row's products show it. Instructions of compute capability 8.9, as products of fp8 need.
typedef unsigned int u32;
typedef unsigned short u16;
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000); }
__device__ __forceinline__ float magnitude(float v) { return v == v ? fabsf(v) : __int_as_float(0x7f800000); }
__device__ __forceinline__ u32 fp8(float a, float b) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
  return r;
}

extern "C" __global__ void __launch_bounds__(1024) fp8_rows(
    const uint4* __restrict__ x, uint2* __restrict__ values, float* __restrict__ scales, int vectors, int stride) {
  __shared__ float found[32];
  const uint4* row = x + (size_t)blockIdx.x*stride;
  uint2* out = values + (size_t)blockIdx.x*vectors;
  float largest = 0.f;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const uint4 v = row[i];
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int j = 0; j < 4; j++) largest = fmaxf(largest, fmaxf(magnitude(low(w[j])), magnitude(high(w[j]))));
  }
  #pragma unroll
  for (int d = 16; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  if ((threadIdx.x & 31) == 0) found[threadIdx.x >> 5] = largest;
  __syncthreads();
  for (int w = 0; w < blockDim.x >> 5; w++) largest = fmaxf(largest, found[w]);
  const float scale = fmaxf(largest/448.f, 1e-12f), inverse = 1.f/scale;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const uint4 v = row[i];
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    u32 r[4];
    #pragma unroll
    for (int j = 0; j < 4; j++) r[j] = fp8(low(w[j])*inverse, high(w[j])*inverse);
    out[i] = make_uint2(r[0] | r[1] << 16, r[2] | r[3] << 16);
  }
}
