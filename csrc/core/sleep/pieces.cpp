#include "core/sleep/pieces.h"

#include <memory>
#include <utility>

#include "base/errors.h"

namespace vmm {

Pieces::~Pieces() {
  for (const UnderWay& each : under_way_) each.point->wait().ignore();
}

void Pieces::add(std::size_t index, const StreamUse& by) {
  under_way_.push_back({index, std::make_shared<StreamPoint>(std::vector<StreamUse>{by})});
}

std::size_t Pieces::wait_for_oldest() {
  throw_if_failed(under_way_.front().point->wait(), "waiting for copies");
  const std::size_t index = under_way_.front().index;
  under_way_.pop_front();
  return index;
}

void append_pieces(std::size_t part, std::vector<MovedChunk> chunks, std::size_t most, std::vector<Piece>* pieces) {
  std::size_t bytes = 0;  // of the latest piece's chunks; 0: there is none
  for (MovedChunk& chunk : chunks) {
    if (bytes == 0 || bytes + chunk.place.size > most) {
      pieces->push_back({part, {}, {}, 0});
      bytes = 0;
    }
    bytes += chunk.place.size;
    for (const ByteRange& range : chunk.kept) pieces->back().bytes += range.size;
    pieces->back().chunks.push_back(std::move(chunk));
  }
}

}  // namespace vmm
