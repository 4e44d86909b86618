// What moving token rows costs at best on one GPU: the limit that dispatch and combine are held
// against. Rows are gathered from random places and stored to random places, as dispatch does; each
// payload byte is read once and written once.
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -o copy_limit benchmarks/copy_limit.cu && ./copy_limit
//
// Prints CSV: copy, CTAs, GB/s of payload (median of 15 launches by events). Rows are far larger
// together than the L2 cache. Ends with 1 when a single copied byte is wrong.
//
// Two ways, both with enough bytes in flight to hide latency:
//   simt  32 warps, a row a warp, 7 loads of 16 bytes per lane before the first store
//   bulk  4 warps, each a ring of 3 stages of one row, copied by the async proxy; the lanes fetch
//         32 row numbers at a time, since one thread that loads each before its copy is bound by it
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include <cuda_runtime.h>

namespace {

constexpr int kRowBytes = 14336;  // hidden 7168, bf16
constexpr int kRows = 32768;
constexpr int kPlaces = 65536;  // rows of each buffer
constexpr int kWarp = 32;

#define CHECK(call)                                                                    \
  do {                                                                                 \
    cudaError_t error = (call);                                                        \
    if (error != cudaSuccess) {                                                        \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));              \
      std::exit(2);                                                                    \
    }                                                                                  \
  } while (0)

__device__ int4 load_once(const int4* from) {
  int4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

__device__ void store_once(int4* to, int4 value) {
  asm volatile("st.global.L1::no_allocate.v4.s32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

constexpr int kSimtWarps = 32;
constexpr int kInFlight = 7;
constexpr int kVectors = kRowBytes / (kWarp * static_cast<int>(sizeof(int4)));  // per lane
static_assert(kVectors % kInFlight == 0, "a row is whole batches of loads");

__global__ void __launch_bounds__(kSimtWarps* kWarp)
    copy_simt(const char* source, char* target, const int* from, const int* to) {
  const int lane = threadIdx.x % kWarp;
  const int first = blockIdx.x * kSimtWarps + threadIdx.x / kWarp;
  for (int row = first; row < kRows; row += gridDim.x * kSimtWarps) {
    auto in = reinterpret_cast<const int4*>(source + int64_t{from[row]} * kRowBytes) + lane;
    auto out = reinterpret_cast<int4*>(target + int64_t{to[row]} * kRowBytes) + lane;
#pragma unroll 1
    for (int batch = 0; batch < kVectors; batch += kInFlight) {
      int4 values[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) values[i] = load_once(in + (batch + i) * kWarp);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) store_once(out + (batch + i) * kWarp, values[i]);
    }
  }
}

constexpr int kBulkWarps = 4;
constexpr int kStages = 3;
constexpr int kStoresBehind = 2;  // stores that may still read their stage when it is filled again
constexpr int kRingBytes = kBulkWarps * kStages * kRowBytes;

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void start_load(const char* from, void* stage, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(kRowBytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(stage)),
      "l"(from), "r"(kRowBytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ void wait_load(uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  }
}

__device__ void start_store(char* to, const void* stage) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(stage)), "r"(kRowBytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__global__ void __launch_bounds__(kBulkWarps* kWarp)
    copy_bulk(const char* source, char* target, const int* from, const int* to) {
  extern __shared__ __align__(128) char ring[];
  __shared__ uint64_t barriers[kBulkWarps][kStages];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  char* stages = ring + warp * kStages * kRowBytes;
  if (lane == 0) {
    for (uint64_t& barrier : barriers[warp]) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&barrier)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncwarp();

  const int first = blockIdx.x * kBulkWarps + warp, step = gridDim.x * kBulkWarps;
  const int mine = first < kRows ? (kRows - first + step - 1) / step : 0;
  int loaded = 0, next_from = 0, next_to = 0;  // next_*: 32 row numbers, one a lane
  for (int stored = 0; stored < mine; ++stored) {
    while (loaded < mine && loaded < stored + kStages - kStoresBehind + 1) {
      if (loaded % kWarp == 0 && loaded + lane < mine) {
        next_from = from[first + (loaded + lane) * step];
      }
      const int row = __shfl_sync(~0u, next_from, loaded % kWarp);
      if (lane == 0) {
        if (loaded >= kStages) {
          asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStoresBehind - 1) : "memory");
        }
        const int stage = loaded % kStages;
        start_load(source + int64_t{row} * kRowBytes, stages + stage * kRowBytes,
                   &barriers[warp][stage]);
      }
      ++loaded;
    }
    if (stored % kWarp == 0 && stored + lane < mine) {
      next_to = to[first + (stored + lane) * step];
    }
    const int row = __shfl_sync(~0u, next_to, stored % kWarp);
    if (lane == 0) {
      const int stage = stored % kStages;
      wait_load(&barriers[warp][stage], stored / kStages & 1);
      start_store(target + int64_t{row} * kRowBytes, stages + stage * kRowBytes);
    }
  }
  if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__global__ void fill(uint32_t* words, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    words[i] = static_cast<uint32_t>(i * 2654435761u);
  }
}

__global__ void count_wrong(const char* source, const char* target, const int* from, const int* to,
                            unsigned long long* wrong) {
  auto in = reinterpret_cast<const uint32_t*>(source + int64_t{from[blockIdx.x]} * kRowBytes);
  auto out = reinterpret_cast<const uint32_t*>(target + int64_t{to[blockIdx.x]} * kRowBytes);
  for (int i = threadIdx.x; i < kRowBytes / 4; i += blockDim.x) {
    if (in[i] != out[i]) atomicAdd(wrong, 1ull);
  }
}

}  // namespace

