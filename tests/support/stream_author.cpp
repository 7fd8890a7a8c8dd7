// random_stream_program(): what programs over streams look like.
#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "base/units.h"
#include "support/stream_program.h"
#include "support/stream_world.h"

namespace vmm::testing {

namespace {

using Kind = StreamOp::Kind;

constexpr std::uint64_t kPeerStreams = 11;  // from here on the named streams are the other device's

using Phrase = std::vector<StreamOp>;

// Makes one program out of single operations and of phrases: short sequences as
// programs have them, alone or in between each other. Each program has its own
// habits, so that some go deep where others never come.
class Author {
 public:
  Author(std::uint64_t seed, const StreamProgramOptions& options) : random_(seed) {
    choose_streams(options);
    pools_ = 1 + any(kPoolSlots);
    slow_ = stream();
    is_crowded_ = any(8) == 0;
    largest_ = any(3) == 0 ? 24 * kMiB : 6 * kMiB;
    phrases_ = any(5) == 0 ? 0 : 60 + any(200);
    captures_ = options.with_captures && any(4) != 0;
    recorder_ = any(3) == 0;
    const bool fails = options.with_failures && any(2) == 0;
    const bool by_hand = any(3) == 0;
    habits_ = {{270, &Author::allocation},
               {170, &Author::freeing},
               {240, &Author::usage},
               {recorder_ ? 60 : 15, &Author::recording},
               {90, &Author::progress},
               {20, &Author::giving_back},
               {10, &Author::waiting},
               {30, &Author::pages},
               {8, &Author::holding},
               {foreign_.empty() ? 0 : 30, &Author::foreign},
               {captures_ ? 60 : 0, &Author::captures},
               {captures_ ? 30 : 0, &Author::part},
               {by_hand ? 50 : 0, &Author::by_hand},
               {fails ? 20 : 0, &Author::failing},
               {6, &Author::ending},
               {peers_ ? 2 : 0, &Author::peering}};
    for (const auto& [weight, habit] : habits_) weights_ += weight;
  }

  std::vector<StreamOp> write(std::size_t steps) {
    std::vector<StreamOp> program;
    if (any(2) == 0) program.push_back({Kind::drift, 1 + any(1000)});
    if (peers_) program.push_back({Kind::add_peers});
    while (program.size() < steps) {
      if (any(1000) < phrases_) {
        Phrase phrase = next_phrase();
        if (any(2) == 0) {
          program.insert(program.end(), phrase.begin(), phrase.end());
        } else {
          open_.push_back(std::move(phrase));
        }
      } else if (!open_.empty() && any(2) == 0) {
        Phrase& phrase = open_[any(open_.size())];
        program.push_back(phrase.front());
        phrase.erase(phrase.begin());
        std::erase_if(open_, [](const Phrase& left) { return left.empty(); });
      } else {
        program.push_back(next());
      }
    }
    program.resize(steps);
    return program;
  }

 private:
  // Some of the streams, two at least that work can be queued on from the start.
  void choose_streams(const StreamProgramOptions& options) {
    peers_ = options.with_peers && any(3) != 0;
    const std::uint64_t foreigners = options.with_foreign ? any(4) : 0;
    for (std::uint64_t number = 0; number < kPeerStreams; ++number) {
      const StreamSlot& slot = stream_slots()[number];
      const bool wanted = slot.kind == StreamSlot::Kind::blocking       ? foreigners >= 2
                          : slot.kind == StreamSlot::Kind::non_blocking ? foreigners == 3
                                                                        : any(5) < 3 || number == 1 || number == 2;
      if (!wanted) continue;
      streams_.push_back(number);
      if (slot.is_foreign()) foreign_.push_back(number);
    }
  }

  StreamOp next() {
    std::uint64_t chosen = any(weights_);
    for (const auto& [weight, habit] : habits_) {
      if (chosen < weight) return (this->*habit)();
      chosen -= weight;
    }
    return {Kind::run_all};
  }

