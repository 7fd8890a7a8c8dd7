// Wall time, for the loops that measure.
#pragma once

#include <chrono>

// Runs from when it is made.
class Stopwatch {
 public:
  [[nodiscard]] double ns() const {
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
