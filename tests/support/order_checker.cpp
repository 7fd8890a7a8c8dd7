// OrderChecker: the program's side, and the rule. The driver's calls are in
// order_checker_driver.cpp.
#include "support/order_checker.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace vmm::testing {

namespace {

// Whose stamps are in memory that the program mapped by hand.
constexpr std::uint64_t kByHand = 0xFFFF;

}  // namespace

// -- Words

std::string OrderChecker::text_of(Lane lane, Seq seq) const {
  std::string text = "use " + std::to_string(seq) + " of stream '" + order_.name_of(lane) + "'";
  const auto deeds = deeds_.find(lane);
  if (deeds == deeds_.end() || seq == 0 || seq > deeds->second.size()) return text;
  const Deed& deed = deeds->second[seq - 1];
  return text + " (" + deed.what + " of " + bytes_text(deed.address, deed.bytes) + ", queued at " + *deed.where + ")";
}

std::string OrderChecker::text_of(const Owner& owner) {
  if (owner.pool == 0) return "nobody";
  const std::string pool = owner.pool == kAllocator ? "the allocator" : "pool " + std::to_string(owner.pool);
  const auto lane = order_.find({owner.stream, owner.device});
  return pool + " on " + (lane.has_value() ? "'" + order_.name_of(*lane) + "'" : "a stream that is no more");
}

std::string OrderChecker::first_late(const UseSet& uses, Seq LaneUses::*which, const VectorClock& point) const {
  for (const LaneUses& of_lane : uses.lanes()) {
    if (point.covers(of_lane.lane, of_lane.*which)) continue;
    return text_of(of_lane.lane, of_lane.*which) + ": what comes before covers that stream up to " +
           std::to_string(point[of_lane.lane]) + ", the host knows up to " +
           std::to_string(order_.host()[of_lane.lane]);
  }
  return "";
}

bool OrderChecker::all_done(const UseSet& uses) const {
  return std::all_of(uses.lanes().begin(), uses.lanes().end(), [&](const LaneUses& of_lane) VMM_REQUIRES(mutex_) {
    return order_.is_done(of_lane.lane, of_lane.any);
  });
}

void OrderChecker::violate(const std::string& text) { violations_.push_back("at " + *where_ + ": " + text); }

void OrderChecker::at(const std::string& where) {
  const MutexLock lock(mutex_);
  where_ = std::make_shared<std::string>(where);
}

// -- Streams

void OrderChecker::add_stream(const StreamSpec& spec) {
  const MutexLock lock(mutex_);
  order_.add_stream(spec);
}

void OrderChecker::destroy_stream(Stream handle) {
  const MutexLock lock(mutex_);
  order_.destroy_stream(handle);
}

Lane OrderChecker::lane_of_program(StreamRef stream) {
  const auto lane = order_.find(stream);
  VMM_CHECK(lane.has_value(), "the program names a stream that is not alive: ",
            format_hex(reinterpret_cast<std::uintptr_t>(stream.handle)));
  return *lane;
}

VectorClock OrderChecker::point(StreamRef stream) {
  const MutexLock lock(mutex_);
  return order_.reach(lane_of_program(stream));
}

void OrderChecker::wait(StreamRef stream, const VectorClock& point) {
  const MutexLock lock(mutex_);
  order_.wait(lane_of_program(stream), point);
}

bool OrderChecker::is_blocked(StreamRef stream) {
  const MutexLock lock(mutex_);
  const Lane lane = lane_of_program(stream);
  return order_.is_captured(lane) || order_.stands_before_a_capture(lane);
}

bool OrderChecker::is_blocking(StreamRef stream) {
  const MutexLock lock(mutex_);
  Lane lane = 0;
  return lane_of_call("is_blocking", stream, &lane).ok() && order_.is_blocking(lane);
}

bool OrderChecker::is_accessible(Address address, std::size_t bytes, int device, Access access) const {
  const MutexLock lock(mutex_);
  return memory_.is_accessible(address, bytes, device, access);
}

// -- Uses (rules 4 and 5)

OrderChecker::Blocks::iterator OrderChecker::block_at(Address address) {
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return blocks_.end();
  --after;
  return after->first + after->second.size > address ? after : blocks_.end();
}

Seq OrderChecker::queue(Lane lane, const char* what, Address address, std::size_t bytes, bool is_long) {
  deeds_[lane].push_back({what, address, bytes, where_});
  return order_.queue(lane, is_long);
}