  // -- Single operations
  StreamOp allocation() {
    const std::uint64_t of = pool();
    return {Kind::allocate, of, size(), stream_for(of)};
  }
  StreamOp freeing() { return {Kind::free, block(), any(12) == 0 ? 1U : 0U, any(2)}; }
  StreamOp usage() { return {Kind::use, block(), stream(), use_flags()}; }
  StreamOp recording() { return {Kind::record_stream, block(), stream()}; }
  StreamOp waiting() { return {Kind::wait, stream(), stream()}; }
  StreamOp progress() {
    if (any(40) == 0) return {Kind::run_all};
    const std::uint64_t chosen = stream();
    return {Kind::run, chosen == slow_ && any(10) != 0 ? stream() : chosen, 1 + any(8)};
  }
  StreamOp pages() {
    const std::uint64_t of = pool();
    if (any(3) == 0) return {Kind::first_pages, of, page_count(), stream_for(of)};
    return {Kind::pages, of, any(32), page_count(), stream_for(of)};
  }
  StreamOp holding() { return {any(2) == 0 ? Kind::hold : Kind::unhold, block()}; }
  StreamOp failing() { return {Kind::fail_call, any(10), 1 + any(2)}; }
  StreamOp ending() {
    return any(8) == 0 ? StreamOp{Kind::close_group, 0, any(2)} : StreamOp{Kind::close_pool, pool(), any(2)};
  }
  StreamOp peering() { return {Kind::add_peers}; }
  StreamOp giving_back() {
    switch (any(8)) {
      case 0:
      case 1:
        return {Kind::trim, pool(), any(2) * 4 * kMiB};
      case 2:
        return {Kind::empty_cache, any(2)};
      case 3:
      case 4:
        return {Kind::settle, pool()};
      case 5:
        return {Kind::pool_limit, pool(), any(2) == 0 ? 0 : (4 + any(40)) * kMiB};
      default:
        return {Kind::group_limit, 0, (20 + any(60)) * kMiB};
    }
  }
  StreamOp foreign() {
    const std::uint64_t which = one_of(foreign_);
    return {any(5) < 3 ? Kind::create_stream : Kind::destroy_stream, which};
  }
  StreamOp captures() {
    const std::uint64_t graph = any(kGraphSlots);
    switch (any(16)) {
      case 0:
      case 1:
      case 2:
        return {Kind::begin_capture, graph, captured_stream(), any(kRegions), any(8) == 0 ? 1U : 0U};
      case 3:
        return {Kind::join_capture, graph, stream()};
      case 4:
        return {Kind::invalidate_capture, graph};
      case 5:
      case 6:
      case 7:
        return {Kind::end_capture, graph};
      case 8:
      case 9:
      case 10:
        return {Kind::launch, graph, stream()};
      case 11:
        return {Kind::drop_graph, graph};
      case 12:
        return {Kind::open_mempool, 3 + any(2), any(2)};
      case 13:
        return {Kind::enter_mempool, 3 + any(2)};
      case 14:
        return {Kind::leave_mempool, 3 + any(2)};
      default:
        return {Kind::close_mempool, 3 + any(2)};
    }
  }
  StreamOp part() {
    switch (any(8)) {
      case 0:
      case 1:
        return {Kind::pin};
      case 2:
        return {Kind::unpin};
      case 3:
        return {Kind::checkpoint};
      case 4:
        return {Kind::restore};
      case 5:
        return {Kind::allocate, kPartOfPlain, size(), captured_stream()};
      default:
        return {Kind::launch_part, stream()};
    }
  }
  StreamOp by_hand() {
    const std::uint64_t place = any(kPlaces);
    switch (any(12)) {
      case 0:
      case 1:
        return {Kind::create_chunk, any(2)};
      case 2:
      case 3:
      case 4:
        return {Kind::map_chunk, any(kChunkSlots), place, any(2)};
      case 5:
      case 6:
      case 7:
        return {Kind::use_mapping, place, stream(), use_flags()};
      case 8:
        return {Kind::set_access, place, any(3), any(2)};
      case 9:
        return {Kind::unmap_chunk, place};
      case 10:
        return {Kind::free_chunk, any(kChunkSlots)};
      default:
        return any(3) == 0 ? StreamOp{Kind::close_manager} : StreamOp{Kind::unmap_chunk, place};
    }
  }

