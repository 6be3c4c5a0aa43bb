// The decisions (qllm/scheduler/scheduler.py): requests, blocks and parked frames in; one decision out.
//
// Each call does bounded work on one block of state, allocates nothing and reads no clock. The
// effects on the runner are left in `effects`; the caller takes them and sets `num_effects`
// to 0. A rank policy resumes a parked frame whole or frees it, so no frame is ever replaced.
#pragma once
#include "be_share.h"

namespace qllm {

struct Scheduler : Ranking {
  QLLM_HD Scheduler(State* state, RankFunction rank) : Ranking(state, rank) {}

  // -- set-up

  // Make lists of free slots and blocks; the caller has written limits, policy and offsets.
  QLLM_HD void start() {
    for (i32 i = 0; i < s->num_blocks; i++) free_blocks[i] = i32(s->num_blocks) - 1 - i;
    s->num_free = s->num_blocks;
    s->running = -1;
    s->free_request = s->free_frame = -1;
    s->idle_since_ns = kNone;
    add_slots(0);
  }
  // Free the slots from `first` on.
  QLLM_HD void add_slots(i64 first) {
    for (i64 i = s->capacity - 1; i >= first; i--) {
      requests[i].live = 0;
      requests[i].next = i32(s->free_request);
      s->free_request = i;
      frames[i].next = i32(s->free_frame);
      s->free_frame = i;
    }
  }
  // Note a new policy: no verdict is valid any more.
  QLLM_HD void rank_anew() {
    for (i32 i = 0; i < s->capacity; i++)
      if (requests[i].live) touch(i);
  }

  // -- arrivals and ends of requests

  // Add a request that has arrived; return its slot, or -1 without a free one.
  QLLM_HD i32 add(i64 id, i64 priority, i64 arrival_ns, i64 ttft_ns, i64 tpot_ns, i64 num_prompt) {
    i32 slot = i32(s->free_request);
    if (slot < 0) return slot;
    Request& r = requests[slot];
    s->free_request = r.next;
    r = Request();
    r.id = id;
    r.priority = priority;
    r.arrival_ns = arrival_ns;
    r.ttft_ns = ttft_ns;
    r.tpot_ns = tpot_ns;
    r.first_token_ns = r.last_token_ns = kNone;
    r.num_prompt = r.num_tokens = i32(num_prompt);
    r.first_block = r.last_block = r.front_layer = r.frame = -1;
    r.live = 1;
    s->num_live++;
    touch(slot);
    return slot;
  }
  // Remove a request that has ended: drop its row and free its blocks.
  QLLM_HD void remove(i32 slot) {
    retire(slot);
    release(slot);
  }
  // Remove a request, but keep its slot until `release`.
  QLLM_HD_CALL void retire(i32 slot) {
    start_over(slot);
    forget(slot);
    clear_suspect(slot);
    requests[slot].live = 0;
    s->num_live--;
  }
  QLLM_HD void release(i32 slot) {
    requests[slot].next = i32(s->free_request);
    s->free_request = slot;
  }
  // Take the KV of a request; it starts again from its first token.
  QLLM_HD_CALL void evict(i32 slot, i64 for_request) {
    Request& r = requests[slot];
    i32 lost = r.num_computed;
    start_over(slot);
    touch(slot);
    r.evictions++;
    tell(EVICT, -1, r.id, lost, for_request);
  }
  // Give a request of a checkpoint the blocks of its computed tokens.
  QLLM_HD void adopt(i32 slot) {
    const Request& r = requests[slot];
    take_blocks(slot, blocks_for(r.front_layer < 0 ? r.num_computed : r.front_hi));
    touch(slot);
  }

  QLLM_HD void tell(i32 kind, i64 frame_id, i64 request_id, i32 lost = 0, i64 for_request = -1) {
    Effect effect = {frame_id, request_id, for_request, kind, lost};
    effects[s->num_effects++] = effect;
  }
  QLLM_HD void start_over(i32 slot) {
    Request& r = requests[slot];
    s->num_gone++;
    leave_frame(slot);
    give_back(slot);
    r.frame = r.front_layer = -1;
    r.num_computed = 0;
  }
  QLLM_HD_CALL void leave_frame(i32 slot) {
    i32 frame = requests[slot].frame;
    if (frame < 0) return;
    Frame& f = frames[frame];
    bool held = false;
    for (Row& row : all_rows(frame)) {
      if (row.slot == slot && row.request_id == requests[slot].id) row.flags |= DEAD;
      held |= !(row.flags & DEAD);
    }
    tell(held ? KILL : DROP, f.id, requests[slot].id);
    if (!held) {
      unpark(frame);
      free_slot(frame);
    }
  }
  QLLM_HD void clear_suspect(i32 slot) {
    i32 at = find(suspects, s->num_suspects, slot);
    if (at >= 0) take_out(suspects, &s->num_suspects, at);
  }

