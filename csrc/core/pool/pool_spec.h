// What a pool is to be.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/units.h"
#include "core/backing/pool_kind.h"
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
  PoolKind kind = PoolKind::model;
  // Of a part: the model pays for its memory, but for what is spilled, and counts it; floor and
  // priority are the model's.
  std::shared_ptr<Pool> model;
  RegionId region;
  std::string tag;        // what the model's user calls what is made here; empty: nothing
  bool no_split = false;  // a block has its chunks for itself
  // Rather takes new memory than moves what it has idle: what is asked for over and over
  // costs no driver call any more, for as much as it may hold beyond its peak.
  bool grows_freely = false;
};

}  // namespace vmm
