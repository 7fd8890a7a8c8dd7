#include "core/backing/stream_table.h"

#include <algorithm>
#include <memory>
#include <string>

#include "base/errors.h"

namespace vmm {

namespace {
// Streams that may come and go are bounded by those that have blocks, above this.
constexpr std::size_t kStreamsKept = 64;
}  // namespace

StreamTable::StreamTable(DeviceStreams& streams, Clock& clock, std::size_t most_streams)
    : streams_(streams), clock_(clock), most_streams_(most_streams), states_(1) {}

StreamTag StreamTable::find_tag(Stream stream, bool is_alive) {
  StreamTag tag = latest_;
  if (tag == kNeutral || states_[tag].stream != stream) {
    tag = known_tag(stream);
    if (tag == kNeutral) {
      tag = tag_without_blocks();
      if (tag == kNeutral) {
        if (states_.size() > most_streams_) {
          throw VmmError("one pool has blocks of " + std::to_string(most_streams_) +
                         " streams, live or kept for the next request, and can have no more; use fewer streams, or "
                         "pools of their own");
        }
        tag = static_cast<StreamTag>(states_.size());
        states_.emplace_back();
      } else {
        tags_.erase(states_[tag].stream);
      }
      State& state = states_[tag];
      state.stream = stream;
      state.kind = StreamKind::unreachable;  // until it is met, below
      state.behind_graphs = kLongAgo;
      state.behind = kLongAgo;
      state.zeroed_by = kLongAgo;
      state.zeroed = nullptr;
      tags_.emplace(stream, tag);
    }
    latest_ = tag;
  }
  // The handle of a stream that somebody else made may be another stream's by now.
  StreamKind& kind = states_[tag].kind;
  if (is_alive && (kind == StreamKind::blocking || kind == StreamKind::unreachable)) [[unlikely]]
    kind = streams_.meet(stream);
  return tag;
}

StreamTag StreamTable::known_tag(Stream stream) const {
  const auto known = tags_.find(stream);
  return known == tags_.end() ? kNeutral : known->second;
}

// Of many streams, one that has no block left and whose free space nobody uses
// any more: that space may be the next stream's as it stands.
StreamTag StreamTable::tag_without_blocks() {
  if (states_.size() <= kStreamsKept) return kNeutral;
  const auto find = [this] {
    for (std::size_t tag = 1; tag < states_.size(); ++tag) {
      const State& state = states_[tag];
      if (state.blocks == 0 && !state.is_kept && clock_.has_passed(std::max(state.last_free, graphs_end_))) {
        return static_cast<StreamTag>(tag);
      }
    }
    return kNeutral;
  };
  if (const StreamTag tag = find(); tag != kNeutral) return tag;
  clock_.cover(clock_.now());
  clock_.poll();
  return find();
}

std::size_t StreamTable::blocks() const {
  std::size_t blocks = 0;
  for (const State& state : states_) blocks += state.blocks;
  return blocks;
}

Status StreamTable::order_behind(StreamTag tag, Epoch epoch) {
  if (clock_.has_passed(epoch)) return {};
  if (const Status status = clock_.order_before(use_of(tag), epoch); !status.ok()) return status;
  State& state = states_[tag];
  state.last_free = std::max(state.last_free, epoch);
  if (!is_lasting(state.kind)) state.behind = std::max(state.behind, epoch);
  return {};
}

void StreamTable::note_zeroing(StreamTag tag) {
  State& state = states_[tag];
  if (is_lasting(state.kind)) return;
  state.zeroed_by = clock_.now();
  state.zeroed = std::make_shared<StreamPoint>(std::vector<StreamUse>{use_of(tag)});
}

void StreamTable::graphs_ended() { graphs_end_ = clock_.now(); }

bool StreamTable::is_past_graphs(StreamTag tag) const {
  return clock_.has_passed(graphs_end_) || (tag != kNeutral && states_[tag].behind_graphs == graphs_end_);
}

// After a graph has gone, its replays may still use the memory on any stream: a
// stream's work comes after them before it is given any of it.
bool StreamTable::is_behind_graphs(StreamTag tag, Epoch* wait_for) {
  if (clock_.has_passed(graphs_end_)) {
    graphs_end_ = kLongAgo;
    return true;
  }
  if (states_[tag].behind_graphs == graphs_end_) return true;
  if (!order_behind(tag, graphs_end_).ok()) {
    *wait_for = graphs_end_;
    return false;
  }
  if (is_lasting(states_[tag].kind)) states_[tag].behind_graphs = graphs_end_;
  return true;
}

bool StreamTable::is_behind_namesakes(StreamTag tag, Epoch* wait_for) {
  State& state = states_[tag];
  clock_.poll();
  if (clock_.has_passed(state.behind)) state.behind = kLongAgo;
  if (!clock_.order_before(use_of(tag), state.behind).ok()) {
    *wait_for = state.behind;
    return false;
  }
  if (state.zeroed_by == kLongAgo) return true;
  if (clock_.has_passed(state.zeroed_by) || state.zeroed->passed()) {
    state.zeroed_by = kLongAgo;
    state.zeroed = nullptr;
    return true;
  }
  if (state.zeroed->order_before(use_of(tag)).ok()) return true;
  *wait_for = state.zeroed_by;
  return false;
}

}  // namespace vmm
