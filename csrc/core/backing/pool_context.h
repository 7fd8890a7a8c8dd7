// The rooms that all pools of a device share, but for the store: spilled memory has its own.
#pragma once

#include <atomic>
#include <cstddef>

namespace vmm {

class AddressSpace;
class BlockCaches;
struct Capabilities;
class ChunkStore;
class Clock;
class DeviceStreams;
class Driver;
struct Options;
class Peaks;
class PoolObserver;
class WatchLog;

struct PoolContext {
  Driver& driver;
  AddressSpace& address_space;
  ChunkStore& store;
  DeviceStreams& streams;
  Clock& clock;
  Peaks& peaks;
  BlockCaches& caches;
  const Options& options;
  const std::atomic<PoolObserver*>& observer;
  const std::atomic<std::size_t>& oversize_bytes;  // requests from here on are counted as oversize
  const std::atomic<bool>& within_chunks;          // see DeviceMemory::keep_blocks_within_chunks()
  const std::atomic<bool>& may_be_over;            // some limit was lowered below what is in use
  const Capabilities& capabilities;
  int device = 0;
  WatchLog* log = nullptr;  // of debug mode; nullptr: it is off
};

}  // namespace vmm