void OrderChecker::use(StreamRef stream, Address address, std::size_t bytes, Use use, bool is_long) {
  const MutexLock lock(mutex_);
  const Lane lane = lane_of_program(stream);
  const auto block = block_at(address);
  const CapturedGraph::Node node{address, bytes, use, block == blocks_.end() ? 0 : block->second.owner.pool};
  if (const CaptureId capture = order_.capture_of(lane); capture != 0) {
    captures_.at(capture).nodes.push_back(node);
    return;
  }
  if (order_.is_captured(lane)) return;  // of an invalid one: CUDA refuses the launch
  const VectorClock before = order_.reach(lane);
  const Seq seq = queue(lane, use == Use::write ? "write" : "read", address, bytes, is_long);
  note_use(lane, seq, before, node, /*is_replay=*/false);
}

void OrderChecker::launch(const CapturedGraph& graph, StreamRef stream) {
  const MutexLock lock(mutex_);
  if (graph.nodes.empty()) return;
  const Lane lane = lane_of_program(stream);
  const VectorClock before = order_.reach(lane);
  const CapturedGraph::Node& first = graph.nodes.front();
  const Seq seq = queue(lane, "launch of a graph that uses, first,", first.address, first.bytes);
  for (const CapturedGraph::Node& node : graph.nodes) note_use(lane, seq, before, node, /*is_replay=*/true);
  ++counts_.launched;
}

void OrderChecker::note_use(Lane lane, Seq seq, const VectorClock& before, const CapturedGraph::Node& node,
                            bool is_replay) {
  const bool is_write = node.use == Use::write;
  const std::size_t size = align_up(node.bytes, kGranule);
  const auto who = [&]() VMM_REQUIRES(mutex_) { return text_of(lane, seq); };
  if (asleep_.count(node.pool) != 0) violate("The program: " + who() + " is of a pool that is asleep");
  bool is_its_own = true;
  if (!memory_.is_accessible(node.address, size, order_.device_of(lane),
                             is_write ? Access::read_write : Access::read)) {
    violate(who() + " touches " + bytes_text(node.address, size) + ", which is not mapped for its device");
    is_its_own = false;
  }
  memory_.each_mapping(node.address, size,
                       [&](Address /*at*/, Mapping& mapping) { mapping.uses.note(lane, seq, is_write, is_replay); });
  const auto block = block_at(node.address);
  memory_.each_piece(node.address, size, [&](const Stretch& stretch, Piece& piece) VMM_REQUIRES(mutex_) {
    piece.uses.note(lane, seq, is_write, is_replay);
    const std::size_t former_violations = violations_.size();
    if (is_replay) {
      // A graph has the freed blocks of its own pool as well.
      const bool has_it =
          piece.owner.pool == node.pool && (piece.block != 0 || node.pool == 0 || pinned_.count(node.pool) != 0);
      if (!has_it) violate(who() + " touches " + bytes_text(stretch) + ", which belongs to " + text_of(piece.owner));
    } else if (block == blocks_.end() && piece.owner.pool != 0) {
      violate("The program: " + who() + " touches " + bytes_text(stretch) + ", which it gave back");
    } else if (block != blocks_.end() && piece.block != block->second.number) {
      violate(who() + " finds other memory under its block: " + bytes_text(stretch) + " belongs to " +
              text_of(piece.owner));
    }
    const std::string late = first_late(piece.former, &LaneUses::any, before);
    if (!late.empty()) violate("first use of " + bytes_text(stretch) + " by " + who() + " is not after " + late);
    is_its_own = is_its_own && violations_.size() == former_violations;
  });
  if (is_its_own) touch_content(node, lane, seq);
}

// Rule 7. What is nobody's (a chunk mapped by hand) has no content to be kept, but none that others
// should see either.
void OrderChecker::touch_content(const CapturedGraph::Node& node, Lane lane, Seq seq) {
  if (node.pool != 0) {
    const std::string wrong = contents_.first_wrong(node.address, node.bytes, node.pool);
    if (!wrong.empty()) violate(text_of(lane, seq) + ": " + wrong);
  }
  if (node.use == Use::write) contents_.write(node.address, node.bytes, node.pool == 0 ? kByHand : node.pool);
}

// -- What is handed out (rules 3 and 5)

void OrderChecker::hand_out(Address address, std::size_t bytes, StreamRef stream, std::uint64_t pool) {
  const MutexLock lock(mutex_);
  hand_out_block(address, bytes, stream, pool, Handing::block);
}

