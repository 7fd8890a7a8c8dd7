// Which pools a device has, in order of registration: all of them, those of one group,
// those of one model, the spaces of a model's tag. Each is found without a look at the
// others, so that one of four thousand comes and goes at the price of one. It never
// looks into a pool beyond what is fixed when the pool is made, and has no lock: its
// owner's guards it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/limits/budget.h"

namespace vmm {

class Pool;
using PoolList = std::vector<std::shared_ptr<Pool>>;

// Some of a registry's pools, in order of registration.
class PoolRow {
 public:
  using Number = std::uint64_t;

  // REQUIRES: `number` is above all that are there.
  void add(Number number, std::shared_ptr<Pool> pool);
  void remove(Number number);
  [[nodiscard]] bool empty() const { return pools_.empty(); }
  [[nodiscard]] std::size_t size() const { return pools_.size(); }
  // The row as it stands; made once until it changes. Whoever keeps it keeps the
  // pools.
  [[nodiscard]] const std::shared_ptr<const PoolList>& list() const;

 private:
  std::map<Number, std::shared_ptr<Pool>> pools_;
  mutable std::shared_ptr<const PoolList> list_;  // nullptr: not asked for since the last change
};

class PoolRegistry {
 public:
  void add(const std::shared_ptr<Pool>& pool);
  // False where it is not registered.
  bool remove(const Pool& pool);

  // nullptr where it is not registered. `pool` may have gone: it is only compared.
  [[nodiscard]] std::shared_ptr<Pool> find(const Pool* pool) const;
  [[nodiscard]] const PoolRow& all() const { return all_; }
  // Those whose group is `budget`, parts included; empty where it is no group's.
  [[nodiscard]] std::shared_ptr<const PoolList> of_group(const Budget& budget) const;
  // Those that stand under `budget`: a group's, a model's or a part's own.
  [[nodiscard]] PoolList under(const Budget& budget) const;
  // The model of `pool`, unless it has ended, and its parts.
  [[nodiscard]] PoolList family(const Pool& pool) const;
  // The spaces that `model` has for the tag's tensors, and for those of all its tags.
  [[nodiscard]] PoolList tagged(const Pool& model, const std::string& tag) const;
  [[nodiscard]] PoolList tagged(const Pool& model) const;
  // Those of whom it depends whether `pools` may end, each once: of a model it and its
  // parts, of a part itself.
  [[nodiscard]] PoolList deciding(const PoolList& pools) const;

 private:
  struct Entry {
    PoolRow::Number number = 0;
    std::shared_ptr<Pool> pool;
  };
  using Numbered = std::map<PoolRow::Number, std::shared_ptr<Pool>>;
  void add_family(const Pool& pool, Numbered& found) const;
  static PoolList in_order(const Numbered& pools);

  PoolRow::Number last_number_ = 0;
  std::unordered_map<const Pool*, Entry> entries_;
  std::unordered_map<const Budget*, const Pool*> of_budget_;  // whose own it is
  PoolRow all_;
  std::unordered_map<const Budget*, PoolRow> groups_;
  std::unordered_map<const Pool*, Numbered> parts_;  // of models that have some
  using ByTag = std::map<std::string, Numbered>;
  std::unordered_map<const Pool*, ByTag> tagged_;  // of models that have some
};

}  // namespace vmm
