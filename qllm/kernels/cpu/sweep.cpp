#include "sweep.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "pool.h"
#include "ranks.h"
#include "scratch.h"

namespace qllm {
namespace {

const Part kAllKeys{nullptr, nullptr, 0, int64_t(1) << 62, 1, 1};

constexpr int64_t kFewMore = 4;

// One task reads as many keys as `key_values` allows: a task over a whole long context would run
// for many milliseconds. The state of rows is kept between the parts.
void attend_keys(const Kernels& k, uint16_t* out, const uint16_t* q, const Heads& heads,
                 const Sweep& s, const Layer& layer, const LayerOp& part) {
  static const Kept<float> sums_, softmax_;
  auto attend = [&](const Part& keys) {
    k.attend(out, q, heads, layer.index, layer.window, part.spans, part.num_spans, keys);
  };
  int64_t blocks = s.key_values / (2 * heads.head_dim - heads.tail) / kKeys;
  int64_t step = std::max<int64_t>(blocks, 1) * kKeys, most = 0;
  for (int64_t i = 0; i < part.num_spans; i++) most = std::max(most, part.spans[i].hi);
  if (most <= step + step / kFewMore) return attend(kAllKeys);
  int64_t rows = (part.hi - part.lo) * heads.heads;
  float *sums = sums_.of(rows * (heads.head_dim - heads.tail)), *softmax = softmax_.of(2 * rows);
  for (int64_t at = 0; at < most; at += step)
    attend({sums, softmax, at, at + step, at == 0, at + step >= most});
}

// Tokens that are in no span get zeros.
void clear(uint16_t* out, int64_t rows, int64_t width) {
  parallel(rows, [&](int64_t r) { memset(out + r * width, 0, width * sizeof *out); });
}

// States that are read are not written, so that an op that is left may begin again.
void carry(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  static const Kept<uint16_t> normed_, given_, out_;
  int64_t rows = part.hi - part.lo, width = layer.out->k;
  uint16_t *normed = normed_.of(rows * s.width), *given = given_.of(rows * layer.into->n);
  uint16_t *out = out_.of(rows * width), *mid = s.mid + part.lo * s.width;
  const uint16_t* x = s.x + part.lo * s.width;
  k.norm(normed, x, *layer.first_norm, rows, s.width);
  k.linear(given, normed, *layer.into, rows);
  if (!part.whole) clear(out, rows, width);
  const DeltaSpan* states = part.states;
  for (int64_t i = 0; i < part.num_rounds; states += part.round_nums[i++])
    k.delta(out, given, *layer.deltas, states, part.round_nums[i]);
  k.linear(mid, out, *layer.out, rows);
  k.add(mid, x, mid, layer.scale, rows * s.width);
}

void gate(const Kernels& k, uint16_t* out, const uint16_t* x, const Sweep& s, const Layer& layer,
          int64_t rows) {
  static const Kept<uint16_t> normed_, by_;
  uint16_t *normed = normed_.of(rows * s.width), *by = by_.of(rows * layer.gate->n);
  k.norm(normed, x, *layer.first_norm, rows, s.width);
  k.linear(by, normed, *layer.gate, rows);
  k.gate(out, by, rows * layer.gate->n);
}

}  // namespace

int64_t attended(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part,
                 const uint16_t*& seen, Enter enter) {
  static const Kept<uint16_t> q_, seen_, out_;
  const Heads& heads = layer.latents ? layer.latents->heads : layer.attention->heads;
  int64_t rows = part.hi - part.lo, size = rows * heads.heads * (heads.head_dim - heads.tail);
  uint16_t *q = q_.of(rows * heads.heads * heads.head_dim), *out = seen_.of(size);
  const uint16_t* x = s.x + part.lo * s.width;
  if (enter)
    enter(k, q, x, s, layer, part);
  else if (layer.latents)
    k.latents_in(q, x, part.cos, part.sin, rows, *layer.latents, layer.index, part.spans,
                 part.num_spans);
  else
    k.attend_in(q, x, part.cos, part.sin, rows, *layer.attention, layer.index, part.spans,
                part.num_spans);
  if (!part.whole) clear(out, rows, size / rows);
  attend_keys(k, out, q, heads, s, layer, part);
  if (layer.gate) gate(k, out, x, s, layer, rows);
  seen = out;
  if (!layer.latents) return size / rows;
  int64_t width = heads.heads * layer.latents->value;
  k.latents_out(out = out_.of(rows * width), seen, *layer.latents, rows);
  seen = out;
  return width;
}

namespace {

void attend(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  int64_t rows = part.hi - part.lo;
  const uint16_t *x = s.x + part.lo * s.width, *seen = nullptr;
  uint16_t* mid = s.mid + part.lo * s.width;
  attended(k, s, layer, part, seen, nullptr);
  k.linear(mid, seen, *layer.out, rows);
  k.add(mid, x, mid, layer.scale, rows * s.width);
}

void route(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  int64_t rows = part.hi - part.lo, at = part.lo * s.top_k, first = part.lo * s.width;
  void* weights = (char*)s.weights + at * (s.wide ? 4 : 2);
  k.route(s.normed + first, s.ids + at, weights, s.mid + first, rows, *layer.router);
  if (layer.mlp) k.mlp(s.shared + first, s.normed + first, *layer.mlp, rows);
}

// Sorts slots by expert, then by (token, k); units have at most `unit_rows` rows. A rank has units
// of its own experts.
bool start_experts(Sweep& s, const Layer& layer) {
  static thread_local Scratch<int64_t> ends_;
  int64_t own = layer.experts->num, first = layer.share ? layer.share->first_expert : 0;
  int64_t num = layer.share ? layer.share->num_experts : own, slots = s.tokens * s.top_k, lo = 0;
  int64_t* ends = ends_.of(num);
  memset(ends, 0, num * sizeof *ends);
  for (int64_t i = 0; i < slots; i++) {
    if (s.ids[i] < 0 || s.ids[i] >= num) return false;
    ends[s.ids[i]]++;
  }
  s.num_units = 0;
  for (int64_t e = 0; e < num; e++) {
    int64_t end = lo + ends[e];
    ends[e] = lo;  // place of its next slot
    bool is_own = first <= e && e < first + own;
    for (; is_own && lo < end; lo = s.units[s.num_units++].hi)
      s.units[s.num_units] = {e - first, lo, end - lo < s.unit_rows ? end : lo + s.unit_rows};
    lo = end;
  }
  for (int64_t i = 0; i < slots; i++) {
    int64_t slot = ends[s.ids[i]]++;
    s.token[slot] = i / s.top_k;
    s.inverse[i] = slot;
  }
  if (s.desk) s.desk->sorted = s.layer;
  return true;
}

// The range of units that starts at `s.pos` ends here, or at `s.pos` if an expert is missing.
int64_t end_of_range(Sweep& s, const Experts& experts) {
  auto is_here = [&](const Unit& u) { return !experts.slots || experts.slots[u.expert].packed; };
  Unit *begin = s.units + s.pos, *end = s.units + s.num_units;
  if (s.begun) return std::all_of(begin, s.units + s.begun, is_here) ? s.begun : s.pos;
  if (experts.slots) std::stable_partition(begin, end, is_here);
  int64_t stop = s.pos, rows = 0;
  for (double ns = 0; stop < s.num_units && ns < s.range_ns; stop++) {
    int64_t num = s.units[stop].hi - s.units[stop].lo;
    if (!is_here(s.units[stop]) || (stop > s.pos && rows + num > s.range_rows)) break;
    rows += num;
    ns += s.unit_ns + double(num) * s.row_ns;
  }
  return stop;
}

void end_range(Sweep& s, const Layer& layer, int64_t stop) {
  bool is_done = stop == s.num_units;
  s.clock++;
  for (int64_t i = s.pos; i < stop; i++) {
    const Unit& u = s.units[i];
    if (!i || u.expert != s.units[i - 1].expert) s.expert_bytes += layer.expert_bytes;
    if (layer.experts->slots) layer.experts->slots[u.expert].used = s.clock;
  }
  // What a rank has done may be forgotten until all have done it
  int64_t from = s.rank ? 0 : s.pos, to = s.rank && !is_done ? from : stop;
  if (s.rank && s.rank->rank && are_cut(*layer.experts)) to = from;  // rank 0 counts these slots
  for (int64_t i = from; i < to; i++) s.slots_done += s.units[i].hi - s.units[i].lo;
  s.pos = is_done ? 0 : stop;
  s.begun = 0;
}

void combine(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  static const Kept<uint16_t> normed_;
  int64_t rows = part.hi - part.lo, at = part.lo * s.top_k, first = part.lo * s.width;
  int64_t size = rows * s.width;
  const void* weights = (const char*)s.weights + at * (s.wide ? 4 : 2);
  uint16_t* next = s.next + first;
  if (layer.experts) {
    k.combine(next, s.slots, s.inverse + at, weights, s.wide, rows, s.top_k, s.width);
    if (layer.mlp) k.add(next, next, s.shared + first, 1, size);
  } else {
    uint16_t* normed = normed_.of(size);
    k.norm(normed, s.mid + first, *layer.norm, rows, s.width);
    k.mlp(next, normed, *layer.mlp, rows);
  }
  k.add(next, s.mid + first, next, layer.scale, size);
}

void finish_layer(Sweep& s) {
  std::swap(s.x, s.next);
  s.part = 0;
  s.layer++;
  s.num_layers++;
  if (s.desk) s.desk->sorted = -1;
}

bool may_stop(const Sweep& s) {
  if (s.grain == kEachStep) return false;
  return s.grain == kEachExpert || (s.part == 0 && s.pos == 0);
}

template <class Polling>
Polls polls_of(const Polling& s) {
  return {s.grain == kEachExpert && s.watch, s.watch, s.seen, s.stop_ns, s.tasks_left, nullptr};
}

template <class Polling>
bool asked(const Polling& s, const Polls& polls) {
  return !s.watch || polls.is_due(now_ns()) || polls.tasks_left <= 0;
}

void run(const Kernels& kernels, Sweep& s) {
  Polls polls = polls_of(s);
  polls.rank = s.rank;
  while (s.layer < s.end_layer) {
    const Layer& layer = s.layers[s.layer];
    const LayerOp& part = s.parts[s.part];
    int64_t stop = s.begun ? end_of_range(s, *layer.experts) : 0;
    s.missing = s.begun && stop == s.pos;
    if (s.missing) return;  // without the course, which stays inside the op
    s.course->begin(polls);
    switch (part.kind) {
      case kAttn:
        (s.rank ? attend_on_rank : layer.deltas ? carry : attend)(kernels, s, layer, part);
        break;
      case kRoute: (s.rank ? route_on_rank : route)(kernels, s, layer, part); break;
      case kExperts:
        s.failed = !s.pos && !s.begun && !start_experts(s, layer);
        stop = s.failed ? s.pos : end_of_range(s, *layer.experts);
        if (s.failed || (stop == s.pos && stop < s.num_units)) {
          s.course->end();
          s.missing = !s.failed;
          return;
        }
        if (s.rank)
          experts_on_rank(kernels, s, layer, stop);
        else if (s.pos < stop)
          kernels.experts(s.slots, s.normed, s.token, s.units + s.pos, stop - s.pos,
                          *layer.experts);
        break;
      case kCombine:
        s.failed = s.desk && layer.experts && s.desk->sorted != s.layer && !start_experts(s, layer);
        if (!s.failed) (s.rank ? combine_on_rank : combine)(kernels, s, layer, part);
        break;
    }
    bool done = s.course->end();
    int64_t longest = s.course->take_longest();
    if (longest > s.longest_ns) {
      s.longest_ns = longest;
      s.longest_kind = part.kind;
    }
    if (!done) {
      s.begun = stop;
      return;
    }
    if (s.failed) return;
    if (part.kind == kExperts) end_range(s, layer, stop);
    if (!s.pos && ++s.part == s.num_parts) finish_layer(s);
    if (s.single || (may_stop(s) && asked(s, polls))) return;
  }
}

void run(const Kernels& kernels, HeadBlocks& s) {
  static const Kept<uint16_t> logits_;
  Polls polls = polls_of(s);
  while (s.at < s.end) {
    const Matrix& block = *s.blocks[s.at];
    s.course->begin(polls);
    uint16_t* logits = logits_.of(s.rows * s.width);
    kernels.linear(logits, s.x, block, s.rows);
    kernels.best(s.peaks, s.ids, logits, s.rows, block.n, s.at * s.width);
    bool done = s.course->end();
    s.longest_ns = std::max(s.longest_ns, s.course->take_longest());
    if (!done) return;
    s.at++;
    if (s.single || (s.grain == kEachExpert && asked(s, polls))) return;
  }
}

template <class Call>
void timed(const Kernels& kernels, Call& s) {
  int64_t begin = now_ns();
  run(kernels, s);
  s.call_ns = now_ns() - begin;
}

}  // namespace

void sweep(const Kernels& kernels, Sweep* s) { timed(kernels, *s); }

void head(const Kernels& kernels, HeadBlocks* s) { timed(kernels, *s); }

}  // namespace qllm
