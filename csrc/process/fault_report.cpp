#include "process/fault_report.h"

#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction() is POSIX's
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/debug/watch_log.h"
#include "core/memory/read_only_ranges.h"
#include "process/runtime.h"

namespace vmm {

namespace {

struct sigaction former {};

// Text on stderr, as a handler of signals may write it: no memory is allocated and no lock
// taken.
class Writer {
 public:
  Writer() = default;
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  ~Writer() { flush(); }
  Writer& operator<<(std::string_view text) {
    for (const char c : text) put(c);
    return *this;
  }
  Writer& operator<<(std::size_t value) { return number(value, 10, 1); }
  Writer& hex(std::uintptr_t value) { return (*this << "0x").number(value, 16, 12); }

 private:
  Writer& number(std::uintptr_t value, unsigned base, std::size_t at_least) {
    std::array<char, 24> digits{};
    std::size_t count = 0;
    while (value != 0 || count < at_least) {
      digits.at(count++) = "0123456789abcdef"[value % base];
      value /= base;
    }
    while (count != 0) put(digits.at(--count));
    return *this;
  }
  void put(char c) {
    if (used_ == text_.size()) flush();
    text_.at(used_++) = c;
  }
  void flush() {
    for (std::size_t done = 0; done < used_;) {
      const ssize_t wrote = ::write(STDERR_FILENO, text_.data() + done, used_ - done);
      if (wrote <= 0) break;
      done += static_cast<std::size_t>(wrote);
    }
    used_ = 0;
  }

  std::array<char, 512> text_{};
  std::size_t used_ = 0;
};

void tell(const Finding& finding) {
  const WatchedBlock& block = finding.block;
  Writer out;
  switch (finding.where) {
    case Finding::Where::inside:
      out << "byte " << finding.distance << " of ";
      break;
    case Finding::Where::beyond:
      out << finding.distance << " bytes beyond the end of ";
      break;
    case Finding::Where::before:
      out << finding.distance << " bytes before ";
      break;
  }
  out << (block.freed == 0 ? "a live block of " : "a freed block of ") << block.requested << " bytes at ";
  out.hex(block.address) << " (pool '" << (block.pool == nullptr ? std::string_view() : std::string_view(*block.pool));
  out << "', allocation " << static_cast<std::size_t>(block.number) << ")";
  if (block.stack == nullptr) {
    out << "\n";
    return;
  }
  out << "; allocated at:\n    ";
  for (const char c : *block.stack) out << std::string_view(&c, 1) << (c == '\n' ? "    " : "");
  out << "\n";
}

constexpr std::string_view kNoTouch = "torch_vmm: debug: the CPU may not touch ";

// Its pool may have ended, and its blocks are known still.
void report_of_ended(std::uintptr_t address) {
  for (int ordinal = 0; ordinal < Runtime::kMostDevices; ++ordinal) {
    const DeviceRoom* const room = Runtime::made(DeviceKind::cpu, ordinal);
    Finding finding;
    if (room == nullptr || room->memory.debug_log() == nullptr) continue;
    if (!room->memory.debug_log()->explain_now(address, &finding) || !finding.is_in_zone) continue;
    Writer().operator<<(kNoTouch).hex(address) << ": ";
    tell(finding);
    return;
  }
}

// The thread was stopped where it touched the address: in a kernel, say, and in none of our
// locks. If it holds the log's all the same, the log is left alone (explain_now). Pools that
// are there are found without a lock. Copying a Finding counts references and allocates
// nothing.
void report(std::uintptr_t address) {
  const Pool* pool = Runtime::pool_at(reinterpret_cast<const void*>(address));
  const std::string_view no_write = "torch_vmm: debug: the CPU may not write to ";
  if (pool == nullptr) {
    if (ReadOnlyRanges::of_process().holds_now(address)) {
      Writer().operator<<(no_write).hex(address) << ": it is of an alias that was made with read_only=True\n";
    } else {
      report_of_ended(address);
    }
    return;
  }
  if (pool->home()->debug_log() == nullptr) return;
  if (pool->is_read_only_now(address)) {
    Writer().operator<<(no_write).hex(address) << ", which is sealed: ";
  } else {
    Writer().operator<<(kNoTouch).hex(address) << ": ";
  }
  Finding finding;
  if (pool->home()->debug_log()->explain_now(address, &finding)) {
    tell(finding);
  } else {
    Writer() << "it is of pool '" << pool->name() << "' and of no watched block\n";
  }
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  static std::atomic<bool> is_reporting{false};
  // Sent by somebody (si_code <= 0), it says no address; and what faults within the report
  // is not reported.
  if (info != nullptr && info->si_code > 0 && !is_reporting.exchange(true)) {
    report(reinterpret_cast<std::uintptr_t>(info->si_addr));
    is_reporting.store(false);
  }
  errno = error;
  if ((former.sa_flags & SA_SIGINFO) != 0) {
    former.sa_sigaction(signal, info, context);
  } else if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
    former.sa_handler(signal);
  } else {
    // As it would have been: the access is tried again, and ends the process.
    (void)::sigaction(signal, &former, nullptr);
    if (info == nullptr || info->si_code <= 0) (void)::raise(signal);
  }
}

}  // namespace

void install_fault_report() {
  static const bool kInstalled = [] {
    struct sigaction ours {};
    ours.sa_sigaction = &on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    (void)::sigemptyset(&ours.sa_mask);
    return ::sigaction(SIGSEGV, &ours, &former) == 0;
  }();
  static_cast<void>(kInstalled);
}

}  // namespace vmm
