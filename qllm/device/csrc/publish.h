// Slots, and output: tokens and ends of requests into the token rings.
//
// A request keeps its slot until its last record is in its front end's ring. A full ring loses
// nothing: unwritten records stay in `tokens` and `serving` and are written later.
#pragma once
#include "meter.h"

namespace qllm {

// A string literal of this file or a sibling, for an error.
typedef const char* Text;

// An end as in a ring: a record and its text.
struct Ending {
  FinishRecord record;
  u8 text[kTextBytes];

  QLLM_D void say(const u8* from, i32 num) {
    record.header.flags |= kHasError;
    record.num_error_bytes = u32(num);
    memcpy(text, from, u64(num));
  }
};

const u64 kTokenBody = sizeof(TokenRecord) - kHeader;

QLLM_D inline TokenRecord record_of(const Send& send) {
  TokenRecord token = {};
  token.request_id = u64(send.request_id);
  token.at_ns = send.at_ns;
  token.token_id = u32(send.token);
  return token;
}

// Work for the end of a turn: the threads of a block write token records, one publishes them.
struct Sender {
  ServerState* v;
  FrontEnd* front_ends;
  Send* sends;

  QLLM_D explicit Sender(ServerState* server)
      : v(server), front_ends((FrontEnd*)((char*)server + server->at_front_ends)),
        sends((Send*)((char*)server + server->at_sends)) {}

  // Write the records into their places. All threads finish before one calls `show`.
  QLLM_D_CALL void send(Share mine) const {
    for (i64 i = mine.thread; i < v->num_sends; i += mine.threads) {
      FrontEnd& f = front_ends[sends[i].front_end];
      if (f.state == DETACHED) continue;  // its rings may be gone
      TokenRecord token = record_of(sends[i]);
      RingWriter(&f.token).fill(u64(sends[i].place), u64(sends[i].seq), kTokenKind, 0,
                                (const u8*)&token + kHeader, kTokenBody);
    }
  }
  // Publish all written records to the front ends, with one fence.
  QLLM_D_CALL void show() {
    bool fenced = false;
    v->num_sends = 0;
    for (i32 n = 0; n < v->num_front_ends; n++) {
      FrontEnd& f = front_ends[n];
      if (f.state == DETACHED || !f.token.held_seq) continue;
      if (!fenced) fence();
      fenced = true;
      RingWriter(&f.token).show();
    }
  }
};

struct Publisher {
  ServerState* v;
  bool holds = false;   // records are left to a `Sender`
  bool shares = false;  // true if the threads of a block read the ordered records
  Scheduler scheduler;
  Request* requests;
#define X(type, name) type* name;
  QLLM_SERVER_SECTIONS(X)
#undef X

  QLLM_D Publisher(ServerState* server, State* state, RankFunction rank)
      : v(server), scheduler(state, rank), requests(scheduler.requests) {
#define X(type, name) name = (type*)((char*)server + server->at_##name);
    QLLM_SERVER_SECTIONS(X)
#undef X
  }

  // -- slots by id: short chains, as there are at least as many buckets as slots

  QLLM_D i32* bucket(i64 id) const {
    u64 mixed = u64(id) * 0x9E3779B97F4A7C15ULL;
    return &buckets[(mixed >> 32) & u64(v->num_buckets - 1)];
  }
  // Return the slot of a request, -1 without one.
  QLLM_D i32 find(i64 id) const {
    i32 slot = *bucket(id);
    while (slot >= 0 && requests[slot].id != id) slot = serving[slot].next;
    return slot;
  }
  QLLM_D void hold(i32 slot) {
    i32* head = bucket(requests[slot].id);
    serving[slot].next = *head;
    *head = slot;
    v->num_held++;
    front_ends[serving[slot].front_end].held++;
  }
  QLLM_D_RARE void let_go(i32 slot) {
    Serving& x = serving[slot];
    i32* link = bucket(requests[slot].id);
    while (*link != slot) link = &serving[*link].next;
    *link = x.next;
    settle(slot);
    x.phase = FREE;
    v->num_held--;
    front_ends[x.front_end].held--;
    scheduler.release(slot);
  }
  QLLM_D void tell(i32 kind, i32 slot) {
    Event event = {requests[slot].id, kind, slot};
    events[v->num_events++] = event;
  }

  // -- records

