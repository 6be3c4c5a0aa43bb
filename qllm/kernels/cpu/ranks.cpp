#include "ranks.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "pool.h"

namespace qllm {
namespace {

constexpr int64_t kRows = 16;  // of a task that copies
constexpr int64_t kMostPieces = 4;

struct Rows {
  int64_t lo, num;
};

// The rows of `num` that a rank computes.
Rows own_rows(const Rank& rank, int64_t num) {
  int64_t size = rank.group->size, lo = num * rank.rank / size;
  return {lo, num * (rank.rank + 1) / size - lo};
}

// The rows of `num` of which a rank computes what costs less than a gather from another host.
Rows light_rows(const Rank& rank, int64_t num) {
  return rank.link ? Rows{0, num} : own_rows(rank, num);
}

// Begins a gather of tensors, of which this rank has written these regions: see `Course::post`.
int64_t post(const Sweep& s, std::initializer_list<Region> own) {
  if (s.rank->link) offer(*s.rank, own);
  int64_t found = s.course->post(*s.rank);
  if (found == kNoGather) return found;
  for (const Region& r : own) s.rank->gathered_bytes += r.row_bytes * r.rows;
  return found;
}

void await(const Sweep& s, int64_t gather) { s.course->await(*s.rank, gather); }

void gather(const Sweep& s, std::initializer_list<Region> own) { await(s, post(s, own)); }

// The pieces of `num` rows: the parts of one are on the way to other hosts while the next is computed.
// Ranks that share memory have one piece.
class Pieces {
 public:
  Pieces(const Sweep& s, int64_t num, int64_t rows_of_token = 1)
      : rows_(num), num_(s.rank->link ? num / (s.piece_rows * rows_of_token) : 1) {
    num_ = std::max<int64_t>(1, std::min(kMostPieces, num_));
  }

  int64_t num() const { return num_; }
  int64_t lo(int64_t i) const { return rows_ * i / num_; }
  Rows operator[](int64_t i) const { return {lo(i), lo(i + 1) - lo(i)}; }