  // -- Phrases
  Phrase next_phrase() {
    if (is_crowded_ && any(8) == 0) return crowd();
    switch (any(captures_ ? 11 : 7)) {
      case 0:
      case 1:
        return reader();
      case 2:
        return explicit_pages();
      case 3:
        return foreign_.empty() ? reader() : foreign_life();
      case 4:
        return closing();
      case 5:
        return mapping();
      case 6:
        return lowered_limit();
      case 7:
        return graph();
      case 8:
        return capture_by_others();
      case 9:
        return pinned_part();
      default:
        return mempool();
    }
  }

  // A block of `owner`, written there and read on other streams.
  Phrase used_block(std::uint64_t of, std::uint64_t bytes, std::uint64_t owner) {
    Phrase phrase = {{Kind::allocate, of, bytes, owner}, {Kind::use, kNewest, owner, kUseWrites}};
    for (std::uint64_t readers = 1 + any(2); readers != 0; --readers) {
      const std::uint64_t reader = stream();
      if (recorder_ && any(2) == 0) phrase.push_back({Kind::record_stream, kNewest, reader});
      phrase.push_back({Kind::use, kNewest, reader, use_flags()});
    }
    return phrase;
  }
  static void append(Phrase& phrase, const Phrase& more) { phrase.insert(phrase.end(), more.begin(), more.end()); }
  // Somebody wants memory: mostly who freed it, or another stream or pool.
  void append_taker(Phrase& phrase, std::uint64_t of, std::uint64_t bytes, std::uint64_t owner) {
    const bool same_pool = any(2) == 0;
    const bool same_stream = any(2) == 0;
    phrase.push_back(
        {Kind::allocate, same_pool ? of : pool(), any(2) == 0 ? bytes : size(), same_stream ? owner : stream()});
    phrase.push_back({Kind::use, kNewest, same_stream ? owner : stream(), kUseWrites});
  }