  // -- blocks

  QLLM_HD void take_blocks(i32 slot, i64 count) {
    Request& r = requests[slot];
    for (i64 i = 0; i < count; i++) {
      i32 block = free_blocks[--s->num_free];
      if (r.num_blocks)
        next_block[r.last_block] = block;
      else
        r.first_block = block;
      r.last_block = block;
      r.num_blocks++;
    }
  }
  QLLM_HD void give_back(i32 slot) {
    Request& r = requests[slot];
    i32 block = r.first_block;
    for (i32 i = 0; i < r.num_blocks; i++) {
      free_blocks[s->num_free++] = block;
      block = next_block[block];
    }
    r.num_blocks = 0;
    r.first_block = r.last_block = -1;
  }

  // -- frames

  QLLM_HD i32 new_frame() {
    i32 frame = i32(s->free_frame);
    s->free_frame = frames[frame].next;
    return frame;
  }
  QLLM_HD void free_slot(i32 frame) {
    frames[frame].next = i32(s->free_frame);
    s->free_frame = frame;
  }
  QLLM_HD void park(i32 frame) { parked[s->num_parked++] = frame; }
  QLLM_HD void unpark(i32 frame) {
    take_out(parked, &s->num_parked, find(parked, s->num_parked, frame));
  }
  // Split parked frames whose remaining rows have all left the sweep.
  QLLM_HD void let_go() {
    for (i32 p = 0; p < s->num_parked;) {
      i32 frame = parked[p];
      Frame& f = frames[frame];
      bool live = false;
      for (const Row& row : all_rows(frame)) live |= is_live(f, row);
      if (live) {
        p++;
        continue;
      }
      // only cancelled rows worked in this layer; live rows left the sweep at its start
      for (const Row& row : all_rows(frame)) {
        if (row.flags & DEAD) continue;
        requests[row.slot].frame = -1;
        set_frontier(row, frontier_layer(f, row));
      }
      tell(SPLIT, f.id, -1);
      unpark(frame);
      free_slot(frame);
    }
  }
  QLLM_HD void set_frontier(const Row& row, i32 layer) {
    Request& r = requests[row.slot];
    r.front_lo = row.lo;
    r.front_hi = row.hi;
    r.front_layer = layer;
  }

  // -- the decision

