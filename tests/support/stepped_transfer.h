// A transfer that goes on only as far as it is told, so that a program of one thread can do
// something between any two of its steps, and does the same each time.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "core/sleep/transfer.h"

namespace vmm::testing {

class SteppedTransfer {
 public:
  SteppedTransfer(std::unique_ptr<Departure> out, std::unique_ptr<Arrival> in)
      : transfer_(std::move(out), std::move(in)), thread_([this] { run(); }) {}
  ~SteppedTransfer() {
    go_on(kToTheEnd);
    thread_.join();
  }
  SteppedTransfer(const SteppedTransfer&) = delete;
  SteppedTransfer& operator=(const SteppedTransfer&) = delete;

  static constexpr std::size_t kToTheEnd = ~std::size_t{0};
  // So many looks further; or, where it is to stop, to what it does then. Returns whether it
  // has ended.
  bool go_on(std::size_t looks, bool stops = false) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (has_ended_) return true;
    stops_ = stops_ || stops;
    looks_ = looks;
    changed_.notify_all();
    changed_.wait(lock, [this] { return looks_ == 0 || has_ended_; });
    return has_ended_;
  }
  // What ended it before its end, or nullptr. REQUIRES: it has ended.
  [[nodiscard]] std::exception_ptr error() const { return error_; }

 private:
  void run() {
    try {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return looks_ != 0; });
      }
      const Look look = [this] { pause(); };
      transfer_.begin(look);
      transfer_.run(look);
    } catch (...) {
      error_ = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    has_ended_ = true;
    changed_.notify_all();
  }
  void pause() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (looks_ != kToTheEnd && --looks_ == 0) {
      changed_.notify_all();
      changed_.wait(lock, [this] { return looks_ != 0; });
    }
    if (stops_) throw VmmError("stopped");
  }

  Transfer transfer_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t looks_ = 0;  // that it may go past
  bool stops_ = false;
  bool has_ended_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // last: it reads the others
};

}  // namespace vmm::testing
