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
std::size_t least_over(const std::string& mount, std::string group, const char* file) {
  std::size_t least = kUnlimited;
  if ((group + "/").find("/../") != std::string::npos) group.clear();  // outside of what this process sees
  for (;;) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    least = std::min(least, limit_in(mount + group + "/" + file));
    if (group.empty()) return least;
    group.erase(group.rfind('/'));
  }
}

bool names_memory(const std::string& controllers) {
  const std::string listed = "," + controllers + ",";
  return listed.find(",memory,") != std::string::npos;
}

}  // namespace

std::size_t control_group_limit(const std::string& root) {
  std::size_t least = kUnlimited;
  std::ifstream groups(root + kGroupsOfThisProcess);
  // "0::/user.slice" in version 2, "7:cpu,memory:/docker/1f" in version 1.
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      least = std::min(least, least_over(root + kGroups, group, "memory.max"));
    } else if (names_memory(controllers)) {
      least = std::min(least, least_over(root + kGroupsOfVersion1, group, "memory.limit_in_bytes"));
    }
  }
  return least;
}

std::size_t available_memory(const std::string& root) {
  std::ifstream told(root + kMachine);
  // "MemAvailable:   16107872 kB"
  for (std::string name; told >> name;) {
    std::size_t amount = 0;
    if (name == "MemAvailable:" && told >> amount) return amount * kKiB;
    told.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return kUnlimited;
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