// The same copies for others to time beside their own: rows from[i] -> to[i], i < kRows.
extern "C" int copy_limit_rows() { return kRows; }
extern "C" int copy_limit_row_bytes() { return kRowBytes; }
extern "C" int copy_limit_launch(int bulk, int ctas, const void* source, void* target,
                                 const int* from, const int* to, cudaStream_t stream) {
  const char* in = static_cast<const char*>(source);
  char* out = static_cast<char*>(target);
  if (bulk) {
    CHECK(cudaFuncSetAttribute(copy_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes));
    copy_bulk<<<ctas, kBulkWarps * kWarp, kRingBytes, stream>>>(in, out, from, to);
  } else {
    copy_simt<<<ctas, kSimtWarps * kWarp, 0, stream>>>(in, out, from, to);
  }
  return cudaGetLastError();
}

namespace {

template <typename Launch>
double median_gbps(Launch launch) {
  constexpr int kWarmups = 3, kTimed = 15;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kWarmups + kTimed; ++i) {
    CHECK(cudaEventRecord(begin));
    launch();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float milliseconds = 0;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= kWarmups) times.push_back(milliseconds);
  }
  CHECK(cudaGetLastError());
  std::nth_element(times.begin(), times.begin() + kTimed / 2, times.end());
  return double{kRows} * kRowBytes / times[kTimed / 2] / 1e6;
}

}  // namespace

int main() {
  const int64_t bytes = int64_t{kPlaces} * kRowBytes;
  char *source, *target;
  int *from, *to;
  unsigned long long* wrong;
  CHECK(cudaMalloc(&source, bytes));
  CHECK(cudaMalloc(&target, bytes));
  CHECK(cudaMalloc(&from, kRows * sizeof(int)));
  CHECK(cudaMalloc(&to, kRows * sizeof(int)));
  CHECK(cudaMallocManaged(&wrong, sizeof(*wrong)));
  *wrong = 0;
  std::mt19937 random(1);
  std::vector<int> gathered(kRows), scattered(kPlaces);
  for (int& row : gathered) row = static_cast<int>(random() % kPlaces);
  std::iota(scattered.begin(), scattered.end(), 0);
  std::shuffle(scattered.begin(), scattered.end(), random);
  CHECK(cudaMemcpy(from, gathered.data(), kRows * sizeof(int), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(to, scattered.data(), kRows * sizeof(int), cudaMemcpyHostToDevice));
  fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(source), bytes / 4);
  CHECK(cudaFuncSetAttribute(copy_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes));

  std::printf("copy,ctas,gbps\n");
  const double memcpy_gbps = median_gbps([&] {
    CHECK(cudaMemcpyAsync(target, source, int64_t{kRows} * kRowBytes, cudaMemcpyDeviceToDevice));
  });
  std::printf("memcpy,,%.0f\n", memcpy_gbps);
  for (const int ctas : {1, 4, 8, 12, 16, 24, 36, 48, 132}) {
    const auto simt = [&] {
      copy_simt<<<ctas, kSimtWarps * kWarp>>>(source, target, from, to);
    };
    const auto bulk = [&] {
      copy_bulk<<<ctas, kBulkWarps * kWarp, kRingBytes>>>(source, target, from, to);
    };
    CHECK(cudaMemset(target, 0, bytes));
    std::printf("simt,%d,%.0f\n", ctas, median_gbps(simt));
    count_wrong<<<kRows, 256>>>(source, target, from, to, wrong);
    CHECK(cudaMemset(target, 0, bytes));
    std::printf("bulk,%d,%.0f\n", ctas, median_gbps(bulk));
    count_wrong<<<kRows, 256>>>(source, target, from, to, wrong);
    CHECK(cudaDeviceSynchronize());
  }
  if (*wrong) {
    std::fprintf(stderr, "%llu words are wrong\n", *wrong);
    return 1;
  }
  return 0;
}
