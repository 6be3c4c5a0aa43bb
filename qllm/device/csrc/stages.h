// From a decision to the next stage graph and the data of its lane, and back to tokens.
//
// Three blocks: the scheduler's state, the served requests, and the captured stages with lanes.
// A group is the rows of a frame that cross a layer; a stage runs one group through a few layers.
// Work per call is bounded by the rows of a frame and, where threads share it, by its tokens.
#pragma once
#include "block.h"
#include "lanes.h"
#include "serving.h"

namespace qllm {

struct Stages {
  const Block& scheduler;  // its requests, frames and rows
  State* s;
  ServerState* server;
  Lanes* now;
  Serving* serving;
  i32* tokens;
#define X(type, name) type* name;
  QLLM_LANES_SECTIONS(X)
#undef X

  QLLM_HD Stages(const Block& decides, ServerState* serves, Lanes* has)
      : scheduler(decides), s(decides.s), server(serves), now(has),
        serving((Serving*)((char*)serves + serves->at_serving)),
        tokens((i32*)((char*)serves + serves->at_tokens)) {
#define X(type, name) name = (type*)((char*)has + has->at_##name);
    QLLM_LANES_SECTIONS(X)
#undef X
  }

  // -- the next stage

  QLLM_HD const Frame& running() const { return scheduler.frames[s->running]; }
  QLLM_HD static bool crosses(const Row& row, i32 layer) {
    return row.start <= layer && layer < row.end;
  }
  QLLM_HD static void bound(Group& g, i32 layer) {
    if (layer <= g.from)
      g.since = most(g.since, layer);
    else
      g.until = least(g.until, layer);
  }
  // Return the group of the running frame at the first layer, from `layer` on, that a live row
  // crosses. It is searched once, and again where rows begin or end and when a request has gone.
  QLLM_HD const Group& group_at(i32 layer) {
    Group& g = now->group;
    bool known = g.frame == running().id && g.gone == s->num_gone;
    if (!known || layer < g.layer || layer >= g.until) find_group(layer);
    g.layer = layer;
    g.from = most(g.from, layer);
    return g;
  }
  QLLM_HD_CALL void find_group(i32 layer) {
    const Frame& f = running();
    const Row* rows = scheduler.rows_of(i32(s->running));
    i32 end = i32(s->num_layers);
    Group g = {f.id, s->num_gone, layer, 0, end, end, 0, 0, 0, 0};
    for (i32 i = 0; i < f.num_rows && g.from > layer; i++)
      if (rows[i].end > layer && scheduler.has_live_request(rows[i]))
        g.from = least(g.from, most(layer, rows[i].start));
    for (i32 i = 0; i < f.num_rows; i++) {
      const Row& row = rows[i];
      bound(g, row.start);
      bound(g, row.end);
      if (!crosses(row, g.from)) continue;
      bool live = scheduler.has_live_request(row);
      g.num_tokens += row.hi - row.lo;
      g.prefill |= row.hi - row.lo > 1;
      g.num_live += live;
      g.samples |= live && samples(row);
    }
    now->group = g;
  }
  // Return true if a row gives a token at the end of the sweep.
  QLLM_HD bool samples(const Row& row) const {
    return (row.flags & SAMPLES) && row.end == s->num_layers;
  }
  QLLM_HD bool fits(const Stage& stage, const Group& g) const {
    if (stage.tokens < g.num_tokens || stage.end > g.until) return false;
    if (g.prefill && !stage.prefill) return false;
    return stage.head || !g.samples || stage.end < s->num_layers;
  }
  // Return the branch of the next stage of the running frame; NOTHING at its end.
  QLLM_HD_CALL i32 next(const Group& g) const {
    const Frame& f = running();
    if (f.inside || f.layer >= s->num_layers) return CANNOT;  // only a host parks there
    if (g.from >= s->num_layers) return NOTHING;
    bool whole = f.grain == kGrainStep && g.from == 0 && g.until == s->num_layers;
    const i32* first = starts + whole * (s->num_layers + 1) + g.from;
    for (i32 branch = first[0]; branch < first[1]; branch++)
      if (fits(stages[branch], g)) return branch;
    return CANNOT;
  }

  // -- data of a stage

  QLLM_HD static i64* ints(i64 at) { return (i64*)at; }
  QLLM_HD static double* reals(i64 at) { return (double*)at; }

