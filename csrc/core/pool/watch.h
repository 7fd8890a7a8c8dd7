// What a pool keeps of the blocks that debug mode watches (watched.cpp). A watched block
// has what lies around it for itself: bytes before it and behind it that nobody asked for,
// which are blocks of their own in the state `guard`.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "core/blocks/block.h"
#include "core/streams/clock.h"

namespace vmm {

struct PoolWatch {
  // What stands around a live one. With `guard`: the first part of its pages, if any, and
  // addresses without memory; with `canary`: memory on both sides.
  struct Around {
    Block* before = nullptr;
    Block* behind = nullptr;
    std::size_t front = 0;  // bytes of pattern before it
    std::size_t back = 0;   // bytes of pattern behind what was asked for
  };
  // A freed one, which is looked at once `epoch` has passed. Until then it is quarantined.
  struct Freed {
    Block* block = nullptr;   // with what was before it, and with `canary` behind it
    Block* behind = nullptr;  // with `guard`: the addresses without memory
    Epoch epoch = kLongAgo;
    std::size_t offset = 0;     // of what was the block
    std::size_t requested = 0;  // bytes
    std::size_t front = 0;
    std::size_t back = 0;
  };

  std::unordered_map<std::size_t, Around> live;  // by the block's offset
  std::deque<Freed> freed;                       // oldest first
  std::size_t freed_bytes = 0;                   // of these, until their memory is free
  std::size_t leaving = 0;                       // out of `freed`, and being looked at with no lock held
  int readers = 0;                               // who look at live ones so: nothing of these goes meanwhile
  std::size_t mapped_bytes = 0;                  // of guard blocks with memory
  std::size_t bare_bytes = 0;                    // of the others
  std::size_t next = 0;                          // offset from which the next one is placed; 0: not begun
  std::shared_ptr<const std::string> name;       // the pool's, once there is one
};

}  // namespace vmm
