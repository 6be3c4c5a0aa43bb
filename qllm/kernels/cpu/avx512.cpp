#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#define QLLM_AVX512
#define QLLM_NAME kAvx512
#define QLLM_TITLE "AVX-512"
#include "kernels.inc"
#endif
