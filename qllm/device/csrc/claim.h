// Input: requests and cancels out of the rings of all front ends (qllm/ingress/shm.py).
//
// A request record is read and taken only if it has a slot or ends at once. Otherwise it stays in
// the ring, which is the backpressure. A record that our front ends never write cuts its front end
// off. Records may change while they are read, so every number is checked in a copy.
#pragma once
#include "publish.h"

namespace qllm {

const i64 kMostNs = 1LL << 60;      // times in records: sums of a few fit 64 bits
const u32 kNumReasons = kReasonError + 1;
const i32 kLsPassed = 1, kBePassed = 2;

struct Claimer : Publisher {
  QLLM_D Claimer(ServerState* server, State* state, RankFunction rank)
      : Publisher(server, state, rank) {}

  QLLM_D ControlMemory* control() const { return (ControlMemory*)v->control; }
  // Return a front end; they take turns, from `first_front_end` on.
  QLLM_D i32 turn(i64 n) const { return i32((v->first_front_end + n) % v->num_front_ends); }

  // -- arrivals and ends of front ends

  // Forget a front end: end its requests without publishing.
  QLLM_D_CALL void detach(i32 index, i32 why, i64 now_ns) {
    FrontEnd& f = front_ends[index];
    f.state = DETACHED;
    f.why = why;
    f.num_pending = 0;
    v->fetch.end = 0;
    for (i32 slot = 0; slot < v->capacity && f.held; slot++)
      if (serving[slot].phase != FREE && serving[slot].front_end == index) drop(slot, now_ns);
  }

  // -- reading

