#include "core/sleep/transfer.h"

#include "base/errors.h"

namespace vmm {

Transfer::~Transfer() {
  if (is_under_way_) undo();
}

void Transfer::begin(const Look& look) {
  if (out_ != nullptr) out_->begin();
  is_under_way_ = true;
  try {
    look();
    if (in_ != nullptr) in_->begin();
    if (in_ != nullptr && out_ != nullptr) in_->require_room(*out_);
    look();
  } catch (...) {
    undo();
    throw;
  }
}

// Both directions at once: what comes takes the memory of what goes.
void Transfer::move(const Look& look) {
  for (;;) {
    bool moves = out_ != nullptr && out_->advance();
    look();
    if (in_ != nullptr && in_->advance(/*is_on_its_way=*/out_ != nullptr && !out_->is_through())) moves = true;
    look();
    // Only then for the bus, which works on at least one more piece meanwhile.
    if (!moves && !(out_ != nullptr && out_->wait()) && !(in_ != nullptr && in_->wait())) return;
  }
}

void Transfer::run(const Look& look) {
  if (!is_under_way_) throw VmmError("a transfer runs once");
  try {
    // What is thrown away goes when nothing can stop the rest any more, or a piece that is there
    // in no time would be lost by Ctrl-C; but what comes may need its memory.
    if (out_ != nullptr && in_ != nullptr) out_->throw_away();
    move(look);
    if (out_ != nullptr) out_->secure();
    look();
    if (out_ != nullptr && in_ == nullptr) {
      out_->throw_away();
      move([] {});
    }
    if (out_ != nullptr) out_->finish();
    if (in_ != nullptr) in_->finish();
    is_under_way_ = false;
  } catch (...) {
    undo();
    throw;
  }
}

void Transfer::undo() noexcept {
  is_under_way_ = false;
  if (in_ != nullptr) in_->undo();
  if (out_ != nullptr) out_->undo();
}

std::size_t Transfer::total() const {
  return (out_ == nullptr ? 0 : out_->total()) + (in_ == nullptr ? 0 : in_->total());
}

}  // namespace vmm
