// Plans from ranks (qllm/scheduler/rank_plan.py): the closed set of shapes around a rank policy.
#pragma once
#include "ranking.h"

namespace qllm {

const i64 kMinSliceNs = kNsPerMs;
const i64 kGoodSliceNs = 10 * kNsPerMs;
const i64 kMinChunk = 32;
const i64 kRideCap = 8;
const i64 kJoinCap = 2;
const i64 kMarginGrowth = 8;
const i64 kMarginDecay = 512;
const i64 kGapSteps = 4;
const i64 kLeastPart = 4;
const i64 kMarginPart = 8;
const i64 kWorthNs = kNsPerMs;

// Rows of one step, and the seats, prefill tokens and blocks that they leave.
struct Batch {
  Row* rows;
  i32 num_rows;
  i32 num_prefills;
  i64 seats;
  i64 tokens;
  i64 free_blocks;
};

// A plan: the rows of a parked frame (`frame` >= 0), or new ones.
struct Plan {
  Row* rows;
  i32 num_rows;
  i32 frame;
  i32 grain;
  i64 stop_below;
  i64 slice_ns;
};

struct Shapes : Ranking {
  i64 now_ns;
  i64 min_slice_ns;
  i32 num_tiers;
  i32 num_decodes, num_prefills;
  Row *best_rows, *joining_rows, *other_rows;

  QLLM_HD Shapes(State* state, RankFunction rank, i64 now) : Ranking(state, rank), now_ns(now) {
    min_slice_ns = least<i64>(s->max_segment_ns, 5 * kNsPerMs);
    num_tiers = num_decodes = num_prefills = 0;
    best_rows = plan_rows;
    joining_rows = plan_rows + s->seats;
    other_rows = plan_rows + 2 * s->seats;
  }

  QLLM_HD bool groups() const { return s->group_tokens > 0; }
  QLLM_HD i32 finest_grain() const { return i32(least(s->grain, s->finest_grain)); }