 private:
  int64_t rows_, num_;
};

using Posted = int64_t[kMostPieces];

// The slots of units that follow each other: so many values of each, `stride` values apart.
template <class T>
Region of_slots(T* at, const Unit* begin, const Unit* end, int64_t num, int64_t stride) {
  if (begin == end) return region(at, 0);
  return region(at + begin->lo * stride, num, stride, end[-1].hi - begin->lo);
}

// Copies rows of `num` values that are so far apart.
void copy_columns(uint16_t* to, int64_t to_stride, const uint16_t* from, int64_t stride,
                  int64_t num, int64_t rows) {
  parallel((rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t r = i * kRows, end = std::min(rows, r + kRows); r < end; r++)
      memcpy(to + r * to_stride, from + r * stride, num * sizeof *to);
  });
}

// The own columns of out = x + y * scale, for y [rows, own columns].
void add_columns(const Kernels& k, uint16_t* out, const uint16_t* x, const uint16_t* y,
                 const Sweep& s, const Layer& layer, int64_t rows) {
  const Share& own = *layer.share;
  parallel(rows, [&](int64_t r) {
    int64_t at = r * s.width + own.column;
    k.add(out + at, x + at, y + r * own.num_columns, layer.scale, own.num_columns);
  });
}

// The own columns of slots, [S, own columns]. Those of all ranks follow each other.
uint16_t* own_slots(const Sweep& s, const Experts& experts) {
  return s.slots + s.tokens * s.top_k * experts.column;
}

// The own columns of the MLP of rows, [rows, own columns]; null if the rank has none.
uint16_t* mlp_columns(const Kernels& k, const Sweep& s, const Layer& layer, const uint16_t* normed,
                      int64_t lo, int64_t rows) {
  static const Kept<uint16_t> both_, inner_, out_, by_, wide_;
  const Share& own = *layer.share;
  const Pieces pieces(s, rows);
  Posted posted;
  for (int64_t i = 0; i < pieces.num(); i++) {
    auto [at, num] = pieces[i];
    uint16_t* all = s.inner + (lo + at) * own.width;
    if (own.into) {
      uint16_t *both = both_.of(num * own.into->n), *inner = inner_.of(num * own.num_inner);
      k.linear(both, normed + at * s.width, *own.into, num);
      k.swiglu(inner, both, num, own.num_inner);
      copy_columns(all + own.inner, own.width, inner, own.num_inner, own.num_inner, num);
    }
    posted[i] = post(s, {region(all + own.inner, own.into ? own.num_inner : 0, own.width, num)});
  }
  if (!own.down) return nullptr;
  uint16_t* out = out_.of(rows * own.num_columns);
  for (int64_t i = 0; i < pieces.num(); i++) {
    auto [at, num] = pieces[i];
    await(s, posted[i]);
    k.linear(out + at * own.num_columns, s.inner + (lo + at) * own.width, *own.down, num);
  }
  if (own.gate) {
    uint16_t *by = by_.of(rows), *wide = wide_.of(rows * own.num_columns);
    k.linear(by, normed, *own.gate, rows);
    parallel(rows, [&](int64_t r) {
      std::fill_n(wide + r * own.num_columns, own.num_columns, by[r]);
    });
    k.gate(out, wide, rows * own.num_columns);
  }
  return out;
}

// Queries and keys are normed over the heads of all ranks.
void enter_wide(const Kernels& k, uint16_t* q, const uint16_t* x, const Sweep& s,
                const Layer& layer, const LayerOp& part) {
  static const Kept<uint16_t> normed_, qkv_, q_, k_;
  const Share& own = *layer.share;
  const Attention& a = *layer.attention;
  int64_t rows = part.hi - part.lo, wide = own.q_width + own.k_width;
  int64_t num_q = a.heads.heads * a.heads.head_dim, num_k = a.heads.kv_heads * a.heads.head_dim;
  uint16_t *normed = normed_.of(rows * s.width), *qkv = qkv_.of(rows * a.qkv.n);
  uint16_t *all = s.queries + part.lo * wide;
  uint16_t *all_q = q_.of(rows * own.q_width), *all_k = k_.of(rows * own.k_width);
  k.norm(normed, x, a.norm, rows, s.width);
  k.linear(qkv, normed, a.qkv, rows);
  uint16_t *of_q = all, *of_k = all + rows * own.q_width;
  copy_columns(of_q + own.q_column, own.q_width, qkv, a.qkv.n, num_q, rows);
  if (own.has_keys)
    copy_columns(of_k + own.k_column, own.k_width, qkv + num_q, a.qkv.n, num_k, rows);
  gather(s, {region(of_q + own.q_column, num_q, own.q_width, rows),
             region(of_k + own.k_column, own.has_keys ? num_k : 0, own.k_width, rows)});
  k.norm(all_q, of_q, *own.q_norm, rows, own.q_width);
  k.norm(all_k, of_k, *own.k_norm, rows, own.k_width);
  copy_columns(qkv, a.qkv.n, all_q + own.q_column, own.q_width, num_q, rows);
  copy_columns(qkv + num_q, a.qkv.n, all_k + own.k_column, own.k_width, num_k, rows);
  k.place_heads(q, qkv, part.cos, part.sin, a, layer.index, part.spans, part.num_spans);
}

void run(const Kernels& kernels, Rank& rank, SweepCall& call) {
  Group& g = *rank.group;
  Report& report = g.reports[rank.rank];
  Sweep s = call.sweep;
  Desk& desk = rank.desk(call.desk);
  if (call.is_new) desk.clear(s.layer, s.part);
  int64_t slots = s.tokens * s.top_k;
  if (int64_t(desk.token.size()) < slots) {
    desk.token.resize(slots);
    desk.inverse.resize(slots);
    desk.units.resize(slots);
  }
  s.rank = &rank;
  s.desk = &desk;
  s.layers = rank.layers;
  s.parts += rank.rank * s.num_parts;
  s.course = &desk.course;
  s.token = desk.token.data();
  s.inverse = desk.inverse.data();
  s.units = desk.units.data();
  if ((desk.layer - s.layer) % 2) std::swap(s.x, s.next);
  s.layer = desk.layer;
  s.part = desk.part;
  s.pos = desk.pos;
  s.num_units = desk.num_units;
  s.begun = 0;  // ranges have the same units again
  if (rank.rank) {
    s.watch = (const int64_t*)&g.stopped;
    s.seen = g.stopped_before;
    s.stop_ns = s.tasks_left = kNever;
    s.single = 0;
  }
  sweep(kernels, &s);
  if (rank.rank == 0 && s.layer < s.end_layer) rank.stop();
  desk.pos = s.pos;
  desk.num_units = s.num_units;
  desk.layer = s.layer;
  desk.part = s.part;
  report.gathers = rank.link ? gathers_of_link(rank) : 0;
  report.layer = s.layer;
  report.part = s.part;
  report.inside = desk.course.done || desk.pos;
  report.kept_bytes = desk.course.kept_bytes;
  report.longest_ns = s.longest_ns;
  report.longest_kind = s.longest_kind;
  report.slots_done = s.slots_done;
  report.expert_bytes = s.expert_bytes;
  leave_call(rank);
  if (rank.rank || rank.has_failed()) return;
  call.done = desk.course.done;
  call.inside = call.kept_bytes = 0;
  for (int64_t i = 0; i < g.size; i++) {
    const Report& other = g.reports[i];
    bool is_apart = other.layer != s.layer || other.part != s.part;
    if (rank.link ? other.gathers != report.gathers : is_apart) rank.fail(kApart);
    call.inside |= other.inside;
    call.kept_bytes += other.kept_bytes;
    if (other.longest_ns > s.longest_ns) {
      s.longest_ns = other.longest_ns;
      s.longest_kind = other.longest_kind;
    }
    if (i) s.slots_done += other.slots_done, s.expert_bytes += other.expert_bytes;
  }
  call.sweep = s;
}

bool sees(const HeadCall& call, int64_t block) {
  return call.first_block <= block && block < call.end_block;
}

// What a rank writes for rank 0: the best of each row, or its logits.
std::vector<Region> written_by(const Rank& rank, const HeadCall& call) {
  std::vector<Region> found;
  const int64_t first = rank.rank * call.rows;
  if (call.peaks) found = {region(call.peaks + first, call.rows), region(call.ids + first, call.rows)};
  for (int64_t i = 0; call.logits && i < rank.num_pieces; i++) {
    const Piece& piece = rank.pieces[i];
    if (sees(call, piece.block))
      found.push_back(region(call.logits + piece.first, piece.weight->n, call.vocabulary, call.rows));
  }
  return found;
}

// The gather of the head, which rank 0 alone reads.
void gather_head(Rank& rank, const HeadCall& call, Course& course) {
  std::vector<Region> own = written_by(rank, call);
  if (rank.link) offer(rank, own.data(), rank.rank ? own.size() : 0);
  if (!course.await(rank, course.post(rank))) return;
  for (const Region& r : own) rank.gathered_bytes += r.row_bytes * r.rows;
}

void run_pieces(const Kernels& k, Rank& rank, const HeadCall& call, Desk& desk, Polls polls) {
  static const Kept<uint16_t> logits_;
  float* peaks = call.peaks ? call.peaks + rank.rank * call.rows : nullptr;
  int64_t* ids = call.peaks ? call.ids + rank.rank * call.rows : nullptr;
  Course& course = desk.course;
  if (peaks && !desk.piece && !course.done) {
    std::fill_n(peaks, call.rows, -INFINITY);
    std::fill_n(ids, call.rows, int64_t(0));
  }
  for (; desk.piece <= rank.num_pieces; desk.piece++) {
    bool is_end = desk.piece == rank.num_pieces;
    if (!is_end && !sees(call, rank.pieces[desk.piece].block)) continue;
    course.begin(polls);
    if (is_end) {
      gather_head(rank, call, course);
    } else {
      const Piece& piece = rank.pieces[desk.piece];
      const Matrix& weight = *piece.weight;
      uint16_t* logits = logits_.of(call.rows * weight.n);
      k.linear(logits, call.x, weight, call.rows);
      if (peaks) k.best(peaks, ids, logits, call.rows, weight.n, piece.first);
      if (call.logits)
        copy_columns(call.logits + piece.first, call.vocabulary, logits, weight.n, weight.n, call.rows);
    }
    if (!course.end()) return;
    if (!is_end && call.grain == kEachExpert &&
        (!polls.watch || polls.is_due(now_ns()) || polls.tasks_left <= 0)) {
      desk.piece++;
      return;
    }
  }
}

void run(const Kernels& kernels, Rank& rank, HeadCall& call) {
  Group& g = *rank.group;
  Report& report = g.reports[rank.rank];
  int64_t begin = now_ns();
  Desk& desk = rank.desk(call.desk);
  if (call.is_new) desk.clear(0, 0);
  bool inside = call.grain == kEachExpert;
  Polls polls{inside && call.watch, call.watch, call.seen, call.stop_ns, call.tasks_left, &rank};
  if (rank.rank)
    polls = {inside, (const int64_t*)&g.stopped, g.stopped_before, kNever, kNever, &rank};
  run_pieces(kernels, rank, call, desk, polls);
  bool done = desk.piece > rank.num_pieces;
  if (rank.rank == 0 && !done) rank.stop();
  report.part = done;
  report.kept_bytes = desk.course.kept_bytes;
  report.longest_ns = desk.course.take_longest();
  leave_call(rank);
  if (done) desk.piece = 0;
  if (rank.rank || rank.has_failed()) return;
  call.longest_ns = call.kept_bytes = 0;
  for (int64_t i = 0; i < g.size; i++) {
    if (g.reports[i].part != done) rank.fail(kApart);
    call.kept_bytes += g.reports[i].kept_bytes;
    call.longest_ns = std::max(call.longest_ns, g.reports[i].longest_ns);
  }
  call.is_done = done;
  call.call_ns = now_ns() - begin;
}

void run(const Kernels&, Rank& rank, EmbedCall& call) {
  int64_t bytes = rank.row_bytes;
  for (int64_t i = 0; i < call.num; i++) {
    int64_t id = call.ids[i] - rank.first_id;
    if (id < 0 || id >= rank.num_ids) continue;
    char* to = (char*)call.x + i * bytes;
    memcpy(to, rank.table + id * bytes, bytes);
    if (rank.link && rank.rank) report(rank, region(to, bytes));
  }
  leave_call(rank);
}

// Rank 0 gets copies of what other ranks have in memory of their own.
void run(const Kernels&, Rank& rank, FetchCall& call) {
  for (int64_t i = 0; rank.rank && i < call.num; i++) {
    Region own = call.regions[i];
    if (std::exchange(own.rank, kAllRanks) == rank.rank) report(rank, own);
  }
  leave_call(rank);
}

// An ATTN op over some of its rows.
LayerOp rows_of(const LayerOp& part, Rows rows, const Layer& layer, std::vector<Span>& spans) {
  for (int64_t i = 0; i < part.num_spans; i++) {
    Span span = part.spans[i];
    int64_t lo = std::max(span.at, rows.lo), end = span.at + span.hi - span.lo;
    int64_t hi = std::min(end, rows.lo + rows.num);
    span.hi = span.lo + hi - span.at;
    span.lo += lo - span.at;
    span.at = lo - rows.lo;
    if (lo < hi) spans.push_back(span);
  }
  const Latents* latents = layer.latents;
  int64_t values = latents ? latents->heads.tail : layer.attention->cos_width;
  int64_t at = rows.lo * values * (latents && latents->rotation == kComplex ? 2 : 1);
  LayerOp found = part;
  found.lo += rows.lo;
  found.hi = found.lo + rows.num;
  found.spans = spans.data();
  found.num_spans = spans.size();
  found.cos += at;
  found.sin += at;
  return found;
}

// The own heads of some rows.
int64_t post_heads(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  const Share& own = *layer.share;
  int64_t rows = part.hi - part.lo, width = layer.out->k;
  const uint16_t* seen = nullptr;
  uint16_t* heads = s.heads + part.lo * width + own.head_column;
  int64_t num = attended(k, s, layer, part, seen, own.q_norm ? enter_wide : nullptr);
  copy_columns(heads, width, seen, num, num, rows);
  return post(s, {region(heads, num, width, rows)});
}

// The part of the output projection that a rank computes of some rows.
enum class Projects { kOwnRows, kOwnColumns, kAll };

void post_projected(const Kernels& k, const Sweep& s, const Layer& layer, Rows rows, Projects what) {
  static const Kept<uint16_t> y_;
  const Share& own = *layer.share;
  const int64_t width = layer.out->k;
  if (what == Projects::kOwnColumns) {
    const uint16_t* x = s.x + rows.lo * s.width;
    uint16_t* mid = s.mid + rows.lo * s.width;
    if (own.out) {
      uint16_t* y = y_.of(rows.num * own.num_columns);
      k.linear(y, s.heads + rows.lo * width, *own.out, rows.num);
      add_columns(k, mid, x, y, s, layer, rows.num);
    }
    post(s, {region(mid + own.column, own.num_columns, s.width, rows.num)});
    return;
  }
  Rows r = what == Projects::kAll ? Rows{0, rows.num} : own_rows(*s.rank, rows.num);
  const int64_t row = rows.lo + r.lo, at = row * s.width;
  if (r.num) {
    uint16_t* y = y_.of(r.num * s.width);
    k.linear(y, s.heads + row * width, *layer.out, r.num);
    k.add(s.mid + at, s.x + at, y, layer.scale, r.num * s.width);
  }
  if (what == Projects::kOwnRows) post(s, {region(s.mid + at, r.num * s.width)});
}

// Units of experts that ranks share. On several hosts a rank keeps its own columns of the outputs.
void cut_experts(const Kernels& k, const Sweep& s, const Experts& experts, const Unit* begin,
                 const Unit* end) {
  const Pieces pieces(s, end[-1].hi - begin->lo, s.top_k);
  const Unit* ends[kMostPieces + 1] = {begin};
  Posted posted;
  for (int64_t i = 0; i < pieces.num(); i++) {
    const int64_t next = begin->lo + pieces.lo(i + 1);
    const Unit *at = ends[i], *to = at;
    while (to < end && to->lo < next) to++;
    if (at < to) k.experts_in(s.expert_inner, s.normed, s.token, at, to - at, experts);
    posted[i] = post(s, {of_slots(s.expert_inner + experts.inner, at, to, experts.num_inner, experts.width)});
    ends[i + 1] = to;
  }
  Experts out = experts;
  if (s.rank->link) out.column = 0, out.hidden = experts.num_columns;
  uint16_t* slots = s.rank->link ? own_slots(s, experts) : s.slots;
  for (int64_t i = 0; i < pieces.num(); i++) {
    const Unit *at = ends[i], *to = ends[i + 1];
    await(s, posted[i]);
    if (at < to) k.experts_out(slots, s.expert_inner, at, to - at, out);
  }
  const Unit* last = s.units + s.num_units;
  if (!s.rank->link && end == last)
    post(s, {of_slots(s.slots + experts.column, s.units, last, experts.num_columns, s.width)});
}

}  // namespace

