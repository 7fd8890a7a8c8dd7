#include "core/device/pool_registry.h"

#include <utility>

#include "base/check.h"
#include "core/pool/pool.h"

namespace vmm {

void PoolRow::add(Number number, std::shared_ptr<Pool> pool) {
  VMM_CHECK(pools_.empty() || pools_.rbegin()->first < number, "pool ", number, " is registered out of order");
  pools_.emplace_hint(pools_.end(), number, std::move(pool));
  list_ = nullptr;
}

void PoolRow::remove(Number number) {
  if (pools_.erase(number) != 0) list_ = nullptr;
}

const std::shared_ptr<const PoolList>& PoolRow::list() const {
  if (list_ != nullptr) return list_;
  PoolList pools;
  pools.reserve(pools_.size());
  for (const auto& [number, pool] : pools_) pools.push_back(pool);
  list_ = std::make_shared<const PoolList>(std::move(pools));
  return list_;
}

void PoolRegistry::add(const std::shared_ptr<Pool>& pool) {
  const PoolRow::Number number = ++last_number_;
  entries_.emplace(pool.get(), Entry{number, pool});
  try {
    of_budget_.emplace(&pool->budget(), pool.get());
    all_.add(number, pool);
    groups_[&pool->group()].add(number, pool);
    if (pool->is_part()) parts_[&pool->model()].emplace(number, pool);
    if (pool->is_tag_space()) tagged_[&pool->model()][pool->tag()].emplace(number, pool);
  } catch (...) {  // there is no memory to note it
    remove(*pool);
    throw;
  }
}

bool PoolRegistry::remove(const Pool& pool) {
  const auto at = entries_.find(&pool);
  if (at == entries_.end()) return false;
  // Who calls may know it by this alone.
  const Entry entry = std::move(at->second);
  entries_.erase(at);
  of_budget_.erase(&entry.pool->budget());
  all_.remove(entry.number);
  // One whose adding failed is not in every row.
  if (const auto group = groups_.find(&entry.pool->group()); group != groups_.end()) {
    group->second.remove(entry.number);
    if (group->second.empty()) groups_.erase(group);
  }
  if (const auto parts = parts_.find(&entry.pool->model()); parts != parts_.end()) {
    parts->second.erase(entry.number);
    if (parts->second.empty()) parts_.erase(parts);
  }
  if (const auto of_model = tagged_.find(&entry.pool->model()); of_model != tagged_.end()) {
    if (const auto spaces = of_model->second.find(entry.pool->tag()); spaces != of_model->second.end()) {
      spaces->second.erase(entry.number);
      if (spaces->second.empty()) of_model->second.erase(spaces);
    }
    if (of_model->second.empty()) tagged_.erase(of_model);
  }
  return true;
}

std::shared_ptr<Pool> PoolRegistry::find(const Pool* pool) const {
  const auto at = entries_.find(pool);
  return at == entries_.end() ? nullptr : at->second.pool;
}

std::shared_ptr<const PoolList> PoolRegistry::of_group(const Budget& budget) const {
  const auto at = groups_.find(&budget);
  return at == groups_.end() ? std::make_shared<const PoolList>() : at->second.list();
}

PoolList PoolRegistry::under(const Budget& budget) const {
  const auto at = of_budget_.find(&budget);
  if (at == of_budget_.end()) return *of_group(budget);
  const Pool& pool = *at->second;
  return pool.is_part() ? PoolList{find(&pool)} : family(pool);
}

void PoolRegistry::add_family(const Pool& pool, Numbered& found) const {
  const Pool& model = pool.model();
  if (const auto at = entries_.find(&model); at != entries_.end()) found.emplace(at->second.number, at->second.pool);
  if (const auto at = parts_.find(&model); at != parts_.end()) found.insert(at->second.begin(), at->second.end());
}

PoolList PoolRegistry::in_order(const Numbered& pools) {
  PoolList list;
  list.reserve(pools.size());
  for (const auto& [number, pool] : pools) list.push_back(pool);
  return list;
}

PoolList PoolRegistry::family(const Pool& pool) const {
  Numbered found;
  add_family(pool, found);
  return in_order(found);
}

PoolList PoolRegistry::tagged(const Pool& model, const std::string& tag) const {
  const auto of_model = tagged_.find(&model);
  if (of_model == tagged_.end()) return {};
  const auto spaces = of_model->second.find(tag);
  return spaces == of_model->second.end() ? PoolList{} : in_order(spaces->second);
}

PoolList PoolRegistry::tagged(const Pool& model) const {
  Numbered found;
  if (const auto at = tagged_.find(&model); at != tagged_.end()) {
    for (const auto& [tag, spaces] : at->second) found.insert(spaces.begin(), spaces.end());
  }
  return in_order(found);
}

PoolList PoolRegistry::deciding(const PoolList& pools) const {
  Numbered found;
  for (const auto& pool : pools) {
    if (!pool->is_part()) {
      add_family(*pool, found);
    } else if (const auto at = entries_.find(pool.get()); at != entries_.end()) {
      found.emplace(at->second.number, at->second.pool);
    }
  }
  return in_order(found);
}

}  // namespace vmm
