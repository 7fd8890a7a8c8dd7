// What programs over streams look like: random_stream_program() is one Author's
// work. It knows the operations and the streams, and nothing of what they do.
#pragma once

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "base/units.h"
#include "support/stream_program.h"
#include "support/stream_world.h"

namespace vmm::testing {

// Makes one program out of single operations and of phrases: short sequences as
// programs have them, alone or in between each other. Each program has its own
// habits, so that some go deep where others never come.
class Author {
 public:
  Author(std::uint64_t seed, const StreamProgramOptions& options);
  std::vector<StreamOp> write(std::size_t steps);

 private:
  using Kind = StreamOp::Kind;
  using Phrase = std::vector<StreamOp>;
  static constexpr std::uint64_t kPeerStreams = 11;  // from here on the named streams are the other device's

  // Some of the streams, two at least that work can be queued on from the start.
  void choose_streams(const StreamProgramOptions& options);

  StreamOp next();

  // -- Single operations
  StreamOp allocation();
  StreamOp freeing() { return {Kind::free, block(), any(12) == 0 ? 1U : 0U, any(2)}; }
  StreamOp usage() { return {Kind::use, block(), stream(), use_flags()}; }
  StreamOp recording() { return {Kind::record_stream, block(), stream()}; }
  StreamOp waiting() { return {Kind::wait, stream(), stream()}; }
  StreamOp progress();
  StreamOp pages();
  StreamOp holding() { return {any(2) == 0 ? Kind::hold : Kind::unhold, block()}; }
  StreamOp failing() { return {Kind::fail_call, any(10), any(5)}; }
  StreamOp ending();
  StreamOp peering() { return {Kind::add_peers}; }
  StreamOp giving_back();
  StreamOp foreign();
  StreamOp captures();
  StreamOp part();
  StreamOp by_hand();
  StreamOp sleeping();

  // -- Phrases
  Phrase next_phrase();

  // A block of `owner`, written there and read on other streams.
  Phrase used_block(std::uint64_t of, std::uint64_t bytes, std::uint64_t owner);
  static void append(Phrase& phrase, const Phrase& more) { phrase.insert(phrase.end(), more.begin(), more.end()); }
  // Somebody wants memory: mostly who freed it, or another stream or pool.
  void append_taker(Phrase& phrase, std::uint64_t of, std::uint64_t bytes, std::uint64_t owner);

  Phrase reader();
  // More streams than a pool keeps a place for, each with a block for a moment.
  Phrase crowd();
  Phrase explicit_pages();
  // Pages that are given back while others of their chunk stay.
  Phrase shared_chunk();
  // What a request left of its chunk goes to another stream, which names the place.
  Phrase beside();
  Phrase foreign_life();
  // One name, two streams: memory of others goes to both, one after the other.
  Phrase namesakes();
  Phrase closing();
  Phrase lowered_limit();
  Phrase mapping();
  Phrase graph();
  Phrase capture_by_others();
  Phrase pinned_part();
  Phrase mempool();
  // A model that sleeps while work on its blocks is queued and others allocate, and wakes.
  Phrase nap();

  std::uint64_t any(std::uint64_t below) { return random_() % below; }
  std::uint64_t block() { return any(3) == 0 ? kNewest + any(4) : any(1000); }
  std::uint64_t pool() { return sleeps_ && any(8) == 0 ? kTagOfFirst : any(pools_); }
  // Mostly in the host's memory, and whole. Files take their time.
  std::uint64_t how() {
    const std::uint64_t where = any(24) == 0 ? 1 : any(3) == 0 ? 2 * any(2) : 3;
    return where + 8 * (any(3) == 0 ? any(3) : 0) + 24 * any(2);
  }
  std::uint64_t looks() { return any(2) == 0 ? 0 : 1 + any(6); }
  template <typename Values>
  std::uint64_t one_of(const Values& values) {
    return values[any(values.size())];
  }
  std::uint64_t stream() { return peers_ && any(5) == 0 ? peer_stream() : one_of(streams_); }
  std::uint64_t tight_limit() { return (6 + any(20)) * kMiB; }
  std::uint64_t peer_stream() { return kPeerStreams + any(kNamedStreams - kPeerStreams); }
  // One that may allocate in the pool.
  std::uint64_t stream_for(std::uint64_t of) { return of == kPeerPool ? peer_stream() : one_of(streams_); }
  std::uint64_t captured_stream() {
    const std::uint64_t chosen = one_of(streams_);
    return stream_slots()[chosen].kind == StreamSlot::Kind::standard ? 1 : chosen;
  }
  std::uint64_t size() {
    const std::uint64_t kind = any(100);
    if (kind < 30) return 1 + any(8 * kKiB);
    if (kind < 45) return 1 + any(700 * kKiB);
    if (kind < 92) return kMiB + any(largest_);
    return 2 * kMiB * (1 + any(8));
  }
  // One less than so many; with more, the chunks are larger than a page.
  std::uint64_t page_count() { return any(3) == 0 ? 7 + any(9) : any(3); }
  std::uint64_t use_flags() {
    return (any(4) == 0 ? kUseWrites : 0) | (any(5) == 0 ? kUseIsLong : 0) | (any(4) == 0 ? kUseIsSmall : 0);
  }
  using Habit = StreamOp (Author::*)();

  std::mt19937_64 random_;
  std::vector<Phrase> open_;
  std::vector<std::pair<std::uint64_t, Habit>> habits_;  // with how often
  std::uint64_t weights_ = 0;
  std::uint64_t phrases_ = 0;           // how many in a thousand
  std::vector<std::uint64_t> streams_;  // of the first device, that the program uses
  std::vector<std::uint64_t> foreign_;  // of these, who come and go
  std::uint64_t pools_ = 0;
  std::uint64_t slow_ = 0;   // a stream whose work takes long
  bool is_tight_ = false;    // what others have must be used before there is more
  bool is_crowded_ = false;  // very many streams come by
  std::uint64_t largest_ = 0;
  bool captures_ = false;
  bool recorder_ = false;
  bool peers_ = false;
  bool sleeps_ = false;
};

}  // namespace vmm::testing
