// What a decoder does to rows beside its products, each in one launch: rotation, gated activation,
// norm, and writing new keys and values into a cache of 16 or of 8 bits. A thread has eight
// neighbouring bf16 values, 16 bytes, and computes in fp32; a result is rounded once. Steps (strides)
// are in elements.
typedef unsigned int u32;
typedef unsigned short u16;
#define DEV __device__ __forceinline__
#define EXPORT extern "C" __global__ void
DEV float low(u32 v) { return __uint_as_float(v << 16); }
DEV float high(u32 v) { return __uint_as_float(v & 0xffff0000); }
DEV u32 pair(float first, float second) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first)); return r; }
DEV void wide(uint4 v, float* f) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  #pragma unroll
  for (int e = 0; e < 4; e++) { f[2*e] = low(w[e]); f[2*e + 1] = high(w[e]); }
}
DEV uint4 narrow(const float* f) { return make_uint4(pair(f[0], f[1]), pair(f[2], f[3]), pair(f[4], f[5]), pair(f[6], f[7])); }
DEV uint4 read(const u16* p) { return *(const uint4*)p; }

// x[batch, tokens, heads, D] turned by cosine and sine [tokens, D]; `half` = D/16 groups of eight.
EXPORT rotated(const u16* __restrict__ x, const u16* __restrict__ cosine, const u16* __restrict__ sine, u16* __restrict__ out,
               int count, int tokens, int heads, int half, int batchstep, int tokenstep, int headstep, int turnstep) {
  const int at = blockIdx.x*blockDim.x + threadIdx.x;
  if (at >= count) return;
  const int part = at % half, head = at/half % heads, row = at/half/heads, token = row % tokens;
  const u16* from = x + (size_t)(row/tokens)*batchstep + (size_t)token*tokenstep + (size_t)head*headstep + 8*part;
  u16* to = out + ((size_t)row*heads + head)*16*half + 8*part;
  const u16* c = cosine + (size_t)token*turnstep + 8*part;
  const u16* s = sine + (size_t)token*turnstep + 8*part;
  float a[8], b[8], ca[8], cb[8], sa[8], sb[8], first[8], second[8];
  wide(read(from), a); wide(read(from + 8*half), b);
  wide(read(c), ca); wide(read(c + 8*half), cb); wide(read(s), sa); wide(read(s + 8*half), sb);
  #pragma unroll
  for (int e = 0; e < 8; e++) { first[e] = a[e]*ca[e] - b[e]*sa[e]; second[e] = b[e]*cb[e] + a[e]*sb[e]; }
  *(uint4*)to = narrow(first); *(uint4*)(to + 8*half) = narrow(second);
}

// KIND 0: silu(gate) * up; 1: gelu(gate) * up, by tanh; 2: gpt-oss's, clamped to `limit`.
template <int KIND> DEV void gated(const u16* gate, const u16* up, u16* out, int count, int columns, int gatestep, int upstep, float limit, float steepness) {
  const int at = blockIdx.x*blockDim.x + threadIdx.x;
  if (at >= count) return;
  const int row = at/columns, column = 8*(at % columns);
  float g[8], u[8];
  wide(read(gate + (size_t)row*gatestep + column), g); wide(read(up + (size_t)row*upstep + column), u);
  #pragma unroll
  for (int e = 0; e < 8; e++) {
    float v = g[e];
    if (KIND == 0) v = v/(1.f + __expf(-v));
    if (KIND == 1) v = v - v/(1.f + __expf(1.5957691216057308f*(v + 0.044715f*v*v*v)));
    if (KIND == 2) { v = fminf(v, limit); v = v/(1.f + __expf(-steepness*v)); u[e] = fminf(fmaxf(u[e], -limit), limit) + 1.f; }
    g[e] = v*u[e];
  }
  *(uint4*)(out + (size_t)at*8) = narrow(g);
}
#define GATED(NAME, KIND) EXPORT NAME(const u16* __restrict__ gate, const u16* __restrict__ up, u16* __restrict__ out, \
    int count, int columns, int gatestep, int upstep, double limit, double steepness) { \
  gated<KIND>(gate, up, out, count, columns, gatestep, upstep, limit, steepness); }
GATED(silu_gated, 0)
GATED(gelu_gated, 1)
GATED(clamped_gated, 2)