void attend_on_rank(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  const int64_t rows = part.hi - part.lo, size = s.rank->group->size;
  const bool is_split = rows >= std::max(size, s.rows_from);
  const Projects few = s.rank->link ? Projects::kAll : Projects::kOwnColumns;
  const Pieces pieces(s, rows);
  Posted posted;
  for (int64_t i = 0; i < pieces.num(); i++) {
    std::vector<Span> spans;
    const LayerOp piece = pieces.num() == 1 ? part : rows_of(part, pieces[i], layer, spans);
    posted[i] = post_heads(k, s, layer, piece);
  }
  for (int64_t i = 0; i < pieces.num(); i++) {
    auto [lo, num] = pieces[i];
    await(s, posted[i]);
    post_projected(k, s, layer, {part.lo + lo, num}, is_split ? Projects::kOwnRows : few);
  }
}

void route_on_rank(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  const Share& own = *layer.share;
  int64_t rows = part.hi - part.lo, first = part.lo * s.width;
  Rows r = light_rows(*s.rank, rows);
  int64_t bytes_of_weight = s.wide ? 4 : 2, row = part.lo + r.lo, at = row * s.top_k;
  char* weights = (char*)s.weights + at * bytes_of_weight;
  if (r.num)
    k.route(s.normed + row * s.width, s.ids + at, weights, s.mid + row * s.width, r.num,
            *layer.router);
  if (!s.rank->link)
    gather(s, {region(s.normed + row * s.width, r.num * s.width), region(s.ids + at, r.num * s.top_k),
               region(weights, r.num * s.top_k * bytes_of_weight)});
  if (!own.width) return;
  if (uint16_t* y = mlp_columns(k, s, layer, s.normed + first, part.lo, rows))
    copy_columns(s.shared + first + own.column, s.width, y, own.num_columns, own.num_columns, rows);
  gather(s, {region(s.shared + first + own.column, own.num_columns, s.width, rows)});
}

