// One end of a ring of records between one writer and one reader: the protocol and the bytes of
// qllm/ingress/ring.py. A record counts when header and trailer hold the next sequence number and
// the checksum holds, so a torn write, in whatever order its bytes arrive, reads as "nothing yet".
//
// Loads and stores of a ring's words are acquire and release for the whole system (a NIC or
// another processor writes the other end). Work per call: one record.
#pragma once
#include "records.h"

#if !defined(__CUDACC_RTC__)
#include <string.h>
#endif
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define QLLM_D __device__
#define QLLM_D_CALL __device__ __noinline__  // large, or called from several places
#else
#define QLLM_D
#define QLLM_D_CALL
#endif

namespace qllm {

const u64 kHeader = sizeof(RecordHeader), kTrailer = 16;  // seq, length, kind, flags; crc, reserved, seq
const u64 kMostBody = 1ULL << 40;
const i64 kBrokenAfterNs = 1000000000;

QLLM_D inline u64 load_acquire(const u64* word) {
#if defined(__CUDA_ARCH__)
  u64 value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}
QLLM_D inline void store_release(u64* word, u64 value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

// CRC-32 as zlib computes it, eight bytes at a time: t[k] is a byte followed by k zeros.
struct CrcTables {
  u32 t[8][256];

  QLLM_D constexpr CrcTables() : t() {
    for (u32 i = 0; i < 256; i++) {
      u32 c = i;
      for (i32 k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      t[0][i] = c;
    }
    for (u32 i = 0; i < 256; i++)
      for (i32 k = 1; k < 8; k++) t[k][i] = t[0][t[k - 1][i] & 255] ^ (t[k - 1][i] >> 8);
  }
};

struct Crc {
  u32 value = 0xFFFFFFFFu;

  QLLM_D void add(u64 word) {
    static constexpr CrcTables tables{};
    word ^= value;
    value = 0;
    for (i32 k = 0; k < 8; k++) value ^= tables.t[7 - k][(word >> (8 * k)) & 255];
  }
  QLLM_D u32 sum() const { return ~value; }
};

struct Ring {
  RingEnd* end;

  QLLM_D explicit Ring(RingEnd* e) : end(e) {}

  // The word at a place in the stream of bytes; records are whole words.
  QLLM_D u64* word(u64 at) const { return (u64*)(end->bytes + at % end->capacity); }
  QLLM_D u64* after(u64* p) const {
    return (u64)(p + 1) == end->bytes + end->capacity ? (u64*)end->bytes : p + 1;
  }
  QLLM_D u64* tail() const { return (u64*)end->tail; }
  QLLM_D static u64 record_bytes(u64 num_body) {
    return (num_body + kHeader + kTrailer + kLine - 1) / kLine * kLine;
  }
};

struct RingReader : Ring {
  QLLM_D explicit RingReader(RingEnd* e) : Ring(e) {}

  // Whether the next record, or its beginning, is there.
  QLLM_D bool has_news() const { return load_acquire(word(end->at)) == end->seq + 1; }

  // Bytes of the next record; 0 while there is none that is whole, -1 if it is broken for good.
  QLLM_D_CALL i64 look(i64 now_ns) {
    u64 seq = end->seq + 1;
    if (load_acquire(word(end->at)) != seq) return 0;
    u64 length = load_acquire(word(end->at + 8)) & 0xFFFFFFFFu;
    if (length % kLine || length < kLine || length > end->capacity - kLine) return 0;
    u64 trailer = end->at + length - kTrailer;
    if (load_acquire(word(trailer + 8)) != seq) return 0;
    Crc crc;
    u64* p = word(end->at);
    for (u64 i = end->at; i < trailer; i += 8, p = after(p)) crc.add(*p);
    if ((*word(trailer) & 0xFFFFFFFFu) != crc.sum() || *word(end->at) != seq) return wrong(now_ns);
    end->wrong_since_ns = 0;
    return i64(length);
  }
  QLLM_D i64 wrong(i64 now_ns) {
    if (!end->wrong_since_ns) end->wrong_since_ns = now_ns;
    return now_ns - end->wrong_since_ns > kBrokenAfterNs ? -1 : 0;
  }

  QLLM_D u32 kind() const { return u32(*word(end->at + 8) >> 32) & 0xFFFFu; }
  QLLM_D u32 flags() const { return u32(*word(end->at + 8) >> 48); }

  // Copy bytes of the body of the record that `look` found; `from` is a multiple of eight.
  QLLM_D_CALL void copy(u8* to, u64 num, u64 from = 0) const {
    u64* p = word(end->at + kHeader + from);
    for (u64 i = 0; i < num; i += 8, p = after(p)) memcpy(to + i, p, num - i < 8 ? num - i : 8);
  }
  // Go past that record without giving it back.
  QLLM_D void pass(u64 length) {
    end->seq++;
    end->at += length;
  }
  // Give back that record.
  QLLM_D void take(u64 length) {
    pass(length);
    store_release(tail(), end->at);
  }
};

struct RingWriter : Ring {
  QLLM_D explicit RingWriter(RingEnd* e) : Ring(e) {}

  QLLM_D i64 num_used() const { return i64(end->at - load_acquire(tail())); }

  // Write one record: 1, 0 if there is no room for it now, -1 if it is larger than the ring.
  QLLM_D_CALL i32 write(u32 kind, u32 flags, const u8* body, u64 num_body) {
    u64 length = record_bytes(num_body), seq = end->seq + 1;
    if (num_body > kMostBody || length + kLine > end->capacity) return -1;
    if (num_used() + i64(length + kLine) > i64(end->capacity)) return 0;
    u64 trailer = end->at + length - kTrailer;
    store_release(word(end->at + length), 0);
    Crc crc;
    u64 header[] = {seq, length | u64(kind) << 32 | u64(flags) << 48};
    for (i32 i = 0; i < 2; i++) crc.add(header[i]);
    store_release(word(end->at + 8), header[1]);  // who sees the number below sees the length too,
    store_release(word(end->at), header[0]);      // and looks for the trailer where it will be
    u64* p = word(end->at + kHeader);
    for (u64 i = 0; i < length - kHeader - kTrailer; i += 8, p = after(p)) {
      u64 value = 0;
      if (i < num_body) memcpy(&value, body + i, num_body - i < 8 ? num_body - i : 8);
      *p = value;
      crc.add(value);
    }
    *word(trailer) = crc.sum();
    store_release(word(trailer + 8), seq);
    end->seq = seq;
    end->at += length;
    return 1;
  }
};

}  // namespace qllm