  // Return the end of a tier in an order, for a `low` in the tier or after it.
  QLLM_HD i32 end_of_tier(const i32* order, i32 low, i32 high, i64 tier) const {
    while (low < high) {
      i32 middle = (low + high) / 2;
      if (requests[order[middle]].tier <= tier)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // Find the tiers, and the decodes, prefills and waiting requests of each.
  QLLM_HD void look_around() {
    i32 a = 0, w = 0;
    while (a < s->num_admitted || w < s->num_waiting) {
      Tier& t = tiers[num_tiers];
      bool first = w >= s->num_waiting;
      if (a < s->num_admitted && !first)
        first = requests[admitted[a]].tier <= requests[waiting[w]].tier;
      t.tier = requests[first ? admitted[a] : waiting[w]].tier;
      t.decodes = num_decodes;
      t.prefills = num_prefills;
      t.cohort = 0;
      for (; a < s->num_admitted && requests[admitted[a]].tier == t.tier; a++) {
        i32 slot = admitted[a];
        if (requests[slot].frame >= 0) continue;
        if (is_decoding(requests[slot]))
          decodes[num_decodes++] = slot;
        else
          prefills[num_prefills++] = slot;
      }
      t.waiting = w;
      w = end_of_tier(waiting, w, i32(s->num_waiting), t.tier);
      t.decodes_end = num_decodes;
      t.prefills_end = num_prefills;
      t.waiting_end = w;
      t.admitted_end = a;
      order[num_tiers] = num_tiers;
      num_tiers++;
    }
  }

  // -- batches

  QLLM_HD Batch empty_batch(Row* rows, i64 tokens) const {
    Batch batch = {rows, 0, 0, s->seats, tokens, s->num_free};
    return batch;
  }
  // Return the blocks that a row takes beyond its request's; a newcomer's up to its allowed end.
  QLLM_HD i64 need(const Row& asked) const {
    Row row = asked;
    if (!requests[row.slot].num_blocks) align(row);
    return most<i64>(0, blocks_for(row.hi) - requests[row.slot].num_blocks);
  }
  QLLM_HD void take(Batch& batch, const Row& row) const {
    batch.rows[batch.num_rows++] = row;
    batch.seats--;
    batch.free_blocks -= need(row);
  }
  QLLM_HD void take_prefill(Batch& batch, const Row& row) const {
    take(batch, row);
    batch.tokens -= row.hi - row.lo;
    batch.num_prefills++;
  }

  // Return the prefill tokens of a step that it shares with the decodes of these tiers.
  QLLM_HD_CALL i64 prefill_tokens(const i32* which, i32 count) const {
    i64 tokens = s->max_step_tokens;
    if (!s->step_tokens && !s->slack_min_tokens) return tokens;
    i64 decoding = 0, due_ns = kMost;
    for (i32 i = 0; i < count; i++) {
      const Tier& t = tiers[which[i]];
      for (i32 d = t.decodes; d < t.decodes_end && decoding < s->seats; d++, decoding++) {
        const Request& r = requests[decodes[d]];
        i64 own = deadline_ns(r);
        if (own == kNone) {
          i64 last = r.last_token_ns == kNone ? 0 : r.last_token_ns;
          own = last + s->slack_tpot_ms * kNsPerMs;
        }
        due_ns = least(due_ns, own);
      }
    }
    if (s->step_tokens) tokens = least(tokens, s->step_tokens - decoding);
    if (s->slack_min_tokens && decoding) {
      i64 spare = floor_div(due_ns - now_ns - decode_cost(decoding), s->prefill_token_ns);
      tokens = least(tokens, most(spare, s->slack_min_tokens));
    }
    return tokens;
  }

  // Return the prefill tokens that fit a slice, for steps that time cannot stop.
  QLLM_HD i64 slice_tokens(i64 slice_ns) const {
    if (finest_grain() > kGrainStep) return s->max_step_tokens;
    return least(s->max_step_tokens, most(kMinChunk, floor_div(slice_ns, s->prefill_token_ns)));
  }

  // Return the layer at which a cohort stops next: the end of its last row's next group.
  QLLM_HD i32 next_cut(i64 tokens, i64 layer) const {
    i64 num = (tokens + s->group_tokens - 1) / s->group_tokens;
    num = most<i64>(1, least(least(num, s->max_groups), s->num_layers));
    for (i64 i = 0; i < num; i++) {
      i64 cut = s->num_layers * (i + 1) / num;
      if (cut > layer) return i32(cut);
    }
    return i32(s->num_layers);
  }

  // Add the next group of layers of a started cohort; return true if there is one.
  QLLM_HD_CALL bool go_on(Batch& batch, const Tier& t) const {
    i64 tokens = 0, least_layer = kMost;
    bool any = false;
    for (i32 p = t.prefills; p < t.prefills_end; p++) {
      if (requests[prefills[p]].front_layer < 0) continue;
      Row row = next_row(prefills[p]);
      tokens += row.hi - row.lo;
      least_layer = least<i64>(least_layer, row.start);
      any = true;
    }
    if (!any) return false;
    i32 cut = next_cut(tokens, least_layer);
    for (i32 p = t.prefills; p < t.prefills_end; p++) {
      if (requests[prefills[p]].front_layer < 0) continue;
      Row row = next_row(prefills[p]);
      if (batch.seats && (row.start < cut || row.start == least_layer)) {
        row.end = cut;
        take_prefill(batch, row);
      }
    }
    return true;
  }

  QLLM_HD bool is_first(i32 slot) const {
    return !(s->num_admitted && before(admitted[0], slot)) &&
           !(s->num_waiting && before(waiting[0], slot));
  }
  // Return the blocks that requests of worse tiers hold.
  QLLM_HD i64 evictable(const Tier& t) const {
    i64 sum = 0;
    for (i32 i = t.admitted_end; i < s->num_admitted; i++) sum += requests[admitted[i]].num_blocks;
    return sum;
  }

  // Fill a batch with prefills of a tier, in strict order.
  QLLM_HD_CALL void prefill(Batch& batch, const Tier& t, bool force) const {
    i64 chunk = s->chunk_tokens ? s->chunk_tokens : s->max_step_tokens;
    i64 worse = -1;
    i32 begin = batch.num_rows, p = t.prefills, w = t.waiting;
    bool blocked = false;
    while (p < t.prefills_end || w < t.waiting_end) {
      if (!batch.seats || batch.tokens <= 0) break;
      bool held = p < t.prefills_end;
      if (held && w < t.waiting_end) held = before(prefills[p], waiting[w]);
      if (blocked && !held) {  // waiting requests are skipped
        w = t.waiting_end;
        continue;
      }
      i32 slot = held ? prefills[p++] : waiting[w++];
      Row row = next_row(slot, least(batch.tokens, chunk));
      i64 more = need(row);
      if (more > batch.free_blocks) {
        if (worse < 0) worse = evictable(t);
        if (more > batch.free_blocks + worse) {
          if (batch.num_rows) {
            batch.tokens = 0;
            break;
          }
          if (!held || !(force || is_first(slot))) {
            blocked = true;
            continue;
          }
        }
      }
      take_prefill(batch, row);
    }
    if (groups()) {
      i64 tokens = 0, layer = kMost;
      for (i32 i = begin; i < batch.num_rows; i++) {
        tokens += batch.rows[i].hi - batch.rows[i].lo;
        layer = least<i64>(layer, batch.rows[i].start);
      }
      i32 cut = next_cut(tokens, layer);
      for (i32 i = begin; i < batch.num_rows; i++) batch.rows[i].end = cut;
    }
  }

  // Return decodes, then prefills, tier by tier. `tokens`: kNone takes those of the shape.
  // `cohort`: the tier whose prefills advance, or one of these.
  enum { kEveryCohort = -1, kMarkedCohorts = -2, kNoCohort = -3 };
  QLLM_HD_CALL Batch batch(const i32* which, i32 count, Row* rows, i64 tokens, i32 cohort, bool force) {
    Batch out = empty_batch(rows, tokens == kNone ? prefill_tokens(which, count) : tokens);
    for (i32 i = 0; i < count; i++) {
      const Tier& t = tiers[which[i]];
      bool advances = cohort == kEveryCohort || cohort == which[i];
      if (cohort == kMarkedCohorts) advances = t.cohort != 0;
      bool under_way = advances && groups() && go_on(out, t);
      for (i32 d = t.decodes; d < t.decodes_end; d++) {
        if (!out.seats) return out;
        take(out, next_row(decodes[d]));
      }
      if (advances && !under_way) prefill(out, t, force);
    }
    return out;
  }

  // -- plans

  QLLM_HD i64 bound_ns() const { return s->max_be_stall_ms * kNsPerMs; }
  QLLM_HD i64 margin_ns() const {
    if (groups()) return bound_ns() / 2;
    i64 slice = min_slice_ns + 2 * least<i64>(s->max_segment_ns, 50 * kNsPerMs);
    i64 slices = most((s->num_parked + 2) * slice, bound_ns() / 8);
    return least(bound_ns() - bound_ns() / 2, slices);
  }
  QLLM_HD bool is_bounded(const Request& r) const {
    return r.tier > tiers[0].tier || r.priority > kPriorityLs;
  }

  QLLM_HD_CALL Plan stoppable_plan(Row* rows, i32 count, i32 frame, i64 slice_ns) {
    Plan plan = {rows, count, frame, finest_grain(), kNoStop, slice_ns};
    if (plan.grain == kGrainStep) return plan;
    i64 stamp = ++s->epoch;
    plan.stop_below = requests[rows[0].slot].tier;
    for (i32 i = 0; i < count; i++) {
      Request& r = requests[rows[i].slot];
      plan.stop_below = least(plan.stop_below, r.tier);
      r.mark = stamp;
    }
    if (s->num_odd) plan.stop_below = kAnyArrival;
    if (!s->max_be_stall_ms) return plan;
    i64 left = bound_ns() - margin_ns(), due = kMost;
    for (i32 i = 0; i < s->num_admitted; i++) {
      const Request& r = requests[admitted[i]];
      if (r.mark != stamp && is_bounded(r)) due = least(due, r.last_progress_ns + left);
    }
    if (due == kMost) return plan;
    i64 left_ns = most(min_slice_ns, due - now_ns);
    plan.slice_ns = plan.slice_ns == kNone ? left_ns : least(plan.slice_ns, left_ns);
    return plan;
  }
  // Return true if nothing would stop these rows inside the step: the best class decodes alone.
  QLLM_HD bool runs_whole(const Plan& plan) const {
    i64 best = least(tiers[0].tier, kPriorityLs);
    if (!s->whole_steps || plan.grain == kGrainStep || plan.stop_below > best) return false;
    if (plan.slice_ns != kNone && plan.slice_ns < decode_cost(plan.num_rows)) return false;
    for (i32 i = 0; i < plan.num_rows; i++) {
      const Row& row = plan.rows[i];
      bool decodes = row.hi - row.lo == 1 && !row.start && row.end == s->num_layers;
      if (!decodes || requests[row.slot].tier > best) return false;
    }
    return true;
  }
  QLLM_HD_CALL Plan finish_plan(Row* rows, i32 count, i32 frame = -1, i64 slice_ns = kNone) {
    Plan plan = stoppable_plan(rows, count, frame, slice_ns);
    if (!runs_whole(plan)) return plan;
    plan.grain = kGrainStep;
    plan.stop_below = kNoStop;
    plan.slice_ns = kNone;
    return plan;
  }
  QLLM_HD Plan finish(const Batch& batch) { return finish_plan(batch.rows, batch.num_rows); }
  QLLM_HD static Plan no_plan() {
    Plan plan = {0, 0, -1, kGrainStep, kNoStop, kNone};
    return plan;
  }
  QLLM_HD i32 live_rows(i32 frame, Row* rows) const {
    const Frame& f = frames[frame];
    i32 count = 0;
    for (Row row : all_rows(frame)) {
      if (!is_live(f, row)) continue;
      row.start = frontier_layer(f, row);
      rows[count++] = row;
    }
    return count;
  }
  QLLM_HD_CALL Plan resume(i32 frame, Row* rows) {
    return finish_plan(rows, live_rows(frame, rows), frame);
  }
  // Return true if the best live row of a parked frame is of a tier.
  QLLM_HD bool is_of_tier(i32 frame, i64 tier) const {
    const Frame& f = frames[frame];
    i64 best = kMost;
    bool any = false;
    for (const Row& row : all_rows(frame)) {
      if (!is_live(f, row)) continue;
      i64 own = requests[row.slot].tier;
      best = any ? least(best, own) : own;
      any = true;
    }
    return any && best == tier;
  }
  // Return the first parked frame of a tier, or -1.
  QLLM_HD_CALL i32 frame_of_tier(i64 tier) const {
    for (i32 i = 0; i < s->num_parked; i++)
      if (is_of_tier(parked[i], tier)) return parked[i];
    return -1;
  }

  // Return true if newcomers of this tier run before a parked step of it: a step that rows of
  // worse tiers joined also stops for its own tier, once.
  QLLM_HD_CALL bool goes_before(i32 frame, const Tier& t) const {
    const Frame& f = frames[frame];
    bool joined = false;
    for (const Row& row : all_rows(frame))
      if (is_live(f, row) && requests[row.slot].tier > t.tier) joined = true;
    if (!joined) return false;
    for (i32 w = t.waiting; w < t.waiting_end; w++)
      if (requests[waiting[w]].arrival_ns <= f.parked_ns) return true;
    return false;
  }

  // -- the stall bound

  // A request without progress since this time is due.
  QLLM_HD i64 due_since_ns() const { return now_ns - (bound_ns() - margin_ns()); }
  QLLM_HD bool is_due(const Request& r, i64 since_ns) const {
    return r.last_progress_ns <= since_ns && is_bounded(r);
  }
  // Return a guaranteed slice for a due request; it needs no seat and no arrival stops it.
  QLLM_HD Plan stalled() {
    if (!s->max_be_stall_ms) return no_plan();
    i32 first = -1;
    const i64 since_ns = due_since_ns();
    for (i32 i = 0; i < s->num_admitted; i++) {
      const Request& r = requests[admitted[i]];
      if (!is_due(r, since_ns)) continue;
      if (first < 0 || r.last_progress_ns < requests[first].last_progress_ns ||
          (r.last_progress_ns == requests[first].last_progress_ns && r.id < requests[first].id))
        first = admitted[i];
    }
    if (first < 0) return no_plan();
    const Request& f = requests[first];
    Plan plan;
    if (f.frame >= 0) {
      plan = resume(f.frame, best_rows);
    } else if (is_decoding(f)) {
      plan = finish(due_decodes());
    } else if (groups() && is_between_groups(f)) {
      return finish(due_cohorts());
    } else {
      best_rows[0] = next_row(first, slice_tokens(min_slice_ns));
      plan = finish_plan(best_rows, 1);
    }
    plan.stop_below = kNoStop;
    plan.slice_ns = min_slice_ns;
    return plan;
  }
  QLLM_HD Batch due_decodes() {
    Batch out = empty_batch(best_rows, 0);
    const i64 since_ns = due_since_ns();
    for (i32 i = 0; i < s->num_admitted && out.seats; i++) {
      const Request& r = requests[admitted[i]];
      if (!is_due(r, since_ns) || !is_decoding(r) || r.frame >= 0) continue;
      Row row = next_row(admitted[i]);
      if (!out.num_rows || need(row) <= out.free_blocks) take(out, row);
    }
    return out;
  }
  QLLM_HD Batch due_cohorts() {
    const i64 since_ns = due_since_ns();
    for (i32 t = 0, i = 0; t < num_tiers; t++)
      for (; i < tiers[t].admitted_end; i++) {
        const Request& r = requests[admitted[i]];
        if (is_due(r, since_ns) && is_between_groups(r) && !is_decoding(r)) tiers[t].cohort = 1;
      }
    i32 count = 0;
    for (i32 wanted = 1; wanted >= 0; wanted--)
      for (i32 t = 0; t < num_tiers; t++)
        if (tiers[t].cohort == wanted) order[count++] = t;
    return batch(order, count, best_rows, kNone, kMarkedCohorts, false);
  }

  // -- turns of the prompts and the streams of one tier (qllm/scheduler/gaps.py)

  // Return when a stream is due, less the margin; `gap_ns` is its gap without a target.
  QLLM_HD i64 stream_due_ns(const Request& r, i64 gap_ns) const {
    i64 last_ns = r.last_token_ns == kNone ? 0 : r.last_token_ns, due_ns = deadline_ns(r);
    if (due_ns != kNone) gap_ns = due_ns - last_ns;
    return last_ns + gap_ns - floor_div(gap_ns, kMarginPart);
  }
  // Return true if all rows that a frame has of a tier are decodes.
  QLLM_HD bool is_stream(i32 frame, i64 tier) const {
    const Frame& f = frames[frame];
    for (const Row& row : all_rows(frame)) {
      const Request& r = requests[row.slot];
      if (is_live(f, row) && r.tier == tier && !is_decoding(r)) return false;
    }
    return true;
  }
  // Find decodes of a tier for which there are seats and free KV.
  QLLM_HD Batch fitting(const Tier& t, Row* rows) const {
    Batch out = empty_batch(rows, 0);
    for (i32 d = t.decodes; d < t.decodes_end; d++) {
      Row row = next_row(decodes[d]);
      if (out.seats && need(row) <= out.free_blocks) take(out, row);
    }
    return out;
  }
  // Return true if a step of decodes and prompts should end in time.
  QLLM_HD bool share(const Batch& batch, i64 left_ns) const {
    i64 decoding = batch.num_rows - batch.num_prefills, tokens = -decoding;
    for (i32 i = 0; i < batch.num_rows; i++) tokens += batch.rows[i].hi - batch.rows[i].lo;
    i64 step_ns = most(decode_cost(decoding) + tokens * s->prefill_token_ns,
                       decode_cost(decoding + tokens));
    return step_ns <= left_ns;
  }
  // Plan a tier whose prompts could delay its streams for too long; no plan if they could not.
  QLLM_HD_CALL Plan take_turns(i32 index) {
    const Tier& t = tiers[index];
    if (!s->max_prompt_gap_ms || !(s->num_parked || has_prefill(t))) return no_plan();
    Batch loose = fitting(t, joining_rows);
    i64 num_decodes = loose.num_rows, num_frames = 0, num_streams = 0;
    i32 waits = -1;
    const i64 stamp = ++s->epoch;  // marks the streams
    for (i32 i = 0; i < loose.num_rows; i++) requests[loose.rows[i].slot].mark = stamp;
    for (i32 i = 0; i < s->num_parked; i++) {
      i32 frame = parked[i];
      if (!is_of_tier(frame, t.tier)) continue;
      num_frames++;
      if (!is_stream(frame, t.tier)) continue;
      if (!num_streams++) waits = frame;
      for (const Row& row : all_rows(frame)) {
        Request& r = requests[row.slot];
        if (!is_live(frames[frame], row) || r.tier != t.tier) continue;
        r.mark = stamp;
        num_decodes++;
      }
    }
    if (!num_decodes || !(num_frames > num_streams || has_prefill(t))) return no_plan();
    if (num_streams && !goes_before(waits, t)) return resume(waits, best_rows);
    const i64 step_ns = decode_cost(num_decodes);
    const i64 gap_ns = most<i64>(s->max_prompt_gap_ms * kNsPerMs, kGapSteps * step_ns);
    i64 due_ns = kMost, oldest_ns = kMost, newest_ns = -kMost;
    for (i32 i = index ? tiers[index - 1].admitted_end : 0; i < t.admitted_end; i++) {
      const Request& r = requests[admitted[i]];
      newest_ns = most<i64>(newest_ns, r.last_progress_ns);
      if (r.mark != stamp) continue;
      oldest_ns = least<i64>(oldest_ns, r.last_progress_ns);
      due_ns = least(due_ns, stream_due_ns(r, gap_ns));
    }
    const i64 left_ns = due_ns - now_ns;
    if (!num_frames) {
      Batch both = batch(order + index, 1, best_rows, kNone, kEveryCohort, false);
      if (both.num_prefills && share(both, left_ns)) return finish(both);
    }
    i64 slice_ns = left_ns - step_ns;
    if (newest_ns <= oldest_ns)
      return prompts_for(index, most(slice_ns, most(step_ns / kLeastPart, min_slice_ns)));
    if (slice_ns >= kWorthNs) return prompts_for(index, slice_ns);
    if (num_streams) return resume(waits, best_rows);
    if (num_frames) return finish(loose);
    return finish(batch(order + index, 1, best_rows, kNone, kNoCohort, false));
  }
  // Plan the prompts of a tier for a time: alone, where steps are cut.
  QLLM_HD_CALL Plan prompts_for(i32 index, i64 slice_ns) {
    const Tier& t = tiers[index];
    const bool alone = finest_grain() > kGrainStep;
    const i64 tokens = least(prefill_tokens(order + index, 1), slice_tokens(slice_ns));
    if (!alone) slice_ns = kNone;
    for (i32 i = 0; i < s->num_parked; i++) {
      i32 frame = parked[i];
      if (!is_of_tier(frame, t.tier) || (alone && is_stream(frame, t.tier))) continue;
      if (goes_before(frame, t)) {
        Batch out = batch(order + index, 1, best_rows, tokens, kEveryCohort, false);
        if (out.num_prefills) return finish_plan(out.rows, chosen(out, alone), -1, slice_ns);
      }
      return finish_plan(best_rows, live_rows(frame, best_rows), frame, slice_ns);
    }
    Batch out = batch(order + index, 1, best_rows, tokens, kEveryCohort, false);
    i32 count = chosen(out, alone);
    return count ? finish_plan(out.rows, count, -1, slice_ns) : no_plan();
  }
  // Keep the prompts of a batch, or all rows; return how many.
  QLLM_HD i32 chosen(const Batch& batch, bool prompts) const {
    if (!prompts) return batch.num_rows;
    i32 count = 0;
    for (i32 i = 0; i < batch.num_rows; i++)
      if (!is_decoding(requests[batch.rows[i].slot])) batch.rows[count++] = batch.rows[i];
    return count;
  }

  // -- all tiers

  // Return decodes of every tier, and the next group of the first cohort that can advance.
  QLLM_HD Plan layered() {
    for (i32 force = 0; force < 2; force++) {
      for (i32 t = 0; t < num_tiers; t++) {
        if (!has_prefill(tiers[t])) continue;
        Batch out = batch(order, num_tiers, best_rows, kNone, t, force != 0);
        if (out.num_prefills) return finish(out);
      }
      Batch out = batch(order, num_tiers, best_rows, kNone, kNoCohort, false);
      if (out.num_rows) return finish(out);
    }
    return no_plan();
  }

  QLLM_HD Plan best() {
    look_around();
    Plan plan = stalled();
    if (plan.num_rows) return plan;
    bool shared = s->ride_unbounded || groups();
    if (shared && s->num_parked) return resume(parked[0], best_rows);
    if (groups()) return layered();
    if (shared) {
      Batch out = batch(order, num_tiers, best_rows, kNone, kEveryCohort, false);
      if (out.num_rows) return finish(out);
    } else {
      for (i32 t = 0; t < num_tiers; t++) {
        plan = take_turns(t);
        if (plan.num_rows) return plan;
        i32 frame = frame_of_tier(tiers[t].tier);
        if (frame >= 0) {
          if (goes_before(frame, tiers[t])) {
            Batch out = batch(order + t, 1, best_rows, kNone, kEveryCohort, false);
            if (out.num_prefills) return finish(out);
          }
          return resume(frame, best_rows);
        }
        Batch out = batch(order + t, 1, best_rows, kNone, kEveryCohort, false);
        if (!out.num_rows) continue;
        plan = finish(out);
        bool rides = !out.num_prefills && s->ride_frac != 0 && !has_prefill(tiers[t]);
        return rides ? ride_along(plan, t + 1) : plan;
      }
    }
    Batch out = batch(order, num_tiers, best_rows, kNone, kEveryCohort, true);
    return out.num_rows ? finish(out) : no_plan();
  }

  // Return true if a request of the tier owes prefill, with or without a seat and KV.
  QLLM_HD bool has_prefill(const Tier& t) const {
    return t.prefills < t.prefills_end || t.waiting < t.waiting_end;
  }
  // Let the next worse tier with work use the time that the best tier's decodes can spare.
  QLLM_HD Plan ride_along(const Plan& best, i32 next) {
    i64 tpot_ns = kNone, ahead_ns = kNoDeadline;
    for (i32 i = 0; i < best.num_rows; i++) {
      const Request& r = requests[best.rows[i].slot];
      if (r.tpot_ns == kNone) continue;
      tpot_ns = tpot_ns == kNone ? r.tpot_ns : least(tpot_ns, r.tpot_ns);
      if (r.first_token_ns == kNone) continue;
      i64 due_ns = r.first_token_ns + i64(r.num_tokens - r.num_prompt) * r.tpot_ns;
      ahead_ns = least(ahead_ns, due_ns - now_ns);
    }
    i64 allowance = ride_allowance_ns(*this, best.num_rows, tpot_ns);
    i64 room_ns = kNoDeadline;
    if (tpot_ns != kNone) {  // no gap may be over the target, but each has room for one slice
      i64 used_ns = s->ride_spent_ns ? now_ns - s->ride_best_ns : 0;
      room_ns = allowance - s->ride_margin_ns - used_ns;
      if (!used_ns) room_ns = most(kMinSliceNs, room_ns);
      // a request that is behind its target leaves no room
      room_ns = least(room_ns, ahead_ns - decode_cost(best.num_rows));
    }
    if (room_ns < kMinSliceNs) return best;
    i64 slice_ns = least(s->ride_credit_ns, room_ns);
    for (i32 t = next; t < num_tiers; t++) {
      i32 joining = join(best, t, room_ns, kJoinCap * allowance);
      Plan other = other_work(best.num_rows + joining, t, slice_ns);
      if (!joining && !other.num_rows) continue;
      i64 worth = joining ? extra_ns(best.num_rows, joining) : kGoodSliceNs;
      if (s->ride_credit_ns < most(kMinSliceNs, least(worth, kRideCap * allowance))) return best;
      if (!other.num_rows || (joining && waits_longer(joining, other))) {
        for (i32 i = 0; i < joining; i++) best_rows[best.num_rows + i] = joining_rows[i];
        i64 own_too = requests[best_rows[0].slot].tier + 1;
        Plan plan = finish_plan(best_rows, best.num_rows + joining);
        if (plan.grain != kGrainStep) plan.stop_below = most(plan.stop_below, own_too);
        return plan;
      }
      i64 own = other.slice_ns == kNone || !other.slice_ns ? kNoDeadline : other.slice_ns;
      other.slice_ns = least(slice_ns, own);
      return other;
    }
    return best;
  }
  // Return the time that more decode rows add to a step.
  QLLM_HD i64 extra_ns(i32 num_rows, i32 num_more) const {
    return most<i64>(0, decode_cost(num_rows + num_more) - decode_cost(num_rows));
  }
  // Return the decode of a tier with the least recent progress after `after`.
  QLLM_HD i32 next_waiting(i32 t, i32 after) const {
    i32 first = -1;
    for (i32 d = tiers[t].decodes; d < tiers[t].decodes_end; d++) {
      i32 slot = decodes[d];
      if ((after < 0 || waited_longer(after, slot)) && (first < 0 || waited_longer(slot, first)))
        first = slot;
    }
    return first;
  }
  QLLM_HD bool waited_longer(i32 slot, i32 other) const {
    const Request &a = requests[slot], &b = requests[other];
    if (a.last_progress_ns != b.last_progress_ns) return a.last_progress_ns < b.last_progress_ns;
    return a.id < b.id;
  }
  // Choose decodes of a worse tier for which the best tier leaves seats, KV and time.
  QLLM_HD i32 join(const Plan& best, i32 t, i64 room_ns, i64 cap_ns) const {
    Batch out = empty_batch(joining_rows, 0);
    for (i32 i = 0; i < best.num_rows; i++) out.free_blocks -= need(best.rows[i]);
    i32 count = 0;
    for (i32 slot = -1; best.num_rows + count + 1 <= s->seats; count++) {
      slot = next_waiting(t, slot);
      if (slot < 0) break;
      take(out, next_row(slot));
      if (out.free_blocks < 0) break;
    }
    while (count > 1 && extra_ns(best.num_rows, count) > cap_ns) count--;
    while (count && extra_ns(best.num_rows, count) > room_ns) count--;
    return count;
  }
  // Return a parked frame of the tier, or its prefills if seats are left.
  QLLM_HD Plan other_work(i32 num_taken, i32 t, i64 slice_ns) {
    i32 frame = frame_of_tier(tiers[t].tier);
    if (frame >= 0) return resume(frame, other_rows);
    if (num_taken >= s->seats) return no_plan();
    Batch out = batch(order + t, 1, other_rows, slice_tokens(slice_ns), kEveryCohort, false);
    i32 count = 0;
    for (i32 i = 0; i < out.num_rows; i++)
      if (!is_decoding(requests[out.rows[i].slot])) other_rows[count++] = out.rows[i];
    return count ? finish_plan(other_rows, count) : no_plan();
  }
  QLLM_HD i64 first_progress_ns(const Row* rows, i32 count) const {
    i64 first = kMost;
    for (i32 i = 0; i < count; i++)
      first = least(first, requests[rows[i].slot].last_progress_ns);
    return first;
  }
  QLLM_HD bool waits_longer(i32 joining, const Plan& other) const {
    return first_progress_ns(joining_rows, joining) <
           first_progress_ns(other.rows, other.num_rows);
  }
};

}  // namespace qllm