void experts_on_rank(const Kernels& k, const Sweep& s, const Layer& layer, int64_t stop) {
  const Experts& experts = *layer.experts;
  const Unit *begin = s.units + s.pos, *end = s.units + stop;
  if (are_cut(experts)) return cut_experts(k, s, experts, begin, end);
  // a rank may have no expert of any slot
  if (begin < end) k.experts(s.slots, s.normed, s.token, begin, end - begin, experts);
  if (stop == s.num_units) gather(s, {of_slots(s.slots, s.units, end, s.width, s.width)});
}

// The own columns of the output of a layer whose experts are shared by ranks on several hosts.
void combine_columns(const Kernels& k, const Sweep& s, const Layer& layer, Rows rows) {
  static const Kept<uint16_t> y_;
  const Share& own = *layer.share;
  const int64_t at = rows.lo * s.top_k, first = rows.lo * s.width, num = own.num_columns;
  const void* weights = (const char*)s.weights + at * (s.wide ? 4 : 2);
  uint16_t* y = y_.of(rows.num * num);
  k.combine(y, own_slots(s, *layer.experts), s.inverse + at, weights, s.wide, rows.num, s.top_k, num);
  if (own.width)
    parallel(rows.num, [&](int64_t r) {
      k.add(y + r * num, y + r * num, s.shared + first + r * s.width + own.column, 1, num);
    });
  add_columns(k, s.next + first, s.mid + first, y, s, layer, rows.num);
  post(s, {region(s.next + first + own.column, num, s.width, rows.num)});
}

