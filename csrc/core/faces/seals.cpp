#include "core/faces/seals.h"

#include <memory>
#include <string>

#include "base/errors.h"

namespace vmm {

namespace {

// The part that holds each piece.
PoolList parts_of(const DeviceMemory& memory, const Pool& model, const std::vector<AliasedPiece>& pieces) {
  PoolList parts;
  for (const AliasedPiece& piece : pieces) {
    parts.push_back(memory.pool_at(piece.address));
    if (parts.back() != nullptr && &parts.back()->model() == &model) continue;
    throw InvalidArgumentError("the memory at " + format_hex(piece.address) + " is not of pool '" + model.name() + "'");
  }
  return parts;
}

}  // namespace

void seal_pages(DeviceMemory& memory, const Pool& model, const std::vector<AliasedPiece>& pieces) {
  const PoolList parts = parts_of(memory, model, pieces);
  Clock& clock = memory.clock();
  throw_if_failed(clock.wait(clock.now()), "waiting for queued work that may write what is to be sealed");
  std::vector<std::size_t> changed;
  try {
    for (std::size_t k = 0; k < pieces.size(); ++k) {
      if (parts[k]->is_read_only(pieces[k].address, pieces[k].size)) continue;
      parts[k]->set_pages_access(pieces[k].address, pieces[k].size, Access::read);
      changed.push_back(k);
    }
  } catch (...) {
    for (const std::size_t k : changed) {
      try {
        parts[k]->set_pages_access(pieces[k].address, pieces[k].size, Access::read_write);
      } catch (const VmmError&) {
        continue;  // the first failure is what is told
      }
    }
    throw;
  }
}

void unseal_pages(DeviceMemory& memory, const Pool& model, const std::vector<AliasedPiece>& pieces) {
  const PoolList parts = parts_of(memory, model, pieces);
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    parts[k]->set_pages_access(pieces[k].address, pieces[k].size, Access::read_write);
  }
}

}  // namespace vmm
