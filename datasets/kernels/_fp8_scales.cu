// Scales sums of fp8 products in place: out[row, feature] *= inputs[row] * features[feature], and adds a
// bias. A thread has eight features of a row; `parts` are a row's groups of eight.
typedef unsigned int u32;
#define DEV __device__ __forceinline__
DEV float low(u32 v) { return __uint_as_float(v << 16); }
DEV float high(u32 v) { return __uint_as_float(v & 0xffff0000); }
DEV u32 both(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
DEV u32 scaled(u32 v, float a, float b, u32 bias) { return both(fmaf(low(v), a, low(bias)), fmaf(high(v), b, high(bias))); }

extern "C" __global__ void __launch_bounds__(256) fp8_scales(
    uint4* __restrict__ out, const float* __restrict__ inputs, const float4* __restrict__ features,
    const uint4* __restrict__ bias, int rows, int parts) {
  const int part = blockIdx.x*blockDim.x + threadIdx.x, row = blockIdx.y;
  if (part >= parts) return;
  const float s = inputs[row];
  const float4 a = features[2*part], b = features[2*part + 1];
  const uint4 add = bias ? bias[part] : make_uint4(0, 0, 0, 0);
  uint4* at = out + (size_t)row*parts + part;
  const uint4 v = *at;
  *at = make_uint4(scaled(v.x, s*a.x, s*a.y, add.x), scaled(v.y, s*a.z, s*a.w, add.y),
                   scaled(v.z, s*b.x, s*b.y, add.z), scaled(v.w, s*b.z, s*b.w, add.w));
}
