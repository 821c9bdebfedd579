// Rows sorted by the expert that they chose, each expert's bias, and results added up again.
typedef unsigned int u32;
typedef unsigned short u16;
__device__ __forceinline__ float bf(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ u32 tobf(float f) {
  u32 u = __float_as_uint(f);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// One block, which takes CHUNKS times 1024 choices. Of choice i of `total`: places[i] is where its row
// lies in the order by expert, and rows[places[i]] the row. Choices of one expert keep their order:
// a warp counts those before each of its own, and warps are added up one after another.
extern "C" __global__ void __launch_bounds__(1024) sort_by_expert(
    const long long* __restrict__ chosen, long long* __restrict__ rows, long long* __restrict__ places,
    int* __restrict__ ends, int total, int active, int experts) {
  __shared__ u16 before[32][MOST_EXPERTS];
  __shared__ u16 counts[MOST_EXPERTS];
  __shared__ int sums[32];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  u16 mine[CHUNKS], nth[CHUNKS];
  for (int e = thread; e < experts; e += 1024) counts[e] = 0;
  #pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    if (c*1024 >= total) break;
    const int i = c*1024 + thread;
    mine[c] = i < total ? (u16)chosen[i] : 0xffff;
    for (int e = lane; e < experts; e += 32) before[warp][e] = 0;
    __syncwarp();
    const u32 alike = __match_any_sync(~0u, (u32)mine[c]);
    nth[c] = __popc(alike & ((1u << lane) - 1));
    if (nth[c] == 0 && i < total) before[warp][mine[c]] = __popc(alike);
    __syncthreads();
    for (int e = thread; e < experts; e += 1024) {
      int upto = counts[e];
      #pragma unroll
      for (int w = 0; w < 32; w++) { const int here = before[w][e]; before[w][e] = upto; upto += here; }
      counts[e] = upto;
    }
    __syncthreads();
    if (i < total) nth[c] += before[warp][mine[c]];
    __syncthreads();
  }
  // Ends are sums over experts, MOST_EXPERTS <= 1024 of them.
  int upto = thread < experts ? counts[thread] : 0;
  #pragma unroll
  for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, upto, d); if (lane >= d) upto += v; }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  if (warp == 0) {
    int all = sums[lane];
    #pragma unroll
    for (int d = 1; d < 32; d *= 2) { int v = __shfl_up_sync(~0u, all, d); if (lane >= d) all += v; }
    sums[lane] = all;
  }
  __syncthreads();
  if (warp) upto += sums[warp - 1];
  if (thread < experts) {
    ends[thread] = upto;
    before[0][thread] = upto - counts[thread];
  }
  __syncthreads();
  #pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int i = c*1024 + thread;
    if (i >= total) break;
    const int at = before[0][mine[c]] + nth[c];
    rows[at] = i / active;
    places[i] = at;
  }
}

// out[r] = the sum over a of share[r, a] * made[places[r, a]]; a thread takes 8 features of a row.
extern "C" __global__ void add_up(
    const uint4* __restrict__ made, const long long* __restrict__ places, const float* __restrict__ share,
    uint4* __restrict__ out, int active, int eighths) {
  const int at = blockIdx.y*blockDim.x + threadIdx.x;
  if (at >= eighths) return;
  const size_t row = blockIdx.x;
  float sum[8] = {};
  for (int a = 0; a < active; a++) {
    const float weight = share[row*active + a];
    const uint4 part = made[(size_t)places[row*active + a]*eighths + at];
    const u32 words[4] = {part.x, part.y, part.z, part.w};
    #pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = fmaf(weight, bf(i & 1 ? words[i/2] >> 16 : words[i/2] & 0xffff), sum[i]);
  }
  u32 words[4];
  #pragma unroll
  for (int i = 0; i < 4; i++) words[i] = tobf(sum[2*i]) | tobf(sum[2*i + 1]) << 16;
  out[row*eighths + at] = make_uint4(words[0], words[1], words[2], words[3]);
}

// out[r] += bias[e], of rows sorted by expert; a thread takes 8 features of a row.
extern "C" __global__ void add_bias(
    uint4* __restrict__ out, const uint4* __restrict__ bias, const int* __restrict__ ends, int experts, int eighths) {
  const int at = blockIdx.y*blockDim.x + threadIdx.x, row = blockIdx.x;
  int expert = 0;
  for (int after = experts; expert < after;) {  // the first that ends behind the row
    const int middle = (expert + after)/2;
    if (ends[middle] > row) after = middle; else expert = middle + 1;
  }
  if (at >= eighths) return;
  const uint4 added = bias[(size_t)expert*eighths + at];
  uint4& whole = out[(size_t)row*eighths + at];
  const u32 words[4] = {added.x, added.y, added.z, added.w};
  u32 sums[4] = {whole.x, whole.y, whole.z, whole.w};
  #pragma unroll
  for (int i = 0; i < 4; i++)
    sums[i] = tobf(bf(sums[i] & 0xffff) + bf(words[i] & 0xffff)) | tobf(bf(sums[i] >> 16) + bf(words[i] >> 16)) << 16;
  whole = make_uint4(sums[0], sums[1], sums[2], sums[3]);
}
