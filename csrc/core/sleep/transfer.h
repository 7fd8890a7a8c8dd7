// Models that go to sleep, or come back, or both at once: a swap.
//
// Everything here waits for the GPU, and holds no lock meanwhile.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "core/sleep/arrival.h"
#include "core/sleep/departure.h"

namespace vmm {

// Is called between two pieces; what it throws stops the transfer.
using Look = std::function<void()>;

// The whole way, by the thread that runs it; others may look at how far it is.
class Transfer {
 public:
  // Either may be nullptr.
  Transfer(std::unique_ptr<Departure> out, std::unique_ptr<Arrival> in) : out_(std::move(out)), in_(std::move(in)) {}
  // Undoes what was begun and never run.
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  // Until all that can be refused has been: without memory for it nothing moves.
  void begin(const Look& look);
  // The rest. REQUIRES: begin() went well. What stops it is thrown, once all is undone
  // that can be.
  void run(const Look& look);
  // Bytes that have been copied; of these those that went, and those that came.
  [[nodiscard]] std::size_t done() const { return gone() + come(); }
  [[nodiscard]] std::size_t gone() const { return out_ == nullptr ? 0 : out_->done(); }
  [[nodiscard]] std::size_t come() const { return in_ == nullptr ? 0 : in_->done(); }
  [[nodiscard]] std::size_t total() const;
  // See Arrival.
  Arrival::Waited wait_for(Address address, std::size_t bytes, std::chrono::milliseconds most) {
    return in_ == nullptr ? Arrival::Waited::there : in_->wait_for(address, bytes, most);
  }

 private:
  void move(const Look& look);
  void undo() noexcept;

  const std::unique_ptr<Departure> out_;
  const std::unique_ptr<Arrival> in_;
  bool is_under_way_ = false;
};

}  // namespace vmm
