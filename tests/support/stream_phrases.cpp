// Author: phrases, short sequences of operations as programs have them.
#include <algorithm>

#include "support/stream_author.h"

namespace vmm::testing {

Author::Phrase Author::next_phrase() {
  if (is_crowded_ && any(8) == 0) return crowd();
  if (sleeps_ && any(4) == 0) return nap();
  switch (any(captures_ ? 13 : 9)) {
    case 0:
    case 1:
      return reader();
    case 2:
      return any(2) == 0 ? explicit_pages() : shared_chunk();
    case 3:
      return any(2) == 0 ? explicit_pages() : beside();
    case 4:
      return foreign_.empty() ? reader() : foreign_life();
    case 5:
      return namesakes();
    case 6:
      return closing();
    case 7:
      return mapping();
    case 8:
      return lowered_limit();
    case 9:
      return graph();
    case 10:
      return capture_by_others();
    case 11:
      return pinned_part();
    default:
      return mempool();
  }
}

Author::Phrase Author::used_block(std::uint64_t of, std::uint64_t bytes, std::uint64_t owner) {
  Phrase phrase = {{Kind::allocate, of, bytes, owner}, {Kind::use, kNewest, owner, kUseWrites}};
  for (std::uint64_t readers = 1 + any(2); readers != 0; --readers) {
    const std::uint64_t reader = stream();
    if (recorder_ && any(2) == 0) phrase.push_back({Kind::record_stream, kNewest, reader});
    phrase.push_back({Kind::use, kNewest, reader, use_flags()});
  }
  return phrase;
}

void Author::append_taker(Phrase& phrase, std::uint64_t of, std::uint64_t bytes, std::uint64_t owner) {
  const bool same_pool = any(2) == 0;
  const bool same_stream = any(2) == 0;
  phrase.push_back(
      {Kind::allocate, same_pool ? of : pool(), any(2) == 0 ? bytes : size(), same_stream ? owner : stream()});
  phrase.push_back({Kind::use, kNewest, same_stream ? owner : stream(), kUseWrites});
}

Author::Phrase Author::reader() {
  const std::uint64_t of = pool();
  const std::uint64_t owner = stream_for(of);
  const std::uint64_t bytes = size();
  Phrase phrase = used_block(of, bytes, owner);
  phrase.push_back({Kind::free, kNewest, any(6) == 0 ? 1U : 0U});
  if (any(3) == 0) phrase.push_back(giving_back());
  append_taker(phrase, of, bytes, owner);
  return phrase;
}

Author::Phrase Author::crowd() {
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

Author::Phrase Author::explicit_pages() {
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

Author::Phrase Author::shared_chunk() {
  const std::uint64_t of = pool();
  const std::uint64_t owner = stream_for(of);
  Phrase phrase = {{Kind::close_pool, of}, {Kind::pages, of, 0, 7 + any(4), owner}};
  phrase.push_back({Kind::use, kNewest, stream(), use_flags()});
  phrase.push_back({Kind::free, kNewest, 0, 1});
  if (any(2) == 0) {
    phrase.push_back({Kind::pages, of, 0, 0, any(2) == 0 ? owner : stream_for(of)});
  } else {
    phrase.push_back({Kind::allocate, of, size(), owner});
  }
  phrase.push_back({Kind::use, kNewest, owner, kUseWrites});
  return phrase;
}

Author::Phrase Author::beside() {
  const std::uint64_t of = any(std::min<std::uint64_t>(pools_, kPlainPool + 1));
  const std::uint64_t owner = stream_for(of);
  Phrase phrase = used_block(pool(), 4 * kMiB, stream());
  phrase.push_back({Kind::close_pool, of});
  phrase.push_back({Kind::free, kNewest});
  phrase.push_back({Kind::allocate, of, 2 * kMiB + any(kMiB), owner});
  phrase.push_back({Kind::allocate_at, of, 1 + any(kMiB), stream_for(of), 3});
  phrase.push_back({Kind::use, kNewest, owner, kUseWrites});
  return phrase;
}

Author::Phrase Author::foreign_life() {
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

Author::Phrase Author::namesakes() {
  const std::uint64_t of = any(std::min<std::uint64_t>(pools_, kPlainPool + 1));
  const std::uint64_t owner = stream_for(of);
  const std::uint64_t bytes = 2 * kMiB * (1 + any(2));
  const bool on_threads = foreign_.empty() || any(2) == 0;
  const std::uint64_t one = on_threads ? 5 : one_of(foreign_);
  const std::uint64_t two = on_threads ? 6 : one;
  Phrase phrase = {{Kind::create_stream, one}, {Kind::empty_cache}};
  for (int k = 0; k < 2; ++k) append(phrase, used_block(of, bytes, owner));
  phrase.push_back({Kind::pool_limit, of, 1});
  phrase.push_back({Kind::free, kNewest});
  phrase.push_back({Kind::free, kNewest});
  phrase.push_back({Kind::pool_limit, of, 2 * bytes});
  phrase.push_back({Kind::allocate, any(3) == 0 ? pool() : of, any(2) == 0 ? bytes : size(), one});
  phrase.push_back({Kind::use, kNewest, one, kUseWrites});
  if (!on_threads) {
    phrase.push_back({Kind::destroy_stream, one});
    phrase.push_back({Kind::create_stream, one});
  }
  phrase.push_back({Kind::allocate, of, any(2) == 0 ? bytes : size(), two});
  phrase.push_back({Kind::use, kNewest, two, kUseWrites});
  return phrase;
}

Author::Phrase Author::closing() {
  const std::uint64_t of = pool();
  const std::uint64_t owner = stream_for(of);
  const std::uint64_t bytes = size();
  Phrase phrase = used_block(of, bytes, owner);
  phrase.push_back({Kind::close_pool, of, any(2)});
  if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
  append_taker(phrase, of, bytes, owner);
  return phrase;
}

Author::Phrase Author::lowered_limit() {
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

Author::Phrase Author::mapping() {
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

Author::Phrase Author::graph() {
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

Author::Phrase Author::capture_by_others() {
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

Author::Phrase Author::pinned_part() {
  const std::uint64_t on = captured_stream();
  const std::uint64_t bytes = size();
  Phrase phrase = {{Kind::pin}, {Kind::allocate, kPartOfPlain, bytes, on}, {Kind::use, kNewest, on, kUseWrites}};
  if (any(3) == 0) phrase.push_back({Kind::checkpoint});
  if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
  phrase.push_back({Kind::launch_part, stream()});
  if (any(3) == 0) phrase.push_back({Kind::restore});
  if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
  if (any(4) == 0) phrase.push_back({Kind::close_pool, any(2) == 0 ? kPartOfPlain : kPlainPool, any(2)});
  phrase.push_back({Kind::unpin});
  append_taker(phrase, kPartOfPlain, bytes, on);
  return phrase;
}

Author::Phrase Author::nap() {
  const std::uint64_t of = pool();
  const std::uint64_t owner = stream_for(of);
  const std::uint64_t bytes = size();
  Phrase phrase = used_block(of, bytes, owner);
  append(phrase, used_block(of, size(), stream_for(of)));
  if (any(2) == 0) phrase.push_back({Kind::free, kNewest});
  phrase.push_back({Kind::sleep, of, how(), looks()});
  append_taker(phrase, of, bytes, owner);  // nobody, or of another pool
  if (any(2) == 0) phrase.push_back(giving_back());
  phrase.push_back({Kind::go_on, any(2), looks(), any(8) == 0 ? 1U : 0U});
  if (any(2) == 0) {
    // What others leave, with readers, is all that there is for it.
    append(phrase, used_block(any(kGroupPools), bytes, owner));
    phrase.push_back({Kind::free, kNewest});
    phrase.push_back({Kind::group_limit, 0, bytes + (4 + any(8)) * kMiB});
  }
  if (any(4) == 0) phrase.push_back({Kind::free, kNewest + 1});
  phrase.push_back(any(3) == 0 ? StreamOp{Kind::swap, pool(), of, how(), looks()}
                               : StreamOp{Kind::wake, of, any(6) == 0 ? any(3) : 0, looks()});
  if (any(2) == 0) append_taker(phrase, pool(), bytes, owner);
  phrase.push_back({Kind::go_on, any(2), 0});
  phrase.push_back({Kind::use, kNewest, stream(), use_flags()});
  phrase.push_back({Kind::use, kNewest + 1, stream(), use_flags()});
  return phrase;
}

Author::Phrase Author::mempool() {
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

}  // namespace vmm::testing
