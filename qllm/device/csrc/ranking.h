// The order of all requests (qllm/scheduler/ranking.py), updated from call to call.
#pragma once
#include "block.h"

namespace qllm {

struct Ranking : Block {
  QLLM_HD Ranking(State* state, RankFunction rank) : Block(state, rank) {}

  QLLM_HD void ask(const Request& r, i64 now_ns, i64* verdict) const {
    i64 deadline = deadline_ns(r);
    if (deadline == kNone) deadline = kNoDeadline;
#if defined(__CUDA_ARCH__)
    qllm_rank(r.arrival_ns, r.priority, deadline, r.num_prompt, r.num_computed, r.served_ns,
              now_ns, verdict);
#else
    rank_function(r.arrival_ns, r.priority, deadline, r.num_prompt, r.num_computed, r.served_ns,
                  now_ns, verdict);
#endif
  }

  QLLM_HD static bool before(i64 tier, i64 key, i64 id, const Request& other) {
    if (tier != other.tier) return tier < other.tier;
    if (key != other.key) return key < other.key;
    return id < other.id;
  }
  QLLM_HD bool before(i32 a, i32 b) const {
    const Request& r = requests[a];
    return before(r.tier, r.key, r.id, requests[b]);
  }

  // Return how many of the first `count` of an order rank before a request.
  QLLM_HD i32 rank_in(const i32* order, i32 count, i32 slot) const {
    i32 low = 0, high = count;
    while (low < high) {
      i32 middle = (low + high) / 2;
      if (before(order[middle], slot))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  QLLM_HD_CALL void insert(i32* order, i64* count, i32 slot) {
    i32 at = rank_in(order, i32(*count), slot);
    for (i32 i = i32(*count); i > at; i--) order[i] = order[i - 1];
    order[at] = slot;
    *count += 1;
    s->num_odd += requests[slot].tier != requests[slot].priority;
  }
  QLLM_HD static void take_out(i32* list, i64* count, i32 at) {
    *count -= 1;
    for (i32 i = at; i < *count; i++) list[i] = list[i + 1];
  }
  QLLM_HD static i32 find(const i32* list, i64 count, i32 value) {
    for (i32 i = 0; i < count; i++)
      if (list[i] == value) return i;
    return -1;
  }

  // Remove a request.
  QLLM_HD_CALL void forget(i32 slot) {
    Request& r = requests[slot];
    if (r.place == ADMITTED) {
      take_out(admitted, &s->num_admitted, rank_in(admitted, i32(s->num_admitted), slot));
      s->num_odd -= r.tier != r.priority;
    } else if (r.place == WAITING) {
      take_out(waiting, &s->num_waiting, rank_in(waiting, i32(s->num_waiting), slot));
      s->num_odd -= r.tier != r.priority;
    } else if (r.place == UNRANKED) {
      take_out(unranked, &s->num_unranked, find(unranked, s->num_unranked, slot));
    }
    r.place = NOWHERE;
  }
  // Rank a request again: it arrived, or it took or lost KV.
  QLLM_HD void touch(i32 slot) {
    forget(slot);
    unranked[s->num_unranked++] = slot;
    requests[slot].place = UNRANKED;
  }

  // Ask for the verdicts of an order again, and sort those that moved.
  QLLM_HD_CALL void rank_again(i32* order, i64 count, i64 now_ns) {
    for (i32 i = 0; i < count; i++) {
      Request& r = requests[order[i]];
      i64 verdict[2];
      ask(r, now_ns, verdict);
      s->num_odd += (verdict[0] != r.priority) - (r.tier != r.priority);
      r.tier = verdict[0];
      r.key = verdict[1];
    }
    for (i32 i = 1; i < count; i++) {
      i32 slot = order[i];
      if (!before(slot, order[i - 1])) continue;
      i32 at = rank_in(order, i, slot);
      for (i32 j = i; j > at; j--) order[j] = order[j - 1];
      order[at] = slot;
    }
  }
  // Rank every request whose rank may have changed.
  QLLM_HD_CALL void update(i64 now_ns) {
    if (s->reads >= kReadsTime) rank_again(waiting, s->num_waiting, now_ns);
    if (s->reads >= kReadsProgress) rank_again(admitted, s->num_admitted, now_ns);
    while (s->num_unranked) {
      i32 slot = unranked[--s->num_unranked];
      Request& r = requests[slot];
      i64 verdict[2];
      ask(r, now_ns, verdict);
      r.tier = verdict[0];
      r.key = verdict[1];
      r.place = r.num_blocks ? ADMITTED : WAITING;
      if (r.num_blocks)
        insert(admitted, &s->num_admitted, slot);
      else
        insert(waiting, &s->num_waiting, slot);
    }
  }
  QLLM_HD i64 best_tier() const {
    i64 a = s->num_admitted ? requests[admitted[0]].tier : kNone;
    i64 w = s->num_waiting ? requests[waiting[0]].tier : kNone;
    if (!s->num_admitted) return w;
    return s->num_waiting ? least(a, w) : a;
  }
  QLLM_HD bool has_two_tiers() const {
    i64 best = best_tier();
    return (s->num_admitted && requests[admitted[s->num_admitted - 1]].tier != best) ||
           (s->num_waiting && requests[waiting[s->num_waiting - 1]].tier != best);
  }
};

}  // namespace qllm
