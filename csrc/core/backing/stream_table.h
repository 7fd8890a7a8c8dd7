// What a pool knows of the streams that use it: for each a tag, which the stream's
// free space and slabs carry, and what the stream's work comes after already. It knows
// neither space nor memory.
//
// Everything here is done with the pool's lock held.
#pragma once

#include <cstddef>
#include <limits>
#include <unordered_map>
#include <vector>

#include "core/blocks/block.h"
#include "core/streams/clock.h"
#include "core/streams/device_streams.h"
#include "core/streams/stream_point.h"

namespace vmm {

class StreamTable {
 public:
  // Tags are two bytes in a block, and size() of them is counted in those too.
  static constexpr std::size_t kMostStreams = std::numeric_limits<StreamTag>::max() - 1;
  // `most_streams`: fewer, in tests.
  StreamTable(DeviceStreams& streams, Clock& clock, std::size_t most_streams = kMostStreams);

  struct State {
    Stream stream = nullptr;
    StreamKind kind = StreamKind::default_stream;
    std::size_t blocks = 0;          // live ones, pending frees and what threads keep included
    bool is_kept = false;            // threads may have shards for it: its tag is no other stream's
    Epoch last_free = kLongAgo;      // the newest that its free space notes
    Epoch behind_graphs = kLongAgo;  // its work comes after what graphs had queued until then
    // Of a name that does not last. Its memory came from elsewhere behind `behind`,
    // and was zeroed until `zeroed_by`: it was the stream of that moment that waited
    // and zeroed, so whichever has the name now comes after both.
    Epoch behind = kLongAgo;
    Epoch zeroed_by = kLongAgo;
    StreamPointPtr zeroed;
  };
  // `is_alive`: the caller is about to use it, so its handle may be looked at. Throws
  // VmmError where kMostStreams have live blocks, or threads that keep some.
  StreamTag tag_of(Stream stream, bool is_alive = true) {
    // Asked for last, by a name that lasts: the common case.
    if (states_[latest_].stream == stream && latest_ != kNeutral && is_lasting(states_[latest_].kind)) [[likely]]
      return latest_;
    return find_tag(stream, is_alive);
  }
  // kNeutral: it has none.
  [[nodiscard]] StreamTag known_tag(Stream stream) const;
  [[nodiscard]] State& operator[](StreamTag tag) { return states_[tag]; }
  [[nodiscard]] const State& operator[](StreamTag tag) const { return states_[tag]; }
  // Tags that there are, neutral space's included.
  [[nodiscard]] std::size_t size() const { return states_.size(); }
  // Blocks of all of them, as State::blocks.
  [[nodiscard]] std::size_t blocks() const;
  [[nodiscard]] StreamUse use_of(StreamTag tag) const { return {&streams_, states_[tag].stream, states_[tag].kind}; }

  // Whether the stream may be given memory of the pool that it may use at once.
  // False, with what to wait for, where it has to come after something first and
  // the GPU cannot be made to wait.
  bool is_behind(StreamTag tag, Epoch* wait_for) {
    if (graphs_end_ != kLongAgo && !is_behind_graphs(tag, wait_for)) [[unlikely]]
      return false;
    const State& state = states_[tag];
    return (state.behind == kLongAgo && state.zeroed_by == kLongAgo) || is_behind_namesakes(tag, wait_for);
  }
  // The stream's work comes after what `epoch` stands for, and so may use all
  // memory that was freed until then.
  Status order_behind(StreamTag tag, Epoch epoch);
  // Its memory is being zeroed on the stream, just now.
  void note_zeroing(StreamTag tag);
  // One of its blocks is free.
  void block_freed(StreamTag tag, Epoch epoch) {
    State& state = states_[tag];
    --state.blocks;
    if (state.last_free < epoch) state.last_free = epoch;
  }

  // The pool's last graph has gone: until all that is queued now has passed, its
  // replays may use any of the memory, on any stream.
  void graphs_ended();
  // When that was; kLongAgo: nothing of graphs is known to be queued.
  [[nodiscard]] Epoch graphs_end() const { return graphs_end_; }
  // It has passed, or the tag's stream (none: kNeutral) comes after it.
  [[nodiscard]] bool is_past_graphs(StreamTag tag) const;

 private:
  StreamTag find_tag(Stream stream, bool is_alive);
  StreamTag tag_without_blocks();
  bool is_behind_graphs(StreamTag tag, Epoch* wait_for);
  bool is_behind_namesakes(StreamTag tag, Epoch* wait_for);

  DeviceStreams& streams_;
  Clock& clock_;
  const std::size_t most_streams_;
  std::vector<State> states_;  // by tag; [0] is neutral space's
  std::unordered_map<Stream, StreamTag> tags_;
  StreamTag latest_ = kNeutral;  // asked for last
  Epoch graphs_end_ = kLongAgo;
};

}  // namespace vmm
