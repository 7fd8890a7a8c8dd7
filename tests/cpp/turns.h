// Threads that take turns: what a thread keeps is seen only where it is known which one did
// what, and when.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/lab.h"

namespace vmm::testing {

// A worker that does what it is told, and nothing meanwhile.
class Turns {
 public:
  template <typename Do>
  void on(std::size_t thread, const Do& what) {
    while (workers_.size() <= thread) workers_.push_back(std::make_unique<Worker>());
    workers_[thread]->run(what);
  }
  void end(std::size_t thread) { workers_[thread] = std::make_unique<Worker>(); }

 private:
  class Worker {
   public:
    Worker()
        : thread_([this] {
            for (;;) {
              has_work_.wait(false, std::memory_order_acquire);
              if (work_ == nullptr) return;
              work_();
              has_work_.store(false, std::memory_order_release);
              has_work_.notify_one();
            }
          }) {}
    ~Worker() {
      work_ = nullptr;
      has_work_.store(true, std::memory_order_release);
      has_work_.notify_one();
      thread_.join();
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    void run(std::function<void()> work) {
      work_ = std::move(work);
      has_work_.store(true, std::memory_order_release);
      has_work_.notify_one();
      has_work_.wait(true, std::memory_order_acquire);
    }

   private:
    std::function<void()> work_;
    std::atomic<bool> has_work_{false};
    std::thread thread_;
  };
  std::vector<std::unique_ptr<Worker>> workers_;
};

// Allocates and frees twice, so that the thread keeps a block of that size.
inline void warm(Lab& lab, Pool& pool, std::size_t bytes, Stream on = nullptr) {
  for (int round = 0; round < 2; ++round) lab.free(lab.allocate(pool, bytes, on));
}

}  // namespace vmm::testing
