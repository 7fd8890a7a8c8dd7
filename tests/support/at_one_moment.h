// Two calls that meet.
#pragma once

#include <atomic>
#include <thread>

namespace vmm::testing {

// So that one of them comes a little later.
inline void spin(int turns) {
  std::atomic<int> done{0};
  while (done.fetch_add(1) < turns) {
  }
}

// Calls `other` on a thread of its own and `here` on this one, from one moment on.
template <typename Other, typename Here>
void at_one_moment(const Other& other, const Here& here) {
  std::atomic<int> ready{0};
  const auto meet = [&ready] {
    ++ready;
    while (ready != 2) {
    }
  };
  std::thread thread([&] {
    meet();
    other();
  });
  meet();
  here();
  thread.join();
}

}  // namespace vmm::testing
