// The one rule of seals: pages are sealed by whole chunks, so all that lives in a chunk that
// is changed has to be given. What says so in words is here too.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/units.h"
#include "core/backing/backed_space.h"
#include "core/blocks/block_directory.h"
#include "core/blocks/explicit_pages.h"
#include "core/pool/sealed_piece.h"

namespace vmm {

// For a tensor of whose pages only some have memory.
std::string what_is_not_there(const std::string& pool, Address address, std::size_t bytes);

// Looks at a pool, whose lock is held.
class SealRule {
 public:
  // `pool`: its name. `has_whole_chunks`: one tensor's addresses, or a tag's space.
  SealRule(const std::string& pool, bool has_whole_chunks, const BackedSpace& space, const BlockDirectory& directory,
           const ExplicitPages& pages)
      : pool_(pool), has_whole_chunks_(has_whole_chunks), space_(space), directory_(directory), pages_(pages) {}
  // The chunks under `pieces`, of one at least, that do not allow `access`, of explicit pages
  // the others too; what touches joined. Throws InvalidArgumentError where something else
  // lives in one of them, and says what.
  [[nodiscard]] std::vector<ByteRange> stretches_to_change(const std::vector<SealedPiece>& pieces, Access access) const;

 private:
  [[nodiscard]] bool is_range() const { return space_.kind().is_range(); }
  [[nodiscard]] std::vector<ByteRange> live_memory() const;
  [[nodiscard]] std::vector<ByteRange> given_memory(const std::vector<SealedPiece>& pieces,
                                                    const std::vector<ByteRange>& live) const;
  [[nodiscard]] bool is_held(ByteRange range) const;
  void require_given(ByteRange run, const std::vector<ByteRange>& given, const std::vector<ByteRange>& live) const;
  [[nodiscard]] std::string why_not_sealed(ByteRange missing, bool is_same) const;

  const std::string& pool_;
  const bool has_whole_chunks_;
  const BackedSpace& space_;
  const BlockDirectory& directory_;
  const ExplicitPages& pages_;
};

}  // namespace vmm
