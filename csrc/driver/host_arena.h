// One sparse memory file (memfd), cut into stretches. It owns the file and
// knows which stretches are taken; it never knows an address, a chunk or a
// lock (its owner guards it).
//
// One file for all chunks of a device, not one a chunk: `ulimit -n` is 1024 on
// most machines, and neighbouring stretches that are mapped at neighbouring
// addresses become one kernel mapping, of which a process may have 65530
// (vm.max_map_count). So the lowest stretch that fits is taken: chunks made
// one after the other lie one after the other.
//
// The file is as long as the process may make one (RLIMIT_FSIZE), and grows
// when it is used up and the limit has been raised meanwhile. What it has stays
// when the limit is lowered.
#pragma once

#include <cstddef>
#include <map>

#include "base/status.h"

namespace vmm {

// The OS's answer as a Status: `call` failed and errno says why. Running out
// of memory, of mappings or of file descriptors is out_of_memory.
Status status_from_errno(const char* call, int error);

// Makes a file `size` bytes long. A size above RLIMIT_FSIZE is not tried, since
// the kernel would end the process with SIGXFSZ: it is out_of_memory that names
// the limit and its value.
Status resize_file(int fd, std::size_t size);

class HostArena {
 public:
  HostArena() = default;
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Takes a stretch that reads as zero. The file is made on the first call.
  // out_of_memory: no stretch is long enough; names RLIMIT_FSIZE where that is
  // what keeps the file short.
  Status take(std::size_t size, std::size_t* offset);
  // Gives the stretch's memory back to the OS: it reads as zero again. False if
  // the OS refuses. Needs no lock; 1 GiB of touched memory takes 100 ms.
  // REQUIRES: taken and not mapped anywhere.
  [[nodiscard]] static bool empty(int fd, std::size_t offset, std::size_t size);
  // Makes [offset, offset + size), which is mapped at `at`, read as zero. Touches no page
  // that nobody has touched: those read as zero already, and the first touch of each costs
  // more than its zeros (0.5 µs for 4 KiB; 1 GiB of them 130 ms). Needs no lock.
  static void zero(int fd, std::size_t offset, std::size_t size, void* at);
  // Makes an emptied stretch free again. One that could not be emptied is not
  // given back: a fresh chunk must read as zero, and the file is large.
  void give_back(std::size_t offset, std::size_t size);
  // -1 before the first take().
  [[nodiscard]] int fd() const { return fd_; }

 private:
  Status grow(std::size_t at_least);
  std::map<std::size_t, std::size_t>::iterator find(std::size_t size);

  int fd_ = -1;
  std::size_t length_ = 0;                   // bytes of the file
  std::map<std::size_t, std::size_t> free_;  // offset -> size, no two touching
};

}  // namespace vmm
