// OrderChecker: pools that are asleep (rule 5, and of rule 7 what it says of them).
#include "support/order_checker.h"

#include <algorithm>

namespace vmm::testing {

void OrderChecker::asleep(std::uint64_t pool) {
  const MutexLock lock(mutex_);
  asleep_.insert(pool);
}

bool OrderChecker::is_asleep(std::uint64_t pool) const {
  const MutexLock lock(mutex_);
  return asleep_.count(pool) != 0;
}

bool OrderChecker::is_asleep(const CapturedGraph& graph) const {
  const MutexLock lock(mutex_);
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const CapturedGraph::Node& node) VMM_REQUIRES(mutex_) {
    return asleep_.count(node.pool) != 0;
  });
}

void OrderChecker::throw_away(std::uint64_t pool, bool surely) {
  const MutexLock lock(mutex_);
  contents_.throw_away(pool, surely);
}

// Whether nobody but the program may write there.
bool OrderChecker::is_held(const Piece& piece) const {
  return piece.block != 0 && asleep_.count(piece.owner.pool) == 0;
}

// What leaves a block is nobody's. Of a graph's pool there is more than blocks.
void OrderChecker::leave_under_sleeper(Address at, const Mapping& mapping) {
  memory_.each_piece(at, mapping.size, [&](const Stretch& stretch, Piece& piece) VMM_REQUIRES(mutex_) {
    if (piece.owner.pool != mapping.pool) return;
    const auto block = block_at(stretch.address);
    if (block != blocks_.end() && block->second.number == piece.block) {
      piece.block = 0;
    } else if (piece.block == 0 && pinned_.count(mapping.pool) != 0) {
      gone_.push_back({stretch.address, stretch.size, piece.owner});
    }
  });
}

void OrderChecker::awake(std::uint64_t pool) {
  const MutexLock lock(mutex_);
  if (asleep_.erase(pool) == 0) return;
  for (const Gone& gone : gone_) {
    const bool is_graphs = gone.owner.pool == pool && pinned_.count(pool) != 0;
    if (is_graphs) come_back(gone.address, gone.size, gone.owner, /*block=*/0);
  }
  std::erase_if(gone_, [pool](const Gone& gone) { return gone.owner.pool == pool; });
  for (const auto& [address, block] : blocks_) {
    if (block.owner.pool == pool) come_back(address, block.size, block.owner, block.number);
  }
}

void OrderChecker::come_back(Address address, std::size_t size, const Owner& owner, std::uint64_t block) {
  const auto what = [&]() VMM_REQUIRES(mutex_) {
    return "awake again, of " + text_of(owner) + ", " + bytes_text(address, size);
  };
  if (!memory_.is_accessible(address, size, owner.device, Access::read_write)) {
    violate(what() + " is not mapped for its device");
    return;
  }
  memory_.each_mapping(address, size, [&](Address /*at*/, Mapping& mapping) { mapping.pool = owner.pool; });
  memory_.each_piece(address, size, [&](const Stretch& stretch, Piece& piece) VMM_REQUIRES(mutex_) {
    const bool has_stayed = piece.block == block && (block != 0 || piece.owner == owner);
    if (piece.block != 0 && !has_stayed) {
      violate(what() + ": " + bytes_text(stretch) + " is held by " + text_of(piece.owner));
    }
    if (!has_stayed) {
      piece.former.join(piece.uses);
      piece.uses.clear();
      ++counts_.came;
    }
    const std::string late = first_late(has_stayed ? piece.moved : piece.former, &LaneUses::any, order_.host());
    if (!late.empty()) violate(what() + ": the host does not know to be done " + late);
    piece.moved.clear();
    piece.owner = owner;
    piece.block = block;
  });
  if (block == 0) return;  // what of it graphs use, their launches look at
  const std::string wrong = contents_.first_wrong(address, size, owner.pool);
  if (!wrong.empty()) violate(what() + ": " + wrong);
}

// A point behind copies that are not done: whoever waits for it waits for these.
bool OrderChecker::covers_copies(const VectorClock& point) const {
  return std::any_of(copies_.begin(), copies_.end(), [&](const auto& copy) VMM_REQUIRES(mutex_) {
    const auto& [lane, newest] = copy;
    return !order_.is_done(lane, std::min(point[lane], newest));
  });
}

}  // namespace vmm::testing
