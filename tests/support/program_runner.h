// Running programs made of printable operations in a world that checks itself,
// and making failing ones smaller. It knows no operation: random_program.h and
// stream_program.h have theirs.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace vmm::testing {

// For the message when the core aborts.
struct RunningStep {
  inline static std::atomic<std::size_t> number{0};
  inline static std::array<char, 256> text{};

  static void report(int /*signal*/) {
    std::array<char, 400> line{};
    const int length = std::snprintf(line.data(), line.size(), "random program: aborted at step %zu: %s\n",
                                     number.load(), text.data());
    if (length > 0 && write(STDERR_FILENO, line.data(), static_cast<std::size_t>(length)) < 0) _exit(2);
  }
};

// Every step, and what World::check() proves after each. Throws
// std::runtime_error with the step, the operation and what was wrong; a broken
// invariant of the core itself aborts, with the step on stderr.
template <typename World, typename Op>
void run_steps(World& world, const std::vector<Op>& program) {
  const auto former = std::signal(SIGABRT, RunningStep::report);
  for (std::size_t step = 0; step < program.size(); ++step) {
    const std::string text = to_string(program[step]);
    RunningStep::number = step;
    std::snprintf(RunningStep::text.data(), RunningStep::text.size(), "%s", text.c_str());
    try {
      world.step(program[step]);
      world.check();
    } catch (const std::exception& error) {
      // Said at once: taking the broken world apart may abort.
      std::fprintf(stderr, "step %zu %s: %s\n", step, text.c_str(), error.what());
      throw std::runtime_error("step " + std::to_string(step) + " " + text + ": " + error.what());
    }
  }
  std::signal(SIGABRT, former);
}

// Runs `work` on a thread of its own: what the core keeps for a thread (its caches, which
// allocations of a sample it watches) begins anew, so a program does the same alone and
// after others.
template <typename Work>
void on_fresh_thread(const Work& work) {
  std::exception_ptr error;
  std::thread([&work, &error] {
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error != nullptr) std::rethrow_exception(error);
}

// How `run(program)` ends, found out in a forked child: 0 as it should, else a number for
// the way in which it fails: it aborts, breaks the order of uses or throws otherwise.
template <typename Op, typename Run>
int ending(const std::vector<Op>& program, const Run& run) {
  const pid_t child = fork();
  if (child == 0) {
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(3);
    std::signal(SIGABRT, SIG_DFL);
    try {
      run(program);
    } catch (const std::exception& error) {
      _exit(std::strstr(error.what(), "the order of uses is broken") != nullptr ? 2 : 1);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

// The smallest program found that still fails in the same way: half a program may be
// refused for what its other half would have changed.
template <typename Op, typename Run>
std::vector<Op> shrink_program(std::vector<Op> program, const Run& run) {
  const int wanted = ending(program, run);
  for (std::size_t piece = program.size() / 2; piece != 0;) {
    bool any = false;
    for (std::size_t at = 0; at < program.size();) {
      std::vector<Op> smaller(program.begin(), program.begin() + static_cast<std::ptrdiff_t>(at));
      smaller.insert(smaller.end(), program.begin() + static_cast<std::ptrdiff_t>(std::min(at + piece, program.size())),
                     program.end());
      if (ending(smaller, run) == wanted) {
        program = std::move(smaller);
        any = true;
      } else {
        at += piece;
      }
    }
    if (!any || piece > program.size()) piece = std::min(piece / 2, program.size());
  }
  return program;
}

}  // namespace vmm::testing
