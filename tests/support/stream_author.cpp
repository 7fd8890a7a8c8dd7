// Author: choosing, and single operations. The phrases are in stream_phrases.cpp.
#include "support/stream_author.h"

namespace vmm::testing {

Author::Author(std::uint64_t seed, const StreamProgramOptions& options) : random_(seed) {
  choose_streams(options);
  pools_ = 1 + any(kPoolSlots);
  slow_ = stream();
  is_crowded_ = any(8) == 0;
  is_tight_ = any(2) == 0;
  largest_ = any(3) == 0 ? 24 * kMiB : 6 * kMiB;
  phrases_ = any(5) == 0 ? 0 : 60 + any(200);
  captures_ = options.with_captures && any(4) != 0;
  recorder_ = any(3) == 0;
  sleeps_ = options.with_sleep && any(3) != 0;
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
             {sleeps_ ? 25 : 0, &Author::sleeping},
             {fails ? 20 : 0, &Author::failing},
             {6, &Author::ending},
             {peers_ ? 2 : 0, &Author::peering}};
  for (const auto& [weight, habit] : habits_) weights_ += weight;
}

std::vector<StreamOp> Author::write(std::size_t steps) {
  std::vector<StreamOp> program;
  if (any(2) == 0) program.push_back({Kind::drift, 1 + any(1000)});
  if (peers_ && any(4) != 0) program.push_back({Kind::add_peers});
  if (is_tight_) {
    for (std::uint64_t of = 0; of < pools_; ++of) program.push_back({Kind::pool_limit, of, tight_limit()});
  }
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

void Author::choose_streams(const StreamProgramOptions& options) {
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

StreamOp Author::next() {
  std::uint64_t chosen = any(weights_);
  for (const auto& [weight, habit] : habits_) {
    if (chosen < weight) return (this->*habit)();
    chosen -= weight;
  }
  return {Kind::run_all};
}

StreamOp Author::allocation() {
  const std::uint64_t of = pool();
  if (any(12) == 0) return {Kind::allocate_at, of, size(), stream_for(of), any(64)};
  return {Kind::allocate, of, size(), stream_for(of)};
}

StreamOp Author::progress() {
  if (any(40) == 0) return {Kind::run_all};
  const std::uint64_t chosen = stream();
  return {Kind::run, chosen == slow_ && any(10) != 0 ? stream() : chosen, 1 + any(8)};
}

StreamOp Author::pages() {
  const std::uint64_t of = pool();
  if (any(3) == 0) return {Kind::first_pages, of, page_count(), stream_for(of)};
  return {Kind::pages, of, any(32), page_count(), stream_for(of)};
}

StreamOp Author::ending() {
  return any(8) == 0 ? StreamOp{Kind::close_group, 0, any(2)} : StreamOp{Kind::close_pool, pool(), any(2)};
}

StreamOp Author::giving_back() {
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
      return {Kind::pool_limit, pool(), is_tight_ ? tight_limit() : any(2) == 0 ? 0 : (4 + any(40)) * kMiB};
    default:
      return {Kind::group_limit, 0, (20 + any(60)) * kMiB};
  }
}

StreamOp Author::foreign() {
  const std::uint64_t which = one_of(foreign_);
  return {any(5) < 3 ? Kind::create_stream : Kind::destroy_stream, which};
}

StreamOp Author::captures() {
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

StreamOp Author::part() {
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

StreamOp Author::by_hand() {
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

StreamOp Author::sleeping() {
  switch (any(8)) {
    case 0:
    case 1:
      return {Kind::sleep, pool(), how(), looks()};
    case 2:
      return {Kind::swap, pool(), pool(), how(), looks()};
    case 3:
    case 4:
    case 5:
      return {Kind::wake, pool(), any(4) == 0 ? any(3) : 0, looks()};
    default:
      return {Kind::go_on, any(2), looks(), any(8) == 0 ? 1U : 0U};
  }
}

std::vector<StreamOp> random_stream_program(std::uint64_t seed, std::size_t steps,
                                            const StreamProgramOptions& options) {
  return Author(seed, options).write(steps);
}

}  // namespace vmm::testing
