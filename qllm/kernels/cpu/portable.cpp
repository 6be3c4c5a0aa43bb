#define QLLM_NAME kPortable
#define QLLM_TITLE "portable"
#include "kernels.inc"
