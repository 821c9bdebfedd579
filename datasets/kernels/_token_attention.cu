// Attention of one new token a sequence over its cache, up to 8 heads that share keys a block.
//
// Scores are taken the other way round, keys times queries, so that heads fill the tensor cores'
// eight columns and none of the sixteen rows is empty. Keys and values go from memory to registers
// as they lie, 16 bytes (of 8-bit caches 8) a lane: the order of a sum over features is free, so
// lanes multiply the features that they have read; of values two rows are put together, key by key,
// by byte permutations. Softmax is done as keys come, in powers of two; each warp has sums of its
// own, which are added up in a fixed order. With `parts` above 1 each of them takes a share of the
// keys, and COMBINE adds up what they leave in `sums` and `norms`.
//
// Defined by the caller: D (features of a head, a multiple of 32, at most 256), BITS (of the cache:
// 16, 8), WARPS, SHARES (most parts), NAME, COMBINE.
typedef unsigned int u32;
typedef unsigned short u16;
#define DEV __device__ __forceinline__
constexpr int STEP = 16, CHUNKS = (D + 63)/64, TILES = CHUNKS*4;
constexpr float LOG2E = 1.4426950408889634f;
#define NONE __int_as_float(0xff800000)
DEV float bf(u16 v) { return __uint_as_float((u32)v << 16); }
DEV u32 pair(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEV u32 turned(u32 v) { u32 r; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }
DEV float power(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
DEV void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }
// Bytes 0 and 2, signed, as bf16: the low seven bits become 128 + low, the sign 128 or 256.
DEV u32 wide(u32 v) {
  u32 low, sign, r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(low) : "r"(v), "r"(0x007f007f), "r"(0x43004300));
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(sign) : "r"(v), "r"(0x00800080), "r"(0x43004300));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(sign), "r"(0xbf80bf80), "r"(low));
  return r;
}
#if BITS == 16
typedef uint4 Read;
#else
typedef uint2 Read;
#endif
// Eight neighbouring features of a key; of 8 bits as the pairs 0 2, 1 3, 4 6, 5 7.
DEV void features(Read v, u32* f) {
#if BITS == 16
  f[0] = v.x; f[1] = v.y; f[2] = v.z; f[3] = v.w;
#else
  f[0] = wide(v.x); f[1] = wide(v.x >> 8); f[2] = wide(v.y); f[3] = wide(v.y >> 8);
#endif
}
// Feature j of eight, of two keys.
DEV u32 both(Read first, Read second, int j) {
#if BITS == 16
  const u32 a = j < 4 ? (j < 2 ? first.x : first.y) : (j < 6 ? first.z : first.w);
  const u32 b = j < 4 ? (j < 2 ? second.x : second.y) : (j < 6 ? second.z : second.w);
  return __byte_perm(a, b, j & 1 ? 0x7632 : 0x5410);
#else
  const u32 two = __byte_perm(j < 4 ? first.x : first.y, j < 4 ? second.x : second.y, j & 2 ? 0x7632 : 0x5410);
  return wide(j & 1 ? two >> 8 : two);
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS*32) NAME(
    const u16* __restrict__ queries, const unsigned char* __restrict__ keys, const unsigned char* __restrict__ values,
    const u16* __restrict__ keyscales, const u16* __restrict__ valuescales, const float* __restrict__ sinks,
    u16* __restrict__ out, float* __restrict__ sums, float2* __restrict__ norms, int shared, int count, int parts,
    int querystride, int headstride, int batchrows, int headrows, double queryscale, double highest_score) {
  __shared__ float4 left[WARPS > 1 ? WARPS/2 : 1][TILES][32];
  __shared__ float most[WARPS][8], total[WARPS][8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, i = lane >> 2, j = lane & 3;
  const int tiles = (shared + 7)/8, group = blockIdx.y/tiles, head0 = (blockIdx.y % tiles)*8;
  const int heads = min(8, shared - head0), part = blockIdx.x;
  const int steps = (count + STEP - 1)/STEP, from = steps*part/parts, to = steps*(part + 1)/parts;
  constexpr int VALUE = BITS/8, ROW = D*VALUE;
  const size_t row0 = (size_t)blockIdx.z*batchrows + (size_t)group*headrows;
  keys += row0*ROW; values += row0*ROW;
  if (BITS == 8) { keyscales += row0; valuescales += row0; }
  const float scale = queryscale, cap = highest_score;
  const int head = group*shared + head0;  // the first of the block

  u32 query[D/32][4];
  const u16* of = queries + (size_t)blockIdx.z*querystride + (size_t)(head + min(i, heads - 1))*headstride;
  #pragma unroll
  for (int c = 0; c < D/32; c++) {
    const uint4 v = *(const uint4*)(of + 32*c + 8*j);
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int e = 0; e < 4; e++) query[c][e] = w[e];
#if BITS == 8
    #pragma unroll
    for (int e = 0; e < 4; e += 2) {
      query[c][e] = __byte_perm(w[e], w[e + 1], 0x5410);
      query[c][e + 1] = __byte_perm(w[e], w[e + 1], 0x7632);
    }
#endif
  }
  float acc[TILES][4], largest[2] = {NONE, NONE}, norm[2] = {0.f, 0.f};
  #pragma unroll
  for (int t = 0; t < TILES; t++)
    #pragma unroll
    for (int e = 0; e < 4; e++) acc[t][e] = 0.f;

  for (int step = from + warp; step < to; step += WARPS) {
    const int key = step*STEP, last = count - 1;
    Read k[D/32][2], v[CHUNKS][4];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned char* row = keys + (size_t)min(key + 8*half + i, last)*ROW;
      #pragma unroll
      for (int c = 0; c < D/32; c++) k[c][half] = __ldcs((const Read*)(row + (32*c + 8*j)*VALUE));
    }
    float keyscale[2] = {1.f, 1.f}, valuescale[2] = {1.f, 1.f};
    if (BITS == 8) {
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int at = min(key + 8*half + i, last);
        keyscale[half] = bf(keyscales[at]); valuescale[half] = bf(valuescales[at]);
      }
    }
    auto read_values = [&](int c) {
      #pragma unroll
      for (int r = 0; r < 4; r++) {
        const int at = min(key + 2*j + (r & 1) + 8*(r >> 1), last);
        // Of a last chunk of 32 features half of the lanes have none: what they read is not stored.
        v[c][r] = __ldcs((const Read*)(values + (size_t)at*ROW + min(64*c + 8*i, D - 8)*VALUE));
      }
    };
    constexpr int EARLY = D*BITS <= 128*16 ? CHUNKS : 0;  // as registers last
    #pragma unroll
    for (int c = 0; c < EARLY; c++) read_values(c);
    float score[4] = {0.f, 0.f, 0.f, 0.f};
    #pragma unroll
    for (int c = 0; c < D/32; c++) {
      u32 first[4], second[4];
      features(k[c][0], first); features(k[c][1], second);
      mma(score, first[0], second[0], first[1], second[1], query[c][0], query[c][1]);
      mma(score, first[2], second[2], first[3], second[3], query[c][2], query[c][3]);
    }
    #pragma unroll
    for (int c = EARLY; c < CHUNKS; c++) read_values(c);
    // score: key i of heads 2j and 2j + 1, then key i + 8.
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      float s = score[e]*scale*keyscale[e >> 1];
      if (cap > 0.f) s = cap*(1.f - 2.f/(1.f + power(2.f*LOG2E/cap*s)));
      score[e] = key + 8*(e >> 1) + i < count ? s*LOG2E : NONE;
    }
    float share[4];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float found = fmaxf(largest[h], fmaxf(score[h], score[h + 2]));
      #pragma unroll
      for (int d = 4; d < 32; d *= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, d));
      const float less = power(largest[h] - found);
      largest[h] = found;
      share[h] = power(score[h] - found); share[h + 2] = power(score[h + 2] - found);
      norm[h] = norm[h]*less + share[h] + share[h + 2];
      #pragma unroll
      for (int t = 0; t < TILES; t++) { acc[t][h] *= less; acc[t][h + 2] *= less; }
    }
    const u32 b0 = turned(pair(share[0]*valuescale[0], share[1]*valuescale[0]));
    const u32 b1 = turned(pair(share[2]*valuescale[1], share[3]*valuescale[1]));
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
      const Read* r = v[t/4];
      const int e = 2*(t % 4);
      mma(acc[t], both(r[0], r[1], e), both(r[0], r[1], e + 1), both(r[2], r[3], e), both(r[2], r[3], e + 1), b0, b1);
    }
  }

  #pragma unroll
  for (int h = 0; h < 2; h++) {
    #pragma unroll
    for (int d = 4; d < 32; d *= 2) norm[h] += __shfl_xor_sync(~0u, norm[h], d);
    if (i == 0) { most[warp][2*j + h] = largest[h]; total[warp][2*j + h] = norm[h]; }
  }
  __syncthreads();
  float highest[2], whole[2] = {0.f, 0.f};
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    highest[h] = NONE;
    for (int w = 0; w < WARPS; w++) highest[h] = fmaxf(highest[h], most[w][2*j + h]);
    for (int w = 0; w < WARPS; w++) whole[h] += total[w][2*j + h]*power(most[w][2*j + h] - highest[h]);
    const float less = power(largest[h] - highest[h]);
    #pragma unroll
    for (int t = 0; t < TILES; t++) { acc[t][h] *= less; acc[t][h + 2] *= less; }
  }
  #pragma unroll
  for (int half = WARPS/2; half; half /= 2) {
    if (warp >= half && warp < 2*half)
      for (int t = 0; t < TILES; t++) left[warp - half][t][lane] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
    __syncthreads();
    if (warp < half)
      for (int t = 0; t < TILES; t++) {
        const float4 o = left[warp][t][lane];
        acc[t][0] += o.x; acc[t][1] += o.y; acc[t][2] += o.z; acc[t][3] += o.w;
      }
    __syncthreads();
  }
  if (warp) return;
  // acc[t]: features 64 (t / 4) + 8i + 2 (t % 4) and one more, of heads 2j and 2j + 1.
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    if (2*j + h >= heads) continue;
    const size_t row = (size_t)blockIdx.z*gridDim.y/tiles*shared + head + 2*j + h;
    if (parts > 1) {
      const size_t at = (size_t)part*gridDim.z*(gridDim.y/tiles)*shared + row;
      if (i == 0) norms[at] = make_float2(highest[h], whole[h]);
      #pragma unroll
      for (int t = 0; t < TILES; t++)
        if (D % 64 == 0 || 64*(t/4) + 8*i < D) *(float2*)(sums + at*D + 64*(t/4) + 8*i + 2*(t % 4)) = make_float2(acc[t][h], acc[t][h + 2]);
      continue;
    }
    float inverse = 1.f;
    if (sinks) {
      const float sink = sinks[head + 2*j + h]*LOG2E, top = fmaxf(sink, highest[h]);
      inverse = power(highest[h] - top);
      whole[h] = whole[h]*inverse + power(sink - top);
    }
    inverse /= whole[h];
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (D % 64 && 64*c + 8*i >= D) continue;
      u32 w[4];
      #pragma unroll
      for (int e = 0; e < 4; e++) w[e] = pair(acc[4*c + e][h]*inverse, acc[4*c + e][h + 2]*inverse);
      *(uint4*)(out + row*D + 64*c + 8*i) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// One block a head and sequence, one thread a pair of features; at most SHARES parts.
extern "C" __global__ void __launch_bounds__(D/2) COMBINE(
    const float* __restrict__ sums, const float2* __restrict__ norms, const float* __restrict__ sinks,
    u16* __restrict__ out, int heads, int rows, int parts) {
  __shared__ float factor[SHARES];
  const int row = blockIdx.x, at = 2*threadIdx.x;
  const float sink = sinks ? sinks[row % heads]*LOG2E : NONE;
  float most = sink;
  #pragma unroll 8
  for (int p = 0; p < parts; p++) most = fmaxf(most, norms[p*rows + row].x);
  for (int p = threadIdx.x; p < parts; p += D/2) factor[p] = power(norms[p*rows + row].x - most);
  __syncthreads();
  float whole = sinks ? power(sink - most) : 0.f, low = 0.f, high = 0.f;
  #pragma unroll 8
  for (int p = 0; p < parts; p++) {
    const float2 v = *(const float2*)(sums + ((size_t)p*rows + row)*D + at);
    whole += norms[p*rows + row].y*factor[p]; low += v.x*factor[p]; high += v.y*factor[p];
  }
  *(u32*)(out + (size_t)row*D + at) = pair(low/whole, high/whole);
}