void combine_on_rank(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part) {
  int64_t rows = part.hi - part.lo;
  if (s.rank->link && layer.experts && are_cut(*layer.experts)) {
    const Pieces pieces(s, rows);
    for (int64_t i = 0; i < pieces.num(); i++)
      combine_columns(k, s, layer, {part.lo + pieces[i].lo, pieces[i].num});
    return;
  }
  Rows r = light_rows(*s.rank, rows);
  int64_t row = part.lo + r.lo, at = row * s.top_k, first = row * s.width, size = r.num * s.width;
  if (layer.experts) {
    const void* weights = (const char*)s.weights + at * (s.wide ? 4 : 2);
    uint16_t* next = s.next + first;
    k.combine(next, s.slots, s.inverse + at, weights, s.wide, r.num, s.top_k, s.width);
    if (layer.share->width) k.add(next, next, s.shared + first, 1, size);
    k.add(next, s.mid + first, next, layer.scale, size);
  } else {
    int64_t begin = part.lo * s.width;
    k.norm(s.normed + first, s.mid + first, *layer.norm, r.num, s.width);
    if (!s.rank->link) gather(s, {region(s.normed + first, size)});
    if (uint16_t* y = mlp_columns(k, s, layer, s.normed + begin, part.lo, rows))
      add_columns(k, s.next + begin, s.mid + begin, y, s, layer, rows);
  }
  if (s.rank->link && layer.experts) return;
  const Share& own = *layer.share;
  uint16_t* columns = s.next + part.lo * s.width + own.column;
  gather(s, {layer.experts ? region(s.next + first, size)
                           : region(columns, own.num_columns, s.width, rows)});
}

void run_call(const Kernels& kernels, Rank& rank, int64_t kind, void* what) {
  if (kind == kRunSweep) return run(kernels, rank, *(SweepCall*)what);
  if (kind == kRunHead) return run(kernels, rank, *(HeadCall*)what);
  if (kind == kRunEmbed) return run(kernels, rank, *(EmbedCall*)what);
  if (kind == kFetch) run(kernels, rank, *(FetchCall*)what);
}

}  // namespace qllm