  Phrase reader() {
    const std::uint64_t of = pool();
    const std::uint64_t owner = stream_for(of);
    const std::uint64_t bytes = size();
    Phrase phrase = used_block(of, bytes, owner);
    phrase.push_back({Kind::free, kNewest, any(6) == 0 ? 1U : 0U});
    if (any(3) == 0) phrase.push_back(giving_back());
    append_taker(phrase, of, bytes, owner);
    return phrase;
  }
  // More streams than a pool keeps a place for, each with a block for a moment.
  Phrase crowd() {
    const std::uint64_t of = any(std::min<std::uint64_t>(pools_, kPlainPool + 1));
    const std::uint64_t first = any(kCrowd);
    const std::uint64_t bytes = any(3) == 0 ? size() : 4096;
    Phrase phrase;
    for (std::uint64_t count = kCrowd / 2 + any(kCrowd); count != 0; --count) {
      const std::uint64_t owner = kNamedStreams + (first + count) % kCrowd;
      phrase.push_back({Kind::allocate, of, bytes, owner});
      phrase.push_back({Kind::use, kNewest, owner, kUseWrites | use_flags()});
      if (any(4) == 0) phrase.push_back({Kind::use, kNewest, stream(), use_flags()});
      phrase.push_back({Kind::free, kNewest});
    }
    return phrase;
  }
  Phrase explicit_pages() {
    const std::uint64_t of = pool();
    const std::uint64_t owner = stream_for(of);
    const std::uint64_t first = any(32);
    const std::uint64_t count = page_count();
    Phrase phrase = {{Kind::pages, of, first, count, owner}, {Kind::use, kNewest, stream(), use_flags()}};
    if (any(2) == 0) phrase.push_back({Kind::use, kNewest, stream(), use_flags()});
    if (any(5) == 0) {
      phrase.push_back({Kind::hold, kNewest});
      phrase.push_back({Kind::close_pool, of, any(2)});
      phrase.push_back({Kind::use, kNewest, stream(), use_flags()});
      phrase.push_back({Kind::unhold, kNewest});
    }
    const std::uint64_t part = any(3);
    phrase.push_back({Kind::free, kNewest, 0, part});
    if (any(2) == 0) {
      // The same addresses again.
      phrase.push_back({Kind::pages, of, first, part == 0 ? count : part - 1, any(2) == 0 ? owner : stream_for(of)});
    } else {
      append_taker(phrase, of, (1 + (part == 0 ? count : part - 1)) * 2 * kMiB, owner);
    }
    return phrase;
  }
  Phrase foreign_life() {
    const std::uint64_t one = one_of(foreign_);
    const std::uint64_t of = pool();
    const std::uint64_t bytes = size();
    const bool owns = any(2) == 0;
    const std::uint64_t owner = owns ? one : stream_for(of);
    Phrase phrase = {{Kind::create_stream, one}, {Kind::allocate, of, bytes, owner}};
    if (any(3) == 0) phrase.push_back({Kind::record_stream, kNewest, one});
    phrase.push_back({Kind::use, kNewest, one, use_flags()});
    const StreamOp end{Kind::destroy_stream, one};
    const StreamOp free{Kind::free, kNewest};
    const bool ends_first = any(2) == 0;
    phrase.push_back(ends_first ? end : free);
    if (any(3) == 0) phrase.push_back({Kind::create_stream, one});
    phrase.push_back(ends_first ? free : end);
    if (any(2) == 0) {
      phrase.push_back({Kind::allocate, of, size(), one});  // perhaps a stream of another life, by the same name
    } else {
      append_taker(phrase, of, bytes, owns ? stream_for(of) : owner);
    }
    return phrase;
  }
  Phrase closing() {
    const std::uint64_t of = pool();
    const std::uint64_t owner = stream_for(of);
    const std::uint64_t bytes = size();
    Phrase phrase = used_block(of, bytes, owner);
    phrase.push_back({Kind::close_pool, of, any(2)});
    if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
    append_taker(phrase, of, bytes, owner);
    return phrase;
  }
  Phrase lowered_limit() {
    const std::uint64_t of = any(kGroupPools);
    const std::uint64_t owner = stream_for(of);
    const std::uint64_t bytes = size();
    const bool of_all = any(2) == 0;
    const Kind limit = of_all ? Kind::group_limit : Kind::pool_limit;
    Phrase phrase = used_block(of, bytes, owner);
    phrase.push_back({limit, of, (4 + any(16)) * kMiB});
    phrase.push_back({Kind::free, kNewest});
    phrase.push_back({limit, of, of_all ? (40 + any(30)) * kMiB : 0});
    append_taker(phrase, of, bytes, owner);
    return phrase;
  }
  Phrase mapping() {
    const std::uint64_t place = any(kPlaces);
    const std::uint64_t other = any(kPlaces);
    const std::uint64_t chunk = any(kChunkSlots);
    Phrase phrase = {{Kind::create_chunk, any(2)}, {Kind::map_chunk, chunk, place, any(2)}};
    if (any(2) == 0) phrase.push_back({Kind::map_chunk, chunk, other, any(2)});
    phrase.push_back({Kind::use_mapping, place, stream(), use_flags()});
    phrase.push_back({Kind::use_mapping, other, stream(), use_flags()});
    switch (any(4)) {
      case 0:
        phrase.push_back({Kind::set_access, place, any(2), any(2)});
        break;
      case 1:
        phrase.push_back({Kind::close_manager});
        break;
      default:
        phrase.push_back({Kind::unmap_chunk, place});
        phrase.push_back({Kind::unmap_chunk, other});
        phrase.push_back({Kind::free_chunk, chunk});
    }
    return phrase;
  }
  Phrase graph() {
    const std::uint64_t number = any(kGraphSlots);
    const std::uint64_t on = captured_stream();
    const std::uint64_t of = any(std::min<std::uint64_t>(pools_, kPlainPool + 1));
    const std::uint64_t bytes = size();
    const std::uint64_t region = 1 + any(kRegions - 1);
    Phrase phrase = {{Kind::drop_graph, number},
                     {Kind::begin_capture, number, on, region},
                     {Kind::allocate, of, bytes, on},
                     {Kind::use, kNewest, on, kUseWrites}};
    if (any(3) == 0) phrase.push_back({Kind::allocate, pool(), size(), stream()});
    if (any(4) == 0) phrase.push_back({Kind::invalidate_capture, number});
    if (any(3) == 0) phrase.push_back(giving_back());
    if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
    phrase.push_back({Kind::end_capture, number});
    for (std::uint64_t launches = 1 + any(2); launches != 0; --launches) {
      phrase.push_back({Kind::launch, number, stream()});
    }
    if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
    phrase.push_back({Kind::drop_graph, number});
    append_taker(phrase, of, bytes, on);
    return phrase;
  }
  Phrase capture_by_others() {
    const std::uint64_t number = any(kGraphSlots);
    const std::uint64_t on = captured_stream();
    const std::uint64_t of = pool();
    const std::uint64_t bytes = size();
    Phrase phrase = used_block(of, bytes, stream_for(of));
    phrase.push_back({Kind::use, kNewest, on, use_flags()});
    phrase.push_back({Kind::drop_graph, number});
    phrase.push_back({Kind::begin_capture, number, on, 0});
    phrase.push_back({Kind::use, any(2) == 0 ? kNewest : block(), on, use_flags()});
    phrase.push_back({Kind::free, kNewest});
    if (any(2) == 0) phrase.push_back(giving_back());
    append_taker(phrase, of, bytes, any(2) == 0 ? on : stream_for(of));
    phrase.push_back({Kind::end_capture, number});
    phrase.push_back({Kind::launch, number, stream()});
    return phrase;
  }
  Phrase pinned_part() {
    const std::uint64_t on = captured_stream();
    const std::uint64_t bytes = size();
    Phrase phrase = {{Kind::pin}, {Kind::allocate, kPartOfPlain, bytes, on}, {Kind::use, kNewest, on, kUseWrites}};
    if (any(3) == 0) phrase.push_back({Kind::checkpoint});
    if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
    phrase.push_back({Kind::launch_part, stream()});
    if (any(3) == 0) phrase.push_back({Kind::restore});
    if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
    phrase.push_back({Kind::unpin});
    append_taker(phrase, kPartOfPlain, bytes, on);
    return phrase;
  }
  Phrase mempool() {
    const std::uint64_t region = 3 + any(2);
    const std::uint64_t of = any(std::min<std::uint64_t>(pools_, kPlainPool + 1));
    const std::uint64_t owner = stream_for(of);
    const std::uint64_t bytes = size();
    Phrase phrase = {{Kind::open_mempool, region, any(2)}, {Kind::enter_mempool, region}};
    append(phrase, used_block(of, bytes, owner));
    phrase.push_back({Kind::free, kNewest});
    if (any(2) == 0) append_taker(phrase, of, bytes, owner);
    phrase.push_back({Kind::leave_mempool, region});
    phrase.push_back({Kind::close_mempool, region});
    append_taker(phrase, of, bytes, owner);
    return phrase;
  }

  std::uint64_t any(std::uint64_t below) { return random_() % below; }
  std::uint64_t block() { return any(3) == 0 ? kNewest + any(4) : any(1000); }
  std::uint64_t pool() { return any(pools_); }
  template <typename Values>
  std::uint64_t one_of(const Values& values) {
    return values[any(values.size())];
  }
  std::uint64_t stream() { return peers_ && any(5) == 0 ? peer_stream() : one_of(streams_); }
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
  bool is_crowded_ = false;  // very many streams come by
  std::uint64_t largest_ = 0;
  bool captures_ = false;
  bool recorder_ = false;
  bool peers_ = false;
};

}  // namespace

std::vector<StreamOp> random_stream_program(std::uint64_t seed, std::size_t steps,
                                            const StreamProgramOptions& options) {
  return Author(seed, options).write(steps);
}

}  // namespace vmm::testing
