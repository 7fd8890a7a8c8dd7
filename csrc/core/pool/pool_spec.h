// What a pool is to be.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/units.h"
#include "core/pool/region_id.h"

namespace vmm {

class Pool;

struct PoolSpec {
  std::string name;           // for messages
  std::size_t capacity = 0;   // bytes of addresses, rounded up to the page
  std::size_t page_size = 0;  // 0: the pool chooses chunk sizes by the request
  std::size_t physical_limit = kUnlimited;
  std::size_t floor = 0;  // bytes that others never take
  int priority = 0;       // higher gives later
  // A part of a model: a private pool of torch's whose memory the model pays
  // for and counts, and whose floor and priority are the model's.
  std::shared_ptr<Pool> model;
  RegionId region;
  std::string tag;           // what the model's user calls what is made here; empty: nothing
  bool no_split = false;     // a block has its chunks for itself
  bool is_mem_pool = false;  // a torch.cuda.MemPool's: a block lies within one chunk
  bool is_range = false;     // one tensor's addresses, held by explicit pages
  // A part for what its model spills: its chunks are in host memory, whose budget is its
  // group, and the model's does not pay for them.
  bool is_spill = false;
  // Rather takes new memory than moves what it has idle: what is asked for over and over
  // costs no driver call any more, for as much as it may hold beyond its peak.
  bool grows_freely = false;
};

}  // namespace vmm
