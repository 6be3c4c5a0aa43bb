#define QLLM_TILES
#define QLLM_EMULATE
#define QLLM_NAME kAmxEmulated
#define QLLM_TITLE "emulated AMX"
#include "kernels.inc"