  QLLM_HD_CALL i32 decide(i64 now_ns) {
    s->decided_frame = -1;
    s->slice_ns = s->wait_until_ns = kNone;
    BeShare share(s, rank_function, now_ns);
    if (!s->num_live) {
      share.rest();
      s->idle_since_ns = kNone;
      s->kind = IDLE;
      return OK;
    }
    if (s->num_effects > s->capacity) return NO_ROOM;  // a decision leaves at most three times it
    let_go();
    if (s->floor_rate) update(now_ns);
    const Plan turn = share.turn();
    Plan plan = alone();
    bool pays = !plan.num_rows && turn.num_rows;
    if (pays) {
      plan = turn;
    } else if (!plan.num_rows) {
      update(now_ns);
      plan = Shapes(s, rank_function, now_ns).best();
      share.cut(plan);
    }
    if (!plan.num_rows) return EMPTY_PLAN;
    if (plan.frame >= 0) {
      go_on_with(plan);
      s->owed_pays = pays;
      return OK;
    }
    i64 stuck = plan.rows[0].slot;
    acquire(plan, now_ns);
    if (plan.num_rows) {
      begin(plan, now_ns);
      s->owed_pays = pays;
      return OK;
    }
    if (!requests[stuck].num_blocks) {
      s->stuck = requests[stuck].id;
      return NO_KV;
    }
    evict(i32(stuck), requests[stuck].id);
    return wait(now_ns);
  }
  // Wait to be asked again soon, unless that has lasted too long.
  QLLM_HD i32 wait(i64 now_ns) {
    if (s->idle_since_ns == kNone) s->idle_since_ns = now_ns;
    if (now_ns >= s->idle_since_ns + kMaxIdleNs) {
      s->idle_since_ns = kNone;
      return STALLS;
    }
    s->kind = WAIT;
    s->wait_until_ns = now_ns + kNsPerMs / 10;
    return OK;
  }
  // Plan a suspect alone, as far as KV is free.
  QLLM_HD_CALL Plan alone() {
    Plan plan = {plan_rows, 0, -1, kGrainStep, kNoStop, kNone};
    for (i32 i = 0; i < s->num_suspects && !plan.num_rows; i++) {
      const Request& r = requests[suspects[i]];
      Row row = next_row(suspects[i], s->max_step_tokens);
      i64 room = (r.num_blocks + s->num_free) * s->block_size;
      if (r.frame >= 0 || row.lo >= room) continue;
      row.hi = i32(least<i64>(row.hi, room));
      align(row);
      if (row.hi > room) continue;
      plan.rows[0] = row;
      plan.num_rows = 1;
    }
    return plan;
  }
  // Give every row its end and its blocks, evicting lower ranks where they are short.
  QLLM_HD_CALL void acquire(Plan& plan, i64 now_ns) {
    i64 stamp = ++s->epoch;
    Row* kept = plan.rows;
    for (Row *at = plan.rows, *end = at + plan.num_rows; at < end; at++) {
      Row& row = *at;
      Request& r = requests[row.slot];
      if (r.gone == stamp) continue;
      align(row);
      row.flags = row.hi == r.num_tokens ? SAMPLES : 0;
      i64 need = blocks_for(row.hi) - r.num_blocks;
      if (need > 0) {
        if (need > s->num_free) make_room(row.slot, need - s->num_free, stamp, now_ns);
        if (need > s->num_free) continue;
        bool is_new = !r.num_blocks;
        take_blocks(row.slot, need);
        if (is_new) {
          r.last_progress_ns = now_ns;
          touch(row.slot);
        }
      }
      r.mark = stamp;
      if (kept < at) *kept = row;
      kept++;
    }
    plan.num_rows = i32(kept - plan.rows);
  }
  // Evict the shortest list of worse ranks that frees so many blocks, or none (I6).
  QLLM_HD void make_room(i32 slot, i64 num_blocks, i64 stamp, i64 now_ns) {
    update(now_ns);
    const Request& r = requests[slot];
    i64 me[2];
    ask(r, now_ns, me);
    i32 count = 0;
    for (i64 i = s->num_admitted - 1; i >= 0 && num_blocks > 0; i--) {
      const Request& x = requests[admitted[i]];
      bool equal = r.num_blocks && before(me[0], me[1], r.id, x) && !is_between_groups(x);
      if (!(x.tier > me[0] || equal) || x.mark == stamp || admitted[i] == slot) continue;
      chosen[count++] = admitted[i];
      num_blocks -= x.num_blocks;
    }
    if (num_blocks > 0) return;
    for (i32 i = 0; i < count; i++) {
      requests[chosen[i]].gone = stamp;
      evict(chosen[i], r.id);
    }
  }
  QLLM_HD void begin(const Plan& plan, i64 now_ns) {
    i32 frame = new_frame();
    Frame& f = frames[frame];
    f.id = ++s->next_frame_id;
    f.num_rows = plan.num_rows;
    f.layer = i32(s->num_layers);
    f.inside = 0;
    f.parked_ns = now_ns;
    Row* to = rows_of(frame);
    for (i32 i = 0; i < plan.num_rows; i++) {
      to[i] = plan.rows[i];
      f.layer = least(f.layer, to[i].start);
    }
    s->kind = START;
    run(frame, plan);
  }
  QLLM_HD void go_on_with(const Plan& plan) {
    unpark(plan.frame);
    for (const Row& row : all_rows(plan.frame))
      if (has_request(row) && requests[row.slot].frame == plan.frame) requests[row.slot].frame = -1;
    s->kind = RESUME;
    run(plan.frame, plan);
  }
  QLLM_HD void run(i32 frame, const Plan& plan) {
    frames[frame].grain = plan.grain;
    frames[frame].stop_below = plan.stop_below;
    s->running = s->decided_frame = frame;
    s->slice_ns = plan.slice_ns;
  }

  // -- results of a run

