#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,fma")
#define QLLM_AVX512
#define QLLM_BF16
#define QLLM_TABLES
#define QLLM_VNNI
#define QLLM_NAME kAvx512Bf16
#define QLLM_TITLE "AVX-512 BF16"
#include "kernels.inc"
#endif