void OrderChecker::hand_out_again(Address address, std::size_t bytes, StreamRef stream, std::uint64_t pool) {
  const MutexLock lock(mutex_);
  hand_out_block(address, bytes, stream, pool, Handing::again);
}

void OrderChecker::hand_out_pages(Address address, std::size_t bytes, StreamRef stream, std::uint64_t pool) {
  const MutexLock lock(mutex_);
  hand_out_block(address, bytes, stream, pool, Handing::pages);
}

void OrderChecker::hand_out_block(Address address, std::size_t bytes, StreamRef stream, std::uint64_t pool,
                                  Handing how) {
  // What is restored may be a stream's that is no more.
  const auto known = order_.find(stream);
  const bool is_dead = how == Handing::again && !known.has_value();
  const Lane lane = is_dead ? 0 : lane_of_program(stream);
  Block block;
  block.size = align_up(bytes, kGranule);
  block.owner = {pool, stream.device, stream.handle};
  block.number = ++last_block_;
  block.pages = how == Handing::pages;
  const auto to = [&]() VMM_REQUIRES(mutex_) {
    return "handed out to " + text_of(block.owner) + ": " + bytes_text(address, block.size);
  };
  const bool is_there = memory_.is_accessible(address, block.size, stream.device, Access::read_write);
  if (!is_there) violate(to() + " is not mapped for its device");
  const auto next = blocks_.lower_bound(address);
  if (block_at(address) != blocks_.end() || (next != blocks_.end() && next->first < address + block.size)) {
    violate(to() + " overlaps a block that nobody gave back");
  }
  const bool in_graph = !is_dead && order_.is_captured(lane) && pinned_.count(pool) != 0;
  const VectorClock before = in_graph || is_dead ? order_.host() : order_.reach(lane);
  memory_.each_mapping(address, block.size, [pool](Address /*at*/, Mapping& mapping) { mapping.pool = pool; });
  memory_.each_piece(address, block.size, [&](const Stretch& stretch, Piece& piece) VMM_REQUIRES(mutex_) {
    if (piece.block != 0) {
      violate(to() + ": " + bytes_text(stretch) + " is held by " + text_of(piece.owner) + " through another address");
    }
    piece.former.join(piece.uses);
    piece.uses.clear();
    piece.moved.clear();
    const bool same = piece.owner == block.owner;
    const bool is_checked = !same || how != Handing::again;
    const std::string late =
        is_checked ? first_late(piece.former, same ? &LaneUses::binding : &LaneUses::any, before) : "";
    if (!late.empty()) {
      violate(to() + (in_graph ? ", in a capture" : "") + ": " + bytes_text(stretch) + ", last of " +
              (same ? "the same" : text_of(piece.owner)) + ", comes without order after " + late);
    }
    if (same && !first_late(piece.former, &LaneUses::any, before).empty()) ++counts_.reused;
    if (!same && !all_done(piece.former)) ++counts_.moved;
    piece.owner = block.owner;
    piece.block = block.number;
  });
  blocks_.insert_or_assign(address, block);
  contents_.forget(address, block.size);
  if (!is_there) return;
  const std::string wrong = contents_.first_wrong(address, bytes, pool);
  if (!wrong.empty()) violate(to() + ": " + wrong);
}

void OrderChecker::record_stream(Address address, StreamRef stream) {
  const MutexLock lock(mutex_);
  const auto block = blocks_.find(address);
  VMM_CHECK(block != blocks_.end(), "the program records a stream for what it does not hold");
  const Owner& owner = block->second.owner;
  if (owner.device == stream.device && owner.stream == stream.handle) return;
  block->second.recorded.push_back(lane_of_program(stream));
}

void OrderChecker::take_piece_back(const Block& block, Piece& piece) {
  if (piece.block == block.number) piece.block = 0;
  if (block.pages) piece.uses.bind_all();
  // The name of a per-thread stream means the one of the thread that frees.
  const auto per_thread = order_.find({kPerThread, block.owner.device});
  for (const Lane lane : block.recorded) {
    if (!order_.is_per_thread(lane) || lane == per_thread) piece.uses.bind(lane);
  }
}

