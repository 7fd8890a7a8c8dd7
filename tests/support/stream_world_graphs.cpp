// StreamWorld: captures, graphs, private pools, and a part that is pinned by hand.
#include <algorithm>
#include <iterator>
#include <set>

#include "base/errors.h"
#include "support/stream_world.h"

namespace vmm::testing {

// -- Regions

StreamWorld::RegionPtr StreamWorld::region_of(const RegionId& id) {
  for (std::size_t k = 1; k < kRegions; ++k) {
    if (!(region_id(k) == id)) continue;
    if (regions_[k] == nullptr) regions_[k] = std::make_shared<Region>();
    return regions_[k];
  }
  return std::make_shared<Region>();
}

void StreamWorld::pin(Region& region) {
  if (region.graphs++ != 0) return;
  for (const std::uint64_t part : region.parts) driver_.pin(part);
}

void StreamWorld::unpin(Region& region) {
  if (--region.graphs != 0) return;
  for (const std::uint64_t part : region.parts) driver_.unpin(part);
}

void StreamWorld::forget_region_if_unused(std::size_t slot) {
  const RegionPtr& region = regions_[slot];
  if (region != nullptr && region->graphs == 0 && !region->is_object && !region->is_routed) regions_[slot].reset();
}

// -- Captures, announced as torch does (the route first), or by nobody

void StreamWorld::begin_capture(std::size_t number, std::size_t stream, std::size_t region, bool is_refused) {
  using Kind = StreamSlot::Kind;
  const Kind kind = slot(stream).kind;
  if (graphs_[number].is_there() || graphs_[number].capture != 0) return;
  if (kind == Kind::standard || kind == Kind::of_other_thread || slot(stream).device != 0) return;
  if (!may_work(stream)) return;
  if (region != 0 && regions_[region] != nullptr && regions_[region]->is_routed) return;
  // What failed on this stream before is found when its thread comes by.
  private_pools_->sweep();
  Graph& graph = graphs_[number] = {};
  graph.region_slot = region;
  if (region != 0) {
    graph.id = std::make_shared<std::uint64_t>(0);
    private_pools_->begin(
        region_id(region),
        [this, id = std::weak_ptr<std::uint64_t>(graph.id)](Stream on) {
          const auto known = id.lock();
          const CaptureId capture = driver_.capture_of({on, 0});
          return known != nullptr && capture != 0 && capture == *known;
        },
        slot(stream).handle);
    if (is_refused) {
      graph = {};  // nobody says so: the allocator finds out by itself
      return;
    }
    graph.region = region_of(region_id(region));
    graph.region->is_routed = true;
    pin(*graph.region);
  }
  if (region == 0) graph.born = point(stream);
  graph.capture = driver_.begin_capture(ref(stream));
  if (graph.id != nullptr) *graph.id = graph.capture;
}

void StreamWorld::join_capture(std::size_t number, std::size_t stream) {
  Graph& graph = graphs_[number];
  const auto kind = slot(stream).kind;
  if (graph.capture == 0 || graph.invalid || slot(stream).device != 0 || !may_work(stream)) return;
  if (kind == StreamSlot::Kind::standard || kind == StreamSlot::Kind::of_other_thread) return;
  if (graph.region == nullptr) graph.born.join(point(stream));
  driver_.join_capture(ref(stream), graph.capture);
}

// CUDA finds a capture broken; torch learns of it when it ends the capture.
void StreamWorld::invalidate_capture(std::size_t number) {
  Graph& graph = graphs_[number];
  if (graph.capture == 0 || graph.invalid) return;
  graph.invalid = true;
  driver_.invalidate_capture(graph.capture);
  if (graph.region != nullptr) unpin(*graph.region);  // it will never be launched
}

void StreamWorld::end_capture(std::size_t number) {
  Graph& graph = graphs_[number];
  if (graph.capture == 0) return;
  graph.work = driver_.end_capture(graph.capture);
  graph.capture = 0;
  if (graph.region != nullptr) graph.region->is_routed = false;
  if (!graph.invalid) {
    if (graph.region != nullptr) private_pools_->end(region_id(graph.region_slot));
    return;
  }
  // torch says nothing: the allocator finds out by itself.
  const std::size_t region = graph.region_slot;
  graph = {};
  if (region == 0) return;
  private_pools_->sweep();
  forget_region_if_unused(region);
}

void StreamWorld::note_captured(CaptureId capture, const Live& live) {
  for (Graph& graph : graphs_) {
    if (graph.capture != capture) continue;
    graph.born.join(live.born);
    if (live.region == nullptr || live.region != graph.region) graph.blocks.push_back(live.number);
  }
}

void StreamWorld::launch(std::size_t number, std::size_t stream) {
  Graph& graph = graphs_[number];
  if (graph.capture != 0 || graph.work.nodes.empty() || slot(stream).device != 0 || !may_work(stream)) return;
  if (!is_coverable(stream) || driver_.is_asleep(graph.work)) return;
  std::vector<Live*> others;
  VectorClock before = graph.born;
  for (const std::uint64_t block : graph.blocks) {
    const auto found = std::find_if(live_.begin(), live_.end(), [&](const Live& live) { return live.number == block; });
    if (found == live_.end()) return;  // what it uses has gone
    others.push_back(&*found);
    before.join(found->born);
    before.join(found->writes);
    before.join(found->reads);
    if (found->region != nullptr) before.join(found->region->turns);
  }
  if (graph.region != nullptr) before.join(graph.region->turns);
  wait(stream, before);
  on_thread_of(stream, [&] { driver_.launch(graph.work, ref(stream)); });
  const VectorClock after = point(stream);
  if (graph.region != nullptr) graph.region->turns.join(after);
  for (Live* live : others) {
    live->writes.join(after);
    live->users.emplace_back(user(stream), after);
    if (live->region != nullptr) live->region->turns.join(after);
  }
}

void StreamWorld::drop_graph(std::size_t number) {
  Graph& graph = graphs_[number];
  if (graph.capture != 0 || !graph.is_there()) return;
  const Graph gone = graph;
  graph = {};
  if (gone.region == nullptr) return;
  unpin(*gone.region);
  private_pools_->release(region_id(gone.region_slot));
  forget_region_if_unused(gone.region_slot);
}

void StreamWorld::end_all_graphs() {
  for (std::size_t k = 0; k < kGraphSlots; ++k) {
    end_capture(k);
    drop_graph(k);
  }
  for (std::size_t k = 3; k < kRegions; ++k) {
    leave_mempool(k);
    close_mempool(k);
  }
}

// -- MemPools

void StreamWorld::open_mempool(std::size_t region, bool use_on_oom) {
  if (region < 3 || (regions_[region] != nullptr && regions_[region]->is_object)) return;
  private_pools_->add_user(region_id(region));
  if (use_on_oom) private_pools_->set_use_on_oom(region_id(region), true);
  region_of(region_id(region))->is_object = true;
}

void StreamWorld::enter_mempool(std::size_t region) {
  if (region < 3 || regions_[region] == nullptr || !regions_[region]->is_object || regions_[region]->is_routed) return;
  private_pools_->begin(
      region_id(region), [](Stream) { return true; }, nullptr);
  regions_[region]->is_routed = true;
}

void StreamWorld::leave_mempool(std::size_t region) {
  if (region < 3 || regions_[region] == nullptr || !regions_[region]->is_routed) return;
  const bool is_a_graphs = std::any_of(graphs_.begin(), graphs_.end(), [&](const Graph& graph) {
    return graph.capture != 0 && graph.region_slot == region;
  });
  if (is_a_graphs) return;
  private_pools_->end(region_id(region));
  private_pools_->release(region_id(region));
  regions_[region]->is_routed = false;
}

void StreamWorld::close_mempool(std::size_t region) {
  if (region < 3 || regions_[region] == nullptr || !regions_[region]->is_object || regions_[region]->is_routed) return;
  regions_[region]->is_object = false;
  private_pools_->set_use_on_oom(region_id(region), false);
  private_pools_->release(region_id(region));
  private_pools_->empty_cache(region_id(region));
  forget_region_if_unused(region);
}

// -- A part pinned by hand: whatever was used of it while pinned is the graph

void StreamWorld::pin_part() {
  if (part_is_pinned_ || driver_.is_asleep(number_of(pools_[kPartOfPlain]))) return;
  part_is_pinned_ = true;
  driver_.pin(number_of(pools_[kPartOfPlain]));
  pools_[kPartOfPlain]->pin();
}

void StreamWorld::forget_pin() {
  if (!part_is_pinned_) return;
  part_is_pinned_ = false;
  part_work_.nodes.clear();
  saved_.reset();
  driver_.unpin(number_of(pools_[kPartOfPlain]));
}

void StreamWorld::unpin_part() {
  if (!part_is_pinned_) return;
  forget_pin();
  pools_[kPartOfPlain]->unpin();
}

void StreamWorld::launch_part(std::size_t stream) {
  if (!part_is_pinned_ || slot(stream).device != 0 || !may_work(stream)) return;
  if (!is_coverable(stream) || driver_.is_asleep(part_work_)) return;
  wait(stream, part_region_->turns);
  on_thread_of(stream, [&] { driver_.launch(part_work_, ref(stream)); });
  part_region_->turns.join(point(stream));
}

void StreamWorld::checkpoint() {
  if (!part_is_pinned_) return;
  try {
    PoolCheckpoint now = pools_[kPartOfPlain]->checkpoint();
    std::vector<Live> blocks;
    std::copy_if(live_.begin(), live_.end(), std::back_inserter(blocks),
                 [&](const Live& live) { return live.region == part_region_; });
    saved_ = {std::move(now), std::move(blocks)};
  } catch (const VmmError&) {
    // A freed block still waits for a recorded stream.
  }
}

void StreamWorld::restore() {
  if (!saved_.has_value()) return;
  std::vector<Address> freed;
  std::vector<Address> allocated;
  try {
    pools_[kPartOfPlain]->restore(saved_->first, &freed, &allocated);
  } catch (const VmmError&) {
    return;
  }
  std::erase_if(live_, [&](const Live& live) {
    if (live.region != part_region_) return false;
    owe(live, false);
    driver_.take_back(live.address);
    return true;
  });
  for (const Live& was : saved_->second) {
    Live live;
    live.address = was.address;
    live.size = was.size;
    live.pool = kPartOfPlain;
    live.again = true;
    adopt(std::move(live), pools_[kPartOfPlain], was.owner);
  }
}

}  // namespace vmm::testing
