// x[rows, k] times the transpose of a weight of int4, int8, fp8 or bf16 values, for few rows (at most
// 8 * NT of a weight).
//
// A weight of bf16 lies row by row; a lane reads 16 inputs of two features. With FP8 two values of 8
// bits, of weight and inputs alike, stand where one of 16 would and k counts such pairs; as a product
// of fp8 takes its values from the same bytes, and the order of a sum is free, nothing else changes
// but the instruction and the scales of features and rows. Any other weight is stored as
// the fragments that mma.m16n8k16 takes (see _fragment_linear.py), so that a lane reads 16 bytes at
// a time and turns two values into bf16 by one logical operation: 0x4300 | q is 128 + q. With int4
// the excess of 128 is taken off by the sum of the inputs, which one more product with ones
// delivers. A byte's low seven bits become 128 + low, its sign 128 or 256, and one subtraction
// leaves the signed value. Accumulation is in fp32.
//
// With GROUPED the weights of several experts lie one behind another and so do their rows, of which
// expert e has those before ends[e]. Each expert's rows take as many blocks along y as they fill.
//
// Defined by the caller: BITS (4, 8, 16), FP8 (0; 1 with 16 bits), NT (tiles of 8 rows), MT (tiles of 16
// features a warp), KW (warps along the inputs), DEPTH (groups of 64 inputs in flight), GROUPED (0, 1),
// NAME, UNPACK.
#define DEV __device__ __forceinline__
typedef unsigned int u32;
typedef unsigned short u16;
DEV u32 lop(u32 a, u32 m, u32 o){ u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(m), "r"(o)); return r; }
// a - b; there is no such instruction before compute capability 9.0.
DEV u32 sub2(u32 a, u32 b){ u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(b), "r"(0xbf80bf80), "r"(a)); return r; }
#if FP8
#define PRODUCT "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
#else
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
DEV void mma(float* c, const u32* a, u32 b0, u32 b1){
  asm volatile(PRODUCT "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
   : "+f"(c[0]),"+f"(c[1]),"+f"(c[2]),"+f"(c[3]) : "r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"r"(b0),"r"(b1)); }
DEV void mma0(float* c, const u32* a, u32 b0, u32 b1){
  asm volatile(PRODUCT "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
   : "=f"(c[0]),"=f"(c[1]),"=f"(c[2]),"=f"(c[3]) : "r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"r"(b0),"r"(b1),"f"(0.f)); }
DEV float bf(u16 v){ return __uint_as_float(((u32)v)<<16); }
DEV u16 tobf(float f){ u32 u=__float_as_uint(f); if((u&0x7fffffff)>0x7f800000) return 0x7fff; u += 0x7fff + ((u>>16)&1); return (u16)(u>>16); }
constexpr int F = MT*16, R = NT*8, VEC = BITS/4;
// Partial sums of all warps at once, or of half of them, in the 48 KB of static shared memory.
constexpr int EACH = R*(F + 4)*4;
constexpr int SLOTS = KW*EACH <= 49152 ? KW : KW/2;
static_assert(SLOTS*EACH <= 49152, "sums of half of the warps do not fit");
extern "C" __global__ void __launch_bounds__(KW*32) NAME(
    const u16* __restrict__ x, const uint4* __restrict__ w, const uint2* __restrict__ sz, const u16* __restrict__ rowscale,
    u16* __restrict__ out, const u16* __restrict__ bias, int rows, int n, int k
#if FP8
    , const float* __restrict__ featurescale, const float* __restrict__ inputscale
#endif
#if GROUPED
    , const int* __restrict__ ends, int experts
#endif
    ) {
  __shared__ float sums[SLOTS][R][F + 4];
  const int lane = threadIdx.x & 31, kw = threadIdx.x >> 5;
  const int groups = k / 64, gr = lane >> 2, t = lane & 3;
#if GROUPED
  // Each warp finds the expert by itself: 32 at a time, by a sum over lanes of the blocks they take.
  int expert = -1, first = 0, left = blockIdx.y;
  for (int e0 = 0; e0 < experts && expert < 0; e0 += 32) {
    const int e = min(e0 + lane, experts - 1), end = ends[e], begin = e ? ends[e - 1] : 0;
    const int blocks = e0 + lane < experts ? (end - begin + R - 1)/R : 0;
    int upto = blocks;
    #pragma unroll
    for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, upto, d); if (lane >= d) upto += v; }
    const unsigned reached = __ballot_sync(~0u, upto > left);
    if (reached) {
      const int at = __ffs(reached) - 1;
      expert = e0 + at;
      first = __shfl_sync(~0u, begin, at) + (left - __shfl_sync(~0u, upto - blocks, at))*R;
      rows = min(R, __shfl_sync(~0u, end, at) - first);
    } else left -= __shfl_sync(~0u, upto, 31);
  }
  if (expert < 0) return;  // more blocks than rows fill
  x += (size_t)first*k; out += (size_t)first*n;
  w += (size_t)expert*(n/16)*groups*VEC*32;
  if (BITS == 4) sz += (size_t)expert*(n/16)*groups*8; else rowscale += (size_t)expert*n;
  if (bias) bias += (size_t)expert*n;
#if FP8
  featurescale += (size_t)expert*n; inputscale += first;
#endif
#endif
  const int g0 = groups*kw/KW, gn = groups*(kw + 1)/KW - g0;
  const int mtiles = n / 16, m0 = blockIdx.x*MT;
  float acc[MT][NT][4];
  #pragma unroll
  for (int a = 0; a < MT; a++)
    #pragma unroll
    for (int b = 0; b < NT; b++)
      #pragma unroll
      for (int c = 0; c < 4; c++) acc[a][b][c] = 0;
  uint4 q[DEPTH][MT][VEC], xf[DEPTH][NT][2]; uint2 s[DEPTH][MT];
  const u32 ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
  const uint4* base[MT]; const uint2* sbase[MT];
  #pragma unroll
  for (int a = 0; a < MT; a++) {
    const size_t tile = min(m0 + a, mtiles - 1), at = tile*groups + g0;
    base[a] = BITS == 16 ? w + ((tile*16 + gr)*k + g0*64 + t*16)/8 : w + at*VEC*32 + lane;
    sbase[a] = sz + at*8 + gr;
  }
  const u16* xbase[NT];
  #pragma unroll
  for (int b = 0; b < NT; b++) xbase[b] = x + (size_t)min(b*8 + gr, rows - 1)*k + g0*64 + t*16;
  auto weights = [&](int d, int g) {
    #pragma unroll
    for (int a = 0; a < MT; a++) {
      #pragma unroll
      for (int v = 0; v < VEC; v++) q[d][a][v] = __ldcs(base[a] + (BITS == 16 ? (v/2)*k + g*8 + v%2 : (g*VEC + v)*32));
      if (BITS == 4) s[d][a] = __ldcs(sbase[a] + g*8);
    }
  };
  auto inputs = [&](int d, int g) {
    #pragma unroll
    for (int b = 0; b < NT; b++) {
      const uint4* p = (const uint4*)(xbase[b] + g*64);
      xf[d][b][0] = __ldg(p); xf[d][b][1] = __ldg(p + 1);
    }
  };
  #pragma unroll
  for (int d = 0; d < DEPTH; d++) if (d < gn) weights(d, d);
  #pragma unroll
  for (int d = 0; d < DEPTH; d++) if (d < gn) inputs(d, d);
  for (int gb = 0; gb < gn; gb += DEPTH) {
    #pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      int g = gb + d; if (g >= gn) break;
      if (BITS == 4) {
        float su[NT][4];
        #pragma unroll
        for (int b = 0; b < NT; b++) {
          const u32* f = (const u32*)xf[d][b];
          mma0(su[b], ones, f[0], f[1]);
          #pragma unroll
          for (int kt = 1; kt < 4; kt++) mma(su[b], ones, f[2*kt], f[2*kt + 1]);
        }
        #pragma unroll
        for (int a = 0; a < MT; a++) {
          float c[NT][4];
          const u32* word = (const u32*)&q[d][a][0];
          #pragma unroll
          for (int kt = 0; kt < 4; kt++) {
            u32 f[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) f[j] = lop(word[kt] >> (4*j), 0x000f000f, 0x43004300);
            #pragma unroll
            for (int b = 0; b < NT; b++) {
              const u32* xx = (const u32*)xf[d][b];
              if (kt) mma(c[b], f, xx[2*kt], xx[2*kt + 1]); else mma0(c[b], f, xx[0], xx[1]);
            }
          }
          float s0 = __uint_as_float(s[d][a].x << 16), s1 = __uint_as_float(s[d][a].y << 16);
          float z0 = fmaf(-136.f, s0, __uint_as_float(s[d][a].x & 0xffff0000)), z1 = fmaf(-136.f, s1, __uint_as_float(s[d][a].y & 0xffff0000));
          #pragma unroll
          for (int b = 0; b < NT; b++)
            #pragma unroll
            for (int i = 0; i < 4; i++) acc[a][b][i] = fmaf(i < 2 ? s0 : s1, c[b][i], fmaf(i < 2 ? z0 : z1, su[b][i], acc[a][b][i]));
        }
      } else {
        #pragma unroll
        for (int a = 0; a < MT; a++) {
          const u32* word = (const u32*)&q[d][a][0];
          #pragma unroll
          for (int kt = 0; kt < 4; kt++) {
            u32 f[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
              if (BITS == 16) { f[j] = word[(j & 1)*8 + 2*kt + j/2]; continue; }
              u32 v = word[2*kt + j/2] >> (8*(j & 1));
              f[j] = sub2(lop(v, 0x007f007f, 0x43004300), lop(v, 0x00800080, 0x43004300));
            }
            #pragma unroll
            for (int b = 0; b < NT; b++) { const u32* xx = (const u32*)xf[d][b]; mma(acc[a][b], f, xx[2*kt], xx[2*kt + 1]); }
          }
        }
      }
      if (g + DEPTH < gn) weights(d, g + DEPTH);
      if (g + DEPTH < gn) inputs(d, g + DEPTH);
    }
  }
  #pragma unroll
  for (int half = KW; half > SLOTS; half /= 2) {
    if (kw >= half/2 && kw < half) {
      #pragma unroll
      for (int a = 0; a < MT; a++)
        #pragma unroll
        for (int b = 0; b < NT; b++)
          #pragma unroll
          for (int i = 0; i < 4; i++) sums[kw - half/2][b*8 + 2*t + (i & 1)][a*16 + gr + (i >= 2 ? 8 : 0)] = acc[a][b][i];
    }
    __syncthreads();
    if (kw < half/2) {
      #pragma unroll
      for (int a = 0; a < MT; a++)
        #pragma unroll
        for (int b = 0; b < NT; b++)
          #pragma unroll
          for (int i = 0; i < 4; i++) acc[a][b][i] += sums[kw][b*8 + 2*t + (i & 1)][a*16 + gr + (i >= 2 ? 8 : 0)];
    }
    __syncthreads();
  }
  if (kw < SLOTS) {
    #pragma unroll
    for (int a = 0; a < MT; a++)
      #pragma unroll
      for (int b = 0; b < NT; b++)
        #pragma unroll
        for (int i = 0; i < 4; i++) sums[kw][b*8 + 2*t + (i & 1)][a*16 + gr + (i >= 2 ? 8 : 0)] = acc[a][b][i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows*F; i += KW*32) {
    int r = i / F, f = i % F, to = blockIdx.x*F + f; float v = 0;
    if (to >= n) continue;
    #pragma unroll
    for (int j = 0; j < SLOTS; j++) v += sums[j][r][f];
    if (BITS == 8) v *= bf(rowscale[to]);
#if FP8
    v *= featurescale[to]*inputscale[r];
#endif
    if (bias) v += bf(bias[to]);
    out[(size_t)r*n + to] = tobf(v);
  }
}

// The weight in bf16, for many rows: one thread a lane's step of 16 inputs x 2 features.
extern "C" __global__ void UNPACK(const u32* __restrict__ w, const u32* __restrict__ sz,
                                  const u16* __restrict__ rowscale, u16* __restrict__ out, int n, int k) {
  const int groups = k / 64;
  const size_t i = (size_t)blockIdx.x*blockDim.x + threadIdx.x;
  if (i >= (size_t)n*k/8) return;
  const int kt = i & 3, lane = (i >> 2) & 31, gr = lane >> 2, t = lane & 3;
  const size_t tile = i >> 7, m = tile / groups, g = tile % groups;
  u32 packed[2];
  if (BITS == 4) packed[0] = w[i];
  else { const u32* p = w + ((tile*2 + kt/2)*32 + lane)*4 + 2*(kt & 1); packed[0] = p[0]; packed[1] = p[1]; }
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = m*16 + half*8 + gr;
    float s, z;
    if (BITS == 4) { u32 both = sz[(tile*8 + gr)*2 + half]; s = bf(both & 0xffff); z = __uint_as_float(both & 0xffff0000); }
    else { s = bf(rowscale[row]); z = 0; }
    u32 words[2];
    #pragma unroll
    for (int khalf = 0; khalf < 2; khalf++) {
      float v[2];
      #pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        int q;
        if (BITS == 4) q = (int)((packed[0] >> (4*(half + 2*khalf) + 16*pair)) & 15) - 8;
        else q = (signed char)(packed[khalf] >> (8*half + 16*pair));
        v[pair] = fmaf((float)q, s, z);
      }
      words[khalf] = tobf(v[0]) | ((u32)tobf(v[1]) << 16);
    }
    *(uint2*)(out + (size_t)row*k + g*64 + t*16 + kt*4) = make_uint2(words[0], words[1]);
  }
}
