#include "sweep.h"

#include <string.h>
#include <time.h>

#include <utility>

#include "scratch.h"

namespace qllm {
namespace {

enum Grain : int64_t { kEachStep = 0, kEachLayer = 1, kEachExpert = 2 };

const Part kAllKeys{nullptr, nullptr, 0, int64_t(1) << 62, 1, 1};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

void attend(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  static thread_local Scratch<uint16_t> q_, seen_, out_;
  const Heads& heads = layer.latents ? layer.latents->heads : layer.attention->heads;
  int64_t rows = part.hi - part.lo, size = rows * heads.heads * (heads.head_dim - heads.tail);
  uint16_t *q = q_.of(rows * heads.heads * heads.head_dim), *out = seen_.of(size);
  const uint16_t* x = s.x + part.lo * s.width;
  uint16_t* mid = s.mid + part.lo * s.width;
  if (layer.latents)
    k.latents_in(q, x, part.cos, part.sin, rows, *layer.latents, layer.index, part.spans,
                 part.num_spans);
  else
    k.attend_in(q, x, part.cos, part.sin, rows, *layer.attention, layer.index, part.spans,
                part.num_spans);
  if (!part.whole) memset(out, 0, size * sizeof *out);
  k.attend(out, q, heads, layer.index, layer.window, part.spans, part.num_spans, kAllKeys);
  if (layer.latents) {
    const uint16_t* seen = out;
    k.latents_out(out = out_.of(rows * layer.out->k), seen, *layer.latents, rows);
  }
  k.linear(mid, out, *layer.out, rows);
  k.add(mid, x, mid, layer.scale, rows * s.width);
}

void route(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  int64_t rows = part.hi - part.lo, at = part.lo * s.top_k, first = part.lo * s.width;
  void* weights = (char*)s.weights + at * (s.wide ? 4 : 2);
  k.route(s.normed + first, s.ids + at, weights, s.mid + first, rows, *layer.router);
  if (layer.mlp) k.mlp(s.shared + first, s.normed + first, *layer.mlp, rows);
}

// Slots in order of their expert, equal ones in order of (token, k); units are cut at `unit_rows`.
bool start_experts(Sweep& s, const Layer& layer) {
  static thread_local Scratch<int64_t> ends_;
  int64_t num = layer.experts->num, slots = s.tokens * s.top_k, lo = 0;
  int64_t* ends = ends_.of(num);
  memset(ends, 0, num * sizeof *ends);
  for (int64_t i = 0; i < slots; i++) {
    if (s.ids[i] < 0 || s.ids[i] >= num) return false;
    ends[s.ids[i]]++;
  }
  s.num_units = 0;
  for (int64_t e = 0; e < num; e++) {
    int64_t end = lo + ends[e];
    ends[e] = lo;  // where its next slot goes
    for (; lo < end; lo = s.units[s.num_units++].hi)
      s.units[s.num_units] = {e, lo, end - lo < s.unit_rows ? end : lo + s.unit_rows};
  }
  for (int64_t i = 0; i < slots; i++) {
    int64_t slot = ends[s.ids[i]]++;
    s.token[slot] = i / s.top_k;
    s.inverse[i] = slot;
  }
  return true;
}

void run_range(const Kernels& k, Sweep& s, const Layer& layer) {
  int64_t stop = s.pos;
  for (double ns = 0; stop < s.num_units && ns < s.range_ns; stop++)
    ns += s.unit_ns + double(s.units[stop].hi - s.units[stop].lo) * s.row_ns;
  for (int64_t i = s.pos; i < stop; i++)
    if (!i || s.units[i].expert != s.units[i - 1].expert) s.expert_bytes += layer.expert_bytes;
  k.experts(s.slots, s.normed, s.token, s.units + s.pos, stop - s.pos, *layer.experts);
  s.slots_done += s.units[stop - 1].hi - s.units[s.pos].lo;
  s.pos = stop < s.num_units ? stop : 0;
}

void combine(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  static thread_local Scratch<uint16_t> normed_;
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
}

bool may_stop(const Sweep& s) {
  if (s.grain == kEachStep) return false;
  return s.grain == kEachExpert || (s.part == 0 && s.pos == 0);
}

template <class Polling>
bool asked(const Polling& s, int64_t left_ns) {
  return !s.watch || __atomic_load_n(s.watch, __ATOMIC_ACQUIRE) != s.seen || left_ns <= 0;
}

}  // namespace

void sweep(const Kernels& kernels, Sweep* given) {
  Sweep& s = *given;
  int64_t start = now_ns();
  for (int64_t begin = start; s.layer < s.end_layer;) {
    const Layer& layer = s.layers[s.layer];
    const LayerOp& part = s.parts[s.part];
    switch (part.kind) {
      case kAttn: attend(kernels, s, layer, part); break;
      case kRoute: route(kernels, s, layer, part); break;
      case kExperts:
        if (!s.pos && !start_experts(s, layer)) {
          s.failed = 1;
          return;
        }
        run_range(kernels, s, layer);
        break;
      case kCombine: combine(kernels, s, layer, part); break;
    }
    if (!s.pos && ++s.part == s.num_parts) finish_layer(s);
    int64_t end = now_ns();
    s.num_segments++;
    if (end - begin > s.longest_ns) {
      s.longest_ns = end - begin;
      s.longest_kind = part.kind;
    }
    begin = end;
    if (s.single || (may_stop(s) && asked(s, s.left_ns - (end - start)))) return;
  }
}

void head(const Kernels& kernels, HeadBlocks* given) {
  static thread_local Scratch<uint16_t> logits_;
  HeadBlocks& s = *given;
  int64_t start = now_ns();
  for (int64_t begin = start; s.at < s.end;) {
    for (int64_t stop = s.at + s.step < s.end ? s.at + s.step : s.end; s.at < stop; s.at++) {
      uint16_t* logits = logits_.of(s.rows * s.width);
      kernels.linear(logits, s.x, *s.blocks[s.at], s.rows);
      kernels.best(s.peaks, s.ids, logits, s.rows, s.blocks[s.at]->n, s.at * s.width);
    }
    int64_t end = now_ns();
    s.num_segments++;
    if (end - begin > s.longest_ns) s.longest_ns = end - begin;
    begin = end;
    if (s.single || (s.grain == kEachExpert && asked(s, s.left_ns - (end - start)))) return;
  }
}

}  // namespace qllm