  // Return the length of a ring's next record and read its fixed part. Return 0 if there is none,
  // or if it has another kind, which cuts the front end off.
  template <class Record>
  QLLM_D i64 look(i32 index, RingEnd& end, u32 kind, Record* record, i64 now_ns) {
    RingReader ring(&end);
    i64 length = kind == kRequestKind ? checked(end, now_ns) : ring.look(now_ns);
    if (length < 0) detach(index, BROKEN_RING, now_ns);
    if (length <= 0) return 0;
    if (ring.kind() != kind || length < i64(sizeof(Record) + kTrailer)) {
      detach(index, BAD_RECORD, now_ns);
      return 0;
    }
    ring.copy((u8*)record + kHeader, sizeof(Record) - kHeader);
    record->header.flags = u16(ring.flags());
    if (record->request_id >> kNumberBits == u64(front_ends[index].number)) return length;
    detach(index, FOREIGN_ID, now_ns);
    return 0;
  }
  // Read the next record of a ring of requests, as `RingReader::look`, with the checksum of
  // `read_fetch`. Return 0 until that is known.
  QLLM_D i64 checked(RingEnd& end, i64 now_ns) {
    RingReader ring(&end);
    i64 length = ring.glance();
    if (length <= 0 || end.checked == end.seq + 1) return length;
    Fetch& f = v->fetch;
    if (f.end != i64(&end) || f.seq != i64(end.seq) + 1) order(end, length);
    if (f.waits) return 0;
    i64 answer = ring.check(length, u32(f.sum), now_ns);
    if (answer <= 0) f.end = 0;  // it is read anew
    return answer;
  }
  // Order the read of a ring's next record: by the threads of a block before `claim` continues if
  // `shares`, else now. Its numbers are not checked yet, so they only bound the read.
  QLLM_D_CALL void order(RingEnd& end, i64 length) {
    RingReader ring(&end);
    RequestRecord r = {};
    if (length >= i64(sizeof r + kTrailer)) ring.copy((u8*)&r + kHeader, sizeof r - kHeader);
    i64 slot = scheduler.s->free_request;
    bool fits = is_whole(r, length) && num_known(r) <= u64(v->max_total_tokens) && slot >= 0;
    Fetch f = {i64(&end), i64(end.seq) + 1, length, slot, first_token(r),
               fits ? i64(num_known(r)) : 0, 0, 0, 1};
    v->fetch = f;
    if (shares) return;
    read_fetch({0, 1});
    fetched();
  }
  QLLM_D static i64 first_token(const RequestRecord& r) {
    return i64(sizeof r + 8 * (u64(r.num_stop_ids) + r.num_stop_token_ids));
  }
  // Read the ordered record, each thread a part: checksum, tokens, and if all tokens are known.
  QLLM_D_CALL void read_fetch(Share mine) const {
    Fetch& f = v->fetch;
    Ring ring((RingEnd*)f.end);
    u64 words = (u64(f.length) - kTrailer) / 8, each = (words + mine.threads - 1) / mine.threads;
    u64 i = mine.thread * each, end = least(i + each, words);
    if (i >= end) return;
    i32* to = tokens + f.slot * v->max_total_tokens;
    Crc crc;
    crc.value = 0;
    bool broken = false;
    for (u64* p = ring.word(ring.end->at + 8 * i); i < end; i++, p = ring.after(p)) {
      u64 word = *p;
      crc.add(i ? word : word ^ 0xFFFFFFFFu);
      i64 token = (i64(8 * i) - f.first_token) / 4;
      for (i32 k = 0; k < 2 && i64(8 * i) >= f.first_token; k++, token++, word >>= 32) {
        if (token >= f.num_tokens) break;
        to[token] = i32(word);
        broken |= i32(word) < 0 || i32(word) >= v->vocab_size;
      }
    }
    add_to_sum(&f.sum, Crc::moved(crc.value, words - end));
    if (broken) f.broken = 1;
  }
  QLLM_D static void add_to_sum(i64* sum, u32 part) {
#if defined(__CUDA_ARCH__)
    atomicXor((unsigned int*)sum, part);
#else
    *sum ^= part;
#endif
  }
  // Finish the read, by one thread after all others.
  QLLM_D void fetched() {
    v->fetch.waits = 0;
    v->fetch.sum = ~v->fetch.sum;
  }
  // Count its prompt and the output of an earlier engine.
  QLLM_D static u64 num_known(const RequestRecord& r) { return u64(r.num_prompt) + r.num_output; }
  // Return true if the arrays of a request lie inside its record.
  QLLM_D static bool is_whole(const RequestRecord& r, i64 length) {
    u64 arrays = 8 * (u64(r.num_stop_ids) + r.num_stop_token_ids + r.num_logit_bias) +
                 4 * (u64(r.num_logit_bias) + num_known(r) + r.num_stops) + r.num_name_bytes +
                 r.num_stop_bytes;
    return sizeof r + arrays + kTrailer <= u64(length);
  }
  // Return the name of a number that our front ends never write (qllm/ingress/admission.py), or
  // null if all are allowed. A wrong number is not used.
  QLLM_D static Text wrong_number(const RequestRecord& r) {
    if (!is_time(r.arrival_ns) || ((r.header.flags & kHasDeadline) && !is_time(r.deadline_ns)))
      return "a time of the request is out of range";
    if (!is_target(r.slo_ttft_ms) || !is_target(r.slo_tpot_ms))
      return "a latency target of the request is out of range";
    if (r.priority < -i32(kPriorityLimit) || r.priority > i32(kPriorityLimit))
      return "the priority of the request is out of range";
    bool samples = r.seed >> 63 == 0 && r.top_k >> 63 == 0 && r.temperature >= 0 &&
                   r.temperature <= 100 && r.top_p > 0 && r.top_p <= 1 && r.min_p >= 0 &&
                   r.min_p <= 1;
    return samples ? nullptr : "a sampling setting of the request is out of range";
  }
  QLLM_D static bool is_time(i64 ns) { return ns > -kMostNs && ns < kMostNs; }
  QLLM_D static bool is_target(double ms) {  // NaN is "no target"
    return ms != ms || (ms > 0 && ms <= double(kMaxTimeMs));
  }
  QLLM_D static i64 target_ns(double ms) {
    return ms != ms ? kNone : i64(ms * double(kNsPerMs));
  }
  // Return the reason why a request cannot be served here; null if it can.
  QLLM_D Text refusal(const RequestRecord& r) const {
    u64 total = u64(r.num_prompt) + r.max_tokens;
    if (Text wrong = wrong_number(r)) return wrong;
    if (r.repetition_penalty != 1 || r.presence_penalty != 0 || r.frequency_penalty != 0)
      return "penalties are not served by the native server";
    if (r.num_logit_bias) return "logit_bias is not served by the native server";
    if (r.logprobs >= 0) return "logprobs are not served by the native server";
    if (r.prompt_logprobs) return "prompt_logprobs are not served by the native server";
    if (r.header.flags & kIsOpen) return "open prompts are not served by the native server";
    if (r.num_stop_ids > u32(kMostStopIds)) return "more stop ids than the native server serves";
    if (!r.num_prompt || r.max_tokens <= r.num_output) return "a prompt or an answer of no tokens";
    if (total > u64(v->max_total_tokens)) return "prompt and max_tokens exceed max_total_tokens";
    const State* s = scheduler.s;
    if (total > u64(s->num_blocks * s->block_size)) return "prompt and max_tokens exceed the KV";
    return nullptr;
  }

