// One end of a ring of records between one writer and one reader: the protocol and the bytes of
// qllm/ingress/ring.py. A record counts when header and trailer hold the next sequence number and
// the checksum holds, so a torn write, in whatever order its bytes arrive, reads as "nothing yet".
//
// Loads and stores of a ring's words are acquire and release for the whole system (a NIC or
// another processor writes the other end). A writer may hold back the number of the first of many
// records: the reader sees none of them before it, so one fence orders all. Work per call: one
// record.
#pragma once
#include "records.h"

#if !defined(__CUDACC_RTC__)
#include <string.h>
#endif
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define QLLM_D __device__
#define QLLM_D_CALL __device__ __noinline__  // large, or called from several places
#define QLLM_D_RARE __device__ __noinline__  // seldom called: it takes no registers of who calls it
#else
#define QLLM_D
#define QLLM_D_CALL
#define QLLM_D_RARE __attribute__((noinline, cold))
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
// `store_fenced` after `fence` is a release of all stores before the fence: on the device a fence
// for the whole system takes about a microsecond, and one is enough for many stores. On the host
// each such store is a release.
QLLM_D inline void fence() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}
QLLM_D inline void store_fenced(u64* word, u64 value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  store_release(word, value);
#endif
}
// Copy a word of a body, or what is left of it. Bodies begin at multiples of four bytes.
QLLM_D inline void copy_word(void* to, const void* from, u64 num) {
#if defined(__CUDA_ARCH__)
  if (num >= 8) {  // two moves: a copy of unknown alignment would be eight
    ((u32*)to)[0] = ((const u32*)from)[0];
    ((u32*)to)[1] = ((const u32*)from)[1];
    return;
  }
#endif
  memcpy(to, from, num < 8 ? num : 8);
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
  // The value after so many more words of zeros: a product with a power of x, modulo the polynomial.
  // Sums of parts, each moved past what follows it, add up (by xor) to the sum of the whole.
  QLLM_D static u32 moved(u32 value, u64 words) {
    u32 power = 0x80000000u >> 8;  // x to the eighth: one byte; bit 31 is the lowest power
    for (i32 i = 0; i < 3; i++) power = times(power, power);
    for (; words; words >>= 1, power = times(power, power))
      if (words & 1) value = times(value, power);
    return value;
  }
  QLLM_D static u32 times(u32 a, u32 b) {
    u32 product = 0;
    for (i32 i = 31; i >= 0; i--) {
      product ^= a >> i & 1 ? b : 0;
      b = b & 1 ? 0xEDB88320u ^ (b >> 1) : b >> 1;
    }
    return product;
  }
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
    if (end->checked == seq) return i64(length);  // it has waited here for a slot
    Crc crc;
    u64* p = word(end->at);
    for (u64 i = end->at; i < trailer; i += 8, p = after(p)) crc.add(*p);
    return check(i64(length), crc.sum(), now_ns);
  }
  // Hold the checksum that was computed of the next record to what is written; answers as `look`.
  QLLM_D i64 check(i64 length, u32 sum, i64 now_ns) {
    u64 seq = end->seq + 1, trailer = end->at + u64(length) - kTrailer;
    if ((*word(trailer) & 0xFFFFFFFFu) != sum || *word(end->at) != seq) return wrong(now_ns);
    end->wrong_since_ns = 0;
    end->checked = seq;
    return length;
  }
  // The same without the checksum, for who takes nothing and can bear a wrong number.
  QLLM_D i64 glance() const {
    u64 seq = end->seq + 1;
    if (load_acquire(word(end->at)) != seq) return 0;
    u64 length = load_acquire(word(end->at + 8)) & 0xFFFFFFFFu;
    if (length % kLine || length < kLine || length > end->capacity - kLine) return 0;
    return load_acquire(word(end->at + length - 8)) == seq ? i64(length) : 0;
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
    for (u64 i = 0; i < num; i += 8, p = after(p)) copy_word(to + i, p, num - i);
  }
  // Go past that record without giving it back.
  QLLM_D void pass(u64 length) {
    end->seq++;
    end->at += length;
  }
  // Give back all records that were passed.
  QLLM_D void give_back() { store_release(tail(), end->at); }
  // Go past that record and give it back.
  QLLM_D void take(u64 length) {
    pass(length);
    give_back();
  }
};

struct RingWriter : Ring {
  QLLM_D explicit RingWriter(RingEnd* e) : Ring(e) {}

  // Whether so many bytes are free; the reader's word is read where what is known is not enough.
  QLLM_D bool has_room(u64 num_bytes) {
    if (end->at - end->known_tail + num_bytes <= end->capacity) return true;
    end->known_tail = load_acquire(tail());
    return i64(end->at - end->known_tail) + i64(num_bytes) <= i64(end->capacity);
  }

  // Write one record and show it: 1, 0 if there is no room for it now, -1 if it is larger than the
  // ring.
  QLLM_D i32 write(u32 kind, u32 flags, const u8* body, u64 num_body) {
    i32 done = put(kind, flags, body, num_body);
    if (done == 1) fence();
    show();
    return done;
  }
  // Show the reader all records, after a `fence`.
  QLLM_D void show() {
    if (end->held_seq) store_fenced(word(end->held_at), end->held_seq);
    end->held_seq = 0;
  }
  // Write one record; the reader sees none before `show`.
  QLLM_D i32 put(u32 kind, u32 flags, const u8* body, u64 num_body) {
    u64 place = end->at;
    i32 done = reserve(num_body);
    if (done == 1) fill(place, end->seq, kind, flags, body, num_body);
    return done;
  }
  // Take the place of the next record, which is to be filled before `show`: answers as `write`.
  QLLM_D_CALL i32 reserve(u64 num_body) {
    u64 length = record_bytes(num_body);
    if (num_body > kMostBody || length + kLine > end->capacity) return -1;
    if (!has_room(length + kLine)) return 0;
    *word(end->at + length) = 0;
    end->seq++;
    if (!end->held_seq) {
      end->held_at = end->at;
      end->held_seq = end->seq;
    }
    end->at += length;
    return 1;
  }
  // Write a record into its place; any thread may, in any order.
  QLLM_D_CALL void fill(u64 place, u64 seq, u32 kind, u32 flags, const u8* body,
                        u64 num_body) const {
    u64 length = record_bytes(num_body), trailer = place + length - kTrailer;
    Crc crc;
    u64 header[] = {seq, length | u64(kind) << 32 | u64(flags) << 48};
    for (i32 i = 0; i < 2; i++) crc.add(header[i]);
    *word(place + 8) = header[1];
    if (seq != end->held_seq) *word(place) = header[0];
    u64* p = word(place + kHeader);
    for (u64 i = 0; i < length - kHeader - kTrailer; i += 8, p = after(p)) {
      u64 value = 0;
      if (i < num_body) copy_word(&value, body + i, num_body - i);
      *p = value;
      crc.add(value);
    }
    *word(trailer) = crc.sum();
    *word(trailer + 8) = seq;
  }
};

}  // namespace qllm