  // Return true if the lane of a stage must be filled for a group; it counts as filled from now on.
  QLLM_HD bool take_lane(const Stage& stage, const Group& g) {
    Lane& lane = lanes[stage.whole];
    i64 id = running().id;
    if (lane.loaded_frame == id && lane.loaded_layer == g.since && lane.loaded_rows == g.num_live)
      return false;
    lane.loaded_frame = id;
    lane.loaded_layer = g.since;
    lane.loaded_rows = g.num_live;
    return true;
  }
  template <class T>
  QLLM_HD static void put(T* to, i64 count, T value, Share mine) {
    for (i64 i = mine.thread; i < count; i += mine.threads) to[i] = value;
  }
  QLLM_HD static void clear_tiles(i64 at, i64 stride, i64 count, Share mine) {
    for (i32 column = 0; column < 4; column++) put<i64>(ints(at) + column * stride, count, 0, mine);
  }
  // Fill the first half of the chosen stage's lane: clear its bucket, and write the block tables.
  // All threads finish it before one begins the second half.
  QLLM_HD_CALL void clear(Share mine) const {
    const Stage& stage = stages[now->branch];
    const Lane& lane = lanes[stage.whole];
    i64 num = stage.tokens, rows = least<i64>(lane.max_rows, num);
    put<i64>(ints(lane.at_ids), num, 0, mine);
    put<i64>(ints(lane.at_pos), num, 0, mine);
    put<i64>(ints(lane.at_slots), num, -1, mine);
    put<i64>(ints(lane.at_seq), num, -1, mine);
    put<i64>(ints(lane.at_gather), num, now->spare_slot, mine);
    clear_tiles(lane.at_decode, lane.max_rows, rows, mine);
    if (stage.prefill)
      clear_tiles(lane.at_prefill, lane.prefill_tiles, num / lane.block + lane.max_rows, mine);
    for (i64 i = mine.thread; i < rows; i += mine.threads) write_head(lane, i, nullptr, 0);
    const Row* row = scheduler.rows_of(i32(s->running));
    for (i32 i = 0, seq = 0; i < running().num_rows; i++) {
      if (!crosses(row[i], stage.start)) continue;
      if (mine.has(seq) && scheduler.has_live_request(row[i])) write_table(lane, seq, row[i]);
      seq++;
    }
  }
  QLLM_HD void write_table(const Lane& lane, i32 seq, const Row& row) const {
    i64* table = ints(lane.at_tables) + i64(seq) * lane.max_pages;
    i32 block = scheduler.requests[row.slot].first_block;
    for (i64 i = 0, count = scheduler.blocks_for(row.hi); i < count; i++, block = scheduler.next_block[block])
      table[i] = block;
  }
  // Fill the second half: tokens, tiles, and the rows that sample.
  QLLM_HD_CALL void write(Share mine) const {
    const Stage& stage = stages[now->branch];
    const Lane& lane = lanes[stage.whole];
    const Row* rows = scheduler.rows_of(i32(s->running));
    i32 seq = 0, at = 0, decodes = 0, prefills = 0, heads = 0;
    for (i32 i = 0; i < running().num_rows; i++) {
      const Row& row = rows[i];
      i32 last = 0, num = row.hi - row.lo;
      if (crosses(row, stage.start)) {
        bool live = scheduler.has_live_request(row);
        write_tokens(lane, seq, at, row, live, mine);
        if (live && num == 1)
          write_tile(lane.at_decode, lane.max_rows, decodes++, seq, at, row, 0, 1, mine);
        for (i32 a = 0; live && num > 1 && a < num; a += lane.block)
          write_tile(lane.at_prefill, lane.prefill_tiles, prefills++, seq, at, row, a,
                     least(lane.block, num - a), mine);
        seq++;
        at += num;
        last = at - 1;
      }
      if (!samples(row)) continue;
      if (mine.has(heads)) write_head(lane, heads, &row, last);
      heads++;
    }
    if (mine.thread == 0) *ints(lane.at_num_tokens) = at;
  }
  QLLM_HD void write_tokens(const Lane& lane, i32 seq, i32 at, const Row& row, bool live,
                            Share mine) const {
    const i64* table = ints(lane.at_tables) + i64(seq) * lane.max_pages;
    const i32* ids = tokens + row.slot * server->max_total_tokens;
    for (i64 t = mine.from(at), end = at + row.hi - row.lo; t < end; t += mine.threads) {
      i64 position = row.lo + t - at;
      ints(lane.at_pos)[t] = position;
      if (!live) continue;
      i64 slot = table[position / s->block_size] * s->block_size + position % s->block_size;
      ints(lane.at_ids)[t] = ids[position];
      ints(lane.at_slots)[t] = ints(lane.at_gather)[t] = slot;
      ints(lane.at_seq)[t] = seq;
    }
  }
  // Write one tile of a row: `num` queries from its token `a` on.
  QLLM_HD static void write_tile(i64 tiles, i64 stride, i32 tile, i32 seq, i32 at, const Row& row,
                                 i32 a, i32 num, Share mine) {
    if (!mine.has(tile)) return;
    i64* columns = ints(tiles) + tile;
    columns[0] = seq;
    columns[stride] = at + a;
    columns[2 * stride] = num;
    columns[3 * stride] = row.lo + a;
  }
  // Fill the sampling parameters of row `head`; dead rows sample greedily.
  QLLM_HD void write_head(const Lane& lane, i64 head, const Row* row, i32 last) const {
    bool live = row && scheduler.has_live_request(*row);
    const Serving* as = live ? serving + row->slot : nullptr;
    ints(lane.at_last)[head] = last;
    ints(lane.at_positions)[head] = row ? row->hi : 0;
    ints(lane.at_seeds)[head] = as ? as->seed : 0;
    ints(lane.at_top_k)[head] = as ? as->top_k : 0;
    reals(lane.at_temperature)[head] = as ? as->temperature : 0;
    reals(lane.at_top_p)[head] = as ? as->top_p : 1;
    reals(lane.at_min_p)[head] = as ? as->min_p : 0;
  }

  // -- results of a stage

  // Take the tokens of the running frame, which is at its end, into `sampled` and after those of
  // their requests. A row without a finite logit is dead from here on; the caller ends it.
  QLLM_HD_CALL void collect() {
    const Lane& lane = lanes[stages[now->branch].whole];
    const float* peaks = (const float*)lane.at_peaks;
    const i64 *found = ints(lane.at_tokens), longest = server->max_total_tokens;
    Sampled* out = sampled;
    i32 head = 0;
    for (Row& row : scheduler.all_rows(i32(s->running))) {
      if (!samples(row)) continue;
      float peak = peaks[head];
      i32 token = i32(found[head++]);
      if (!scheduler.has_live_request(row)) continue;
      bool finite = peak - peak == 0;
      if (finite)
        tokens[row.slot * longest + row.hi] = token;
      else
        row.flags |= DEAD;
      out->slot = row.slot;
      out++->token = finite ? token : kBroken;
    }
    now->num_sampled = out - sampled;
  }
};

}  // namespace qllm