  // -- cancels

  QLLM_D i32 take_cancels(i32 index, i64 now_ns) {
    FrontEnd& f = front_ends[index];
    i32 taken = 0;
    CancelRecord cancel;
    while (taken < kMostClaims && f.state == ATTACHED) {
      if (skip_update(f, now_ns)) {
        taken++;
        continue;
      }
      i64 length = look(index, f.cancel, kCancelKind, &cancel, now_ns);
      if (!length) break;
      if (cancel.reason >= kNumReasons) {
        detach(index, BAD_RECORD, now_ns);
        break;
      }
      i32 slot = find(i64(cancel.request_id));
      if (slot < 0 && !put_off(f, cancel)) break;
      if (slot >= 0 && serving[slot].phase == LIVE) finish(slot, i32(cancel.reason), now_ns);
      RingReader(&f.cancel).pass(u64(length));
      taken++;
    }
    if (taken) RingReader(&f.cancel).give_back();
    return taken;
  }
  // Skip an update: here a request does not change. Front ends refuse updates with the reason.
  QLLM_D static bool skip_update(FrontEnd& f, i64 now_ns) {
    RingReader ring(&f.cancel);
    i64 length = ring.look(now_ns);
    if (length <= 0 || ring.kind() != kUpdateKind) return false;
    ring.pass(u64(length));
    return true;
  }
  // Store a cancel whose request may still be in a ring, as it came first. Return false without
  // room.
  QLLM_D bool put_off(FrontEnd& f, const CancelRecord& cancel) {
    if (!RingReader(&f.ls).has_news() && !RingReader(&f.be).has_news()) return true;
    if (f.num_pending == kMostPending) return false;
    Pending pending = {i64(cancel.request_id), i32(cancel.reason), 0};
    f.pending[f.num_pending++] = pending;
    return true;
  }
  QLLM_D static void take_pending(FrontEnd& f, i32 at) {
    f.pending[at] = f.pending[--f.num_pending];
  }
  QLLM_D static i32 find_pending(const FrontEnd& f, i64 id) {
    i32 at = f.num_pending - 1;
    while (at >= 0 && f.pending[at].request_id != id) at--;
    return at;
  }
  // Note that a ring was empty: no pending cancel refers to a request in it.
  QLLM_D static void passed(FrontEnd& f, i32 ring) {
    for (i32 at = f.num_pending - 1; at >= 0; at--) {
      f.pending[at].passed |= ring;
      if (f.pending[at].passed == (kLsPassed | kBePassed)) take_pending(f, at);
    }
  }

  // -- requests

