// Memory of the ranks of one model as one rank sees it, and the threads that use it. A GPU and a
// host compile the same text. A GPU's compiler needs -fmad=false, a host's -ffp-contract=off, so
// that both compute the same bits.
//
// All ranks have buffers of one layout: a tensor has the same offset in each. A net is a way to
// store on all of them:
//
//   Loads<p>     buffers at addresses of their own, with plain loads and stores
//   Virtual<p>   buffers one behind the other in one memory: all ranks on one device, or on a host
//   Multimem<p>  as Loads, and an address that stands for all buffers (NVLink multicast, from sm_90
//                on): a store to it goes to all, and `reduce` loads the sum of all
#pragma once

#if defined(__CUDACC__)
#define QLLM_BOTH __device__ __forceinline__
#else
#define QLLM_BOTH inline
#include <math.h>
#include <pthread.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <thread>
#endif

namespace qllm {

using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;

constexpr int kMostRanks = 8;
constexpr int kAtOnce = 8;  // bf16 of one load or store

struct alignas(16) Eight {  // bf16
  u32 pairs[kAtOnce / 2];
};

#if defined(__CUDACC__)

QLLM_BOTH u32 bits_of(float x) { return __float_as_uint(x); }
QLLM_BOTH float float_of(u32 bits) { return __uint_as_float(bits); }
QLLM_BOTH i64 now_ns() {
  i64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
QLLM_BOTH void publish(u32* word, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
QLLM_BOTH u32 look(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
QLLM_BOTH void rest() {}
QLLM_BOTH Eight fetch(const char* from) {  // one load
  uint4 x = *(const uint4*)from;
  return {{x.x, x.y, x.z, x.w}};
}

// One of the blocks of threads of a rank.
struct Block {
  i32 number, count;  // of the block, and of the rank's blocks
  i32 first, step;    // the thread, and the threads of the block

  QLLM_BOTH void wait() const { __syncthreads(); }
  QLLM_BOTH bool all(bool mine) const { return __syncthreads_and(mine); }  // waits too
};

#else

QLLM_BOTH u32 bits_of(float x) {
  u32 bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
QLLM_BOTH float float_of(u32 bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
QLLM_BOTH i64 now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
QLLM_BOTH void publish(u32* word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
QLLM_BOTH u32 look(const u32* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
QLLM_BOTH void rest() { std::this_thread::yield(); }
QLLM_BOTH Eight fetch(const char* from) { return *(const Eight*)from; }

// The threads of a block on a host.
struct Crowd {
  pthread_barrier_t barrier;
  std::atomic<bool> misses{false};

  explicit Crowd(i32 size) { pthread_barrier_init(&barrier, nullptr, u32(size)); }
  ~Crowd() { pthread_barrier_destroy(&barrier); }
};

struct Block {
  i32 number, count;
  i32 first, step;
  Crowd* crowd;

  void wait() const { pthread_barrier_wait(&crowd->barrier); }
  bool all(bool mine) const {
    if (!mine) crowd->misses = true;
    wait();
    return !crowd->misses;
  }
};

#endif

template <int kRanks>
struct Loads {
  static constexpr int kSize = kRanks;
  char* parts[kRanks];

  QLLM_BOTH char* part(i64 rank) const { return parts[rank]; }
  QLLM_BOTH void store(i64 at, const Eight& x) const {
    for (int i = 0; i < kRanks; i++) *(Eight*)(parts[i] + at) = x;
  }
  QLLM_BOTH void fence() const {}
};

template <int kRanks>
struct Virtual {
  static constexpr int kSize = kRanks;
  char* base;
  i64 stride;

  QLLM_BOTH char* part(i64 rank) const { return base + rank * stride; }
  QLLM_BOTH void store(i64 at, const Eight& x) const {
    for (int i = 0; i < kRanks; i++) *(Eight*)(part(i) + at) = x;
  }
  QLLM_BOTH void fence() const {}
};

#if defined(__CUDACC__)

template <int kRanks>
struct Multimem : Loads<kRanks> {
  char* all;

  QLLM_BOTH void store(i64 at, const Eight& x) const {
    asm volatile("multimem.st.relaxed.sys.global.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(all + at),
                 "r"(x.pairs[0]), "r"(x.pairs[1]), "r"(x.pairs[2]), "r"(x.pairs[3])
                 : "memory");
  }
  // Sums in fp32, in an order that is not specified.
  QLLM_BOTH Eight reduce(i64 at) const {
    Eight x;
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.pairs[0]), "=r"(x.pairs[1]), "=r"(x.pairs[2]), "=r"(x.pairs[3])
        : "l"(all + at)
        : "memory");
    return x;
  }
  // Orders accesses to one memory by two addresses.
  QLLM_BOTH void fence() const { asm volatile("fence.proxy.alias;" ::: "memory"); }
};

#endif

}  // namespace qllm