void OrderChecker::take_back(Address address) {
  const MutexLock lock(mutex_);
  const auto found = blocks_.find(address);
  VMM_CHECK(found != blocks_.end() && !found->second.pages, "the program gives back what it does not hold");
  const Block block = found->second;
  blocks_.erase(found);
  // It comes back all the same when its pool wakes, for graphs.
  if (asleep_.count(block.owner.pool) != 0 && pinned_.count(block.owner.pool) != 0)
    gone_.push_back({address, block.size, block.owner});
  memory_.each_piece(address, block.size, [&](const Stretch& /*stretch*/, Piece& piece) VMM_REQUIRES(mutex_) {
    take_piece_back(block, piece);
  });
}

void OrderChecker::take_back_pages(Address address, std::size_t bytes) {
  const MutexLock lock(mutex_);
  const auto found = block_at(address);
  VMM_CHECK(found != blocks_.end() && found->second.pages && address + bytes <= found->first + found->second.size,
            "the program gives back pages that it does not hold");
  const Address begin = found->first;
  const Block whole = found->second;
  blocks_.erase(found);
  memory_.each_piece(address, bytes, [&](const Stretch& /*stretch*/, Piece& piece) VMM_REQUIRES(mutex_) {
    take_piece_back(whole, piece);
  });
  // What is kept goes on under the same number.
  const auto keep = [&](Address from, Address to) VMM_REQUIRES(mutex_) {
    if (from == to) return;
    Block& part = blocks_[from] = whole;
    part.size = to - from;
  };
  keep(begin, address);
  keep(address + bytes, begin + whole.size);
}

// -- Captures and graphs

CaptureId OrderChecker::begin_capture(StreamRef stream) {
  const MutexLock lock(mutex_);
  const CaptureId capture = order_.begin_capture(lane_of_program(stream));
  captures_[capture] = {};
  return capture;
}

void OrderChecker::join_capture(StreamRef stream, CaptureId capture) {
  const MutexLock lock(mutex_);
  order_.join_capture(lane_of_program(stream), capture);
}

void OrderChecker::invalidate_capture(CaptureId capture) {
  const MutexLock lock(mutex_);
  order_.invalidate(capture);
  captures_.at(capture).nodes.clear();
}

CapturedGraph OrderChecker::end_capture(CaptureId capture) {
  const MutexLock lock(mutex_);
  order_.end_capture(capture);
  CapturedGraph graph = std::move(captures_.at(capture));
  captures_.erase(capture);
  return graph;
}

CaptureId OrderChecker::capture_of(StreamRef stream) {
  const MutexLock lock(mutex_);
  const auto lane = order_.find(stream);
  return lane.has_value() ? order_.capture_of(*lane) : 0;
}

void OrderChecker::pin(std::uint64_t pool) {
  const MutexLock lock(mutex_);
  pinned_.insert(pool);
}

void OrderChecker::unpin(std::uint64_t pool) {
  const MutexLock lock(mutex_);
  if (pinned_.erase(pool) == 0) return;
  memory_.each_piece([&](Piece& piece) {
    if (piece.owner.pool != pool) return;
    piece.uses.bind_replays();
    piece.former.bind_replays();
  });
}

// -- When work is done

void OrderChecker::run(StreamRef stream, std::size_t count) {
  const MutexLock lock(mutex_);
  order_.run(lane_of_program(stream), count);
}

void OrderChecker::run_all() {
  const MutexLock lock(mutex_);
  for (int device = 0; device < inner_.device_count(); ++device) order_.finish(order_.all_of(device));
}

void OrderChecker::drift(std::uint64_t seed) {
  const MutexLock lock(mutex_);
  drifts_ = seed != 0;
  random_.seed(seed);
}

void OrderChecker::work_goes_on() {
  if (drifts_) order_.drift(random_);
}

// -- What came of it

void OrderChecker::check() {
  const MutexLock lock(mutex_);
  // Walks everything, so now and then.
  if (++checks_ % 16 == 0) memory_.tidy(order_.host());
  if (violations_.empty()) return;
  constexpr std::size_t kMostShown = 8;
  std::string text;
  for (std::size_t k = 0; k < std::min(violations_.size(), kMostShown); ++k) text += "\n  " + violations_[k];
  if (violations_.size() > kMostShown) {
    text += "\n  and " + std::to_string(violations_.size() - kMostShown) + " more";
  }
  violations_.clear();
  throw std::runtime_error("the order of uses is broken:" + text);
}

std::vector<std::string> OrderChecker::violations() const {
  const MutexLock lock(mutex_);
  return violations_;
}

OrderChecker::Counts OrderChecker::counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

}  // namespace vmm::testing