  // Return the slots that a front end may take now: others keep theirs, and BE leaves some to LS.
  QLLM_D_CALL i64 num_claimable(i32 index, bool is_be) const {
    i64 free = v->capacity - v->num_held - (is_be ? v->ls_slots : 0);
    for (i32 n = 0; n < v->num_front_ends; n++)
      if (n != index && front_ends[n].state == ATTACHED)
        free -= most<i64>(0, v->shared_slots - front_ends[n].held);
    return free;
  }
  QLLM_D_CALL i32 take_requests(i32 index, bool is_be, i64 now_ns) {
    FrontEnd& f = front_ends[index];
    RingEnd& end = is_be ? f.be : f.ls;
    i32 taken = 0;
    RequestRecord record;
    while (taken < kMostClaims && f.state == ATTACHED) {
      bool news = RingReader(&end).has_news();
      i64 length = look(index, end, kRequestKind, &record, now_ns);
      if (!news) passed(f, is_be ? kBePassed : kLsPassed);
      if (!length || !admit(index, record, length, is_be, now_ns)) break;
      RingReader(&end).pass(u64(length));
      f.num_claimed++;
      taken++;
    }
    if (taken) RingReader(&end).give_back();
    return taken;
  }
  // Give the request of a record a slot, or end it; return false if it must stay in the ring.
  QLLM_D_CALL bool admit(i32 index, const RequestRecord& r, i64 length, bool is_be, i64 now_ns) {
    FrontEnd& f = front_ends[index];
    bool whole = is_whole(r, length);
    if (!whole || find(i64(r.request_id)) >= 0) {
      detach(index, whole ? DOUBLE_ID : BAD_RECORD, now_ns);
      return false;
    }
    i32 pending = find_pending(f, i64(r.request_id));
    bool late = (r.header.flags & kHasDeadline) && r.deadline_ns <= now_ns;
    Text why = refusal(r);
    if (why) return end_at_once(f, r, kReasonError, why);
    if (pending >= 0) {
      if (!end_at_once(f, r, u32(f.pending[pending].reason), nullptr)) return false;
      take_pending(f, pending);
      return true;
    }
    if (late) return end_at_once(f, r, kReasonTimeout, nullptr);
    if (num_claimable(index, is_be) <= 0 || v->num_events >= 2 * v->capacity) return false;
    RingEnd& end = is_be ? f.be : f.ls;
    i32 slot = i32(scheduler.s->free_request);
    if (!has_tokens(end, slot, r)) order(end, length);
    if (v->fetch.waits) return false;
    if (v->fetch.broken || !has_tokens(end, slot, r))
      return end_at_once(f, r, kReasonError, "a token id of the prompt is not in the vocabulary");
    RingReader(&end).copy((u8*)serving[slot].stop_ids, 8 * u64(r.num_stop_ids), sizeof r - kHeader);
    add(index, r);
    return true;
  }
  // End a request that never had a slot; return false if its end does not fit the token ring.
  QLLM_D_CALL bool end_at_once(FrontEnd& f, const RequestRecord& r, u32 reason, Text why) {
    Ending e = {};
    e.record.header.flags = kHasMetrics;
    e.record.request_id = r.request_id;
    e.record.arrival_ns = r.arrival_ns;
    e.record.queue_ms = nan();
    e.record.reason = reason;
    e.record.priority = r.priority;
    e.record.num_prompt_tokens = r.num_prompt;
    i32 num = 0;
    while (why && why[num] && num < kTextBytes) num++;
    if (num) e.say((const u8*)why, num);
    if (!write_end(f, e)) return false;
    f.num_refused++;
    return true;
  }
  // Return true if the tokens of a request were read into a slot.
  QLLM_D bool has_tokens(const RingEnd& end, i32 slot, const RequestRecord& r) const {
    const Fetch& f = v->fetch;
    return f.end == i64(&end) && f.seq == i64(end.seq) + 1 && f.slot == slot &&
           f.num_tokens == i64(num_known(r)) && f.first_token == first_token(r);
  }
  QLLM_D void add(i32 index, const RequestRecord& r) {
    i32 slot = scheduler.add(i64(r.request_id), r.priority, r.arrival_ns, target_ns(r.slo_ttft_ms),
                             target_ns(r.slo_tpot_ms), r.num_prompt);
    requests[slot].num_tokens += i32(r.num_output);
    Serving& x = serving[slot];
    x.seed = r.seed;
    x.top_k = i64(r.top_k);
    x.temperature = r.temperature;
    x.top_p = r.top_p;
    x.min_p = r.min_p;
    x.deadline_ns = r.header.flags & kHasDeadline ? r.deadline_ns : kNone;
    x.num_stop_ids = i32(r.num_stop_ids);
    x.max_tokens = i32(r.max_tokens);
    x.front_end = index;
    x.flags = r.header.flags;
    x.phase = LIVE;
    x.num_published = i32(r.num_output);
    x.reason = x.owes = x.num_text = 0;
    Meter(x).start();
    hold(slot);
    expect(x.deadline_ns);
    tell(ADDED, slot);
  }

  // -- reads that take nothing

  QLLM_D void lower(i64 word, i64 at_ns) {
    if (word >= v->word) return;
    v->word = word;
    v->lowered_ns = at_ns;
  }
  // Lower the word by the requests of a ring that `claim` would take now. It skips checksums, so a
  // torn record may park a frame in vain, once per look.
  QLLM_D_CALL void lower_by(i32 index, bool is_be, i64 now_ns) {
    RingEnd ahead = is_be ? front_ends[index].be : front_ends[index].ls;
    RingReader ring(&ahead);
    i64 num = least<i64>(kMostClaims, num_claimable(index, is_be)), length;
    RequestRecord r;
    for (i64 n = 0; n < num && (length = ring.glance()) > 0; n++) {
      if (length < i64(sizeof r + kTrailer)) return;
      ring.copy((u8*)&r + kHeader, sizeof r - kHeader);
      r.header.flags = u16(ring.flags());
      if (!wrong_number(r)) lower(r.priority, r.arrival_ns < 0 ? now_ns : r.arrival_ns);  // before our time: replayed
      ring.pass(u64(length));
    }
  }
};

}  // namespace qllm