// x / sqrt(mean(x^2) + eps) * weight. blockDim.x threads have a row of at most 8 * KEPT columns each: a
// warp one of several of a block, or a whole block one. `inner` rows lie innerstep apart, those groups
// step.
constexpr int KEPT = 4;
EXPORT __launch_bounds__(1024) rms_rows(const u16* __restrict__ x, const u16* __restrict__ weight, u16* __restrict__ out,
                                         int rows, int columns, int inner, int step, int innerstep, double eps) {
  __shared__ float found[32];
  const int at = blockIdx.x*blockDim.y + threadIdx.y;
  if (at >= rows) return;
  const u16* row = x + (size_t)(at/inner)*step + (size_t)(at % inner)*innerstep;
  uint4 kept[KEPT];
  float f[8], sum = 0.f;
  #pragma unroll
  for (int j = 0; j < KEPT; j++) {
    const int column = 8*(threadIdx.x + j*blockDim.x);
    if (column >= columns) break;
    kept[j] = read(row + column);
  }
  #pragma unroll
  for (int j = 0; j < KEPT; j++) {
    if (8*(threadIdx.x + j*blockDim.x) >= columns) break;
    wide(kept[j], f);
    #pragma unroll
    for (int e = 0; e < 8; e++) sum = fmaf(f[e], f[e], sum);
  }
  #pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (blockDim.x > 32) {
    if ((threadIdx.x & 31) == 0) found[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0.f;
    for (int w = 0; w < blockDim.x >> 5; w++) sum += found[w];
  }
  const float scale = rsqrtf(sum/columns + (float)eps);
  #pragma unroll
  for (int j = 0; j < KEPT; j++) {
    const int column = 8*(threadIdx.x + j*blockDim.x);
    if (column >= columns) break;
    float w[8];
    wide(kept[j], f); wide(read(weight + column), w);
    #pragma unroll
    for (int e = 0; e < 8; e++) f[e] *= scale*w[e];
    *(uint4*)(out + (size_t)at*columns + column) = narrow(f);
  }
}

// Rows [batch, tokens, groups, D] into [batch, groups, position + token, D]; `lanes` of a warp a row, a
// power of two, keys by blockIdx.y 0, values by 1. `rowstep`s are of the cache, in rows.
struct Place { size_t from, to; };
DEV Place place(int row, int tokens, int groups, int batchstep, int tokenstep, int headstep, int batchrows, int headrows, int position) {
  const int group = row % groups, token = row/groups % tokens, batch = row/groups/tokens;
  return {(size_t)batch*batchstep + (size_t)token*tokenstep + (size_t)group*headstep,
          (size_t)batch*batchrows + (size_t)group*headrows + position + token};
}
EXPORT copied_rows(const u16* __restrict__ k, const u16* __restrict__ v, u16* __restrict__ cachek, u16* __restrict__ cachev, int lanes, int rows,
                   int tokens, int groups, int features, int batchstep, int tokenstep, int headstep, int batchstepv, int tokenstepv, int headstepv,
                   int batchrows, int headrows, int position) {
  const int row = (blockIdx.x*blockDim.x + threadIdx.x)/lanes, lane = threadIdx.x & (lanes - 1);
  if (row >= rows) return;
  const bool values = blockIdx.y;
  const Place at = place(row, tokens, groups, values ? batchstepv : batchstep, values ? tokenstepv : tokenstep, values ? headstepv : headstep, batchrows, headrows, position);
  for (int f = 8*lane; f < features; f += 8*lanes) *(uint4*)((values ? cachev : cachek) + at.to*features + f) = read((values ? v : k) + at.from + f);
}
// The largest magnitude over 127, rounded to bf16, is the scale; as QuantisedCache.write has it. A NaN
// counts as infinitely large: what is read back is NaN.
EXPORT quantised_rows(const u16* __restrict__ k, const u16* __restrict__ v, unsigned char* __restrict__ cachek, unsigned char* __restrict__ cachev,
                      u16* __restrict__ scalek, u16* __restrict__ scalev, int lanes, int rows, int tokens, int groups, int features,
                      int batchstep, int tokenstep, int headstep, int batchstepv, int tokenstepv, int headstepv,
                      int batchrows, int headrows, int position) {
  // All lanes of a warp take part in finding the largest: those behind the last row have it again.
  const int row = min((int)(blockIdx.x*blockDim.x + threadIdx.x)/lanes, rows - 1), lane = threadIdx.x & (lanes - 1);
  const bool values = blockIdx.y;
  const Place at = place(row, tokens, groups, values ? batchstepv : batchstep, values ? tokenstepv : tokenstep, values ? headstepv : headstep, batchrows, headrows, position);
  const u16* from = (values ? v : k) + at.from;
  float f[8], largest = 0.f;
  for (int c = 8*lane; c < features; c += 8*lanes) {
    wide(read(from + c), f);
    #pragma unroll
    for (int e = 0; e < 8; e++) largest = fmaxf(largest, f[e] == f[e] ? fabsf(f[e]) : __int_as_float(0x7f800000));
  }
  for (int d = lanes/2; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  const u32 scale = pair(__fdiv_rn(largest, 127.f), 0.f) & 0xffff;
  const float step = fmaxf(low(scale), 1.1754943508222875e-38f);
  if (lane == 0) (values ? scalev : scalek)[at.to] = scale;
  for (int c = 8*lane; c < features; c += 8*lanes) {
    wide(read(from + c), f);
    u32 codes[2] = {0, 0};
    #pragma unroll
    for (int e = 0; e < 8; e++) {
      const int code = max(-127, min(127, __float2int_rn(__fdiv_rn(f[e], step))));
      codes[e/4] |= (u32)(code & 255) << (8*(e % 4));
    }
    *(uint2*)((values ? cachev : cachek) + at.to*features + c) = make_uint2(codes[0], codes[1]);
  }
}