  QLLM_HD i32 take_running() {
    i32 frame = i32(s->running);
    s->running = -1;
    s->idle_since_ns = kNone;
    return frame;
  }
  // Count the run for requests whose rows took part in it: up to an op of layer `high`.
  QLLM_HD_CALL void progress(i32 frame, i32 high, bool done, i64 start_ns, i64 end_ns) {
    const i32 layer = frames[frame].layer;
    i64 tokens = 0, be_tokens = 0;
    for (const Row& row : all_rows(frame)) {
      bool last = (row.flags & SAMPLES) && row.end == layer;
      if (!has_live_request(row) || row.start > high || !(row.end > layer || last)) continue;
      requests[row.slot].served_ns += end_ns - start_ns;
      requests[row.slot].last_progress_ns = end_ns;
      tokens += row.hi - row.lo;
      if (BeShare::is_be(requests[row.slot])) be_tokens += row.hi - row.lo;
    }
    BeShare::ran(s, be_tokens, tokens, end_ns - start_ns);
    if (s->ride_frac != 0) {
      update(end_ns);
      settle_ride(frame, done, start_ns, end_ns);
    }
  }
  // Earn or spend the time that worse tiers may take from decoding requests.
  QLLM_HD void settle_ride(i32 frame, bool done, i64 start_ns, i64 end_ns) {
    i64 elapsed_ns = end_ns - start_ns;
    if (!has_two_tiers()) {
      s->ride_credit_ns = s->ride_spent_ns = 0;
      s->ride_best_ns = end_ns;
      return;
    }
    const Frame& f = frames[frame];
    i64 best = best_tier(), tpot_ns = kNone;
    i32 count = 0;
    bool decoding = true;
    for (const Row& row : all_rows(frame)) {
      const Request& r = requests[row.slot];
      if (!has_request(row) || r.place != ADMITTED || r.tier != best) continue;
      count++;
      decoding &= is_decoding(r);
      if (r.tpot_ns != kNone) tpot_ns = tpot_ns == kNone ? r.tpot_ns : least(tpot_ns, r.tpot_ns);
    }
    if (!count) {
      s->ride_credit_ns -= elapsed_ns;
      s->ride_spent_ns += elapsed_ns;
      return;
    }
    i64 best_ns = s->ride_best_ns;
    s->ride_best_ns = end_ns;
    bool spent = s->ride_spent_ns != 0;
    s->ride_spent_ns = 0;
    if (!done || !decoding) return;
    i64 allowance = ride_allowance_ns(*this, count, tpot_ns);
    i64 credit = s->ride_credit_ns + allowance;
    bool joined = count < f.num_rows;
    if (joined) credit -= most<i64>(0, elapsed_ns - decode_cost(count));
    if (tpot_ns != kNone && (joined || spent)) {
      if (end_ns - best_ns > tpot_ns)
        s->ride_margin_ns = least(tpot_ns, s->ride_margin_ns + tpot_ns / kMarginGrowth);
      else
        s->ride_margin_ns -= s->ride_margin_ns / kMarginDecay;
    }
    s->ride_credit_ns = least(credit, kRideCap * allowance);
  }

  // Commit the running frame, which reached its end; return how many tokens its rows sampled.
  QLLM_HD_CALL i32 done(i32 high, i64 start_ns, i64 end_ns) {
    i32 frame = take_running(), num_sampled = 0;
    progress(frame, high, true, start_ns, end_ns);
    for (const Row& row : all_rows(frame)) {
      if (!has_live_request(row)) continue;
      Request& r = requests[row.slot];
      r.frame = -1;
      if (row.end < s->num_layers) {
        set_frontier(row, row.end);
        continue;
      }
      r.front_layer = -1;
      r.num_computed = row.hi;
      if (row.flags & SAMPLES) {
        num_sampled++;
        r.num_tokens++;
        r.last_token_ns = end_ns;
        if (r.first_token_ns == kNone) r.first_token_ns = end_ns;
      }
      i32 suspect = find(suspects, s->num_suspects, row.slot);
      if (suspect >= 0) {
        take_out(suspects, &s->num_suspects, suspect);
        r.failures = 0;
      }
    }
    free_slot(frame);
    return num_sampled;
  }
  // Park the running frame, which stopped at a boundary.
  QLLM_HD_CALL void stopped(i32 high, i32 layer, i32 inside, i64 start_ns, i64 end_ns, i32 preempted) {
    i32 frame = take_running();
    progress(frame, high, false, start_ns, end_ns);
    Frame& f = frames[frame];
    f.layer = layer;
    f.inside = inside;
    f.parked_ns = end_ns;
    for (const Row& row : all_rows(frame)) {
      if (!has_live_request(row)) continue;
      Request& r = requests[row.slot];
      r.frame = frame;
      r.preemptions += preempted;
      set_frontier(row, frontier_layer(f, row));
    }
    park(frame);
  }
  // Rerun the requests of the running frame, which raised, one by one. Leave those that failed
  // alone in `chosen`; return their number.
  QLLM_HD_CALL i32 failed() {
    i32 frame = take_running(), hopeless = 0;
    for (const Row& row : all_rows(frame)) {
      if (!has_live_request(row)) continue;
      Request& r = requests[row.slot];
      r.frame = r.front_layer = -1;
      r.failures++;
      if (r.failures > 1)
        chosen[hopeless++] = row.slot;
      else if (find(suspects, s->num_suspects, row.slot) < 0)
        suspects[s->num_suspects++] = row.slot;
    }
    free_slot(frame);
    return hopeless;
  }
};

}  // namespace qllm
