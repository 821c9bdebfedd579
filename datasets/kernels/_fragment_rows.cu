// x[rows, k] times the transpose of a weight of int4 or int8 fragments (see _fragment_linear.py), for
// tens of rows and more, by the matrix instructions of compute capability 9.0 (wgmma).
//
// A block has R rows and F features, of which each warp has tiles of 16. Their values become bf16 in
// the registers that the instruction reads, once for all rows of the block: 0x4300 | q is 128 + q.
// Those of 4 bits are scaled there, as where a weight is written out, those of 8 at the end. KW
// groups of warps take 64 inputs in turn, and MW share them. Inputs lie in shared memory in the order
// that fragments have: word I of a row's 32 is I = (t, step, half), and the instruction wants
// (step, half, t); 16-byte words of row r stand at their place xor r % 8, its swizzle of 128 bytes.
//
// A cluster of SPLIT blocks shares the inputs of its rows and features, and sums what they found:
// few blocks that each take all of a row would read all rows from L2 as often as there are blocks.
//
// Defined by the caller: BITS (4, 8), NB (1 or 2 times 64 rows), MT (tiles of 64 features a group), MW, KW,
// SPLIT, NAME.
#define DEV __device__ __forceinline__
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
constexpr int F = MW*MT*64, R = NB*64, VEC = BITS/4, WARPS = MW*KW*4;
constexpr u32 MINUS_ONE = 0xbf80bf80;
// 16-byte words: inputs of a step, fragments of a stage, and its scales with zeros.
constexpr int INPUTS = KW*R*8, WEIGHTS = WARPS*MT*VEC*32, SCALES = BITS == 4 ? WARPS*MT*4 : 0;
constexpr int STAGE = WEIGHTS + SCALES;
DEV u32 lop(u32 a, u32 m, u32 o){ u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(m), "r"(o)); return r; }
DEV u32 fma2(u32 a, u32 b, u32 c){ u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DEV u32 place(const void* p){ return (u32)__cvta_generic_to_shared(p); }
DEV void fetch16(void* to, const void* from){ asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place(to)), "l"(from)); }
DEV void fetch8(void* to, const void* from){ asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(place(to)), "l"(from)); }
#define EIGHT(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3]), "+f"((c)[4]), "+f"((c)[5]), "+f"((c)[6]), "+f"((c)[7])
#define TILE(c) EIGHT(c), EIGHT((c) + 8), EIGHT((c) + 16), EIGHT((c) + 24)
#define FIRST "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SECOND "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ALWAYS "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned."
DEV void wgmma(float (&c)[1][32], const u32* a, u64 b){
  asm volatile(ALWAYS "m64n64k16.f32.bf16.bf16 {" FIRST "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
   : TILE(c[0]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); }
DEV void wgmma(float (&c)[2][32], const u32* a, u64 b){
  asm volatile(ALWAYS "m64n128k16.f32.bf16.bf16 {" FIRST ", " SECOND "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
   : TILE(c[0]), TILE(c[1]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); }
DEV float bf(u16 v){ return __uint_as_float(((u32)v)<<16); }
DEV u16 tobf(float f){ u32 u=__float_as_uint(f); if((u&0x7fffffff)>0x7f800000) return 0x7fff; u += 0x7fff + ((u>>16)&1); return (u16)(u>>16); }
DEV void arrive(){ asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEV float4 of_block(u32 at, int block){
  u32 there; float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there));
  return v; }
extern "C" __global__ void __cluster_dims__(1, 1, SPLIT) __launch_bounds__(WARPS*32) NAME(
    const u16* __restrict__ x, const uint4* __restrict__ w, const uint2* __restrict__ sz, const u16* __restrict__ rowscale,
    u16* __restrict__ out, const u16* __restrict__ bias, int rows, int n, int k) {
  extern __shared__ __align__(1024) uint4 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kw = (warp >> 2) % KW, mw = (warp >> 2)/KW;
  const int gr = lane >> 2, t = lane & 3, all = k / 64;
  const int begin = all*(int)blockIdx.z/SPLIT, groups = all*((int)blockIdx.z + 1)/SPLIT - begin;
  const int steps = (groups + KW - 1)/KW, mine = (groups + KW - 1 - kw)/KW;
  const int first = blockIdx.x*R, tiles = n / 16, tile0 = (blockIdx.y*MW + mw)*MT*4 + (warp & 3);
  // Where this thread takes from, moved on every four steps, and where it puts what it takes: what
  // depends on a step's place among the four alone is a constant of an instruction.
  uint4* fragments = shared + 2*INPUTS + warp*MT*VEC*32 + lane;
  uint2* scales = (uint2*)(shared + 2*INPUTS + WEIGHTS) + warp*MT*8 + gr;
  const uint4* weight[MT]; const uint2* scale[MT];
  #pragma unroll
  for (int a = 0; a < MT; a++) {
    const size_t at = (size_t)min(tile0 + a*4, tiles - 1)*all + begin + kw;
    weight[a] = w + at*VEC*32 + lane;
    scale[a] = sz + at*8 + gr;
  }
  // Eight threads take the 128 bytes of a row's group.
  constexpr int PASS = WARPS*4, PARTS = (R + PASS - 1)/PASS;
  const int word = threadIdx.x & 7, row = threadIdx.x >> 3;
  const u16* from[PARTS]; u32* to[4];
  #pragma unroll
  for (int p = 0; p < PARTS; p++) from[p] = x + (size_t)min(first + row + p*PASS, rows - 1)*k + begin*64 + word*8;
  #pragma unroll
  for (int i = 0; i < 4; i++) to[i] = (u32*)shared + row*32 + (((word & 1)*4 + i) ^ (row & 7))*4 + (word >> 1);
  auto load = [&](uint4* taken, int ahead, int step) {
    #pragma unroll
    for (int s = 0; s < KW; s++)
      if (step*KW + s < groups) {
        #pragma unroll
        for (int p = 0; p < PARTS; p++)
          if (R % PASS == 0 || row + p*PASS < R) taken[s*PARTS + p] = __ldg((const uint4*)(from[p] + (ahead*KW + s)*64));
      }
  };
  auto store = [&](const uint4* taken, int buffer, int step) {
    #pragma unroll
    for (int s = 0; s < KW; s++)
      if (step*KW + s < groups) {
        #pragma unroll
        for (int p = 0; p < PARTS; p++)
          if (R % PASS == 0 || row + p*PASS < R) {
            const int at = buffer*INPUTS*4 + (s*R + p*PASS)*32;
            const uint4 v = taken[s*PARTS + p];
            to[0][at] = v.x; to[1][at] = v.y; to[2][at] = v.z; to[3][at] = v.w;
          }
      }
  };
  auto fetch = [&](int stage, int ahead, int step) {
    if (step < mine) {
      #pragma unroll
      for (int a = 0; a < MT; a++) {
        #pragma unroll
        for (int v = 0; v < VEC; v++) fetch16(fragments + stage*STAGE + (a*VEC + v)*32, weight[a] + (ahead*KW*VEC + v)*32);
        if (BITS == 4 && t == 0) fetch8(scales + stage*STAGE*2 + a*8, scale[a] + ahead*KW*8);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  auto unpack = [&](u32 (&f)[MT][4][4], int stage, int step) {
    if (step >= mine) return;
    #pragma unroll
    for (int a = 0; a < MT; a++) {
      const uint4* at = fragments + stage*STAGE + a*VEC*32;
      if (BITS == 4) {
        const uint4 q = at[0]; const uint2 both = scales[stage*STAGE*2 + a*8];
        const u32 words[4] = {q.x, q.y, q.z, q.w};
        const u32 s[2] = {__byte_perm(both.x, 0, 0x1010), __byte_perm(both.y, 0, 0x1010)};
        const u32 z[2] = {__byte_perm(both.x, 0, 0x3232), __byte_perm(both.y, 0, 0x3232)};
        #pragma unroll
        for (int j = 0; j < 16; j++)
          f[a][j/4][j & 3] = fma2(fma2(0x43084308, MINUS_ONE, lop(words[j/4] >> (4*(j & 3)), 0x000f000f, 0x43004300)), s[j & 1], z[j & 1]);
      } else {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4 q = at[h*32];
          const u32 words[4] = {q.x, q.y, q.z, q.w};
          #pragma unroll
          for (int j = 0; j < 8; j++) {
            const u32 v = words[j/2] >> (8*(j & 1));
            f[a][2*h + j/4][j & 3] = fma2(lop(v, 0x00800080, 0x43004300), MINUS_ONE, lop(v, 0x007f007f, 0x43004300));
          }
        }
      }
    }
  };
  float acc[MT][NB][32];
  #pragma unroll
  for (int a = 0; a < MT; a++)
    #pragma unroll
    for (int b = 0; b < NB; b++)
      #pragma unroll
      for (int c = 0; c < 32; c++) acc[a][b][c] = 0;
  // Of K-major operands swizzled by 128 bytes: eight rows are 1024 bytes, 16 inputs 32.
  const u64 operand = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((place(shared + kw*R*8) & 0x3ffff) >> 4);
  u32 f[2][MT][4][4]; uint4 taken[2][KW*PARTS];
  #pragma unroll
  for (int s = 0; s < 3; s++) fetch(s, s, s);
  load(taken[0], 0, 0);
  load(taken[1], 1, 1);
  asm volatile("cp.async.wait_group 2;" ::: "memory");
  __syncwarp();
  unpack(f[0], 0, 0);
  store(taken[0], 0, 0);
  load(taken[0], 2, 2);
  for (int step0 = 0; step0 < steps; step0 += 4) {
    #pragma unroll
    for (int d = 0; d < 4; d++) {
      const int step = step0 + d, next = (d + 1) & 1;
      if (step >= steps) break;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      if (step < mine) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int i = 0; i < 4; i++)
          #pragma unroll
          for (int a = 0; a < MT; a++) wgmma(acc[a], f[d & 1][a][i], operand + (d & 1)*INPUTS + i*2);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
      // Meanwhile the next step is made ready.
      fetch((d + 3) & 3, d + 3, step + 3);
      store(taken[next], next, step + 1);
      load(taken[next], d + 3, step + 3);
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      __syncwarp();  // a lane in four has fetched the scales
      unpack(f[next], (d + 1) & 3, step + 1);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    #pragma unroll
    for (int a = 0; a < MT; a++) { weight[a] += 4*KW*VEC*32; scale[a] += 4*KW*8; }
    #pragma unroll
    for (int p = 0; p < PARTS; p++) from[p] += 4*KW*64;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  float* sums = (float*)shared;
  #pragma unroll
  for (int half = KW/2; half > 0; half /= 2) {
    float* mine = sums + ((kw % half)*MW + mw)*MT*NB*4096 + (threadIdx.x & 127);
    if (kw >= half && kw < 2*half) {
      #pragma unroll
      for (int i = 0; i < MT*NB*32; i++) mine[i*128] = (&acc[0][0][0])[i];
    }
    __syncthreads();
    if (kw < half) {
      #pragma unroll
      for (int i = 0; i < MT*NB*32; i++) (&acc[0][0][0])[i] += mine[i*128];
    }
    __syncthreads();
  }
  if (kw == 0) {
    #pragma unroll
    for (int a = 0; a < MT; a++)
      #pragma unroll
      for (int b = 0; b < NB*8; b++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
          sums[(b*8 + 2*t + (i & 1))*(F + 4) + (mw*MT + a)*64 + (warp & 3)*16 + gr + (i >= 2 ? 8 : 0)] = acc[a][b/8][b%8*4 + i];
  }
  __syncthreads();
  const int here = min(R, rows - first), r0 = here*(int)blockIdx.z/SPLIT, r1 = here*((int)blockIdx.z + 1)/SPLIT;
  if (SPLIT > 1) arrive();
  for (int i = threadIdx.x; i < (r1 - r0)*F/4; i += WARPS*32) {
    const int r = r0 + i/(F/4), f = i%(F/4)*4, to = blockIdx.y*F + f;
    if (to >= n) continue;
    float4 v = *(const float4*)(sums + r*(F + 4) + f);
    #pragma unroll
    for (int j = 1; j < SPLIT; j++) {
      const float4 o = of_block(place(sums + r*(F + 4) + f), (blockIdx.z + j) % SPLIT);
      v.x += o.x; v.y += o.y; v.z += o.z; v.w += o.w;
    }
    float each[4] = {v.x, v.y, v.z, v.w}; u16 made[4];
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      if (BITS == 8) each[j] *= bf(rowscale[to + j]);
      if (bias) each[j] += bf(bias[to + j]);
      made[j] = tobf(each[j]);
    }
    *(uint2*)(out + (size_t)(first + r)*n + to) = make_uint2(made[0] | made[1] << 16, made[2] | made[3] << 16);
  }
  if (SPLIT > 1) arrive();  // what others read stays until they have it
}
