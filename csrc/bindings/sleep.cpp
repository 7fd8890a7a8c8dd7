// Sleep and wake: _C.sleep, wake, swap and the _C.Transfer that they return.
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <tuple>

#include "base/errors.h"
#include "bindings/bind.h"
#include "core/faces/shared_memory_pool.h"
#include "core/sleep/transfer.h"
#include "torch_adapter/routing.h"

namespace vmm::bindings {

namespace {

using PoolPtr = std::shared_ptr<Pool>;
using TransferPtr = std::shared_ptr<Transfer>;
// What the Python face makes of a place: what kind, the file's path, the other device.
using PlaceArgument = std::tuple<std::string, std::string, int>;
using PlacesArgument = std::vector<PlaceArgument>;
// By tag; "" is what has none.
using PlacesByTag = std::map<std::string, PlacesArgument>;

Place to_place(const PlaceArgument& argument, const Pool& pool) {
  const auto& [kind, path, ordinal] = argument;
  Place place;
  if (kind == "host") return place;
  if (kind == "host, packed") {
    place.is_packed = true;
    return place;
  }
  if (kind == "discard" || kind == "poison") {
    place.kind = Place::Kind::discard;
    place.is_poisoned = kind == "poison";
  } else if (kind == "file") {
    place.kind = Place::Kind::file;
    place.path = path;
  } else {
    place.kind = Place::Kind::device;
    if (ordinal == pool.device()) {
      throw InvalidArgumentError("keep=\"device:" + std::to_string(ordinal) + "\" is the model's own device");
    }
    place.device = &Runtime::room(Runtime::room_of(pool).kind, ordinal).memory;
  }
  return place;
}

Places to_places(const PlacesArgument& arguments, const Pool& pool) {
  Places places;
  for (const PlaceArgument& each : arguments) places.push_back(to_place(each, pool));
  return places;
}

// AsleepError where a part of it is memory that is elsewhere; what is no pool's is there.
void require_there(std::uintptr_t address, std::size_t size) {
  const Pool* const pool = Runtime::pool_at(reinterpret_cast<const void*>(address));
  if (pool != nullptr) pool->require_there(address, size);
}

// Whoever waits looks for Ctrl-C so often.
constexpr std::chrono::milliseconds kWaitForSignals{50};

// Throws what a signal's handler raised: Ctrl-C.
void look_for_signals() {
  if (!may_run_python()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// What a transfer asks of Python on its way: as seldom as can be, since where another thread
// computes in Python each time takes 5 ms. A model of 28 GiB was swapped beside a busy server
// in 1.2 s, on a bus that takes 0.7.
class OnTheWay {
 public:
  // `tell` (none: nobody) is called for what has moved, and stops the transfer by what it
  // raises, as a signal does where the thread `sees_signals`.
  OnTheWay(const Transfer& transfer, const py::object& tell, bool sees_signals)
      : transfer_(transfer), tell_(tell.is_none() ? nullptr : &tell), sees_signals_(sees_signals) {}

  void operator()() {
    const auto now = std::chrono::steady_clock::now();
    if (sees_signals_ && now - looked_ >= kWaitForSignals) {
      look_for_signals();
      looked_ = now;
    }
    const std::optional<std::size_t> done = transfer_.done();
    if (tell_ == nullptr || done == told_ || !may_run_python()) return;
    told_ = done;
    const py::gil_scoped_acquire gil;
    (*tell_)();
  }

 private:
  const Transfer& transfer_;
  const py::object* const tell_;
  const bool sees_signals_;
  std::chrono::steady_clock::time_point looked_;
  std::optional<std::size_t> told_;
};

void run(Transfer& transfer, const py::object& tell, bool sees_signals) {
  const GilReleased released;
  OnTheWay on_the_way(transfer, tell, sees_signals);
  transfer.run([&on_the_way] { on_the_way(); });
}

std::unique_ptr<Departure> departure(const Pool& pool, const std::optional<PlacesArgument>& all,
                                     const PlacesByTag& by_tag, bool release) {
  DeviceMemory& memory = home_of(pool);
  std::vector<PartToSleep> parts;
  for (const PoolPtr& member : memory.family(pool)) {
    const auto named = by_tag.find(member->tag());
    if (named != by_tag.end()) {
      parts.push_back({member, to_places(named->second, pool)});
    } else if (all.has_value()) {
      parts.push_back({member, to_places(*all, pool)});
    }
  }
  return std::make_unique<Departure>(Runtime::room_of(pool).sleeper, std::move(parts), release,
                                     &require_left_by_others);
}

std::unique_ptr<Arrival> arrival(const Pool& pool, const std::optional<std::vector<std::string>>& tags,
                                 Arrival::Memory memory) {
  PoolList members = home_of(pool).family(pool);
  if (tags.has_value()) {
    std::erase_if(members, [&](const PoolPtr& member) {
      return std::find(tags->begin(), tags->end(), member->tag()) == tags->end();
    });
  }
  return std::make_unique<Arrival>(Runtime::room_of(pool).sleeper, std::move(members), memory);
}

TransferPtr begun(std::unique_ptr<Departure> out, std::unique_ptr<Arrival> in) {
  auto transfer = destroyed_without_gil(std::make_unique<Transfer>(std::move(out), std::move(in)));
  transfer->begin(look_for_signals);
  return transfer;
}

TransferPtr sleep(const Pool& pool, const std::optional<PlacesArgument>& all, const PlacesByTag& by_tag, bool release) {
  const GilReleased released;
  open_home_of(pool);
  return begun(departure(pool, all, by_tag, release), nullptr);
}

TransferPtr wake(const Pool& pool, const std::optional<std::vector<std::string>>& tags) {
  const GilReleased released;
  return begun(nullptr, arrival(pool, tags, Arrival::Memory::collected));
}

TransferPtr swap(const Pool& out, const std::optional<PlacesArgument>& all, const PlacesByTag& by_tag,
                 const Pool& into) {
  const GilReleased released;
  if (&open_home_of(out) != &home_of(into)) {
    throw InvalidArgumentError("swap() is for two models of one device");
  }
  if (&out.model() == &into.model()) throw InvalidArgumentError("swap() is for two models, and these are one");
  return begun(departure(out, all, by_tag, /*release=*/false), arrival(into, std::nullopt, Arrival::Memory::by_piece));
}

// Where each part that sleeps is, by its tag: where its contents are, or, of one without any,
// where they would have gone.
std::map<std::string, std::string> asleep(const Pool& pool) {
  std::map<std::string, std::set<std::string>> contents;
  std::map<std::string, std::string> found;
  for (const PoolPtr& member : home_of(pool).family(pool)) {
    const AsleepWhere where = member->asleep_where();
    if (!where.contents.empty()) contents[member->tag()].insert(where.contents.begin(), where.contents.end());
    if (!where.memory.empty()) found[member->tag()] = where.memory;
  }
  for (const auto& [tag, places] : contents) found[tag] = in_words(places);
  if (!found.empty()) return found;
  for (const PoolPtr& member : home_of(pool).family(pool)) {
    if (member->is_asleep()) found[member->tag()] = "nothing";
  }
  return found;
}

// Those of all backups that parts of it are in.
void forget_names_of_backups(const Pool& pool) {
  for (const PoolPtr& member : home_of(pool).family(pool)) member->forget_names_of_backups();
}

std::shared_ptr<PinnedMemory> host_memory(const SharedMemoryPool& pool) {
  Runtime::require_own_process();
  return Runtime::room_of(pool.memory()).sleeper.host_memory(pool.budget());
}

}  // namespace

void bind_sleep(py::module_& module) {
  py::class_<Transfer, TransferPtr>(module, "Transfer")
      .def("run", &run, py::arg("tell") = py::none(), py::arg("sees_signals") = true)
      .def_property_readonly("done", &Transfer::done)
      .def_property_readonly("gone", &Transfer::gone)
      .def_property_readonly("come", &Transfer::come)
      .def_property_readonly("total", &Transfer::total)
      .def(
          "wait_for",
          [](Transfer& self, std::uintptr_t address, std::size_t size) -> std::optional<bool> {
            Runtime::require_own_process();
            switch (self.wait_for(address, size, kWaitForSignals)) {
              case Arrival::Waited::there:
                require_there(address, size);  // or it is none of those that this brings
                return true;
              case Arrival::Waited::ended:
                return false;
              default:
                return std::nullopt;
            }
          },
          py::arg("address"), py::arg("size"), WithoutGil());

  module.def("sleep", &sleep, py::arg("pool"), py::arg("keep"), py::arg("by_tag"), py::arg("release"));
  module.def("wake", &wake, py::arg("pool"), py::arg("tags"));
  module.def("swap", &swap, py::arg("out"), py::arg("keep"), py::arg("by_tag"), py::arg("into"));
  module.def("asleep", &asleep, py::arg("pool"), WithoutGil());
  module.def("forget_names_of_backups", &forget_names_of_backups, py::arg("pool"), WithoutGil());
  module.def(
      "is_asleep", [](const Pool& pool) { return home_of(pool).is_any_asleep(pool); }, py::arg("pool"), WithoutGil());

  module.def(
      "require_there",
      [](std::uintptr_t address, std::size_t size) {
        Runtime::require_own_process();
        require_there(address, size);
      },
      py::arg("address"), py::arg("size"), WithoutGil());

  module.def(
      "read_backup",
      [](std::uintptr_t address, std::size_t size, std::uintptr_t to) {
        Runtime::require_own_process();
        Pool* const pool = Runtime::pool_at(reinterpret_cast<const void*>(address));
        return pool != nullptr && pool->read_kept(address, size, reinterpret_cast<std::byte*>(to));
      },
      py::arg("address"), py::arg("size"), py::arg("to"), WithoutGil());

  module.def(
      "host_backup_limit", [](const SharedMemoryPool& pool) { return from_limit(host_memory(pool)->limit()); },
      py::arg("pool"), WithoutGil());
  module.def(
      "set_host_backup_limit",
      [](SharedMemoryPool& pool, std::optional<std::size_t> limit) {
        Runtime::require_own_process();
        return Runtime::room_of(pool.memory()).sleeper.set_host_limit(pool.budget(), to_limit(limit));
      },
      py::arg("pool"), py::arg("limit"), WithoutGil());
  module.def(
      "release_host_backups",
      [](SharedMemoryPool& pool) {
        Runtime::require_own_process();
        return Runtime::room_of(pool.memory()).sleeper.release_host_memory(pool.budget());
      },
      py::arg("pool"), WithoutGil());
  module.def(
      "host_backup_bytes",
      [](const SharedMemoryPool& pool) {
        const std::shared_ptr<PinnedMemory> memory = host_memory(pool);
        return memory->used_bytes() + memory->unused_bytes();
      },
      py::arg("pool"), WithoutGil());
}

}  // namespace vmm::bindings
