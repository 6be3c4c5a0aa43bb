// Made from qllm/ingress/layout.py by `python -m qllm.ingress.layout`; do not edit.
#pragma once
namespace qllm {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
const u32 kNumberBits = 40;
const u32 kLine = 64;
const u32 kRequestKind = 1;
const u32 kCancelKind = 2;
const u32 kTokenKind = 3;
const u32 kFinishKind = 4;
const u32 kPromptKind = 5;
const u32 kUpdateKind = 6;
const u32 kReviseKind = 7;
const u32 kHasDeadline = 1;
const u32 kIgnoreEos = 2;
const u32 kIsOpen = 16;
const u32 kHasLogprobs = 1;
const u32 kHasMetrics = 1;
const u32 kHasError = 2;
const u32 kMaxTimeMs = 1000000000;
const u32 kPriorityLimit = 1048576;
const u32 kReasonStop = 0;
const u32 kReasonLength = 1;
const u32 kReasonCancelled = 2;
const u32 kReasonTimeout = 3;
const u32 kReasonError = 4;

struct RecordHeader {
  u64 seq;
  u32 length;
  u16 kind;
  u16 flags;
};
static_assert(sizeof(RecordHeader) == 16, "RecordHeader");

struct RequestRecord {
  RecordHeader header;
  u64 request_id;
  i64 arrival_ns;
  i64 deadline_ns;
  u64 seed;
  u64 top_k;
  double temperature;
  double top_p;
  double min_p;
  double repetition_penalty;
  double presence_penalty;
  double frequency_penalty;
  double slo_ttft_ms;
  double slo_tpot_ms;
  i32 priority;
  i32 logprobs;
  u32 max_tokens;
  u32 num_stop_ids;
  u32 num_stop_token_ids;
  u32 num_logit_bias;
  u32 num_prompt;
  u32 num_stops;
  u32 num_name_bytes;
  u32 num_stop_bytes;
  u32 num_output;
  u32 prompt_logprobs;
};
static_assert(sizeof(RequestRecord) == 168, "RequestRecord");

struct CancelRecord {
  RecordHeader header;
  u64 request_id;
  u32 reason;
  u32 reserved;
};
static_assert(sizeof(CancelRecord) == 32, "CancelRecord");

struct TokenRecord {
  RecordHeader header;
  u64 request_id;
  i64 at_ns;
  double logprob;
  u32 token_id;
  u32 num_top;
};
static_assert(sizeof(TokenRecord) == 48, "TokenRecord");

struct FinishRecord {
  RecordHeader header;
  u64 request_id;
  i64 arrival_ns;
  double queue_ms;
  double parked_ms;
  double max_stall_ms;
  u32 reason;
  i32 priority;
  u32 num_prompt_tokens;
  u32 num_prefilled_tokens;
  u32 preemptions;
  u32 evictions;
  u32 evict_recomputed_tokens;
  u32 retry_recomputed_tokens;
  u32 preempt_recomputed_tokens;
  u32 num_error_bytes;
};
static_assert(sizeof(FinishRecord) == 96, "FinishRecord");

struct ControlMemory {
  u64 magic;
  u32 version;
  u32 pid;
  i64 zero_ns;
  u8 reserved0[40];
  u64 bell;
  u8 reserved1[56];
  u64 drain;
  u64 stop;
  u8 reserved2[48];
  i64 heartbeat_ns;
  u64 stats_version;
  u64 num_steps;
  u64 num_live;
  u64 num_waiting;
  u8 reserved3[24];
  u64 num_error_bytes;
  u8 error[2000];
  u8 reserved4[40];
};
static_assert(sizeof(ControlMemory) == 2304, "ControlMemory");

struct RingEnd {
  u64 bytes;
  u64 tail;
  u64 capacity;
  u64 at;
  u64 seq;
  i64 wrong_since_ns;
  u64 checked;
  u64 known_tail;
  u64 held_at;
  u64 held_seq;
};
static_assert(sizeof(RingEnd) == 80, "RingEnd");

}  // namespace qllm
