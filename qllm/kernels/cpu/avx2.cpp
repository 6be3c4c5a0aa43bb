#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define QLLM_AVX2
#define QLLM_NAME kAvx2
#define QLLM_TITLE "AVX2"
#include "kernels.inc"
#endif
