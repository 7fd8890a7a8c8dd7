#include "driver/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>

#include "base/units.h"

namespace vmm {
namespace {

constexpr const char* kGroupsOfThisProcess = "/proc/self/cgroup";
constexpr const char* kMostMappings = "/proc/sys/vm/max_map_count";
constexpr const char* kMachine = "/proc/meminfo";
constexpr const char* kGroups = "/sys/fs/cgroup";
constexpr const char* kGroupsOfVersion1 = "/sys/fs/cgroup/memory";

// The number in a file of one; kUnlimited for "max" and where there is no such
// file: the root has none, and a controller may be off for a group.
std::size_t limit_in(const std::string& file) {
  std::ifstream in(file);
  std::string text;
  in >> text;
  std::size_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  return error == std::errc{} && !text.empty() && end == text.data() + text.size() ? bytes : kUnlimited;
}

// The least that `group` or one above it allows. A limit holds for all groups
// below, so each level is asked. The path may name groups that are not to be
// seen here (a container sees its own group as the root, whatever the path
// says): they are passed over, and the root is asked in any case.
template <typename Room>
std::size_t least_over(const std::string& mount, std::string group, const Room& room) {
  std::size_t least = kUnlimited;
  if ((group + "/").find("/../") != std::string::npos) group.clear();  // outside of what this process sees
  for (;;) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    least = std::min(least, room(mount + group + "/"));
    if (group.empty()) return least;
    group.erase(group.rfind('/'));
  }
}

bool names_memory(const std::string& controllers) {
  const std::string listed = "," + controllers + ",";
  return listed.find(",memory,") != std::string::npos;
}

}  // namespace

namespace {

// What a file like memory.stat says of `name`, or 0.
std::size_t entry_of(const std::string& file, const std::string& name) {
  std::ifstream in(file);
  for (std::string key; in >> key;) {
    std::size_t amount = 0;
    if (key == name && in >> amount) return amount;
    in.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

// The files of one version of control groups, in a group's folder.
struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* reclaimable;  // an entry of memory.stat: the kernel takes it back before it refuses
};
constexpr GroupFiles kVersion2{"memory.max", "memory.current", "inactive_file"};
constexpr GroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

// The least of what `room(folder, files)` says of the groups of this process and those above.
template <typename Room>
std::size_t least_of_groups(const std::string& root, const Room& room) {
  std::size_t least = kUnlimited;
  std::ifstream groups(root + kGroupsOfThisProcess);
  // "0::/user.slice" in version 2, "7:cpu,memory:/docker/1f" in version 1.
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    const auto of = [&](const std::string& mount, const GroupFiles& files) {
      const auto in_folder = [&](const std::string& folder) { return room(folder, files); };
      least = std::min(least, least_over(root + mount, group, in_folder));
    };
    if (controllers.empty()) {
      of(kGroups, kVersion2);
    } else if (names_memory(controllers)) {
      of(kGroupsOfVersion1, kVersion1);
    }
  }
  return least;
}

// What a group's limit leaves; none: kUnlimited.
std::size_t room_in(const std::string& folder, const GroupFiles& files) {
  const std::size_t limit = limit_in(folder + files.limit);
  const std::size_t usage = limit == kUnlimited ? kUnlimited : limit_in(folder + files.usage);
  if (usage == kUnlimited) return kUnlimited;
  const std::size_t reclaimable = entry_of(folder + "memory.stat", files.reclaimable);
  const std::size_t used = usage - std::min(usage, reclaimable);
  return limit - std::min(limit, used);
}

std::size_t machines_available(const std::string& root) {
  std::ifstream told(root + kMachine);
  // "MemAvailable:   16107872 kB"
  for (std::string name; told >> name;) {
    std::size_t amount = 0;
    if (name == "MemAvailable:" && told >> amount) return amount * kKiB;
    told.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return kUnlimited;
}

}  // namespace

std::size_t control_group_limit(const std::string& root) {
  return least_of_groups(
      root, [](const std::string& folder, const GroupFiles& files) { return limit_in(folder + files.limit); });
}

std::size_t control_group_room(const std::string& root) { return least_of_groups(root, &room_in); }

std::size_t available_memory(const std::string& root) {
  return std::min(machines_available(root), control_group_room(root));
}

std::size_t most_mappings(const std::string& root) { return limit_in(root + kMostMappings); }

std::size_t usable_memory(const std::string& root) {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page = ::sysconf(_SC_PAGESIZE);
  const std::size_t machine =
      pages > 0 && page > 0 ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(page) : kGiB;
  return std::min(machine, control_group_limit(root));
}

}  // namespace vmm
