// Two calls that meet.
#pragma once

#include <atomic>
#include <thread>

namespace vmm::testing {

// Begins both at one moment, but for `later` turns of a loop that the other one waits.
template <typename Other, typename Here>
void at_one_moment(int later, const Other& other, const Here& here) {
  std::atomic<int> ready{0};
  const auto wait = [&ready] {
    ready.fetch_add(1);
    while (ready.load() != 2) {
    }
  };
  std::thread beside([&] {
    wait();
    std::atomic<int> turns{0};
    while (turns.fetch_add(1) < later) {
    }
    other();
  });
  wait();
  here();
  beside.join();
}

}  // namespace vmm::testing