  QLLM_D bool write(FrontEnd& f, u32 kind, u32 flags, const u8* record, u64 num_bytes) {
    RingWriter ring(&f.token);
    const u8* body = record + kHeader;
    u64 num = num_bytes - kHeader;
    if ((holds ? ring.put(kind, flags, body, num) : ring.write(kind, flags, body, num)) != 1)
      return false;
    f.num_written++;
    return true;
  }
  QLLM_D bool write_token(FrontEnd& f, i32 slot, i32 number) {
    if (!holds || v->num_sends >= v->capacity) return write_token_now(f, slot, number);
    const i64 place = i64(f.token.at);
    if (RingWriter(&f.token).reserve(kTokenBody) != 1) return false;
    say_token(sends[v->num_sends++], place, f, slot, number);
    f.num_written++;
    return true;
  }
  QLLM_D_RARE bool write_token_now(FrontEnd& f, i32 slot, i32 number) {
    Send send;
    say_token(send, 0, f, slot, number);
    TokenRecord token = record_of(send);
    return write(f, kTokenKind, 0, (const u8*)&token, sizeof token);
  }
  // The record that a `Sender` writes into the place reserved last.
  QLLM_D void say_token(Send& send, i64 place, const FrontEnd& f, i32 slot, i32 number) const {
    const i64 at = slot * v->max_total_tokens + requests[slot].num_prompt + number;
    send.place = place;
    send.seq = i64(f.token.seq);
    send.request_id = requests[slot].id;
    send.at_ns = token_ns[at];
    send.token = tokens[at];
    send.front_end = serving[slot].front_end;
  }
  QLLM_D_CALL bool write_end(FrontEnd& f, const Ending& ending) {
    const FinishRecord& r = ending.record;
    u64 size = sizeof r + r.num_error_bytes;
    if (!write(f, kFinishKind, r.header.flags, (const u8*)&ending, size)) return false;
    f.num_ended++;
    return true;
  }
  // A separate function that writes to memory: a returned value would take all registers.
  QLLM_D_CALL void say_ending(i32 slot, Ending& e) const {
    const Request& r = requests[slot];
    Serving& x = serving[slot];
    e.record = FinishRecord();
    e.record.header.flags = kHasMetrics;
    e.record.request_id = u64(r.id);
    e.record.arrival_ns = r.arrival_ns;
    e.record.queue_ms = x.planned_ns == kNone ? nan() : ms(x.planned_ns - r.arrival_ns);
    e.record.parked_ms = ms(x.parked_ns);
    e.record.max_stall_ms = ms(x.stall_ns);
    e.record.reason = u32(x.reason);
    e.record.priority = i32(r.priority);
    e.record.num_prompt_tokens = u32(r.num_prompt);
    e.record.num_prefilled_tokens = u32(Meter(x).num_prefilled(r.num_prompt, v->most_layers));
    e.record.preemptions = u32(r.preemptions);
    e.record.evictions = u32(r.evictions);
    e.record.evict_recomputed_tokens = u32(x.recomputed[EVICTED]);
    e.record.retry_recomputed_tokens = u32(x.recomputed[RETRIED]);
    e.record.preempt_recomputed_tokens = u32(x.recomputed[PREEMPTED]);
    if (x.num_text) e.say(x.text, x.num_text);
  }
  QLLM_D_RARE bool write_end_of(FrontEnd& f, i32 slot) {
    Ending ending;
    say_ending(slot, ending);
    return write_end(f, ending);
  }
  QLLM_D static double ms(i64 ns) { return double(ns) / 1e6; }
  QLLM_D static double nan() {
    u64 bits = 0x7FF8000000000000ULL;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }

  // -- output

  // Write the ready records of a request, as far as there is room.
  QLLM_D_CALL void publish(i32 slot) {
    Serving& x = serving[slot];
    const Request& r = requests[slot];
    FrontEnd& f = front_ends[x.front_end];
    const i32 all_of = r.num_tokens - r.num_prompt;
    i32 at = x.num_published, ready = least(all_of, at + kMostPublished);
    while (at < ready && write_token(f, slot, at)) at++;
    x.num_published = at;
    bool all = at == all_of;
    if (!all || (x.phase == ENDED && !write_end_of(f, slot)))
      owe(slot);
    else if (x.phase == ENDED)
      let_go(slot);
    else if (x.owes)
      settle(slot);
  }
  QLLM_D void owe(i32 slot) {
    if (!serving[slot].owes) front_ends[serving[slot].front_end].owing++;
    serving[slot].owes = 1;
  }
  QLLM_D void settle(i32 slot) {
    if (serving[slot].owes) front_ends[serving[slot].front_end].owing--;
    serving[slot].owes = 0;
  }
  // Write records that lacked room before: one pass over the slots of each front end with some,
  // from where the last pass ended. Return how many slots still have some.
  QLLM_D_CALL i32 flush() {
    i32 left = 0;
    for (i32 n = 0; n < v->num_front_ends; n++) {
      FrontEnd& f = front_ends[n];
      i64 first = f.cursor;
      for (i64 i = 0; i < v->capacity && f.owing; i++) {
        i32 slot = i32((first + i) % v->capacity);
        Serving& x = serving[slot];
        if (x.phase == FREE || x.front_end != n || !x.owes) continue;
        i64 before = f.num_written;
        publish(slot);
        if (f.num_written == before) break;  // no room
        f.cursor = i32((slot + 1) % v->capacity);
      }
      left += f.owing;
    }
    return left;
  }

  // -- ends

  // End a request: it is no longer computed. Its records go out now, or when there is room.
  QLLM_D_CALL void finish(i32 slot, i32 reason, i64 now_ns) {
    retire(slot, now_ns);
    serving[slot].phase = ENDED;
    serving[slot].reason = reason;
    publish(slot);
  }
  // End a request of a front end that is gone.
  QLLM_D void drop(i32 slot, i64 now_ns) {
    if (serving[slot].phase == LIVE) retire(slot, now_ns);
    let_go(slot);
  }
  QLLM_D_CALL void retire(i32 slot, i64 now_ns) {
    Meter(serving[slot]).left(now_ns);
    scheduler.retire(slot);
    tell(REMOVED, slot);
    i64 deadline_ns = serving[slot].deadline_ns;
    serving[slot].deadline_ns = kNone;
    if (deadline_ns != kNone && deadline_ns == v->next_deadline_ns) find_deadline();
  }
  QLLM_D_CALL void find_deadline() {
    v->next_deadline_ns = kNone;
    for (i32 slot = 0; slot < v->capacity; slot++)
      if (serving[slot].phase == LIVE) expect(serving[slot].deadline_ns);
  }
  QLLM_D void expect(i64 deadline_ns) {
    if (deadline_ns == kNone) return;
    if (v->next_deadline_ns == kNone || deadline_ns < v->next_deadline_ns)
      v->next_deadline_ns = deadline_ns;
  }
};

}  // namespace qllm
